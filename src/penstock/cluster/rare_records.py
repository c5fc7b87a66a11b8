"""Kafka's metadata records that a small cluster rarely writes; the module is imported when the first one is needed.

They are about broker fencing, metadata transactions and no-ops, about security (SCRAM credentials, quotas, ACLs), and
about controllers.
"""

from dataclasses import dataclass
from typing import ClassVar, Final
from uuid import UUID

from penstock.cluster.metadata_records import MetadataRecord
from penstock.protocol.stored_records import NestedSchema, kafka_field

# ruff: noqa: RUF009 - kafka_field() is dataclasses.field()


@dataclass(frozen=True, slots=True, kw_only=True)
class UnregisterBrokerRecord(MetadataRecord):
    __api_key__: ClassVar[int] = 1
    broker_id: int = kafka_field("int32")
    broker_epoch: int = kafka_field("int64")


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceBrokerRecord(MetadataRecord):
    __api_key__: ClassVar[int] = 7
    id: int = kafka_field("int32")
    epoch: int = kafka_field("int64")


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfenceBrokerRecord(MetadataRecord):
    __api_key__: ClassVar[int] = 8
    id: int = kafka_field("int32")
    epoch: int = kafka_field("int64")


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerRegistrationChangeRecord(MetadataRecord):
    """`fenced`: -1 unfences, 0 leaves it, 1 fences. `in_controlled_shutdown`: 1 enters it."""

    __api_key__: ClassVar[int] = 17
    __version__: ClassVar[int] = 2
    broker_id: int = kafka_field("int32")
    broker_epoch: int = kafka_field("int64")
    fenced: int = kafka_field("int8", default=0, tag=0)
    in_controlled_shutdown: int = kafka_field("int8", default=0, tag=1)
    log_dirs: tuple[UUID, ...] = kafka_field("uuid", default=(), tag=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoOpRecord(MetadataRecord):
    __api_key__: ClassVar[int] = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginTransactionRecord(MetadataRecord):
    """The records that follow take effect at the EndTransactionRecord, or not at all."""

    __api_key__: ClassVar[int] = 23
    name: str | None = kafka_field("string", default=None, tag=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndTransactionRecord(MetadataRecord):
    __api_key__: ClassVar[int] = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortTransactionRecord(MetadataRecord):
    __api_key__: ClassVar[int] = 25
    reason: str | None = kafka_field("string", default=None, tag=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class UserScramCredentialRecord(MetadataRecord):
    __api_key__: ClassVar[int] = 11
    name: str = kafka_field("string")
    mechanism: int = kafka_field("int8")
    salt: bytes = kafka_field("bytes")
    stored_key: bytes = kafka_field("bytes")
    server_key: bytes = kafka_field("bytes")
    iterations: int = kafka_field("int32")


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveUserScramCredentialRecord(MetadataRecord):
    __api_key__: ClassVar[int] = 22
    name: str = kafka_field("string")
    mechanism: int = kafka_field("int8")


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaEntity(NestedSchema):
    """A name of None stands for the default entity of its type."""

    entity_type: str = kafka_field("string")
    entity_name: str | None = kafka_field("string")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientQuotaRecord(MetadataRecord):
    __api_key__: ClassVar[int] = 14
    entity: tuple[QuotaEntity, ...]
    key: str = kafka_field("string")
    value: float = kafka_field("float64")
    remove: bool = kafka_field("bool")


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessControlEntryRecord(MetadataRecord):
    __api_key__: ClassVar[int] = 18
    id: UUID = kafka_field("uuid")
    resource_type: int = kafka_field("int8")
    resource_name: str = kafka_field("string")
    pattern_type: int = kafka_field("int8")
    principal: str = kafka_field("string")
    host: str = kafka_field("string")
    operation: int = kafka_field("int8")
    permission_type: int = kafka_field("int8")


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveAccessControlEntryRecord(MetadataRecord):
    __api_key__: ClassVar[int] = 19
    id: UUID = kafka_field("uuid")


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerEndpoint(NestedSchema):
    name: str = kafka_field("string")
    host: str = kafka_field("string")
    port: int = kafka_field("uint16")
    security_protocol: int = kafka_field("int16")


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerFeature(NestedSchema):
    name: str = kafka_field("string")
    min_supported_version: int = kafka_field("int16")
    max_supported_version: int = kafka_field("int16")


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisterControllerRecord(MetadataRecord):
    __api_key__: ClassVar[int] = 27
    controller_id: int = kafka_field("int32")
    incarnation_id: UUID = kafka_field("uuid")
    zk_migration_ready: bool = kafka_field("bool", default=False)
    end_points: tuple[ControllerEndpoint, ...]
    features: tuple[ControllerFeature, ...] = ()


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
        UserScramCredentialRecord,
        RemoveUserScramCredentialRecord,
        ClientQuotaRecord,
        AccessControlEntryRecord,
        RemoveAccessControlEntryRecord,
        RegisterControllerRecord,
    )
}
