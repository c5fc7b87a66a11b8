"""Tenants of a Penstock cluster: lists them with what they use, creates, alters and deletes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from penstock.client.errors import Refused, raise_for_error
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.connection import Connection
from penstock.client.wire.topics import ConfigResourceType, alter_configs, describe_configs
from penstock.protocol.errors import ErrorCode
from penstock.protocol.schemas import schema_class
from penstock.protocol.tenant_usage import TENANT_USAGE, TenantUsage, decode_usage, encode_usage_request

#: The limits that a tenant may have, by the names of its settings.
LIMITS: Final = (
    "producer_byte_rate",
    "consumer_byte_rate",
    "request_rate",
    "storage_bytes_max",
    "partitions_max",
    "connections_max",
    "groups_max",
)
_USER: Final = "User:"


class Tenant(NamedTuple):
    name: str
    users: tuple[str, ...]
    prefix: str
    limits: dict[str, int]


def list_tenants(cluster: Cluster) -> list[Tenant]:
    """Return all tenants, in order. Raises Refused, Unavailable, UnsupportedVersion."""
    request = schema_class("list_config_resources.v1.request:ListConfigResourcesRequest")(
        resource_types=(ConfigResourceType.TENANT.value,)
    )

    def ask(connection: Connection) -> list[Tenant]:
        response = connection.call(request, oldest=1)
        raise_for_error(response.error_code, "tenants")
        names = sorted(str(resource.resource_name) for resource in response.config_resources)
        return [found for name in names if (found := _describe(connection, name)) is not None]

    return cluster.call_any(ask)


def find_tenant(cluster: Cluster, name: str) -> Tenant | None:
    """Return the tenant; None if there is none of this name. Raises Refused, Unavailable."""
    return cluster.call_any(lambda connection: _describe(connection, name))


def _describe(connection: Connection, name: str) -> Tenant | None:
    try:
        entries = describe_configs(connection, ConfigResourceType.TENANT, name)
    except Refused as error:
        if error.code is ErrorCode.resource_not_found:
            return None
        raise
    values = {key: entry.value for key, entry in entries.items()}
    users = (part.removeprefix(_USER) for part in (values.get("users") or "").split(";"))
    limits = {limit: int(text) for limit in LIMITS if (text := values.get(limit)) is not None}
    return Tenant(name, tuple(filter(None, users)), values.get("prefix") or "", limits)


def alter_tenant(
    cluster: Cluster, name: str, changes: Mapping[str, str | None], *, dry_run: bool = False
) -> None:
    """Set these settings of a tenant, which may be new; None removes one. Raises Refused, Unavailable."""
    alter_configs(cluster, ConfigResourceType.TENANT, name, changes, dry_run=dry_run)


def tenant_changes(wanted: Tenant, present: Tenant | None) -> dict[str, str | None]:
    """Return what has to be set or removed to make the tenant as it is wanted."""
    changes: dict[str, str | None] = {}
    if present is None or set(present.users) != set(wanted.users):
        changes["users"] = ";".join(f"{_USER}{user}" for user in wanted.users)
    if present is None or present.prefix != wanted.prefix:
        changes["prefix"] = wanted.prefix
    before = {} if present is None else present.limits
    for limit in LIMITS:
        if before.get(limit) != wanted.limits.get(limit):
            changes[limit] = str(wanted.limits[limit]) if limit in wanted.limits else None
    return changes


def delete_tenant(cluster: Cluster, tenant: Tenant) -> None:
    """Delete a tenant; its users, topics and groups stay. Raises Refused, Unavailable."""
    alter_tenant(cluster, tenant.name, dict.fromkeys(("users", "prefix", *tenant.limits)))


def tenant_usage(cluster: Cluster) -> dict[str, TenantUsage]:
    """Return what tenants use on all nodes, as one node knows it. Raises Unavailable, MalformedFrame."""

    def ask(connection: Connection) -> dict[str, TenantUsage]:
        return decode_usage(connection.call_raw(TENANT_USAGE, 0, [encode_usage_request(of_cluster=True)]))

    return cluster.call_any(ask)
