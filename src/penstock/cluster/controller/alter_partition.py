"""AlterPartition and AssignReplicasToDirs: what brokers report about their replicas.

With AlterPartition a leader requests another ISR; the request is fenced by broker, leader and partition epochs.
With AssignReplicasToDirs a broker reports where its replicas are, or that a copy is gone or damaged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar
from uuid import UUID

from penstock.cluster.controller.decision import ControllerConfig, Decision
from penstock.cluster.controller.partition_change import PartitionChanges, current_broker
from penstock.cluster.image import BrokerState, ClusterImage, PartitionState, TopicState, changed_partition
from penstock.cluster.metadata_records import NO_LEADER_CHANGE
from penstock.protocol.errors import ApiError, ErrorCode


class IsrMember(NamedTuple):
    """`broker_epoch` is the epoch of the fetches that brought the replica into the ISR; -1 if the leader lacks it."""

    broker_id: int
    broker_epoch: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class AlterPartition:
    topic_id: UUID
    partition: int
    leader_epoch: int
    partition_epoch: int
    isr: tuple[IsrMember, ...]
    leader_recovering: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AlterPartitionResult:
    """`state` is the partition after the change, None on error.

    NEW_LEADER_ELECTED is an error although the change took effect: the requested ISR completed a reassignment that
    moves leadership to another broker.
    """

    topic_id: UUID
    partition: int
    error: ErrorCode = ErrorCode.none
    state: PartitionState | None = None


def alter_partitions(
    image: ClusterImage,
    items: Sequence[AlterPartition],
    *,
    broker_id: int,
    broker_epoch: int,
    rules: ControllerConfig,
) -> Decision[tuple[AlterPartitionResult, ...]]:
    """One result per item, in order. Raises STALE_BROKER_EPOCH."""
    current_broker(image, broker_id, broker_epoch)
    changes = PartitionChanges(image, rules)
    return changes.decision(_each_once(items, lambda item: _alter_one(changes, item, broker_id), _result))


Item = TypeVar("Item", AlterPartition, "DirectoryAssignment")
Result = TypeVar("Result")


def _each_once(
    items: Sequence[Item], change: Callable[[Item], Result], refused: Callable[[Item, ErrorCode], Result]
) -> tuple[Result, ...]:
    """One result per item, in order. A partition may be named once; INVALID_REQUEST for later items that name it."""
    done: set[tuple[UUID, int]] = set()
    results = []
    for item in items:
        try:
            if (item.topic_id, item.partition) in done:
                raise ApiError(ErrorCode.invalid_request)
            done.add((item.topic_id, item.partition))
            results.append(change(item))
        except ApiError as error:
            results.append(refused(item, error.code))
    return tuple(results)


def _alter_one(changes: PartitionChanges, item: AlterPartition, broker_id: int) -> AlterPartitionResult:
    topic, partition = _find_partition(changes.image, item)
    refuse_other_epochs(partition, item, broker_id)
    _refuse_bad_isr(partition, item)
    refuse_ineligible(changes.image, item)
    change = changes.of(topic, item.partition)
    change.isr = tuple(member.broker_id for member in item.isr)
    change.leader_recovering = item.leader_recovering
    record = changes.add(change)
    if record is None:
        return _result(item, state=partition)
    if record.leader not in (broker_id, NO_LEADER_CHANGE):
        return _result(item, ErrorCode.new_leader_elected)
    return _result(item, state=changed_partition(partition, record))


def _find_partition(
    image: ClusterImage, item: AlterPartition | DirectoryAssignment
) -> tuple[TopicState, PartitionState]:
    topic = image.topics_by_id.get(item.topic_id)
    if topic is None:
        raise ApiError(ErrorCode.unknown_topic_id)
    if item.partition not in topic.partitions:
        raise ApiError(ErrorCode.unknown_topic_or_partition)
    return topic, topic.partitions[item.partition]


def refuse_other_epochs(partition: PartitionState, item: AlterPartition, broker_id: int) -> None:
    if item.leader_epoch > partition.leader_epoch or item.partition_epoch > partition.partition_epoch:
        # The broker has seen later epochs than this controller, so another controller is active.
        raise ApiError(ErrorCode.not_controller)
    if item.leader_epoch < partition.leader_epoch:
        raise ApiError(ErrorCode.fenced_leader_epoch)
    if broker_id != partition.leader:
        raise ApiError(ErrorCode.invalid_request)
    refuse_stale_partition_epoch(partition, item)


def refuse_stale_partition_epoch(partition: PartitionState, item: AlterPartition) -> None:
    if item.partition_epoch < partition.partition_epoch:
        raise ApiError(ErrorCode.invalid_update_version)


def _refuse_bad_isr(partition: PartitionState, item: AlterPartition) -> None:
    members = [member.broker_id for member in item.isr]
    sound = len(set(members)) == len(members) and set(members) <= set(partition.replicas)
    if not sound or partition.leader not in members:
        raise ApiError(ErrorCode.invalid_request)
    if item.leader_recovering and (len(members) > 1 or not partition.leader_recovering):
        raise ApiError(ErrorCode.invalid_request)


def refuse_ineligible(image: ClusterImage, item: AlterPartition) -> None:
    if not all(is_eligible(image, member) for member in item.isr):
        raise ApiError(ErrorCode.ineligible_replica)


def is_eligible(image: ClusterImage, member: IsrMember) -> bool:
    """Whether the broker is active and in the epoch of its fetches. After a restart it may have lost records."""
    broker = image.brokers.get(member.broker_id)
    return broker is not None and broker.is_active and member.broker_epoch in (-1, broker.epoch)


def _result(
    item: AlterPartition, error: ErrorCode = ErrorCode.none, state: PartitionState | None = None
) -> AlterPartitionResult:
    return AlterPartitionResult(topic_id=item.topic_id, partition=item.partition, error=error, state=state)


#: The directory id of a replica whose copy is lost.
LOST_DIRECTORY: Final = UUID(int=2)


class DirectoryAssignment(NamedTuple):
    topic_id: UUID
    partition: int
    directory: UUID


class DirectoryResult(NamedTuple):
    topic_id: UUID
    partition: int
    directory: UUID
    error: ErrorCode = ErrorCode.none


def assign_replicas_to_dirs(
    image: ClusterImage,
    items: Sequence[DirectoryAssignment],
    *,
    broker_id: int,
    broker_epoch: int,
    rules: ControllerConfig,
) -> Decision[tuple[DirectoryResult, ...]]:
    """Records the directories of the broker's replicas.

    A lost copy leaves the ISR and may not lead until it has been fetched again; its recorded directory stays the same.
    One result per item, in order. Raises STALE_BROKER_EPOCH.
    """
    broker = current_broker(image, broker_id, broker_epoch)
    changes = PartitionChanges(image, rules)
    return changes.decision(
        _each_once(
            items,
            lambda item: _assign_one(changes, broker, item),
            lambda item, error: DirectoryResult(*item, error),
        )
    )


def _assign_one(changes: PartitionChanges, broker: BrokerState, item: DirectoryAssignment) -> DirectoryResult:
    topic, partition = _find_partition(changes.image, item)
    if broker.id not in partition.replicas:
        raise ApiError(ErrorCode.not_leader_or_follower)
    change = changes.of(topic, item.partition)
    if item.directory == LOST_DIRECTORY:
        change.mark_lost(broker.id)
    elif item.directory in broker.log_dirs:
        change.directories[broker.id] = item.directory
    else:
        raise ApiError(ErrorCode.invalid_request)
    changes.add(change)
    return DirectoryResult(*item)
