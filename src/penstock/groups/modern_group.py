"""The common part of consumer, share and streams groups, which Kafka calls modern groups: the coordinator assigns.

Records: each record belongs to the whole group or to something in it that has a name. Keys start with an int16 record
type (consumer groups use 3, 5 to 8 and 16; the content of 4 has moved into 3), values with their version, which is 0
for all of them. The formats are Kafka's published ones, declared on kio's serializers.

Drafts: during an operation each change is a record, and later decisions of the operation see it at once. The group
itself changes when the records are replayed. Until then the draft works on a copy, made with the first record, so an
operation that changes nothing is cheap.
"""

import struct
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache
from io import BytesIO
from typing import Any, ClassVar, Final, Generic, NamedTuple, Protocol, Self, TypeVar

from kio.serial import entity_reader, entity_writer
from kio.static.constants import EntityType
from kio.static.primitive import i8, i16, i32, i64

from penstock.groups.coordinator_records import KeyValue, UnknownVersion, key_type
from penstock.groups.group import Group, Operation
from penstock.groups.group_shard import GroupCoordinatorShard

# ruff: noqa: RUF009 - kafka_field() is dataclasses.field()


def kafka_field(kafka_type: str, **more: Any) -> Any:
    default = {"default": more.pop("default")} if "default" in more else {}
    return field(metadata={"kafka_type": kafka_type, **more}, **default)


class KeySchema:
    __slots__ = ()
    __type__: ClassVar = EntityType.data
    __version__: ClassVar[i16] = i16(0)
    __flexible__: ClassVar[bool] = False


class ValueSchema:
    __slots__ = ()
    __type__: ClassVar = EntityType.data
    __version__: ClassVar[i16] = i16(0)
    __flexible__: ClassVar[bool] = True


class NestedSchema:
    __slots__ = ()
    __type__: ClassVar = EntityType.nested
    __version__: ClassVar[i16] = i16(0)
    __flexible__: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupKey(KeySchema):
    """The key of the group epoch (3) and of the target epoch (6)."""

    group_id: str = kafka_field("string")


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedKey(KeySchema):
    """The key of a member's subscription (5), target (7) and assignment (8), and of a regular expression (16)."""

    group_id: str = kafka_field("string")
    name: str = kafka_field("string")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerGroupMetadataValue(ValueSchema):
    epoch: i32 = kafka_field("int32")
    metadata_hash: i64 = kafka_field("int64", tag=0, default=i64(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassicProtocolPart(NestedSchema):
    name: str = kafka_field("string")
    metadata: bytes = kafka_field("bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassicMemberMetadataPart(NestedSchema):
    #: Kafka writes this byte before a nullable struct. kio writes it too, except in tagged fields.
    presence: i8 = kafka_field("int8", default=i8(1))
    session_timeout_ms: i32 = kafka_field("int32")
    supported_protocols: tuple[ClassicProtocolPart, ...]


#: Never written, because it is the default.
NO_CLASSIC_MEMBER_METADATA: Final = ClassicMemberMetadataPart(
    presence=i8(-1), session_timeout_ms=i32(0), supported_protocols=()
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerGroupMemberMetadataValue(ValueSchema):
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetAssignmentMetadataValue(ValueSchema):
    assignment_epoch: i32 = kafka_field("int32")
    assignment_timestamp: i64 = kafka_field("int64", tag=0, default=i64(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicPartitionsPart(NestedSchema):
    topic_id: uuid.UUID | None = kafka_field("uuid")
    partitions: tuple[i32, ...] = kafka_field("int32")


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetAssignmentMemberValue(ValueSchema):
    topic_partitions: tuple[TopicPartitionsPart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignedPartitionsPart(NestedSchema):
    topic_id: uuid.UUID | None = kafka_field("uuid")
    partitions: tuple[i32, ...] = kafka_field("int32")
    #: One epoch per partition. Kafka writes them since 4.3.
    assignment_epochs: tuple[i32, ...] | None = kafka_field("int32", tag=0, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerGroupCurrentMemberAssignmentValue(ValueSchema):
    member_epoch: i32 = kafka_field("int32")
    previous_member_epoch: i32 = kafka_field("int32")
    state: i8 = kafka_field("int8")
    assigned_partitions: tuple[AssignedPartitionsPart, ...]
    partitions_pending_revocation: tuple[AssignedPartitionsPart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerGroupRegularExpressionValue(ValueSchema):
    topics: tuple[str, ...] = kafka_field("string")
    version: i64 = kafka_field("int64")
    timestamp: i64 = kafka_field("int64")


_INT16: Final = struct.Struct(">h")
_VERSION: Final = _INT16.pack(0)

RecordTypeT = TypeVar("RecordTypeT", bound=IntEnum)


class ModernGroupRecord(NamedTuple, Generic[RecordTypeT]):
    """`value` is None for a tombstone; otherwise its type depends on `kind`."""

    kind: RecordTypeT
    group_id: str
    #: A member id or a regular expression; empty if the record belongs to the whole group.
    name: str
    value: Any


class GroupRecordCodec(Generic[RecordTypeT]):
    """Encodes and decodes the records of one kind of group."""

    def __init__(
        self,
        kinds: type[RecordTypeT],
        *,
        of_group: Collection[RecordTypeT],
        entities: Mapping[RecordTypeT, Any],
        parsers: Mapping[RecordTypeT, tuple[Any, Any]],
    ) -> None:
        """`entities` convert a value to an entity, `parsers` (with the schema) an entity to a value.

        Record types without a parser are no longer written, and are ignored.
        """
        self._kinds = kinds
        self._of_group = frozenset(of_group)
        self._entities, self._parsers = entities, parsers

    def encode(self, record: ModernGroupRecord[RecordTypeT]) -> KeyValue:
        kind = record.kind
        if kind in self._of_group:
            key: Any = GroupKey(group_id=record.group_id)
        else:
            key = NamedKey(group_id=record.group_id, name=record.name)
        value = None if record.value is None else _write_entity(_VERSION, self._entities[kind](record.value))
        return _write_entity(_INT16.pack(kind), key), value

    def decode(self, key: bytes, value: bytes | None) -> ModernGroupRecord[RecordTypeT]:
        kind = self._kinds(key_type(key))
        is_of_group = kind in self._of_group
        parsed = _read_entity(GroupKey if is_of_group else NamedKey, key)
        name = "" if is_of_group else parsed.name
        return ModernGroupRecord(
            kind, parsed.group_id, name, None if value is None else self._parse(kind, value)
        )

    def _parse(self, kind: RecordTypeT, value: bytes) -> Any:
        if kind not in self._parsers:
            return None
        if not value.startswith(_VERSION):
            raise UnknownVersion(f"{kind.name} record of version {key_type(value)}")
        schema, parse = self._parsers[kind]
        return parse(_read_entity(schema, value))


@cache
def _writer(schema: Any) -> Any:
    return entity_writer(schema)


@cache
def _reader(schema: Any) -> Any:
    return entity_reader(schema)


def _write_entity(prefix: bytes, entity: Any) -> bytes:
    buffer = BytesIO()
    buffer.write(prefix)
    schema: Any = type(entity)
    _writer(schema)(buffer, entity)
    return buffer.getvalue()


def _read_entity(schema: Any, data: bytes) -> Any:
    entity, _ = _reader(schema)(data, _INT16.size)
    return entity


class ModernGroupData(Protocol):
    """The state of a group to which the coordinator assigns partitions or tasks."""

    group_id: str
    #: The version of the topics at the last check. Not stored, so a coordinator that loads the group checks again.
    topics_version: int | None

    def fork(self) -> Self:
        """A copy to which an operation applies its records before they are replayed."""
        ...

    def record_of(self, kind: Any, name: str, value: Any) -> KeyValue:
        """The record of a change; the value None deletes."""
        ...

    def apply(self, kind: Any, name: str, value: Any) -> None: ...


GroupDataT = TypeVar("GroupDataT", bound=ModernGroupData)


class GroupDraft(Generic[GroupDataT]):
    __slots__ = ("_is_copy", "_origin", "group_id", "operation", "state")

    def __init__(self, state: GroupDataT, operation: Operation, *, is_new: bool = False) -> None:
        """`is_new` is true for a state that is in no shard yet, so that it needs no copy."""
        self.group_id = state.group_id
        self.state = state
        self.operation = operation
        self._origin = state
        self._is_copy = is_new

    def change(self, kind: Any, name: str, value: Any) -> None:
        if not self._is_copy:
            self.state, self._is_copy = self.state.fork(), True
        self.state.apply(kind, name, value)
        self.operation.store(self.state.record_of(kind, name, value))

    @property
    def topics_unchanged(self) -> bool:
        """Whether the topics are unchanged since the last check for this group."""
        return self._origin.topics_version == self.operation.topics.version

    def mark_topics_seen(self) -> None:
        self._origin.topics_version = self.state.topics_version = self.operation.topics.version


class ModernGroup(Group, Protocol):
    def __init__(self, group_id: str) -> None: ...

    def apply(self, kind: Any, name: str, value: Any) -> None: ...


ModernGroupT = TypeVar("ModernGroupT", bound=ModernGroup)


def replay_modern_group(
    shard: GroupCoordinatorShard,
    record: ModernGroupRecord[Any],
    group_class: type[ModernGroupT],
    *,
    ends_with: Any,
) -> None:
    """The tombstone of the type `ends_with` is the last record of a group."""
    group = shard.groups.get(record.group_id)
    if not isinstance(group, group_class):
        if record.value is None:
            # A tombstone of the group's previous kind, or of a group that no longer exists.
            return
        if group is not None:
            shard.drop(group)
        group = shard.groups[record.group_id] = group_class(record.group_id)
    group.apply(record.kind, record.name, record.value)
    if record.kind is ends_with and record.value is None:
        shard.drop(group)
