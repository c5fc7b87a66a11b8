"""Kafka's metadata records that few clusters write; the module is imported when the first one is read or written.

They are about broker fencing, metadata transactions, security (SCRAM credentials, delegation tokens,
quotas, ACLs) and controllers.
"""

from uuid import UUID

from penstock.cluster.metadata_records import MetadataRecord, metadata_record
from penstock.protocol.stored_records import NestedSchema, kafka_field, schema


@metadata_record(1)
class UnregisterBrokerRecord(MetadataRecord):
    broker_id: int = kafka_field("int32")
    broker_epoch: int = kafka_field("int64")


@metadata_record(7)
class FenceBrokerRecord(MetadataRecord):
    id: int = kafka_field("int32")
    epoch: int = kafka_field("int64")


@metadata_record(8)
class UnfenceBrokerRecord(MetadataRecord):
    id: int = kafka_field("int32")
    epoch: int = kafka_field("int64")


@metadata_record(17, version=2)
class BrokerRegistrationChangeRecord(MetadataRecord):
    """`fenced`: -1 unfences, 0 leaves it, 1 fences. `in_controlled_shutdown`: 1 enters it."""

    broker_id: int = kafka_field("int32")
    broker_epoch: int = kafka_field("int64")
    fenced: int = kafka_field("int8", default=0, tag=0)
    in_controlled_shutdown: int = kafka_field("int8", default=0, tag=1)
    log_dirs: tuple[UUID, ...] = kafka_field("uuid", default=(), tag=2)


@metadata_record(20)
class NoOpRecord(MetadataRecord): ...


@metadata_record(23)
class BeginTransactionRecord(MetadataRecord):
    """The records that follow take effect at the EndTransactionRecord, or not at all."""

    name: str | None = kafka_field("string", default=None, tag=0)


@metadata_record(24)
class EndTransactionRecord(MetadataRecord): ...


@metadata_record(25)
class AbortTransactionRecord(MetadataRecord):
    reason: str | None = kafka_field("string", default=None, tag=0)


@metadata_record(11)
class UserScramCredentialRecord(MetadataRecord):
    name: str = kafka_field("string")
    mechanism: int = kafka_field("int8")
    salt: bytes = kafka_field("bytes")
    stored_key: bytes = kafka_field("bytes")
    server_key: bytes = kafka_field("bytes")
    iterations: int = kafka_field("int32")


@metadata_record(22)
class RemoveUserScramCredentialRecord(MetadataRecord):
    name: str = kafka_field("string")
    mechanism: int = kafka_field("int8")


@metadata_record(10)
class DelegationTokenRecord(MetadataRecord):
    """Principals are texts such as `User:alice`. The HMAC of the token is not stored."""

    owner: str = kafka_field("string")
    requester: str = kafka_field("string")
    renewers: tuple[str, ...] = kafka_field("string")
    issue_timestamp: int = kafka_field("int64")
    max_timestamp: int = kafka_field("int64")
    expiration_timestamp: int = kafka_field("int64")
    token_id: str = kafka_field("string")


@metadata_record(26)
class RemoveDelegationTokenRecord(MetadataRecord):
    token_id: str = kafka_field("string")


@schema()
class QuotaEntity(NestedSchema):
    """A name of None stands for the default entity of its type."""

    entity_type: str = kafka_field("string")
    entity_name: str | None = kafka_field("string")


@metadata_record(14)
class ClientQuotaRecord(MetadataRecord):
    entity: tuple[QuotaEntity, ...]
    key: str = kafka_field("string")
    value: float = kafka_field("float64")
    remove: bool = kafka_field("bool")


@metadata_record(18)
class AccessControlEntryRecord(MetadataRecord):
    id: UUID = kafka_field("uuid")
    resource_type: int = kafka_field("int8")
    resource_name: str = kafka_field("string")
    pattern_type: int = kafka_field("int8")
    principal: str = kafka_field("string")
    host: str = kafka_field("string")
    operation: int = kafka_field("int8")
    permission_type: int = kafka_field("int8")


@metadata_record(19)
class RemoveAccessControlEntryRecord(MetadataRecord):
    id: UUID = kafka_field("uuid")


@schema()
class ControllerEndpoint(NestedSchema):
    name: str = kafka_field("string")
    host: str = kafka_field("string")
    port: int = kafka_field("uint16")
    security_protocol: int = kafka_field("int16")


@schema()
class ControllerFeature(NestedSchema):
    name: str = kafka_field("string")
    min_supported_version: int = kafka_field("int16")
    max_supported_version: int = kafka_field("int16")


@metadata_record(27)
class RegisterControllerRecord(MetadataRecord):
    controller_id: int = kafka_field("int32")
    incarnation_id: UUID = kafka_field("uuid")
    zk_migration_ready: bool = kafka_field("bool", default=False)
    end_points: tuple[ControllerEndpoint, ...]
    features: tuple[ControllerFeature, ...] = ()
