"""What client quotas belong to, as (type, name) pairs; a name of None is the default of its type."""

from __future__ import annotations

from typing import Final

from penstock.protocol.acls import canonical_host

IP: Final = "ip"


def canonical_entity(entity: tuple[tuple[str, str | None], ...]) -> tuple[tuple[str, str | None], ...]:
    """Return one entity for every spelling of an IP address."""
    if len(entity) == 1 and entity[0][0] == IP and entity[0][1] is not None:
        return ((IP, canonical_host(entity[0][1])),)
    return entity
