"""Kafka's metadata records of topics, partitions, brokers and settings, and how they are encoded.

kio has no schemas for these records, so they are declared here once, on kio's serializers, in the layout of the newest
version of each. An all-zero UUID is None. An encoded record is the frame version, the record's key and its version as
unsigned varints, then the message. `rare_records` has the records that few clusters write: every record class takes
half a millisecond of the start-up time.
"""

import io
from collections.abc import Callable, Iterable
from dataclasses import field
from typing import ClassVar, Final, TypeVar, dataclass_transform
from uuid import UUID

from kio.serial import entity_reader, entity_writer
from kio.serial.errors import SerialError
from kio.serial.readers import read_unsigned_varint
from kio.serial.writers import write_unsigned_varint

from penstock.protocol.stored_records import NestedSchema, RecordSchema, kafka_field, schema


class MetadataRecord(RecordSchema):
    """All metadata records are flexible from their first version."""

    __slots__ = ()
    __api_key__: ClassVar[int]
    #: The oldest version with the same layout, tagged fields aside.
    __readable_from__: ClassVar[int]


RecordT = TypeVar("RecordT", bound=MetadataRecord)

#: By key. Those of `rare_records` are added when that module is imported.
RECORD_TYPES: Final[dict[int, type[MetadataRecord]]] = {}


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(kafka_field, field))
def metadata_record(
    key: int, *, version: int = 0, readable_from: int = 0
) -> Callable[[type[RecordT]], type[RecordT]]:
    """Declares a record with its key and version, and adds it to RECORD_TYPES."""

    def declare(cls: type[RecordT]) -> type[RecordT]:
        cls.__api_key__, cls.__readable_from__ = key, readable_from
        RECORD_TYPES[key] = record_type = schema(version=version)(cls)
        return record_type

    return declare


#: The leader id of a partition without a leader.
NO_LEADER: Final = -1
#: A PartitionChangeRecord with this leader keeps the leader and its epoch.
NO_LEADER_CHANGE: Final = -2
#: The directory of a replica whose broker has not yet reported which of its directories holds it.
UNASSIGNED_DIRECTORY: Final = UUID(int=1)


@schema(version=3)
class BrokerEndpoint(NestedSchema):
    name: str = kafka_field("string")
    host: str = kafka_field("string")
    port: int = kafka_field("uint16")
    security_protocol: int = kafka_field("int16")


@schema(version=3)
class BrokerFeature(NestedSchema):
    name: str = kafka_field("string")
    min_supported_version: int = kafka_field("int16")
    max_supported_version: int = kafka_field("int16")


@metadata_record(0, version=3, readable_from=2)
class RegisterBrokerRecord(MetadataRecord):
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


@metadata_record(2)
class TopicRecord(MetadataRecord):
    name: str = kafka_field("string")
    topic_id: UUID = kafka_field("uuid")


@metadata_record(3, version=2, readable_from=1)
class PartitionRecord(MetadataRecord):
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


@metadata_record(4)
class ConfigRecord(MetadataRecord):
    resource_type: int = kafka_field("int8")
    resource_name: str = kafka_field("string")
    name: str = kafka_field("string")
    value: str | None = kafka_field("string")


@metadata_record(5, version=2)
class PartitionChangeRecord(MetadataRecord):
    """Absent fields (None, NO_LEADER_CHANGE, -1) keep their values."""

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


@metadata_record(9)
class RemoveTopicRecord(MetadataRecord):
    topic_id: UUID = kafka_field("uuid")


@metadata_record(12)
class FeatureLevelRecord(MetadataRecord):
    """Level 0 removes the feature."""

    name: str = kafka_field("string")
    feature_level: int = kafka_field("int16")


@metadata_record(15)
class ProducerIdsRecord(MetadataRecord):
    """The broker owns the block of ids that ends just below `next_producer_id`."""

    broker_id: int = kafka_field("int32")
    broker_epoch: int = kafka_field("int64", default=-1)
    next_producer_id: int = kafka_field("int64")


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
    if key not in RECORD_TYPES:
        import penstock.cluster.rare_records  # noqa: F401 - adds its records; here because of the start-up time
    record_type = RECORD_TYPES.get(key)
    if record_type is None:
        raise UnreadableRecord(f"metadata record has unknown key {key}")
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
