"""The ledger that a URL names, with its driver imported only now."""

from __future__ import annotations

import time
from collections.abc import Callable

from penstock.client.ledgers.base import Ledger
from penstock.client.stores.base import StoreError
from penstock.client.stores.locating import Kind, locate
from penstock.client.stores.opening import require_driver

__all__ = ["open_ledger"]


def open_ledger(url: str, *, clock: Callable[[], float] = time.time) -> Ledger:
    """Connects, and makes the table where it is missing. `clock` is for SQLite; servers have their own.

    Raises StoreUnavailable when nobody answers, StoreError for what cannot be.
    """
    location = locate(url)
    match location.kind:
        case Kind.SQLITE:
            from penstock.client.ledgers.sqlite import SqliteLedger

            return SqliteLedger(location, clock)
        case Kind.POSTGRESQL:
            require_driver(location, "psycopg", "postgres")
            from penstock.client.ledgers.postgres import PostgresLedger

            return PostgresLedger(location)
        case Kind.REDIS:
            raise StoreError(
                f"{location.shown}: a ledger shares transactions with results, which Redis cannot: "
                "use SQLite or PostgreSQL"
            )
