# ruff: noqa: RUF009 - wire() is dataclasses.field()
"""Kafka's metadata records: topics, partitions, brokers, settings. The newest version's layout of each.

kio has no schemas for these, so they are declared once, on its serializers. An all-zero UUID is None. Records that
a start seldom meets are in `seldom_records` and `tenant_records`, because every class costs half a millisecond.
"""

from dataclasses import dataclass
from typing import ClassVar, Final
from uuid import UUID

from penstock.cluster.wire import MetadataRecord, Struct, wire

#: The leader of a partition that has none.
NO_LEADER: Final = -1
#: A PartitionChangeRecord with this leader leaves the leader and its epoch alone.
NO_LEADER_CHANGE: Final = -2
#: A replica whose broker has not yet said which of its directories holds it.
UNASSIGNED_DIRECTORY: Final = UUID(int=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerEndpoint(Struct):
    __version__: ClassVar[int] = 3
    name: str = wire("string")
    host: str = wire("string")
    port: int = wire("uint16")
    security_protocol: int = wire("int16")


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerFeature(Struct):
    __version__: ClassVar[int] = 3
    name: str = wire("string")
    min_supported_version: int = wire("int16")
    max_supported_version: int = wire("int16")


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisterBrokerRecord(MetadataRecord):
    __api_key__: ClassVar[int] = 0
    __version__: ClassVar[int] = 3
    __readable_from__: ClassVar[int] = 2
    broker_id: int = wire("int32")
    is_migrating_zk_broker: bool = wire("bool", default=False)
    incarnation_id: UUID = wire("uuid")
    broker_epoch: int = wire("int64")
    end_points: tuple[BrokerEndpoint, ...]
    features: tuple[BrokerFeature, ...] = ()
    rack: str | None = wire("string", default=None)
    fenced: bool = wire("bool", default=True)
    in_controlled_shutdown: bool = wire("bool", default=False)
    log_dirs: tuple[UUID, ...] = wire("uuid", default=(), tag=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicRecord(MetadataRecord):
    __api_key__: ClassVar[int] = 2
    name: str = wire("string")
    topic_id: UUID = wire("uuid")


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionRecord(MetadataRecord):
    __api_key__: ClassVar[int] = 3
    __version__: ClassVar[int] = 2
    __readable_from__: ClassVar[int] = 1
    partition_id: int = wire("int32")
    topic_id: UUID = wire("uuid")
    replicas: tuple[int, ...] = wire("int32")
    isr: tuple[int, ...] = wire("int32")
    removing_replicas: tuple[int, ...] = wire("int32", default=())
    adding_replicas: tuple[int, ...] = wire("int32", default=())
    leader: int = wire("int32")
    leader_recovery_state: int = wire("int8", default=0, tag=0)
    leader_epoch: int = wire("int32")
    partition_epoch: int = wire("int32")
    directories: tuple[UUID | None, ...] = wire("uuid")
    eligible_leader_replicas: tuple[int, ...] | None = wire("int32", default=None, tag=1)
    last_known_elr: tuple[int, ...] | None = wire("int32", default=None, tag=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigRecord(MetadataRecord):
    __api_key__: ClassVar[int] = 4
    resource_type: int = wire("int8")
    resource_name: str = wire("string")
    name: str = wire("string")
    value: str | None = wire("string")


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionChangeRecord(MetadataRecord):
    """What is absent (None, NO_LEADER_CHANGE, -1) stays as it was."""

    __api_key__: ClassVar[int] = 5
    __version__: ClassVar[int] = 2
    partition_id: int = wire("int32")
    topic_id: UUID = wire("uuid")
    isr: tuple[int, ...] | None = wire("int32", default=None, tag=0)
    leader: int = wire("int32", default=NO_LEADER_CHANGE, tag=1)
    replicas: tuple[int, ...] | None = wire("int32", default=None, tag=2)
    removing_replicas: tuple[int, ...] | None = wire("int32", default=None, tag=3)
    adding_replicas: tuple[int, ...] | None = wire("int32", default=None, tag=4)
    leader_recovery_state: int = wire("int8", default=-1, tag=5)
    eligible_leader_replicas: tuple[int, ...] | None = wire("int32", default=None, tag=6)
    last_known_elr: tuple[int, ...] | None = wire("int32", default=None, tag=7)
    directories: tuple[UUID | None, ...] | None = wire("uuid", default=None, tag=8)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveTopicRecord(MetadataRecord):
    __api_key__: ClassVar[int] = 9
    topic_id: UUID = wire("uuid")


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureLevelRecord(MetadataRecord):
    """Level 0 removes the feature."""

    __api_key__: ClassVar[int] = 12
    name: str = wire("string")
    feature_level: int = wire("int16")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerIdsRecord(MetadataRecord):
    """The broker owns the block of ids that ends just below `next_producer_id`."""

    __api_key__: ClassVar[int] = 15
    broker_id: int = wire("int32")
    broker_epoch: int = wire("int64", default=-1)
    next_producer_id: int = wire("int64")


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
