"""Helpers for tests of stores: the transaction of a handler, and its results."""

from collections.abc import Callable
from typing import Any

from penstock.client.stores import DedupeStore

HOUR_S = 3600.0
BLINK_S = 0.001


def results(store: DedupeStore) -> list[str]:
    with store.transaction() as transaction:
        return [what for (what,) in transaction.connection.execute("SELECT what FROM results ORDER BY what")]


def put(connection: Any, what: str) -> None:
    connection.execute(f"INSERT INTO results VALUES ('{what}')")


def handle(store: DedupeStore, work: Callable[[Any], object]) -> None:
    """As a subscription does: claim the message and do the work in one transaction."""
    with store.transaction() as transaction:
        assert transaction.claim("billing", "a", HOUR_S)
        work(transaction.connection)
