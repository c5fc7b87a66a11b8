"""The transactional outbox: messages written with the business change in one database transaction, and relayed.

`add` puts a message into a table of the caller's database, in the caller's transaction. `Relay` takes the rows to
their topics: ordered by key, none lost, none twice, whatever dies on the way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.client.outbox.adding import add, create_table
from penstock.client.outbox.errors import OutboxError
from penstock.client.outbox.schema import schema

if TYPE_CHECKING:
    from penstock.client.outbox.relay import OnReject, Relay

__all__ = ["OnReject", "OutboxError", "Relay", "add", "create_table", "schema"]


def __getattr__(name: str) -> Any:
    """What only a relay needs is loaded only by it."""
    if name in ("OnReject", "Relay"):
        from penstock.client.outbox import relay

        return getattr(relay, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
