"""Records of `__consumer_offsets`: committed offsets and classic groups as typed values, and their bytes.

The formats are Kafka's published ones, declared on kio's serializers. Keys start with an int16 record type, values
with an int16 version. Every Kafka release since 2.3 writes and reads version 3 values; version 1 carries an explicit
expiry; version 4 of an offset carries the id of its topic (Kafka 4.1); version 4 of a group is only read.
"""

from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from kio.static.primitive import i32, i64

from penstock.protocol.stored_records import (
    KeySchema,
    KeyValue,
    NestedSchema,
    RecordSchema,
    UnknownVersion,
    decode_entity,
    encode_entity,
    kafka_field,
    key_type,
    schema,
    value_version,
)


@schema()
class OffsetCommitKey(KeySchema):
    group: str = kafka_field("string")
    topic: str = kafka_field("string")
    partition: i32 = kafka_field("int32")


@schema()
class GroupMetadataKey(KeySchema):
    group: str = kafka_field("string")


@schema(version=1, flexible=False)
class OffsetCommitValueV1(RecordSchema):
    offset: i64 = kafka_field("int64")
    metadata: str = kafka_field("string")
    commit_timestamp: i64 = kafka_field("int64")
    expire_timestamp: i64 = kafka_field("int64")


@schema(version=3, flexible=False)
class OffsetCommitValueV3(RecordSchema):
    offset: i64 = kafka_field("int64")
    leader_epoch: i32 = kafka_field("int32")
    metadata: str = kafka_field("string")
    commit_timestamp: i64 = kafka_field("int64")


@schema(version=4, flexible=True)
class OffsetCommitValueV4(OffsetCommitValueV3):
    topic_id: UUID | None = kafka_field("uuid", tag=0, default=None)


@schema(version=3, flexible=False)
class MemberMetadataV3(NestedSchema):
    member_id: str = kafka_field("string")
    group_instance_id: str | None = kafka_field("string")
    client_id: str = kafka_field("string")
    client_host: str = kafka_field("string")
    rebalance_timeout: i32 = kafka_field("int32")
    session_timeout: i32 = kafka_field("int32")
    subscription: bytes = kafka_field("bytes")
    assignment: bytes = kafka_field("bytes")


@schema(version=4, flexible=True)
class MemberMetadataV4(MemberMetadataV3): ...


@schema(version=3, flexible=False)
class GroupMetadataValueV3(RecordSchema):
    protocol_type: str = kafka_field("string")
    generation: i32 = kafka_field("int32")
    protocol: str | None = kafka_field("string")
    leader: str | None = kafka_field("string")
    current_state_timestamp: i64 = kafka_field("int64")
    members: tuple[MemberMetadataV3, ...]


@schema(version=4, flexible=True)
class GroupMetadataValueV4(GroupMetadataValueV3):
    members: tuple[MemberMetadataV4, ...]


OFFSET_COMMIT: Final = 1
#: Old Kafka releases wrote key type 0; it has the same fields as type 1.
OFFSET_KEY_TYPES: Final = (0, OFFSET_COMMIT)
GROUP_METADATA: Final = 2
CLASSIC_KEY_TYPES: Final = (GROUP_METADATA,)
#: The packages of the other kinds of groups define these records.
CONSUMER_KEY_TYPES: Final = (3, 4, 5, 6, 7, 8, 16)
SHARE_KEY_TYPES: Final = (10, 11, 12, 13, 14, 15)
STREAMS_KEY_TYPES: Final = (17, 19, 20, 21, 22, 23)
#: The version that we write, except for offsets with an expiry or a topic id.
_VALUE_VERSION: Final = 3

_OFFSET_VALUES: Final[dict[int, Any]] = {
    1: OffsetCommitValueV1,
    3: OffsetCommitValueV3,
    4: OffsetCommitValueV4,
}
_GROUP_VALUES: Final[dict[int, Any]] = {3: GroupMetadataValueV3, 4: GroupMetadataValueV4}


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedOffset:
    offset: int
    leader_epoch: int = -1
    metadata: str = ""
    commit_timestamp_ms: int
    #: Set only for old clients that send a retention time; all other offsets have the broker's retention.
    expire_timestamp_ms: int | None = None
    #: Prevents a later topic of the same name from inheriting the offset. None if it was not stored.
    topic_id: UUID | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMember:
    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    rebalance_timeout_ms: int
    session_timeout_ms: int
    subscription: bytes
    assignment: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredGroup:
    protocol_type: str
    generation: int
    protocol: str | None
    leader: str | None
    state_timestamp_ms: int
    members: tuple[StoredMember, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OffsetCommitRecord:
    """`value` is None for a tombstone."""

    group: str
    topic: str
    partition: int
    value: CommittedOffset | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMetadataRecord:
    """`value` is None for a tombstone."""

    group: str
    value: StoredGroup | None


def encode_offset_commit(record: OffsetCommitRecord) -> KeyValue:
    key = OffsetCommitKey(group=record.group, topic=record.topic, partition=record.partition)
    value = None if record.value is None else _encode_offset_value(record.value)
    return encode_entity(OFFSET_COMMIT, key), value


def encode_group_metadata(record: GroupMetadataRecord) -> KeyValue:
    key = encode_entity(GROUP_METADATA, GroupMetadataKey(group=record.group))
    return key, None if record.value is None else _encode_group_value(record.value)


def decode_record(key: bytes, value: bytes | None) -> OffsetCommitRecord | GroupMetadataRecord | None:
    """None for a record of another kind (the newer group protocols use the same topic)."""
    kind = key_type(key)
    if kind in OFFSET_KEY_TYPES:
        parsed = decode_entity(OffsetCommitKey, key)
        offset = None if value is None else _decode_offset_value(value)
        return OffsetCommitRecord(
            group=parsed.group, topic=parsed.topic, partition=parsed.partition, value=offset
        )
    if kind == GROUP_METADATA:
        parsed = decode_entity(GroupMetadataKey, key)
        return GroupMetadataRecord(
            group=parsed.group, value=None if value is None else _decode_group_value(value)
        )
    return None


def _value_schema(schemas_by_version: dict[int, Any], value: bytes) -> Any:
    version = value_version(value)
    if version not in schemas_by_version:
        raise UnknownVersion(f"record value of version {version}")
    return schemas_by_version[version]


def _encode_offset_value(value: CommittedOffset) -> bytes:
    if value.expire_timestamp_ms is not None:
        expiring = OffsetCommitValueV1(
            offset=value.offset,
            metadata=value.metadata,
            commit_timestamp=value.commit_timestamp_ms,
            expire_timestamp=value.expire_timestamp_ms,
        )
        return encode_entity(1, expiring)
    if value.topic_id is not None:
        of_topic = OffsetCommitValueV4(
            offset=value.offset,
            leader_epoch=value.leader_epoch,
            metadata=value.metadata,
            commit_timestamp=value.commit_timestamp_ms,
            topic_id=value.topic_id,
        )
        return encode_entity(4, of_topic)
    entity = OffsetCommitValueV3(
        offset=value.offset,
        leader_epoch=value.leader_epoch,
        metadata=value.metadata,
        commit_timestamp=value.commit_timestamp_ms,
    )
    return encode_entity(_VALUE_VERSION, entity)


def _decode_offset_value(value: bytes) -> CommittedOffset:
    entity = decode_entity(_value_schema(_OFFSET_VALUES, value), value)
    expire_timestamp_ms = getattr(entity, "expire_timestamp", -1)
    return CommittedOffset(
        offset=entity.offset,
        leader_epoch=getattr(entity, "leader_epoch", -1),
        metadata=entity.metadata,
        commit_timestamp_ms=entity.commit_timestamp,
        expire_timestamp_ms=None if expire_timestamp_ms == -1 else expire_timestamp_ms,
        topic_id=getattr(entity, "topic_id", None),
    )


def _encode_group_value(value: StoredGroup) -> bytes:
    members = tuple(
        MemberMetadataV3(
            member_id=member.member_id,
            group_instance_id=member.instance_id,
            client_id=member.client_id,
            client_host=member.client_host,
            rebalance_timeout=member.rebalance_timeout_ms,
            session_timeout=member.session_timeout_ms,
            subscription=member.subscription,
            assignment=member.assignment,
        )
        for member in value.members
    )
    entity = GroupMetadataValueV3(
        protocol_type=value.protocol_type,
        generation=value.generation,
        protocol=value.protocol,
        leader=value.leader,
        current_state_timestamp=value.state_timestamp_ms,
        members=members,
    )
    return encode_entity(_VALUE_VERSION, entity)


def _decode_group_value(value: bytes) -> StoredGroup:
    entity = decode_entity(_value_schema(_GROUP_VALUES, value), value)
    return StoredGroup(
        protocol_type=entity.protocol_type,
        generation=entity.generation,
        protocol=entity.protocol,
        leader=entity.leader,
        state_timestamp_ms=entity.current_state_timestamp,
        members=tuple(_decode_member(member) for member in entity.members),
    )


def _decode_member(member: Any) -> StoredMember:
    return StoredMember(
        member_id=member.member_id,
        instance_id=member.group_instance_id,
        client_id=member.client_id,
        client_host=member.client_host,
        rebalance_timeout_ms=member.rebalance_timeout,
        session_timeout_ms=member.session_timeout,
        subscription=member.subscription,
        assignment=member.assignment,
    )
