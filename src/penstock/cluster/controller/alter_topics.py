"""Adding partitions to topics. Keys move to other partitions from then on; records do not."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.cluster.controller.assignment import (
    UNBOUNDED,
    BrokerLoad,
    Replicas,
    partition_records,
    placed,
    refuse_bad_replicas,
)
from penstock.cluster.decision import Decision
from penstock.cluster.image import ClusterImage
from penstock.cluster.names import is_internal
from penstock.cluster.placement import Draw
from penstock.cluster.records import PartitionRecord
from penstock.cluster.state import TopicState
from penstock.protocol.errors import ApiError, ErrorCode


@dataclass(frozen=True, slots=True, kw_only=True)
class MorePartitions:
    """`count` is the new total; `assignments` are the replicas of each new partition, None to place them."""

    name: str
    count: int
    assignments: tuple[Replicas, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionsResult:
    name: str
    error: ErrorCode = ErrorCode.none
    message: str | None = None


def create_partitions(
    image: ClusterImage,
    topics: Sequence[MorePartitions],
    *,
    partitions_max: int,
    draw: Draw,
    validate_only: bool = False,
    broker_replicas_max: int = UNBOUNDED,
) -> Decision[tuple[PartitionsResult, ...]]:
    """One result per name, in the order asked. A topic that fails leaves the others alone."""
    load = BrokerLoad(image, broker_replicas_max)
    asked = Counter(topic.name for topic in topics)
    records: list[PartitionRecord] = []
    results: list[PartitionsResult] = []
    for topic in {topic.name: topic for topic in topics}.values():
        try:
            if asked[topic.name] > 1:
                raise ApiError(ErrorCode.invalid_request, "Duplicate topic name.")
            records += _grow(image, topic, partitions_max - len(records), draw, load)
            results.append(PartitionsResult(name=topic.name))
        except ApiError as error:
            results.append(PartitionsResult(name=topic.name, error=error.code, message=error.message))
    return Decision(() if validate_only else tuple(records), tuple(results))


def _grow(
    image: ClusterImage, asked: MorePartitions, partitions_left: int, draw: Draw, load: BrokerLoad
) -> list[PartitionRecord]:
    topic = image.topics.get(asked.name)
    if topic is None:
        raise ApiError(ErrorCode.unknown_topic_or_partition, "This server does not host this topic.")
    more = _additional(topic, asked, partitions_left)
    replication_factor = len(topic.partitions[0].replicas)
    if asked.assignments is None:
        assignments = placed(image, partitions=more, replication_factor=replication_factor, draw=draw)
    else:
        assignments = list(asked.assignments)
        for replicas in assignments:
            refuse_bad_replicas(image, replicas, replication_factor)
    load.add(assignments)
    return partition_records(image, topic.id, assignments, first=len(topic.partitions))


def _additional(topic: TopicState, asked: MorePartitions, partitions_left: int) -> int:
    have = len(topic.partitions)
    if asked.count == have:
        raise ApiError(ErrorCode.invalid_partitions, f"Topic already has {have} partition(s).")
    if asked.count < have:
        raise ApiError(
            ErrorCode.invalid_partitions,
            f"The topic {topic.name} currently has {have} partition(s); "
            f"{asked.count} would not be an increase.",
        )
    if is_internal(topic.name):
        # Its records are found by a hash over the number of partitions.
        raise ApiError(
            ErrorCode.invalid_request, f"The number of partitions of internal topic {topic.name} is fixed."
        )
    more = asked.count - have
    if asked.assignments is not None and len(asked.assignments) != more:
        raise ApiError(
            ErrorCode.invalid_replica_assignment,
            f"Attempted to add {more} additional partition(s), but only {len(asked.assignments)} "
            "assignment(s) were specified.",
        )
    if more > partitions_left:
        raise ApiError(ErrorCode.policy_violation, "One request may not create so many partitions.")
    return more
