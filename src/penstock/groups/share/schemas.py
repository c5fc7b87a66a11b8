# ruff: noqa: RUF009 - wire() is dataclasses.field()
"""Kafka's published record formats of share groups in `__consumer_offsets`, declared on kio's serializers.

Keys start with an int16 that names the record (10 to 15), values with their version, which is 0 for all of them. Keys
and the target assignment look as those of consumer groups.
"""

import uuid
from dataclasses import dataclass

from kio.static.primitive import i8, i32, i64

from penstock.groups.consumer.schemas import Part, TopicPartitionsPart, Value, wire


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEpochValue(Value):
    epoch: i32 = wire("int32")
    metadata_hash: i64 = wire("int64")


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionValue(Value):
    rack_id: str | None = wire("string")
    client_id: str = wire("string")
    client_host: str = wire("string")
    subscribed_topic_names: tuple[str, ...] = wire("string")


@dataclass(frozen=True, slots=True, kw_only=True)
class CurrentValue(Value):
    member_epoch: i32 = wire("int32")
    previous_member_epoch: i32 = wire("int32")
    state: i8 = wire("int8")
    assigned_partitions: tuple[TopicPartitionsPart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedPartitionsPart(Part):
    topic_id: uuid.UUID | None = wire("uuid")
    topic_name: str = wire("string")
    partitions: tuple[i32, ...] = wire("int32")


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTopicPart(Part):
    topic_id: uuid.UUID | None = wire("uuid")
    topic_name: str = wire("string")


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePlacesValue(Value):
    initializing_topics: tuple[NamedPartitionsPart, ...]
    initialized_topics: tuple[NamedPartitionsPart, ...]
    deleting_topics: tuple[NamedTopicPart, ...]
