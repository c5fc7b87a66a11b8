"""The stored state of a consumer group, as values and as records in Kafka's formats.

The values are subscriptions, assignments, epochs, and the state of each member between two assignments.
"""

from collections.abc import Iterable, Iterator, Mapping
from enum import IntEnum
from typing import Any, Final, NamedTuple
from uuid import UUID

from penstock.groups import modern_group
from penstock.groups.group import Protocols
from penstock.groups.modern_group import GroupRecordCodec

#: Partitions by topic. Immutable by convention; topics without partitions are omitted.
Assignment = Mapping[UUID, frozenset[int]]
NO_PARTITIONS: Final[Assignment] = {}
#: An epoch for each partition, by topic.
AssignmentEpochs = Mapping[UUID, Mapping[int, int]]
NO_ASSIGNMENT_EPOCHS: Final[AssignmentEpochs] = {}

#: The member epochs of a heartbeat that joins, leaves, or (static members) leaves temporarily.
JOIN_GROUP_MEMBER_EPOCH: Final = 0
LEAVE_GROUP_MEMBER_EPOCH: Final = -1
LEAVE_GROUP_STATIC_MEMBER_EPOCH: Final = -2
#: The epoch of a group that has no target assignment yet.
NO_TARGET_EPOCH: Final = -1


class MemberState(IntEnum):
    """The progress of a member towards its target assignment, numbered as Kafka stores it."""

    STABLE = 0
    #: The member must revoke partitions before it gets the next epoch.
    UNREVOKED = 1
    #: The member waits for partitions that other members have not released.
    UNRELEASED = 2


class ClassicMemberMetadata(NamedTuple):
    """The metadata of a member that uses the classic protocol."""

    session_timeout_ms: int
    protocols: Protocols


class ConsumerSubscription(NamedTuple):
    instance_id: str | None = None
    rack_id: str | None = None
    client_id: str = ""
    client_host: str = ""
    #: Sorted.
    topic_names: tuple[str, ...] = ()
    topic_regex: str = ""
    rebalance_timeout_ms: int = -1
    assignor: str | None = None
    classic: ClassicMemberMetadata | None = None


class ConsumerCurrentAssignment(NamedTuple):
    """The assignment that the member has received."""

    epoch: int = JOIN_GROUP_MEMBER_EPOCH
    previous_epoch: int = -1
    phase: MemberState = MemberState.STABLE
    assigned: Assignment = NO_PARTITIONS
    #: The member must revoke these; it still owns them until it confirms.
    revoking: Assignment = NO_PARTITIONS
    #: The epoch since which the member has held each partition without interruption.
    since: AssignmentEpochs = NO_ASSIGNMENT_EPOCHS

    def moved(
        self, epoch: int, phase: MemberState, assigned: Assignment, revoking: Assignment = NO_PARTITIONS
    ) -> "ConsumerCurrentAssignment":
        """Partitions that are new to the member, or that it regains after an absence, count from this epoch."""
        known = self.since if self.epoch > JOIN_GROUP_MEMBER_EPOCH else NO_ASSIGNMENT_EPOCHS
        since = {
            topic_id: {
                number: known.get(topic_id, {}).get(number, epoch)
                for part in (assigned, revoking)
                for number in part.get(topic_id, ())
            }
            for topic_id in {**assigned, **revoking}
        }
        return ConsumerCurrentAssignment(epoch, self.epoch, phase, assigned, revoking, since)

    def is_settled(self, target_epoch: int) -> bool:
        return self.phase is MemberState.STABLE and self.epoch == target_epoch

    def owned(self) -> Iterator[tuple[UUID, int]]:
        for part in (self.assigned, self.revoking):
            for topic_id, partitions in part.items():
                for partition in partitions:
                    yield topic_id, partition


class ConsumerGroupMember(NamedTuple):
    member_id: str
    subscription: ConsumerSubscription = ConsumerSubscription()
    current: ConsumerCurrentAssignment = ConsumerCurrentAssignment()

    @property
    def is_classic(self) -> bool:
        return self.subscription.classic is not None

    @property
    def instance_id(self) -> str | None:
        return self.subscription.instance_id


class GroupEpoch(NamedTuple):
    epoch: int
    #: A hash of the subscribed topics at this epoch.
    metadata_hash: int = 0


class TargetAssignmentEpoch(NamedTuple):
    """The group epoch for which the target was last computed, and when."""

    epoch: int = NO_TARGET_EPOCH
    timestamp_ms: int = 0


class ResolvedRegularExpression(NamedTuple):
    """The topics that a regular expression matched."""

    topics: frozenset[str]
    version: int
    timestamp_ms: int


def to_assignment(partitions: Iterable[tuple[UUID, int]]) -> Assignment:
    found: dict[UUID, list[int]] = {}
    for topic_id, partition in partitions:
        found.setdefault(topic_id, []).append(partition)
    return {topic_id: frozenset(numbers) for topic_id, numbers in found.items()}


def overlaps(one: Assignment, other: Assignment) -> bool:
    return any(not partitions.isdisjoint(other.get(topic_id, ())) for topic_id, partitions in one.items())


def is_within(part: Assignment, whole: Assignment) -> bool:
    return all(partitions <= whole.get(topic_id, frozenset()) for topic_id, partitions in part.items())


def difference(whole: Assignment, part: Assignment) -> Assignment:
    left = {topic_id: partitions - part.get(topic_id, frozenset()) for topic_id, partitions in whole.items()}
    return {topic_id: partitions for topic_id, partitions in left.items() if partitions}


def union(one: Assignment, other: Assignment) -> Assignment:
    return {
        topic_id: one.get(topic_id, frozenset()) | other.get(topic_id, frozenset())
        for topic_id in {**one, **other}
    }


class ConsumerGroupRecordType(IntEnum):
    """The record types, by the number at the start of the key."""

    GROUP_EPOCH = 3  # GroupEpoch
    #: Kafka 4.0 stored the partitions of topics here; a hash in the group epoch has replaced that.
    PARTITION_METADATA = 4
    SUBSCRIPTION = 5  # ConsumerSubscription, by member
    TARGET_EPOCH = 6  # TargetAssignmentEpoch
    TARGET = 7  # Assignment, by member
    CURRENT = 8  # ConsumerCurrentAssignment, by member
    REGEX = 16  # ResolvedRegularExpression, by regular expression


# --- values to entities ---


def _epoch_entity(value: GroupEpoch) -> Any:
    return modern_group.ConsumerGroupMetadataValue(epoch=value.epoch, metadata_hash=value.metadata_hash)


def _subscription_entity(value: ConsumerSubscription) -> Any:
    return modern_group.ConsumerGroupMemberMetadataValue(
        instance_id=value.instance_id,
        rack_id=value.rack_id,
        client_id=value.client_id,
        client_host=value.client_host,
        subscribed_topic_names=value.topic_names,
        subscribed_topic_regex=value.topic_regex or None,
        rebalance_timeout_ms=value.rebalance_timeout_ms,
        server_assignor=value.assignor,
        classic_member_metadata=_classic_metadata_entity(value.classic),
    )


def _classic_metadata_entity(classic: ClassicMemberMetadata | None) -> Any:
    if classic is None:
        return modern_group.NO_CLASSIC_MEMBER_METADATA
    protocols = tuple(
        modern_group.ClassicProtocolPart(name=name, metadata=data) for name, data in classic.protocols
    )
    return modern_group.ClassicMemberMetadataPart(
        session_timeout_ms=classic.session_timeout_ms, supported_protocols=protocols
    )


def _target_epoch_entity(value: TargetAssignmentEpoch) -> Any:
    return modern_group.TargetAssignmentMetadataValue(
        assignment_epoch=value.epoch, assignment_timestamp=value.timestamp_ms
    )


def partition_parts(value: Assignment) -> tuple[Any, ...]:
    return tuple(
        modern_group.TopicPartitionsPart(topic_id=topic_id, partitions=tuple(sorted(partitions)))
        for topic_id, partitions in value.items()
    )


def _target_entity(value: Assignment) -> Any:
    return modern_group.TargetAssignmentMemberValue(topic_partitions=partition_parts(value))


def _current_entity(value: ConsumerCurrentAssignment) -> Any:
    return modern_group.ConsumerGroupCurrentMemberAssignmentValue(
        member_epoch=value.epoch,
        previous_member_epoch=value.previous_epoch,
        state=value.phase,
        assigned_partitions=_assigned_parts(value.assigned, value.since),
        partitions_pending_revocation=_assigned_parts(value.revoking, value.since),
    )


def _assigned_parts(value: Assignment, since: AssignmentEpochs) -> tuple[Any, ...]:
    return tuple(
        modern_group.AssignedPartitionsPart(
            topic_id=topic_id,
            partitions=(numbers := tuple(sorted(partitions))),
            assignment_epochs=tuple(since[topic_id][number] for number in numbers),
        )
        for topic_id, partitions in value.items()
    )


def _regex_entity(value: ResolvedRegularExpression) -> Any:
    return modern_group.ConsumerGroupRegularExpressionValue(
        topics=tuple(sorted(value.topics)), version=value.version, timestamp=value.timestamp_ms
    )


# --- entities to values ---


def _subscription(entity: Any) -> ConsumerSubscription:
    return ConsumerSubscription(
        instance_id=entity.instance_id,
        rack_id=entity.rack_id,
        client_id=entity.client_id,
        client_host=entity.client_host,
        topic_names=entity.subscribed_topic_names,
        topic_regex=entity.subscribed_topic_regex or "",
        rebalance_timeout_ms=entity.rebalance_timeout_ms,
        assignor=entity.server_assignor,
        classic=_classic_metadata(entity.classic_member_metadata),
    )


def _classic_metadata(part: Any) -> ClassicMemberMetadata | None:
    if part.presence < 0:
        return None
    protocols = tuple((protocol.name, protocol.metadata) for protocol in part.supported_protocols)
    return ClassicMemberMetadata(part.session_timeout_ms, protocols)


def assignment_of(parts: tuple[Any, ...]) -> Assignment:
    return {part.topic_id: frozenset(part.partitions) for part in parts}


def _assignment_epochs(entity: Any) -> AssignmentEpochs:
    """Before Kafka 4.3 the epochs were not stored; the member epoch is the latest possible value."""
    found: dict[UUID, dict[int, int]] = {}
    for part in (*entity.assigned_partitions, *entity.partitions_pending_revocation):
        epochs = part.assignment_epochs
        if epochs is None:
            epochs = (entity.member_epoch,) * len(part.partitions)
        found.setdefault(part.topic_id, {}).update(zip(part.partitions, epochs, strict=True))
    return found


def _current(entity: Any) -> ConsumerCurrentAssignment:
    return ConsumerCurrentAssignment(
        epoch=entity.member_epoch,
        previous_epoch=entity.previous_member_epoch,
        phase=MemberState(entity.state),
        assigned=assignment_of(entity.assigned_partitions),
        revoking=assignment_of(entity.partitions_pending_revocation),
        since=_assignment_epochs(entity),
    )


_ENTITIES: Final[dict[ConsumerGroupRecordType, Any]] = {
    ConsumerGroupRecordType.GROUP_EPOCH: _epoch_entity,
    ConsumerGroupRecordType.SUBSCRIPTION: _subscription_entity,
    ConsumerGroupRecordType.TARGET_EPOCH: _target_epoch_entity,
    ConsumerGroupRecordType.TARGET: _target_entity,
    ConsumerGroupRecordType.CURRENT: _current_entity,
    ConsumerGroupRecordType.REGEX: _regex_entity,
}

_PARSERS: Final[dict[ConsumerGroupRecordType, tuple[Any, Any]]] = {
    ConsumerGroupRecordType.GROUP_EPOCH: (
        modern_group.ConsumerGroupMetadataValue,
        lambda entity: GroupEpoch(entity.epoch, entity.metadata_hash),
    ),
    ConsumerGroupRecordType.SUBSCRIPTION: (modern_group.ConsumerGroupMemberMetadataValue, _subscription),
    ConsumerGroupRecordType.TARGET_EPOCH: (
        modern_group.TargetAssignmentMetadataValue,
        lambda entity: TargetAssignmentEpoch(entity.assignment_epoch, entity.assignment_timestamp),
    ),
    ConsumerGroupRecordType.TARGET: (
        modern_group.TargetAssignmentMemberValue,
        lambda entity: assignment_of(entity.topic_partitions),
    ),
    ConsumerGroupRecordType.CURRENT: (modern_group.ConsumerGroupCurrentMemberAssignmentValue, _current),
    ConsumerGroupRecordType.REGEX: (
        modern_group.ConsumerGroupRegularExpressionValue,
        lambda entity: ResolvedRegularExpression(frozenset(entity.topics), entity.version, entity.timestamp),
    ),
}

CONSUMER_GROUP_CODEC: Final = GroupRecordCodec(
    ConsumerGroupRecordType,
    of_group=(
        ConsumerGroupRecordType.GROUP_EPOCH,
        ConsumerGroupRecordType.PARTITION_METADATA,
        ConsumerGroupRecordType.TARGET_EPOCH,
    ),
    entities=_ENTITIES,
    parsers=_PARSERS,
)
