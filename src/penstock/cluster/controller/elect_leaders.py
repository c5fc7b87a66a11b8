"""ElectLeaders: an operator asks for preferred leaders, or for somebody at any price."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from penstock.cluster.controller.election import Election
from penstock.cluster.controller.leadership import all_partitions
from penstock.cluster.controller.partition_change import Changes
from penstock.cluster.controller.rules import ControllerRules
from penstock.cluster.decision import Decision
from penstock.cluster.delta import TopicPartition
from penstock.cluster.image import ClusterImage
from penstock.cluster.state import PartitionState
from penstock.protocol.errors import ApiError, ErrorCode


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
    rules: ControllerRules,
) -> Decision[tuple[ElectionResult, ...]]:
    """None asks for all; then those that need no election are left out of the reply."""
    changes = Changes(image, rules)
    results = []
    for topic, index in _asked(image, partitions):
        try:
            _elect(changes, topic, index, election)
            results.append(ElectionResult(topic=topic, partition=index))
        except ApiError as error:
            if partitions is not None or error.code is not ErrorCode.election_not_needed:
                results.append(
                    ElectionResult(topic=topic, partition=index, error=error.code, message=error.message)
                )
    return changes.decision(tuple(results))


def elect_where_leaderless(
    image: ClusterImage, *, rules: ControllerRules, partitions_max: int
) -> Decision[int]:
    """For the settings that allow a leader by now: nothing else tries again. The reply is how many got one."""
    changes = Changes(image, rules)
    for topic, index, partition in all_partitions(image):
        if len(changes.records) >= partitions_max:
            break
        if not partition.has_leader:
            changes.add(changes.of(topic, index))
    return changes.decision(len(changes.records))


def _asked(image: ClusterImage, partitions: Sequence[TopicPartition] | None) -> Iterable[TopicPartition]:
    if partitions is not None:
        return dict.fromkeys(partitions)
    return [TopicPartition(topic.name, index) for topic, index, _ in all_partitions(image)]


def _elect(changes: Changes, topic: str, index: int, election: ElectionType) -> None:
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
        raise ApiError(_NOT_AVAILABLE[election], _WHY[election])


_WHY = {
    ElectionType.PREFERRED: "The preferred leader was not available.",
    ElectionType.UNCLEAN: "Eligible topic partition leaders are not available.",
}


def _needs_no_election(partition: PartitionState, election: ElectionType) -> bool:
    if election is ElectionType.PREFERRED:
        return partition.leader == partition.replicas[0]
    return partition.has_leader
