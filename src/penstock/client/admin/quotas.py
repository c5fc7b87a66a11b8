"""Client quotas: describes them and changes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from penstock.client.errors import raise_for_error
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.connection import Connection
from penstock.protocol.schemas import schema_class

#: Names by entity type (user, client-id, ip); a name of None is the default of that type.
Entity = Mapping[str, str | None]


class EntityQuotas(NamedTuple):
    entity: dict[str, str | None]
    limits: dict[str, float]


def describe_quotas(cluster: Cluster, entity: Entity) -> list[EntityQuotas]:
    """Return the quotas of the entities that have all these parts. Raises Refused, Unavailable, UnsupportedVersion."""
    component = schema_class("describe_client_quotas.v1.request:ComponentData")
    request = schema_class("describe_client_quotas.v1.request:DescribeClientQuotasRequest")(
        components=tuple(
            component(entity_type=kind, match_type=1 if name is None else 0, match=name)
            for kind, name in entity.items()
        ),
        strict=False,
    )

    def ask(connection: Connection) -> list[EntityQuotas]:
        response = connection.call(request)
        raise_for_error(response.error_code, "quotas", response.error_message)
        return [
            EntityQuotas(
                {part.entity_type: part.entity_name for part in entry.entity},
                {value.key: value.value for value in entry.values},
            )
            for entry in response.entries or ()
        ]

    return cluster.call_any(ask)


def alter_quotas(cluster: Cluster, entity: Entity, limits: Mapping[str, float | None]) -> None:
    """Set the limits of an entity; None removes a limit. Raises Refused, Unavailable, UnsupportedVersion."""
    part = schema_class("alter_client_quotas.v1.request:EntityData")
    operation = schema_class("alter_client_quotas.v1.request:OpData")
    entry = schema_class("alter_client_quotas.v1.request:EntryData")(
        entity=tuple(part(entity_type=kind, entity_name=name) for kind, name in entity.items()),
        ops=tuple(
            operation(key=key, value=0.0 if value is None else value, remove=value is None)
            for key, value in limits.items()
        ),
    )
    request = schema_class("alter_client_quotas.v1.request:AlterClientQuotasRequest")(
        entries=(entry,), validate_only=False
    )

    def ask(connection: Connection) -> None:
        (result,) = connection.call(request).entries
        raise_for_error(result.error_code, "quotas", result.error_message)

    cluster.call_controller(ask)
