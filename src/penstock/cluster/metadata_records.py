"""Kafka's metadata records of topics, partitions, brokers and settings, and how they are encoded.

kio has no schemas for these records, so they are declared here once, on kio's serializers, in the layout of the newest
version of each. An all-zero UUID is None. An encoded record is the frame version, the record's key and its version as
unsigned varints, then the message. Records that are rarely read at start-up are in `rare_records`, because every record
class adds half a millisecond to the start-up time.
"""

import io
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Final
from uuid import UUID

from kio.serial import entity_reader, entity_writer
from kio.serial.errors import SerialError
from kio.serial.readers import read_unsigned_varint
from kio.serial.writers import write_unsigned_varint

from penstock.protocol.stored_records import NestedSchema, RecordSchema, kafka_field


class MetadataRecord(RecordSchema):
    """All metadata records are flexible from their first version."""

    __slots__ = ()
    __api_key__: ClassVar[int]
    #: The oldest version with the same layout, tagged fields aside.
    __readable_from__: ClassVar[int] = 0


# ruff: noqa: RUF009 - kafka_field() is dataclasses.field()


#: The leader id of a partition without a leader.
NO_LEADER: Final = -1
#: A PartitionChangeRecord with this leader keeps the leader and its epoch.
NO_LEADER_CHANGE: Final = -2
#: The directory of a replica whose broker has not yet reported which of its directories holds it.
UNASSIGNED_DIRECTORY: Final = UUID(int=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerEndpoint(NestedSchema):
    __version__: ClassVar[int] = 3
    name: str = kafka_field("string")
    host: str = kafka_field("string")
    port: int = kafka_field("uint16")
    security_protocol: int = kafka_field("int16")


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerFeature(NestedSchema):
    __version__: ClassVar[int] = 3
    name: str = kafka_field("string")
    min_supported_version: int = kafka_field("int16")
    max_supported_version: int = kafka_field("int16")


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisterBrokerRecord(MetadataRecord):
    __api_key__: ClassVar[int] = 0
    __version__: ClassVar[int] = 3
    __readable_from__: ClassVar[int] = 2
    broker_id: int = kafka_field("int32")
    is_migrating_zk_broker: bool = kafka_field("bool", default=False)
    incarnation_id: UUID = kafka_field("uuid")
    broker_epoch: int = kafka_field("int64")
    end_points: tuple[BrokerEndpoint, ...]
    features: tuple[BrokerFeature, ...] = ()
    rack: str | None = kafka_field("string", default=None)
    fenced: bool = kafka_field("bool", default=True)
    in_controlled_shutdown: bool = kafka_field("bool", default=False)
    log_dirs: tuple[UUID, ...] = kafka_field("uuid", default=(), tag=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicRecord(MetadataRecord):
    __api_key__: ClassVar[int] = 2
    name: str = kafka_field("string")
    topic_id: UUID = kafka_field("uuid")


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionRecord(MetadataRecord):
    __api_key__: ClassVar[int] = 3
    __version__: ClassVar[int] = 2
    __readable_from__: ClassVar[int] = 1
    partition_id: int = kafka_field("int32")
    topic_id: UUID = kafka_field("uuid")
    replicas: tuple[int, ...] = kafka_field("int32")
    isr: tuple[int, ...] = kafka_field("int32")
    removing_replicas: tuple[int, ...] = kafka_field("int32", default=())
    adding_replicas: tuple[int, ...] = kafka_field("int32", default=())
    leader: int = kafka_field("int32")
    leader_recovery_state: int = kafka_field("int8", default=0, tag=0)
    leader_epoch: int = kafka_field("int32")
    partition_epoch: int = kafka_field("int32")
    directories: tuple[UUID | None, ...] = kafka_field("uuid")
    eligible_leader_replicas: tuple[int, ...] | None = kafka_field("int32", default=None, tag=1)
    last_known_elr: tuple[int, ...] | None = kafka_field("int32", default=None, tag=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigRecord(MetadataRecord):
    __api_key__: ClassVar[int] = 4
    resource_type: int = kafka_field("int8")
    resource_name: str = kafka_field("string")
    name: str = kafka_field("string")
    value: str | None = kafka_field("string")


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionChangeRecord(MetadataRecord):
    """Absent fields (None, NO_LEADER_CHANGE, -1) keep their values."""

    __api_key__: ClassVar[int] = 5
    __version__: ClassVar[int] = 2
    partition_id: int = kafka_field("int32")
    topic_id: UUID = kafka_field("uuid")
    isr: tuple[int, ...] | None = kafka_field("int32", default=None, tag=0)
    leader: int = kafka_field("int32", default=NO_LEADER_CHANGE, tag=1)
    replicas: tuple[int, ...] | None = kafka_field("int32", default=None, tag=2)
    removing_replicas: tuple[int, ...] | None = kafka_field("int32", default=None, tag=3)
    adding_replicas: tuple[int, ...] | None = kafka_field("int32", default=None, tag=4)
    leader_recovery_state: int = kafka_field("int8", default=-1, tag=5)
    eligible_leader_replicas: tuple[int, ...] | None = kafka_field("int32", default=None, tag=6)
    last_known_elr: tuple[int, ...] | None = kafka_field("int32", default=None, tag=7)
    directories: tuple[UUID | None, ...] | None = kafka_field("uuid", default=None, tag=8)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveTopicRecord(MetadataRecord):
    __api_key__: ClassVar[int] = 9
    topic_id: UUID = kafka_field("uuid")


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureLevelRecord(MetadataRecord):
    """Level 0 removes the feature."""

    __api_key__: ClassVar[int] = 12
    name: str = kafka_field("string")
    feature_level: int = kafka_field("int16")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerIdsRecord(MetadataRecord):
    """The broker owns the block of ids that ends just below `next_producer_id`."""

    __api_key__: ClassVar[int] = 15
    broker_id: int = kafka_field("int32")
    broker_epoch: int = kafka_field("int64", default=-1)
    next_producer_id: int = kafka_field("int64")


RECORD_TYPES: Final[dict[int, type[MetadataRecord]]] = {
    record.__api_key__: record
    for record in (
        RegisterBrokerRecord,
        TopicRecord,
        PartitionRecord,
        ConfigRecord,
        PartitionChangeRecord,
        RemoveTopicRecord,
        FeatureLevelRecord,
        ProducerIdsRecord,
    )
}


FRAME_VERSION: Final = 1


class UnreadableRecord(Exception):
    """A metadata record that this version cannot read. Without it the image would be wrong."""


def encode_record(record: MetadataRecord) -> bytes:
    buffer = io.BytesIO()
    write_unsigned_varint(buffer, FRAME_VERSION)
    write_unsigned_varint(buffer, record.__api_key__)
    write_unsigned_varint(buffer, record.__version__)
    entity_writer(type(record))(buffer, record)
    return buffer.getvalue()


def encode_records(records: Iterable[MetadataRecord]) -> list[bytes]:
    """Returns the values of the log records, in order; metadata records have no key."""
    return [encode_record(record) for record in records]


def decode_record(data: bytes) -> MetadataRecord:
    """Raises UnreadableRecord."""
    try:
        return _decode(data)
    except SerialError as error:
        raise UnreadableRecord(f"metadata record is cut short or damaged: {error}") from error
    except KeyError as error:
        # kio's reader cannot skip an unknown tagged field.
        raise UnreadableRecord(f"metadata record is of a newer kind: {error}") from error


def _decode(data: bytes) -> MetadataRecord:
    frame_version, position = read_unsigned_varint(data, 0)
    if frame_version != FRAME_VERSION:
        raise UnreadableRecord(f"metadata record has frame version {frame_version}, expected {FRAME_VERSION}")
    key, size = read_unsigned_varint(data, position)
    position += size
    version, size = read_unsigned_varint(data, position)
    position += size
    record_type = _record_type(key)
    if not record_type.__readable_from__ <= version <= record_type.__version__:
        raise UnreadableRecord(
            f"{record_type.__name__} has version {version}, readable are "
            f"{record_type.__readable_from__} to {record_type.__version__}"
        )
    record: MetadataRecord
    record, size = entity_reader(record_type)(data, position)
    if position + size != len(data):
        raise UnreadableRecord(f"{len(data) - position - size} bytes after {record_type.__name__}")
    return record


def _record_type(key: int) -> type[MetadataRecord]:
    found = RECORD_TYPES.get(key) or _rare_record_types().get(key)
    if found is None:
        raise UnreadableRecord(f"metadata record has unknown key {key}")
    return found


@cache
def _rare_record_types() -> dict[int, type[MetadataRecord]]:
    from penstock.cluster.rare_records import RARE_RECORD_TYPES  # start-up cost

    return RARE_RECORD_TYPES
