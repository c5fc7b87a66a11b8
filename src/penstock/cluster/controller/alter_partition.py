"""AlterPartition: a leader asks for another in-sync set. Fenced by broker, leader and partition epochs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple
from uuid import UUID

from penstock.cluster.controller.leadership import current_broker
from penstock.cluster.controller.partition_change import Changes
from penstock.cluster.controller.rules import ControllerRules
from penstock.cluster.decision import Decision
from penstock.cluster.image import ClusterImage, changed_partition
from penstock.cluster.records import NO_LEADER_CHANGE
from penstock.cluster.state import PartitionState, TopicState
from penstock.protocol.errors import ApiError, ErrorCode


class IsrMember(NamedTuple):
    """The epoch is that of the fetches which made it a member; -1 where the leader does not know it."""

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
    """The partition as it is now, unless there is an error. NEW_LEADER_ELECTED is one that changed something:
    the in-sync set asked for completed a reassignment that takes the lead away."""

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
    rules: ControllerRules,
) -> Decision[tuple[AlterPartitionResult, ...]]:
    """One result per item, in order. Raises STALE_BROKER_EPOCH."""
    current_broker(image, broker_id, broker_epoch)
    changes = Changes(image, rules)
    done: set[tuple[UUID, int]] = set()
    results = []
    for item in items:
        try:
            if (item.topic_id, item.partition) in done:
                raise ApiError(ErrorCode.invalid_request)
            done.add((item.topic_id, item.partition))
            results.append(_alter(changes, item, broker_id))
        except ApiError as error:
            results.append(_result(item, error.code))
    return changes.decision(tuple(results))


def _alter(changes: Changes, item: AlterPartition, broker_id: int) -> AlterPartitionResult:
    topic, partition = _find(changes.image, item)
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


def _find(image: ClusterImage, item: AlterPartition) -> tuple[TopicState, PartitionState]:
    topic = image.topics_by_id.get(item.topic_id)
    if topic is None:
        raise ApiError(ErrorCode.unknown_topic_id)
    if item.partition not in topic.partitions:
        raise ApiError(ErrorCode.unknown_topic_or_partition)
    return topic, topic.partitions[item.partition]


def refuse_other_epochs(partition: PartitionState, item: AlterPartition, broker_id: int) -> None:
    if item.leader_epoch > partition.leader_epoch or item.partition_epoch > partition.partition_epoch:
        # It knows more than we do: somebody else is the active controller.
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
    """Alive, staying, and still the one whose fetches were counted: a restart may have lost what it had."""
    broker = image.brokers.get(member.broker_id)
    return broker is not None and broker.is_active and member.broker_epoch in (-1, broker.epoch)


def _result(
    item: AlterPartition, error: ErrorCode = ErrorCode.none, state: PartitionState | None = None
) -> AlterPartitionResult:
    return AlterPartitionResult(topic_id=item.topic_id, partition=item.partition, error=error, state=state)
