"""The records of a share group in `__consumer_offsets`, as values and as bytes.

The values are subscriptions, assignments, and the share partitions that have a state at the share coordinator. The
formats are Kafka's published ones, declared on kio's serializers. Keys start with an int16 record type (10 to 15),
values with their version, which is 0 for all of them. Keys and the target assignment have the formats of consumer
groups.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any, Final, NamedTuple
from uuid import UUID

from kio.static.primitive import i8, i32, i64

from penstock.groups.modern_group import (
    JOIN_GROUP_MEMBER_EPOCH,
    NO_PARTITIONS,
    Assignment,
    GroupRecordCodec,
    MemberState,
    TargetAssignmentMemberValue,
    TargetAssignmentMetadataValue,
    TopicPartitionsPart,
    assignment_of,
    difference,
    epoch_entity,
    epoch_of,
    partition_parts,
    target_entity,
    target_of,
    union,
)
from penstock.protocol.stored_records import NestedSchema, RecordSchema, kafka_field


class ShareSubscription(NamedTuple):
    rack_id: str | None = None
    client_id: str = ""
    client_host: str = ""
    #: Sorted.
    topic_names: tuple[str, ...] = ()


class ShareCurrentAssignment(NamedTuple):
    """The assignment that the member has received."""

    epoch: int = JOIN_GROUP_MEMBER_EPOCH
    previous_epoch: int = -1
    assigned: Assignment = NO_PARTITIONS


class ShareGroupMember(NamedTuple):
    member_id: str
    subscription: ShareSubscription = ShareSubscription()
    current: ShareCurrentAssignment = ShareCurrentAssignment()


class StatePartitionMetadata(NamedTuple):
    """Which share partitions have a state at the share coordinator, or whose state is being initialized or deleted."""

    initializing: Assignment = NO_PARTITIONS
    initialized: Assignment = NO_PARTITIONS
    #: Topics whose entire state is being deleted.
    deleting: frozenset[UUID] = frozenset()
    #: The names of all the topics above.
    names: Mapping[UUID, str] = {}

    @property
    def is_empty(self) -> bool:
        return not (self.initializing or self.initialized or self.deleting)

    def of_topic(self, topic_id: UUID) -> frozenset[int]:
        """The partitions that have a state, or may have one."""
        none: frozenset[int] = frozenset()
        return self.initializing.get(topic_id, none) | self.initialized.get(topic_id, none)

    def initialize(self, partitions: Assignment, names: Mapping[UUID, str]) -> "StatePartitionMetadata":
        initializing = union(self.initializing, difference(partitions, self.initialized))
        return StatePartitionMetadata(
            initializing, self.initialized, self.deleting, {**self.names, **names}
        ).without_unused_names()

    def initialization_done(self, partitions: Assignment) -> "StatePartitionMetadata":
        """Skip partitions that are no longer initializing: a deletion may have come in between."""
        done = _intersection(partitions, self.initializing)
        return self._replace(
            initializing=difference(self.initializing, done), initialized=union(self.initialized, done)
        )

    def delete(self, topic_ids: Iterable[UUID]) -> "StatePartitionMetadata":
        deleting = self.deleting.union(topic_ids)
        return self._replace(
            initializing=_without_topics(self.initializing, deleting),
            initialized=_without_topics(self.initialized, deleting),
            deleting=deleting,
        )

    def deletion_done(self, topic_ids: Iterable[UUID]) -> "StatePartitionMetadata":
        return self._replace(deleting=self.deleting.difference(topic_ids)).without_unused_names()

    def forget(self, topic_ids: frozenset[UUID]) -> "StatePartitionMetadata":
        """Drop topics that no longer exist."""
        return StatePartitionMetadata(
            _without_topics(self.initializing, topic_ids),
            _without_topics(self.initialized, topic_ids),
            self.deleting - topic_ids,
            self.names,
        ).without_unused_names()

    def without_unused_names(self) -> "StatePartitionMetadata":
        known = (*self.initializing, *self.initialized, *self.deleting)
        return self._replace(names={topic_id: self.names[topic_id] for topic_id in dict.fromkeys(known)})


NO_STATE_PARTITIONS: Final = StatePartitionMetadata()


def _intersection(one: Assignment, other: Assignment) -> Assignment:
    both = {topic_id: partitions & other.get(topic_id, frozenset()) for topic_id, partitions in one.items()}
    return {topic_id: partitions for topic_id, partitions in both.items() if partitions}


def _without_topics(assignment: Assignment, topic_ids: frozenset[UUID]) -> Assignment:
    return {topic_id: partitions for topic_id, partitions in assignment.items() if topic_id not in topic_ids}


# ruff: noqa: RUF009 - kafka_field() is dataclasses.field()


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareGroupMetadataValue(RecordSchema):
    epoch: i32 = kafka_field("int32")
    metadata_hash: i64 = kafka_field("int64")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareGroupMemberMetadataValue(RecordSchema):
    rack_id: str | None = kafka_field("string")
    client_id: str = kafka_field("string")
    client_host: str = kafka_field("string")
    subscribed_topic_names: tuple[str, ...] = kafka_field("string")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareGroupCurrentMemberAssignmentValue(RecordSchema):
    member_epoch: i32 = kafka_field("int32")
    previous_member_epoch: i32 = kafka_field("int32")
    state: i8 = kafka_field("int8")
    assigned_partitions: tuple[TopicPartitionsPart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedPartitionsPart(NestedSchema):
    topic_id: UUID | None = kafka_field("uuid")
    topic_name: str = kafka_field("string")
    partitions: tuple[i32, ...] = kafka_field("int32")


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTopicPart(NestedSchema):
    topic_id: UUID | None = kafka_field("uuid")
    topic_name: str = kafka_field("string")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareGroupStatePartitionMetadataValue(RecordSchema):
    initializing_topics: tuple[NamedPartitionsPart, ...]
    initialized_topics: tuple[NamedPartitionsPart, ...]
    deleting_topics: tuple[NamedTopicPart, ...]


class ShareGroupRecordType(IntEnum):
    """The record types, by the number at the start of the key."""

    MEMBER_METADATA = 10  # ShareSubscription, by member
    GROUP_METADATA = 11  # GroupEpoch
    TARGET_ASSIGNMENT_METADATA = 12  # int
    TARGET_ASSIGNMENT_MEMBER = 13  # Assignment, by member
    CURRENT_MEMBER_ASSIGNMENT = 14  # ShareCurrentAssignment, by member
    STATE_PARTITION_METADATA = 15  # StatePartitionMetadata


# --- values to entities ---


def _subscription_entity(value: ShareSubscription) -> Any:
    return ShareGroupMemberMetadataValue(
        rack_id=value.rack_id,
        client_id=value.client_id,
        client_host=value.client_host,
        subscribed_topic_names=value.topic_names,
    )


def _current_entity(value: ShareCurrentAssignment) -> Any:
    return ShareGroupCurrentMemberAssignmentValue(
        member_epoch=value.epoch,
        previous_member_epoch=value.previous_epoch,
        state=MemberState.STABLE,  # members of share groups always have their whole assignment
        assigned_partitions=partition_parts(value.assigned),
    )


def _state_partitions_entity(value: StatePartitionMetadata) -> Any:
    return ShareGroupStatePartitionMetadataValue(
        initializing_topics=_named_parts(value.initializing, value.names),
        initialized_topics=_named_parts(value.initialized, value.names),
        deleting_topics=tuple(
            NamedTopicPart(topic_id=topic_id, topic_name=value.names[topic_id])
            for topic_id in sorted(value.deleting)
        ),
    )


def _named_parts(assignment: Assignment, names: Mapping[UUID, str]) -> tuple[Any, ...]:
    return tuple(
        NamedPartitionsPart(
            topic_id=topic_id, topic_name=names[topic_id], partitions=tuple(sorted(partitions))
        )
        for topic_id, partitions in assignment.items()
    )


# --- entities to values ---


def _subscription(entity: Any) -> ShareSubscription:
    return ShareSubscription(
        rack_id=entity.rack_id,
        client_id=entity.client_id,
        client_host=entity.client_host,
        topic_names=entity.subscribed_topic_names,
    )


def _current(entity: Any) -> ShareCurrentAssignment:
    return ShareCurrentAssignment(
        epoch=entity.member_epoch,
        previous_epoch=entity.previous_member_epoch,
        assigned=assignment_of(entity.assigned_partitions),
    )


def _state_partitions(entity: Any) -> StatePartitionMetadata:
    every: Iterable[Any] = (
        *entity.initializing_topics,
        *entity.initialized_topics,
        *entity.deleting_topics,
    )
    return StatePartitionMetadata(
        initializing=assignment_of(entity.initializing_topics),
        initialized=assignment_of(entity.initialized_topics),
        deleting=frozenset(part.topic_id for part in entity.deleting_topics),
        names={part.topic_id: part.topic_name for part in every},
    )


_ENTITIES: Final[dict[ShareGroupRecordType, Any]] = {
    ShareGroupRecordType.MEMBER_METADATA: _subscription_entity,
    ShareGroupRecordType.GROUP_METADATA: partial(epoch_entity, ShareGroupMetadataValue),
    ShareGroupRecordType.TARGET_ASSIGNMENT_METADATA: lambda epoch: TargetAssignmentMetadataValue(
        assignment_epoch=epoch
    ),
    ShareGroupRecordType.TARGET_ASSIGNMENT_MEMBER: target_entity,
    ShareGroupRecordType.CURRENT_MEMBER_ASSIGNMENT: _current_entity,
    ShareGroupRecordType.STATE_PARTITION_METADATA: _state_partitions_entity,
}

_PARSERS: Final[dict[ShareGroupRecordType, tuple[Any, Any]]] = {
    ShareGroupRecordType.MEMBER_METADATA: (ShareGroupMemberMetadataValue, _subscription),
    ShareGroupRecordType.GROUP_METADATA: (ShareGroupMetadataValue, epoch_of),
    ShareGroupRecordType.TARGET_ASSIGNMENT_METADATA: (
        TargetAssignmentMetadataValue,
        lambda entity: entity.assignment_epoch,
    ),
    ShareGroupRecordType.TARGET_ASSIGNMENT_MEMBER: (TargetAssignmentMemberValue, target_of),
    ShareGroupRecordType.CURRENT_MEMBER_ASSIGNMENT: (ShareGroupCurrentMemberAssignmentValue, _current),
    ShareGroupRecordType.STATE_PARTITION_METADATA: (ShareGroupStatePartitionMetadataValue, _state_partitions),
}

SHARE_GROUP_CODEC: Final = GroupRecordCodec(
    ShareGroupRecordType,
    of_group=(
        ShareGroupRecordType.GROUP_METADATA,
        ShareGroupRecordType.TARGET_ASSIGNMENT_METADATA,
        ShareGroupRecordType.STATE_PARTITION_METADATA,
    ),
    entities=_ENTITIES,
    parsers=_PARSERS,
)
