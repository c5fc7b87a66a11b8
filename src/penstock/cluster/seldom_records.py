"""Kafka's metadata records that a small cluster seldom writes: fencing, metadata transactions, no-ops."""

from dataclasses import dataclass
from typing import ClassVar, Final
from uuid import UUID

from penstock.cluster.wire import MetadataRecord, wire


@dataclass(frozen=True, slots=True, kw_only=True)
class UnregisterBrokerRecord(MetadataRecord):
    __api_key__: ClassVar[int] = 1
    broker_id: int = wire("int32")
    broker_epoch: int = wire("int64")


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceBrokerRecord(MetadataRecord):
    __api_key__: ClassVar[int] = 7
    id: int = wire("int32")
    epoch: int = wire("int64")


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfenceBrokerRecord(MetadataRecord):
    __api_key__: ClassVar[int] = 8
    id: int = wire("int32")
    epoch: int = wire("int64")


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerRegistrationChangeRecord(MetadataRecord):
    """`fenced`: -1 unfences, 0 leaves it, 1 fences. `in_controlled_shutdown`: 1 enters it."""

    __api_key__: ClassVar[int] = 17
    __version__: ClassVar[int] = 2
    broker_id: int = wire("int32")
    broker_epoch: int = wire("int64")
    fenced: int = wire("int8", default=0, tag=0)
    in_controlled_shutdown: int = wire("int8", default=0, tag=1)
    log_dirs: tuple[UUID, ...] = wire("uuid", default=(), tag=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoOpRecord(MetadataRecord):
    __api_key__: ClassVar[int] = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginTransactionRecord(MetadataRecord):
    """What follows takes effect at the EndTransactionRecord, or not at all."""

    __api_key__: ClassVar[int] = 23
    name: str | None = wire("string", default=None, tag=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndTransactionRecord(MetadataRecord):
    __api_key__: ClassVar[int] = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortTransactionRecord(MetadataRecord):
    __api_key__: ClassVar[int] = 25
    reason: str | None = wire("string", default=None, tag=0)


SELDOM_RECORD_TYPES: Final[dict[int, type[MetadataRecord]]] = {
    record.__api_key__: record
    for record in (
        UnregisterBrokerRecord,
        FenceBrokerRecord,
        UnfenceBrokerRecord,
        BrokerRegistrationChangeRecord,
        NoOpRecord,
        BeginTransactionRecord,
        EndTransactionRecord,
        AbortTransactionRecord,
    )
}
