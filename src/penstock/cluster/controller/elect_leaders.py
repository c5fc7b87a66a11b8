"""ElectLeaders, and the controller's own changes: preferred leaders and replicas of internal topics.

An operator requests the preferred leaders, or an unclean election: any live replica where no other can lead. The
controller itself moves leadership back to preferred leaders, elects leaders for leaderless partitions, and raises the
number of replicas of internal topics.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from penstock.cluster.controller.decision import ControllerConfig, Decision
from penstock.cluster.controller.election import Election
from penstock.cluster.controller.partition_change import PartitionChanges, all_partitions, replicas_by_broker
from penstock.cluster.controller.reassignment import is_reassigning, reassign
from penstock.cluster.image import ClusterImage, PartitionState, TopicPartition
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.steps import Steps


class ElectionType(IntEnum):
    """Numbered as in the request."""

    PREFERRED = 0
    UNCLEAN = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ElectionResult:
    topic: str
    partition: int
    error: ErrorCode = ErrorCode.none
    message: str | None = None


_ELECTIONS = {ElectionType.PREFERRED: Election.PREFERRED, ElectionType.UNCLEAN: Election.UNCLEAN}
_NOT_AVAILABLE = {
    ElectionType.PREFERRED: ErrorCode.preferred_leader_not_available,
    ElectionType.UNCLEAN: ErrorCode.eligible_leaders_not_available,
}


def elect_leaders(
    image: ClusterImage,
    partitions: Sequence[TopicPartition] | None,
    *,
    election: ElectionType,
    rules: ControllerConfig,
) -> Steps[Decision[tuple[ElectionResult, ...]]]:
    """None elects for all partitions; the reply then leaves out those that need no election."""
    changes = PartitionChanges(image, rules)
    results = []
    for topic, index in _requested_partitions(image, partitions):
        try:
            _elect_one(changes, topic, index, election)
            results.append(ElectionResult(topic=topic, partition=index))
        except ApiError as error:
            if partitions is not None or error.code is not ErrorCode.election_not_needed:
                results.append(
                    ElectionResult(topic=topic, partition=index, error=error.code, message=error.message)
                )
        yield
    return changes.decision(tuple(results))


def elect_leaderless_partitions(
    image: ClusterImage, *, rules: ControllerConfig, partitions_max: int
) -> Decision[int]:
    """Retries where changed settings may allow a leader now: nothing else retries. Replies with the number elected."""
    changes = PartitionChanges(image, rules)
    for topic, index, partition in all_partitions(image):
        if len(changes.records) >= partitions_max:
            break
        if not partition.has_leader:
            changes.add(changes.of(topic, index))
    return changes.decision(len(changes.records))


def _requested_partitions(
    image: ClusterImage, partitions: Sequence[TopicPartition] | None
) -> Iterable[TopicPartition]:
    if partitions is not None:
        return dict.fromkeys(partitions)
    return [TopicPartition(topic.name, index) for topic, index, _ in all_partitions(image)]


def _elect_one(changes: PartitionChanges, topic: str, index: int, election: ElectionType) -> None:
    found = changes.image.topics.get(topic)
    if found is None:
        raise ApiError(ErrorCode.unknown_topic_or_partition, f"No such topic as {topic}")
    partition = found.partitions.get(index)
    if partition is None:
        raise ApiError(ErrorCode.unknown_topic_or_partition, f"No such partition as {topic}-{index}")
    if _needs_no_election(partition, election):
        raise ApiError(ErrorCode.election_not_needed, "Leader election not needed for topic partition.")
    change = changes.of(found, index)
    change.election = _ELECTIONS[election]
    if changes.add(change) is None:
        raise ApiError(_NOT_AVAILABLE[election], _NOT_AVAILABLE_MESSAGES[election])


_NOT_AVAILABLE_MESSAGES = {
    ElectionType.PREFERRED: "The preferred leader was not available.",
    ElectionType.UNCLEAN: "Eligible topic partition leaders are not available.",
}


def _needs_no_election(partition: PartitionState, election: ElectionType) -> bool:
    if election is ElectionType.PREFERRED:
        return partition.leader == partition.replicas[0]
    return partition.has_leader


Replicas = tuple[int, ...]


def balance_leaders(image: ClusterImage, *, rules: ControllerConfig, partitions_max: int) -> Decision[int]:
    """Moves leadership to the first replicas where these are in sync.

    The reply is the number of partitions moved; if it equals `partitions_max`, there may be more.
    """
    changes = PartitionChanges(image, rules)
    for topic, index, partition in all_partitions(image):
        if len(changes.records) >= partitions_max:
            break
        if can_return_to_preferred_leader(image, partition):
            change = changes.of(topic, index)
            change.election = Election.PREFERRED
            changes.add(change)
    return changes.decision(len(changes.records))


def can_return_to_preferred_leader(image: ClusterImage, partition: PartitionState) -> bool:
    preferred = partition.replicas[0]
    if partition.leader == preferred or preferred not in partition.isr or preferred not in image.brokers:
        return False
    return partition.has_leader and image.brokers[preferred].is_active


def raise_internal_topic_replicas(
    image: ClusterImage,
    replication_factors: Mapping[str, int],
    *,
    rules: ControllerConfig,
    partitions_max: int = 1000,
) -> Decision[int]:
    """Adds replicas up to the topic's replication factor, as far as there are active brokers.

    A cluster that grew from one node then keeps its groups when that node fails. The reply is the number of partitions
    that get more replicas.
    """
    changes = PartitionChanges(image, rules)
    load = replicas_by_broker(image)
    for name, replication_factor in sorted(replication_factors.items()):
        topic = image.topics.get(name)
        for index, partition in topic.partitions.items() if topic is not None else ():
            target = _with_more_replicas(image, partition, replication_factor, load)
            if is_reassigning(partition) or len(target) == len(partition.replicas):
                continue
            if len(changes.records) >= partitions_max:
                break
            load.update(target[len(partition.replicas) :])
            assert topic is not None
            change = changes.of(topic, index)
            reassign(change, _rotated_by_partition(target, index))
            changes.add(change)
    return changes.decision(len(changes.records))


def _rotated_by_partition(replicas: Replicas, index: int) -> Replicas:
    """Without this the cluster's first node would stay the preferred leader of every partition."""
    turn = index % len(replicas)
    return replicas[turn:] + replicas[:turn]


def _with_more_replicas(
    image: ClusterImage, partition: PartitionState, replication_factor: int, load: Counter[int]
) -> Replicas:
    """Chooses racks with the fewest replicas of the partition first, then brokers with the fewest replicas."""
    replicas = list(partition.replicas)
    racks = [image.brokers[broker].rack_or_host for broker in replicas if broker in image.brokers]
    free = {broker.id: broker.rack_or_host for broker in image.active_brokers() if broker.id not in replicas}
    while free and len(replicas) < replication_factor:
        chosen = min(free, key=lambda broker: (racks.count(free[broker]), load[broker], broker))
        replicas.append(chosen)
        racks.append(free.pop(chosen))
    return tuple(replicas)
