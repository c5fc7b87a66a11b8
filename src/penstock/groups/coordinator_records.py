"""What `__consumer_offsets` remembers: typed values, and their bytes in Kafka's formats."""

import struct
from dataclasses import dataclass
from io import BytesIO
from typing import Any, Final
from uuid import UUID

from kio.serial import entity_reader, entity_writer

from penstock.groups import schemas

OFFSET_COMMIT: Final = 1
#: Kafka wrote key type 0 before it knew of 1; both have the same fields.
OFFSET_KEYS: Final = (0, OFFSET_COMMIT)
GROUP_METADATA: Final = 2
CLASSIC_KEYS: Final = (GROUP_METADATA,)
#: What is behind these is told in the room of their kind.
CONSUMER_KEYS: Final = (3, 4, 5, 6, 7, 8, 16)
SHARE_KEYS: Final = (10, 11, 12, 13, 14, 15)
STREAMS_KEYS: Final = (17, 19, 20, 21, 22, 23)
#: The version we write; see schemas.py.
_VALUE_VERSION: Final = 3

_STRING_BYTES_MAX: Final = 32_767
_INT16: Final = struct.Struct(">h")
_OFFSET_VALUES: Final[dict[int, Any]] = {
    1: schemas.OffsetCommitValueV1,
    3: schemas.OffsetCommitValueV3,
    4: schemas.OffsetCommitValueV4,
}
_GROUP_VALUES: Final[dict[int, Any]] = {3: schemas.GroupMetadataValueV3, 4: schemas.GroupMetadataValueV4}


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedOffset:
    offset: int
    leader_epoch: int = -1
    metadata: str = ""
    commit_timestamp_ms: int
    #: Asked for by clients that still send a retention time; everyone else has the broker's retention.
    expire_timestamp_ms: int | None = None
    #: Another topic may have the same name one day, and must not inherit the offset. None where nobody noted it.
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
class OffsetRecord:
    """`value` is None for a tombstone."""

    group: str
    topic: str
    partition: int
    value: CommittedOffset | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord:
    """`value` is None for a tombstone."""

    group: str
    value: StoredGroup | None


KeyValue = tuple[bytes, bytes | None]


class UnknownVersion(ValueError):
    """A value in a layout newer than any that this code knows: reading on would lose what it says."""


def can_store(*texts: str) -> bool:
    """Strings are stored with a length of 16 bits."""
    return all(len(text.encode()) <= _STRING_BYTES_MAX for text in texts)


def key_type(key: bytes) -> int:
    (kind,) = _INT16.unpack_from(key)
    return int(kind)


def encode_offset(record: OffsetRecord) -> KeyValue:
    key = schemas.OffsetCommitKey(group=record.group, topic=record.topic, partition=record.partition)
    return _encode(OFFSET_COMMIT, key), None if record.value is None else _encode_offset_value(record.value)


def encode_group(record: GroupRecord) -> KeyValue:
    key = _encode(GROUP_METADATA, schemas.GroupMetadataKey(group=record.group))
    return key, None if record.value is None else _encode_group_value(record.value)


def decode(key: bytes, value: bytes | None) -> OffsetRecord | GroupRecord | None:
    """None for a record of another kind (the newer group protocols share this topic)."""
    kind = key_type(key)
    if kind in OFFSET_KEYS:
        parsed = _read(schemas.OffsetCommitKey, key)
        offset = None if value is None else _decode_offset_value(value)
        return OffsetRecord(group=parsed.group, topic=parsed.topic, partition=parsed.partition, value=offset)
    if kind == GROUP_METADATA:
        parsed = _read(schemas.GroupMetadataKey, key)
        return GroupRecord(group=parsed.group, value=None if value is None else _decode_group_value(value))
    return None


def _encode(prefix: int, entity: Any) -> bytes:
    buffer = BytesIO()
    buffer.write(_INT16.pack(prefix))
    entity_writer(type(entity))(buffer, entity)
    return buffer.getvalue()


def _read(schema: Any, data: bytes) -> Any:
    entity, _ = entity_reader(schema)(data, _INT16.size)
    return entity


def _value_schema(schemas_by_version: dict[int, Any], value: bytes) -> Any:
    (version,) = _INT16.unpack_from(value)
    if version not in schemas_by_version:
        raise UnknownVersion(f"record value of version {version}")
    return schemas_by_version[version]


def _encode_offset_value(value: CommittedOffset) -> bytes:
    if value.expire_timestamp_ms is not None:
        expiring = schemas.OffsetCommitValueV1(
            offset=value.offset,
            metadata=value.metadata,
            commit_timestamp=value.commit_timestamp_ms,
            expire_timestamp=value.expire_timestamp_ms,
        )
        return _encode(1, expiring)
    if value.topic_id is not None:
        of_topic = schemas.OffsetCommitValueV4(
            offset=value.offset,
            leader_epoch=value.leader_epoch,
            metadata=value.metadata,
            commit_timestamp=value.commit_timestamp_ms,
            topic_id=value.topic_id,
        )
        return _encode(4, of_topic)
    entity = schemas.OffsetCommitValueV3(
        offset=value.offset,
        leader_epoch=value.leader_epoch,
        metadata=value.metadata,
        commit_timestamp=value.commit_timestamp_ms,
    )
    return _encode(_VALUE_VERSION, entity)


def _decode_offset_value(value: bytes) -> CommittedOffset:
    entity = _read(_value_schema(_OFFSET_VALUES, value), value)
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
        schemas.MemberMetadataV3(
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
    entity = schemas.GroupMetadataValueV3(
        protocol_type=value.protocol_type,
        generation=value.generation,
        protocol=value.protocol,
        leader=value.leader,
        current_state_timestamp=value.state_timestamp_ms,
        members=members,
    )
    return _encode(_VALUE_VERSION, entity)


def _decode_group_value(value: bytes) -> StoredGroup:
    entity = _read(_value_schema(_GROUP_VALUES, value), value)
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
