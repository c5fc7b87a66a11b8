"""The part of the cluster image about security: quotas, ACLs, SCRAM credentials, tokens; and registered controllers."""

from collections.abc import Iterator
from typing import TYPE_CHECKING
from uuid import UUID

from penstock.cluster.metadata_records import MetadataRecord
from penstock.protocol.acls import AclBinding

if TYPE_CHECKING:
    from penstock.cluster.rare_records import (
        AccessControlEntryRecord,
        ClientQuotaRecord,
        DelegationTokenRecord,
        RegisterControllerRecord,
        UserScramCredentialRecord,
    )

QuotaKey = tuple[tuple[str, str | None], ...]


class SecurityImage:
    __slots__ = ("acl_ids", "acls", "controllers", "credentials", "quotas", "tokens")

    def __init__(self) -> None:
        self.acls: dict[UUID, AccessControlEntryRecord] = {}
        #: The same rules, to find out whether one exists.
        self.acl_ids: dict[AclBinding, UUID] = {}
        self.controllers: dict[int, RegisterControllerRecord] = {}
        self.credentials: dict[tuple[str, int], UserScramCredentialRecord] = {}
        self.quotas: dict[QuotaKey, dict[str, float]] = {}
        self.tokens: dict[str, DelegationTokenRecord] = {}  # by id

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SecurityImage):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in self.__slots__)

    __hash__ = None  # type: ignore[assignment]

    def fork(self) -> "SecurityImage":
        state = SecurityImage()
        state.acls, state.acl_ids = dict(self.acls), dict(self.acl_ids)
        state.controllers = dict(self.controllers)
        state.credentials = dict(self.credentials)
        state.tokens = dict(self.tokens)
        state.quotas = {key: dict(limits) for key, limits in self.quotas.items()}
        return state

    def replay(self, record: MetadataRecord) -> None:
        from penstock.cluster import rare_records

        match record:
            case rare_records.AccessControlEntryRecord():
                self.acls[record.id] = record
                self.acl_ids[acl_binding(record)] = record.id
            case rare_records.RemoveAccessControlEntryRecord():
                self.acl_ids.pop(acl_binding(self.acls.pop(record.id)), None)
            case rare_records.UserScramCredentialRecord():
                self.credentials[record.name, record.mechanism] = record
            case rare_records.RemoveUserScramCredentialRecord():
                del self.credentials[record.name, record.mechanism]
            case rare_records.DelegationTokenRecord():
                self.tokens[record.token_id] = record
            case rare_records.RemoveDelegationTokenRecord():
                del self.tokens[record.token_id]
            case rare_records.ClientQuotaRecord():
                self._quota(record)
            case rare_records.RegisterControllerRecord():
                self.controllers[record.controller_id] = record
            case _:
                raise AssertionError(f"no rule to replay {record!r}")

    def records(self) -> Iterator[MetadataRecord]:
        """Yields the records that rebuild this state."""
        yield from self.controllers.values()
        yield from self.credentials.values()
        yield from self.tokens.values()
        yield from self.acls.values()
        if not self.quotas:
            return
        from penstock.cluster.rare_records import ClientQuotaRecord, QuotaEntity  # start-up time

        for key, limits in self.quotas.items():
            entity = tuple(QuotaEntity(entity_type=kind, entity_name=name) for kind, name in key)
            for name, value in limits.items():
                yield ClientQuotaRecord(entity=entity, key=name, value=value, remove=False)

    def _quota(self, record: "ClientQuotaRecord") -> None:
        key = tuple(sorted((e.entity_type, e.entity_name) for e in record.entity))
        limits = self.quotas.setdefault(key, {})
        if record.remove:
            limits.pop(record.key, None)
        else:
            limits[record.key] = record.value
        if not limits:
            del self.quotas[key]


def acl_binding(record: "AccessControlEntryRecord") -> AclBinding:
    return AclBinding(
        record.resource_type,
        record.resource_name,
        record.pattern_type,
        record.principal,
        record.host,
        record.operation,
        record.permission_type,
    )
