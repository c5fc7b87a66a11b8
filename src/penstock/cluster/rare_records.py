# ruff: noqa: RUF009 - wire() is dataclasses.field()
"""Kafka's metadata records about tenants (quotas, access rules, credentials) and controllers.

Apart from the others because few clusters have any: they are loaded when the first one is met.
"""

from dataclasses import dataclass
from typing import ClassVar, Final
from uuid import UUID

from penstock.cluster.wire import MetadataRecord, Struct, wire


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
    """A name of None is the default of its type."""

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


TENANT_RECORD_TYPES: Final[dict[int, type[MetadataRecord]]] = {
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
