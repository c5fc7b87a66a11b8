"""CreatePartitions and DeleteTopics: changes of topics that exist.

After partitions are added, keys map to other partitions; records do not move. Topics are deleted by name or by id.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple
from uuid import UUID

from penstock.cluster.controller import placement
from penstock.cluster.controller.decision import Decision
from penstock.cluster.image import ClusterImage, TopicState
from penstock.cluster.metadata_records import PartitionRecord, RemoveTopicRecord
from penstock.cluster.tenants import PartitionBudgets
from penstock.cluster.topic_names import is_internal
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.steps import Steps


@dataclass(frozen=True, slots=True, kw_only=True)
class NewPartitions:
    """`count` is the new total; `assignments` are the replicas of each new partition, None for automatic placement."""

    name: str
    count: int
    assignments: tuple[placement.Replicas, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CreatePartitionsResult:
    name: str
    error: ErrorCode = ErrorCode.none
    message: str | None = None


def create_partitions(
    image: ClusterImage,
    topics: Sequence[NewPartitions],
    *,
    partitions_max: int,
    draw: placement.Draw,
    validate_only: bool = False,
    broker_replicas_max: int = placement.REPLICAS_UNLIMITED,
) -> Steps[Decision[tuple[CreatePartitionsResult, ...]]]:
    """One result per name, in request order. A topic that fails does not affect the others."""
    load, budgets = placement.ReplicaLimit(image, broker_replicas_max), PartitionBudgets(image)
    asked = Counter(topic.name for topic in topics)
    records: list[PartitionRecord] = []
    results: list[CreatePartitionsResult] = []
    for topic in {topic.name: topic for topic in topics}.values():
        try:
            if asked[topic.name] > 1:
                raise ApiError(ErrorCode.invalid_request, "Duplicate topic name.")
            left = partitions_max - len(records)
            records += yield from _add_partitions(image, topic, left, draw, load, budgets)
            results.append(CreatePartitionsResult(name=topic.name))
        except ApiError as error:
            results.append(CreatePartitionsResult(name=topic.name, error=error.code, message=error.message))
        yield
    return Decision(() if validate_only else tuple(records), tuple(results))


def _add_partitions(
    image: ClusterImage,
    asked: NewPartitions,
    partitions_left: int,
    draw: placement.Draw,
    load: placement.ReplicaLimit,
    budgets: PartitionBudgets,
) -> Steps[list[PartitionRecord]]:
    topic = image.topics.get(asked.name)
    if topic is None:
        raise ApiError(ErrorCode.unknown_topic_or_partition, "This server does not host this topic.")
    more = _additional_partitions(topic, asked, partitions_left)
    replication_factor = len(topic.partitions[0].replicas)
    if asked.assignments is None:
        assignments = yield from placement.assign_replicas(
            image, partitions=more, replication_factor=replication_factor, draw=draw
        )
    else:
        assignments = list(asked.assignments)
        for replicas in assignments:
            placement.refuse_bad_replicas(image, replicas, replication_factor)
            yield
    budgets.check(topic.name, more)
    load.add(assignments)
    budgets.take(topic.name, more)
    first = len(topic.partitions)
    return (yield from placement.partition_records(image, topic.id, assignments, first=first))


def _additional_partitions(topic: TopicState, asked: NewPartitions, partitions_left: int) -> int:
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
        # A key's partition is a hash modulo the number of partitions: existing state would no longer be found.
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


class TopicRef(NamedTuple):
    """Must have exactly one of the two."""

    name: str | None = None
    id: UUID | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteTopicResult:
    name: str | None
    id: UUID | None
    error: ErrorCode = ErrorCode.none
    message: str | None = None


def delete_topics(
    image: ClusterImage, topics: Sequence[TopicRef]
) -> Steps[Decision[tuple[DeleteTopicResult, ...]]]:
    """One result per distinct reference, in request order."""
    asked = Counter(topics)
    found: dict[TopicRef, TopicState | ApiError] = {}
    for ref in asked:
        found[ref] = _find_topic(image, ref, asked[ref])
        yield
    by_id = Counter(topic.id for topic in found.values() if isinstance(topic, TopicState))
    results: list[DeleteTopicResult] = []
    records: list[RemoveTopicRecord] = []
    for ref, topic in found.items():
        if isinstance(topic, ApiError):
            results.append(
                DeleteTopicResult(name=ref.name, id=ref.id, error=topic.code, message=topic.message)
            )
        elif by_id[topic.id] > 1:
            results.append(
                DeleteTopicResult(
                    name=topic.name,
                    id=topic.id,
                    error=ErrorCode.invalid_request,
                    message="The provided topic name maps to an ID that was already supplied.",
                )
            )
        else:
            records.append(RemoveTopicRecord(topic_id=topic.id))
            results.append(DeleteTopicResult(name=topic.name, id=topic.id))
        yield
    return Decision(tuple(records), tuple(results))


def _find_topic(image: ClusterImage, ref: TopicRef, times: int) -> TopicState | ApiError:
    """Returns the error instead of raising it, so that the other topics are still deleted."""
    if ref.name is None and ref.id is None:
        return ApiError(ErrorCode.invalid_request, "Neither topic name nor id were specified.")
    if ref.name is not None and ref.id is not None:
        return ApiError(ErrorCode.invalid_request, "You may not specify both topic name and topic id.")
    if times > 1:
        return ApiError(ErrorCode.invalid_request, f"Duplicate topic {'id' if ref.name is None else 'name'}.")
    if ref.id is not None:
        topic = image.topics_by_id.get(ref.id)
        missing = ErrorCode.unknown_topic_id
    else:
        assert ref.name is not None
        topic = image.topics.get(ref.name)
        missing = ErrorCode.unknown_topic_or_partition
    if topic is None:
        return ApiError(missing, "This server does not host this topic.")
    if is_internal(topic.name):
        # Apache Kafka leaves this check to its tools. Without it a client could delete every group's offsets.
        return ApiError(ErrorCode.invalid_request, f"Topic {topic.name} is internal and cannot be deleted.")
    return topic
