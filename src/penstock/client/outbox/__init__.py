"""The transactional outbox: messages written with a business change in one database transaction, and relayed to topics.

`add` writes a message into a table of the caller's database, in the caller's transaction. `Relay` publishes the rows
to their topics: in order by key, none lost, none twice, whatever crashes on the way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.client.outbox.messages import OutboxError, add, create_table, schema

if TYPE_CHECKING:
    from penstock.client.outbox.relay import OnReject, Relay

__all__ = ["OnReject", "OutboxError", "Relay", "add", "create_table", "schema"]


def __getattr__(name: str) -> Any:
    """Loads the relay on first use, because applications that only add messages do not need it."""
    if name in ("OnReject", "Relay"):
        from penstock.client.outbox import relay

        return getattr(relay, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
