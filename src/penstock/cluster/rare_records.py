"""Kafka's metadata records that a small cluster rarely writes; the module is imported when the first one is needed.

They are about broker fencing, metadata transactions and no-ops, about security (SCRAM credentials, quotas, ACLs), and
about controllers.
"""

from dataclasses import dataclass
from typing import ClassVar, Final
from uuid import UUID

from penstock.cluster.metadata_records import MetadataRecord, Struct, wire


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
    """The records that follow take effect at the EndTransactionRecord, or not at all."""

    __api_key__: ClassVar[int] = 23
    name: str | None = wire("string", default=None, tag=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndTransactionRecord(MetadataRecord):
    __api_key__: ClassVar[int] = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortTransactionRecord(MetadataRecord):
    __api_key__: ClassVar[int] = 25
    reason: str | None = wire("string", default=None, tag=0)


RARE_RECORD_TYPES: Final[dict[int, type[MetadataRecord]]] = {
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


# ruff: noqa: RUF009 - wire() is dataclasses.field()


@dataclass(frozen=True, slots=True, kw_only=True)
class UserScramCredentialRecord(MetadataRecord):
    __api_key__: ClassVar[int] = 11
    name: str = wire("string")
    mechanism: int = wire("int8")
    salt: bytes = wire("bytes")
    stored_key: bytes = wire("bytes")
    server_key: bytes = wire("bytes")
    iterations: int = wire("int32")


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveUserScramCredentialRecord(MetadataRecord):
    __api_key__: ClassVar[int] = 22
    name: str = wire("string")
    mechanism: int = wire("int8")


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaEntity(Struct):
    """A name of None stands for the default entity of its type."""

    entity_type: str = wire("string")
    entity_name: str | None = wire("string")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientQuotaRecord(MetadataRecord):
    __api_key__: ClassVar[int] = 14
    entity: tuple[QuotaEntity, ...]
    key: str = wire("string")
    value: float = wire("float64")
    remove: bool = wire("bool")


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessControlEntryRecord(MetadataRecord):
    __api_key__: ClassVar[int] = 18
    id: UUID = wire("uuid")
    resource_type: int = wire("int8")
    resource_name: str = wire("string")
    pattern_type: int = wire("int8")
    principal: str = wire("string")
    host: str = wire("string")
    operation: int = wire("int8")
    permission_type: int = wire("int8")


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveAccessControlEntryRecord(MetadataRecord):
    __api_key__: ClassVar[int] = 19
    id: UUID = wire("uuid")


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerEndpoint(Struct):
    name: str = wire("string")
    host: str = wire("string")
    port: int = wire("uint16")
    security_protocol: int = wire("int16")


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerFeature(Struct):
    name: str = wire("string")
    min_supported_version: int = wire("int16")
    max_supported_version: int = wire("int16")


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisterControllerRecord(MetadataRecord):
    __api_key__: ClassVar[int] = 27
    controller_id: int = wire("int32")
    incarnation_id: UUID = wire("uuid")
    zk_migration_ready: bool = wire("bool", default=False)
    end_points: tuple[ControllerEndpoint, ...]
    features: tuple[ControllerFeature, ...] = ()


SECURITY_RECORD_TYPES: Final[dict[int, type[MetadataRecord]]] = {
    record.__api_key__: record
    for record in (
        UserScramCredentialRecord,
        RemoveUserScramCredentialRecord,
        ClientQuotaRecord,
        AccessControlEntryRecord,
        RemoveAccessControlEntryRecord,
        RegisterControllerRecord,
    )
}
