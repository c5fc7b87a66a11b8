"""Moving replicas: newcomers are added beside the old ones, and these go once the newcomers are in sync."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.cluster.controller.assignment import refuse_bad_replicas
from penstock.cluster.controller.leadership import all_partitions
from penstock.cluster.controller.partition_change import Changes, PartitionChange
from penstock.cluster.controller.rules import ControllerRules
from penstock.cluster.decision import Decision
from penstock.cluster.delta import TopicPartition
from penstock.cluster.image import ClusterImage
from penstock.cluster.state import PartitionState, TopicState
from penstock.protocol.errors import ApiError, ErrorCode

Replicas = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reassignment:
    """`replicas` is what is wanted in the end, preferred leader first; None takes back what is under way."""

    topic: str
    partition: int
    replicas: Replicas | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReassignmentResult:
    topic: str
    partition: int
    error: ErrorCode = ErrorCode.none
    message: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OngoingReassignment:
    topic: str
    partition: int
    replicas: Replicas
    adding: Replicas
    removing: Replicas


def alter_reassignments(
    image: ClusterImage,
    items: Sequence[Reassignment],
    *,
    rules: ControllerRules,
    allow_replication_factor_change: bool = True,
) -> Decision[tuple[ReassignmentResult, ...]]:
    """One result per item, in order; what fails leaves the others alone."""
    changes = Changes(image, rules)
    done: set[tuple[str, int]] = set()
    results = []
    for item in items:
        try:
            if (item.topic, item.partition) in done:
                raise ApiError(ErrorCode.invalid_request, "Each partition must appear at most once.")
            done.add((item.topic, item.partition))
            _alter(changes, item, allow_replication_factor_change)
            results.append(ReassignmentResult(topic=item.topic, partition=item.partition))
        except ApiError as error:
            results.append(
                ReassignmentResult(
                    topic=item.topic, partition=item.partition, error=error.code, message=error.message
                )
            )
    return changes.decision(tuple(results))


def list_reassignments(
    image: ClusterImage, partitions: Iterable[TopicPartition] | None = None
) -> tuple[OngoingReassignment, ...]:
    """All that are under way, or those of the partitions that are named."""
    if partitions is None:
        found = ((topic.name, index, partition) for topic, index, partition in all_partitions(image))
    else:
        found = (
            (name, index, partition)
            for name, index in partitions
            if (partition := image.partition(name, index)) is not None
        )
    return tuple(
        OngoingReassignment(
            topic=name,
            partition=index,
            replicas=partition.replicas,
            adding=partition.adding_replicas,
            removing=partition.removing_replicas,
        )
        for name, index, partition in found
        if is_reassigning(partition)
    )


def is_reassigning(partition: PartitionState) -> bool:
    return bool(partition.adding_replicas or partition.removing_replicas)


def reassign(change: PartitionChange, target: Replicas) -> None:
    """What holds a replica now goes on holding it until the target is in sync."""
    current = change.old.replicas
    change.adding = tuple(replica for replica in target if replica not in current)
    change.removing = tuple(replica for replica in current if replica not in target)
    change.replicas = (*target, *change.removing)


def _alter(changes: Changes, item: Reassignment, allow_replication_factor_change: bool) -> None:
    topic = _find(changes.image, item)
    change = changes.of(topic, item.partition)
    if item.replicas is None:
        _cancel(change, item)
    else:
        refuse_bad_replicas(changes.image, item.replicas, None)
        if not allow_replication_factor_change:
            _refuse_other_size(change.old, item.replicas)
        reassign(change, item.replicas)
    changes.add(change)


def _find(image: ClusterImage, item: Reassignment) -> TopicState:
    topic = image.topics.get(item.topic)
    if topic is None:
        raise ApiError(ErrorCode.unknown_topic_or_partition, f"Unable to find a topic named {item.topic}.")
    if item.partition not in topic.partitions:
        raise ApiError(
            ErrorCode.unknown_topic_or_partition,
            f"Unable to find partition {item.topic}:{item.partition}.",
        )
    return topic


def _cancel(change: PartitionChange, item: Reassignment) -> None:
    """Back to the replicas from before; impossible once only newcomers have everything."""
    if not is_reassigning(change.old):
        raise ApiError(ErrorCode.no_reassignment_in_progress, "No partition reassignment is in progress.")
    change.replicas = tuple(replica for replica in change.replicas if replica not in change.adding)
    change.leave_isr(change.adding)
    change.adding = change.removing = ()
    complete = {*change.old.isr, *change.old.elr}
    if complete and not complete & set(change.replicas):
        raise ApiError(
            ErrorCode.invalid_replica_assignment,
            f"Unable to revert partition assignment for {item.topic}:{item.partition} because it would "
            "require an unclean leader election.",
        )


def _refuse_other_size(partition: PartitionState, target: Replicas) -> None:
    have = len(partition.replicas) - len(partition.adding_replicas)
    if len(target) != have:
        raise ApiError(
            ErrorCode.invalid_replication_factor,
            f"The replication factor is changed from {have} to {len(target)}",
        )
