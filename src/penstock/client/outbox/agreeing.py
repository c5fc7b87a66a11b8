"""Which relays may be at work together: those that divide the rows alike, and tell of them in the same place.

A row that is published and not yet deleted is known by the marker of whoever published it. So a change of the number
of shards, or of the name, waits until no relay of the old kind is left, locks out those that only seem to be gone, and
deletes what their markers name. Only then rows are divided anew.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from random import Random
from typing import Final

from penstock.client.outbox.databases.base import Agreement, Database
from penstock.client.outbox.errors import OutboxError
from penstock.client.retrying import Backoff, Deadline, attempts

__all__ = ["agree"]

#: Relays that start together step on each other's toes for a moment.
PATIENCE_MS: Final = 10_000
_RESTS: Final = Backoff(base_ms=20, cap_ms=500)

Settle = Callable[[Agreement], None]


def agree(
    database: Database, name: str, shards: int, *, settle: Settle, stopping: threading.Event
) -> Agreement | None:
    """Hold the table together with all relays of the same kind. None if it is time to stop.

    `settle` ends what relays of another kind have left. Raises OutboxError while they are at work.
    """
    found: Agreement | None = None
    for _ in attempts(Deadline(PATIENCE_MS), _RESTS, Random(), sleep=lambda rest_s: _rest(stopping, rest_s)):
        if stopping.is_set():
            return None
        if database.hold_table(alone=False):
            found = database.agreement()
            if found is not None and (found.name, found.shards) == (name, shards):
                return found
            database.release_table()
        if database.hold_table(alone=True):
            _change(database, name, shards, settle)
            database.release_table()
    raise OutboxError(_refusal(found, name, shards))


def _change(database: Database, name: str, shards: int, settle: Settle) -> None:
    """Alone: nobody else reads or writes the agreement."""
    before = database.agreement()
    if before is not None and (before.name, before.shards) != (name, shards):
        settle(before)
    database.agree(name, shards)


def _rest(stopping: threading.Event, rest_s: float) -> None:
    stopping.wait(rest_s)


def _refusal(found: Agreement | None, name: str, shards: int) -> str:
    if found is None:
        return "other relays of this database come and go all the time: start them one after the other"
    return (
        f"relays of this database are at work with {found.shards} shards under the name {found.name}: "
        f"stop them all before starting any with {shards} shards under the name {name}"
    )
