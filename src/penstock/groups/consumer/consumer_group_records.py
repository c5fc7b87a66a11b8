"""The stored state of a consumer group, as values and as records in Kafka's formats.

The values are subscriptions, assignments, epochs, and the state of each member between two assignments.
"""

from collections.abc import Iterator, Mapping
from dataclasses import field
from enum import IntEnum
from functools import partial
from typing import Any, Final, NamedTuple
from uuid import UUID

from kio.static.primitive import i8, i32, i64

from penstock.groups.group import Protocols
from penstock.groups.modern_group import (
    JOIN_GROUP_MEMBER_EPOCH,
    NO_PARTITIONS,
    Assignment,
    GroupRecordCodec,
    MemberState,
    TargetAssignmentEpoch,
    TargetAssignmentMemberValue,
    TargetAssignmentMetadataValue,
    assignment_of,
    epoch_entity,
    epoch_of,
    target_entity,
    target_of,
)
from penstock.protocol.stored_records import NestedSchema, RecordSchema, kafka_field, schema

#: An epoch for each partition, by topic.
AssignmentEpochs = Mapping[UUID, Mapping[int, int]]
NO_ASSIGNMENT_EPOCHS: Final[AssignmentEpochs] = {}


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


class ResolvedRegularExpression(NamedTuple):
    """The topics that a regular expression matched."""

    topics: frozenset[str]
    version: int
    timestamp_ms: int


@schema()
class ConsumerGroupMetadataValue(RecordSchema):
    epoch: i32 = kafka_field("int32")
    metadata_hash: i64 = kafka_field("int64", tag=0, default=i64(0))


@schema()
class ClassicProtocolPart(NestedSchema):
    name: str = kafka_field("string")
    metadata: bytes = kafka_field("bytes")


@schema()
class ClassicMemberMetadataPart(NestedSchema):
    #: Kafka writes this byte before a nullable struct. kio writes it too, except in tagged fields.
    presence: i8 = kafka_field("int8", default=i8(1))
    session_timeout_ms: i32 = kafka_field("int32")
    supported_protocols: tuple[ClassicProtocolPart, ...]


#: Never written, because it is the default.
NO_CLASSIC_MEMBER_METADATA: Final = ClassicMemberMetadataPart(
    presence=i8(-1), session_timeout_ms=i32(0), supported_protocols=()
)


@schema()
class ConsumerGroupMemberMetadataValue(RecordSchema):
    instance_id: str | None = kafka_field("string")
    rack_id: str | None = kafka_field("string")
    client_id: str = kafka_field("string")
    client_host: str = kafka_field("string")
    subscribed_topic_names: tuple[str, ...] = kafka_field("string")
    subscribed_topic_regex: str | None = kafka_field("string")
    rebalance_timeout_ms: i32 = kafka_field("int32")
    server_assignor: str | None = kafka_field("string")
    classic_member_metadata: ClassicMemberMetadataPart = field(
        metadata={"tag": 0}, default=NO_CLASSIC_MEMBER_METADATA
    )


@schema()
class AssignedPartitionsPart(NestedSchema):
    topic_id: UUID | None = kafka_field("uuid")
    partitions: tuple[i32, ...] = kafka_field("int32")
    #: One epoch per partition. Kafka writes them since 4.3.
    assignment_epochs: tuple[i32, ...] | None = kafka_field("int32", tag=0, default=None)


@schema()
class ConsumerGroupCurrentMemberAssignmentValue(RecordSchema):
    member_epoch: i32 = kafka_field("int32")
    previous_member_epoch: i32 = kafka_field("int32")
    state: i8 = kafka_field("int8")
    assigned_partitions: tuple[AssignedPartitionsPart, ...]
    partitions_pending_revocation: tuple[AssignedPartitionsPart, ...]


@schema()
class ConsumerGroupRegularExpressionValue(RecordSchema):
    topics: tuple[str, ...] = kafka_field("string")
    version: i64 = kafka_field("int64")
    timestamp: i64 = kafka_field("int64")


class ConsumerGroupRecordType(IntEnum):
    """The record types, by the number at the start of the key."""

    GROUP_METADATA = 3  # GroupEpoch
    #: Kafka 4.0 stored the partitions of topics here; a hash in the group epoch has replaced that.
    PARTITION_METADATA = 4
    MEMBER_METADATA = 5  # ConsumerSubscription, by member
    TARGET_ASSIGNMENT_METADATA = 6  # TargetAssignmentEpoch
    TARGET_ASSIGNMENT_MEMBER = 7  # Assignment, by member
    CURRENT_MEMBER_ASSIGNMENT = 8  # ConsumerCurrentAssignment, by member
    REGULAR_EXPRESSION = 16  # ResolvedRegularExpression, by regular expression


# --- values to entities ---


def _subscription_entity(value: ConsumerSubscription) -> Any:
    return ConsumerGroupMemberMetadataValue(
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
        return NO_CLASSIC_MEMBER_METADATA
    protocols = tuple(ClassicProtocolPart(name=name, metadata=data) for name, data in classic.protocols)
    return ClassicMemberMetadataPart(
        session_timeout_ms=classic.session_timeout_ms, supported_protocols=protocols
    )


def _target_epoch_entity(value: TargetAssignmentEpoch) -> Any:
    return TargetAssignmentMetadataValue(
        assignment_epoch=value.epoch, assignment_timestamp=value.timestamp_ms
    )


def _current_entity(value: ConsumerCurrentAssignment) -> Any:
    return ConsumerGroupCurrentMemberAssignmentValue(
        member_epoch=value.epoch,
        previous_member_epoch=value.previous_epoch,
        state=value.phase,
        assigned_partitions=_assigned_parts(value.assigned, value.since),
        partitions_pending_revocation=_assigned_parts(value.revoking, value.since),
    )


def _assigned_parts(value: Assignment, since: AssignmentEpochs) -> tuple[Any, ...]:
    return tuple(
        AssignedPartitionsPart(
            topic_id=topic_id,
            partitions=(numbers := tuple(sorted(partitions))),
            assignment_epochs=tuple(since[topic_id][number] for number in numbers),
        )
        for topic_id, partitions in value.items()
    )


def _regex_entity(value: ResolvedRegularExpression) -> Any:
    return ConsumerGroupRegularExpressionValue(
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
    ConsumerGroupRecordType.GROUP_METADATA: partial(epoch_entity, ConsumerGroupMetadataValue),
    ConsumerGroupRecordType.MEMBER_METADATA: _subscription_entity,
    ConsumerGroupRecordType.TARGET_ASSIGNMENT_METADATA: _target_epoch_entity,
    ConsumerGroupRecordType.TARGET_ASSIGNMENT_MEMBER: target_entity,
    ConsumerGroupRecordType.CURRENT_MEMBER_ASSIGNMENT: _current_entity,
    ConsumerGroupRecordType.REGULAR_EXPRESSION: _regex_entity,
}

_PARSERS: Final[dict[ConsumerGroupRecordType, tuple[Any, Any]]] = {
    ConsumerGroupRecordType.GROUP_METADATA: (ConsumerGroupMetadataValue, epoch_of),
    ConsumerGroupRecordType.MEMBER_METADATA: (ConsumerGroupMemberMetadataValue, _subscription),
    ConsumerGroupRecordType.TARGET_ASSIGNMENT_METADATA: (
        TargetAssignmentMetadataValue,
        lambda entity: TargetAssignmentEpoch(entity.assignment_epoch, entity.assignment_timestamp),
    ),
    ConsumerGroupRecordType.TARGET_ASSIGNMENT_MEMBER: (TargetAssignmentMemberValue, target_of),
    ConsumerGroupRecordType.CURRENT_MEMBER_ASSIGNMENT: (ConsumerGroupCurrentMemberAssignmentValue, _current),
    ConsumerGroupRecordType.REGULAR_EXPRESSION: (
        ConsumerGroupRegularExpressionValue,
        lambda entity: ResolvedRegularExpression(frozenset(entity.topics), entity.version, entity.timestamp),
    ),
}

CONSUMER_GROUP_CODEC: Final = GroupRecordCodec(
    ConsumerGroupRecordType,
    of_group=(
        ConsumerGroupRecordType.GROUP_METADATA,
        ConsumerGroupRecordType.PARTITION_METADATA,
        ConsumerGroupRecordType.TARGET_ASSIGNMENT_METADATA,
    ),
    entities=_ENTITIES,
    parsers=_PARSERS,
)
