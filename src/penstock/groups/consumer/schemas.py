# ruff: noqa: RUF009 - wire() is dataclasses.field()
"""Kafka's published record formats of consumer groups in `__consumer_offsets`, declared on kio's serializers.

Keys start with an int16 that names the record (3 and 5 to 8, 16; what 4 held has moved into 3), values with their
version, which is 0 for all of them.
"""

import uuid
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from kio.static.constants import EntityType
from kio.static.primitive import i8, i16, i32, i64


def wire(kafka_type: str, **more: Any) -> Any:
    default = {"default": more.pop("default")} if "default" in more else {}
    return field(metadata={"kafka_type": kafka_type, **more}, **default)


class Key:
    __slots__ = ()
    __type__: ClassVar = EntityType.data
    __version__: ClassVar[i16] = i16(0)
    __flexible__: ClassVar[bool] = False


class Value:
    __slots__ = ()
    __type__: ClassVar = EntityType.data
    __version__: ClassVar[i16] = i16(0)
    __flexible__: ClassVar[bool] = True


class Part:
    __slots__ = ()
    __type__: ClassVar = EntityType.nested
    __version__: ClassVar[i16] = i16(0)
    __flexible__: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupKey(Key):
    """Of the group's epoch (3) and of the target's epoch (6)."""

    group_id: str = wire("string")


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedKey(Key):
    """Of a member's subscription (5), target (7) and current assignment (8), and of a regular expression (16)."""

    group_id: str = wire("string")
    name: str = wire("string")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEpochValue(Value):
    epoch: i32 = wire("int32")
    metadata_hash: i64 = wire("int64", tag=0, default=i64(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassicProtocolPart(Part):
    name: str = wire("string")
    metadata: bytes = wire("bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassicMemberPart(Part):
    #: What Kafka writes before a struct that may be null. kio does so everywhere but in tagged fields.
    presence: i8 = wire("int8", default=i8(1))
    session_timeout_ms: i32 = wire("int32")
    supported_protocols: tuple[ClassicProtocolPart, ...]


#: Never written, because it is the default.
NOT_CLASSIC: Final = ClassicMemberPart(presence=i8(-1), session_timeout_ms=i32(0), supported_protocols=())


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionValue(Value):
    instance_id: str | None = wire("string")
    rack_id: str | None = wire("string")
    client_id: str = wire("string")
    client_host: str = wire("string")
    subscribed_topic_names: tuple[str, ...] = wire("string")
    subscribed_topic_regex: str | None = wire("string")
    rebalance_timeout_ms: i32 = wire("int32")
    server_assignor: str | None = wire("string")
    classic_member_metadata: ClassicMemberPart = field(metadata={"tag": 0}, default=NOT_CLASSIC)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetEpochValue(Value):
    assignment_epoch: i32 = wire("int32")
    assignment_timestamp: i64 = wire("int64", tag=0, default=i64(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicPartitionsPart(Part):
    topic_id: uuid.UUID | None = wire("uuid")
    partitions: tuple[i32, ...] = wire("int32")


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetValue(Value):
    topic_partitions: tuple[TopicPartitionsPart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldPartitionsPart(Part):
    topic_id: uuid.UUID | None = wire("uuid")
    partitions: tuple[i32, ...] = wire("int32")
    #: One for each of them. Kafka began to write them with 4.3.
    assignment_epochs: tuple[i32, ...] | None = wire("int32", tag=0, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class CurrentValue(Value):
    member_epoch: i32 = wire("int32")
    previous_member_epoch: i32 = wire("int32")
    state: i8 = wire("int8")
    assigned_partitions: tuple[HeldPartitionsPart, ...]
    partitions_pending_revocation: tuple[HeldPartitionsPart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RegexValue(Value):
    topics: tuple[str, ...] = wire("string")
    version: i64 = wire("int64")
    timestamp: i64 = wire("int64")
