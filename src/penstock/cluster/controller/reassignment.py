"""AlterPartitionReassignments: adds the new replicas, and removes the old ones once the new ones are in sync."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.cluster.controller.decision import ControllerConfig, Decision
from penstock.cluster.controller.partition_change import (
    PartitionChangeBuilder,
    PartitionChanges,
    all_partitions,
)
from penstock.cluster.controller.placement import refuse_bad_replicas
from penstock.cluster.image import ClusterImage, PartitionState, TopicPartition, TopicState
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.steps import Steps

Replicas = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reassignment:
    """`replicas` is the final assignment, preferred leader first; None cancels the reassignment in progress."""

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
    rules: ControllerConfig,
    allow_replication_factor_change: bool = True,
) -> Steps[Decision[tuple[ReassignmentResult, ...]]]:
    """One result per item, in order; an item that fails does not affect the others."""
    changes = PartitionChanges(image, rules)
    done: set[tuple[str, int]] = set()
    results = []
    for item in items:
        try:
            if (item.topic, item.partition) in done:
                raise ApiError(ErrorCode.invalid_request, "Each partition must appear at most once.")
            done.add((item.topic, item.partition))
            _alter_one(changes, item, allow_replication_factor_change)
            results.append(ReassignmentResult(topic=item.topic, partition=item.partition))
        except ApiError as error:
            results.append(
                ReassignmentResult(
                    topic=item.topic, partition=item.partition, error=error.code, message=error.message
                )
            )
        yield
    return changes.decision(tuple(results))


def list_reassignments(
    image: ClusterImage, partitions: Iterable[TopicPartition] | None = None
) -> tuple[OngoingReassignment, ...]:
    """Returns all reassignments in progress, or those of the given partitions."""
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


def reassign(change: PartitionChangeBuilder, target: Replicas) -> None:
    """Keeps the current replicas until the target is in sync."""
    current = change.old.replicas
    change.adding = tuple(replica for replica in target if replica not in current)
    change.removing = tuple(replica for replica in current if replica not in target)
    change.replicas = (*target, *change.removing)


def _alter_one(changes: PartitionChanges, item: Reassignment, allow_replication_factor_change: bool) -> None:
    topic = _find_topic(changes.image, item)
    change = changes.of(topic, item.partition)
    if item.replicas is None:
        _cancel(change, item)
    else:
        refuse_bad_replicas(changes.image, item.replicas, None)
        if not allow_replication_factor_change:
            _refuse_other_size(change.old, item.replicas)
        reassign(change, item.replicas)
    changes.add(change)


def _find_topic(image: ClusterImage, item: Reassignment) -> TopicState:
    topic = image.topics.get(item.topic)
    if topic is None:
        raise ApiError(ErrorCode.unknown_topic_or_partition, f"Unable to find a topic named {item.topic}.")
    if item.partition not in topic.partitions:
        raise ApiError(
            ErrorCode.unknown_topic_or_partition,
            f"Unable to find partition {item.topic}:{item.partition}.",
        )
    return topic


def _cancel(change: PartitionChangeBuilder, item: Reassignment) -> None:
    """Restores the previous replicas; impossible once only added replicas have every acknowledged record."""
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
