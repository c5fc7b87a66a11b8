"""The part of the image about tenants (quotas, access rules, credentials) and registered controllers."""

from typing import TYPE_CHECKING
from uuid import UUID

from penstock.cluster.wire import MetadataRecord

if TYPE_CHECKING:
    from penstock.cluster.tenant_records import (
        AccessControlEntryRecord,
        ClientQuotaRecord,
        RegisterControllerRecord,
        UserScramCredentialRecord,
    )

QuotaKey = tuple[tuple[str, str | None], ...]


class TenantState:
    __slots__ = ("acls", "controllers", "credentials", "quotas")

    def __init__(self) -> None:
        self.acls: dict[UUID, AccessControlEntryRecord] = {}
        self.controllers: dict[int, RegisterControllerRecord] = {}
        self.credentials: dict[tuple[str, int], UserScramCredentialRecord] = {}
        self.quotas: dict[QuotaKey, dict[str, float]] = {}

    def fork(self) -> "TenantState":
        state = TenantState()
        state.acls, state.controllers = dict(self.acls), dict(self.controllers)
        state.credentials = dict(self.credentials)
        state.quotas = {key: dict(limits) for key, limits in self.quotas.items()}
        return state

    def replay(self, record: MetadataRecord) -> None:
        from penstock.cluster import tenant_records as kinds

        match record:
            case kinds.AccessControlEntryRecord():
                self.acls[record.id] = record
            case kinds.RemoveAccessControlEntryRecord():
                del self.acls[record.id]
            case kinds.UserScramCredentialRecord():
                self.credentials[record.name, record.mechanism] = record
            case kinds.RemoveUserScramCredentialRecord():
                del self.credentials[record.name, record.mechanism]
            case kinds.ClientQuotaRecord():
                self._quota(record)
            case kinds.RegisterControllerRecord():
                self.controllers[record.controller_id] = record
            case _:
                raise AssertionError(f"no rule to replay {record!r}")

    def _quota(self, record: "ClientQuotaRecord") -> None:
        key = tuple(sorted((e.entity_type, e.entity_name) for e in record.entity))
        limits = self.quotas.setdefault(key, {})
        if record.remove:
            limits.pop(record.key, None)
        else:
            limits[record.key] = record.value
        if not limits:
            del self.quotas[key]
