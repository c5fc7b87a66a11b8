"""Dedupe stores for effectively-once: the ids of messages that a group has handled, kept while they may be redelivered.

`open_store(url)` opens one and imports its driver only then. SQLite and PostgreSQL keep the ids in a table of the
user's database, so that a result and its id can be one transaction. Redis keeps only ids.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.util import find_spec

from penstock.client.databases.base import (
    DatabaseKind,
    DatabaseLocation,
    DedupeStore,
    StoreError,
    StoreUnavailable,
    Transaction,
    TransactionSpoiled,
    parse_database_url,
    schema,
)

__all__ = (
    "DedupeStore",
    "StoreError",
    "StoreUnavailable",
    "Transaction",
    "TransactionSpoiled",
    "open_store",
    "require_driver",
    "schema",
)


def open_store(url: str, *, clock: Callable[[], float] = time.time) -> DedupeStore:
    """Connects, and creates the table if it is missing. `clock` is for SQLite; servers have their own clock.

    Raises StoreUnavailable if the server does not answer, StoreError if the URL or the database cannot be used.
    """
    # Drivers are optional and imported only for the database that is used.
    location = parse_database_url(url)
    match location.kind:
        case DatabaseKind.SQLITE:
            from penstock.client.databases.sqlite import SqliteStore

            return SqliteStore(location, clock)
        case DatabaseKind.POSTGRESQL:
            require_driver(location, "psycopg", "postgres")
            from penstock.client.databases.postgres import PostgresStore

            return PostgresStore(location)
        case DatabaseKind.REDIS:
            require_driver(location, "redis", "redis")
            from penstock.client.databases.redis import RedisStore

            return RedisStore(location)


def require_driver(location: DatabaseLocation, package: str, extra: str) -> None:
    """Raises StoreError, with the command that installs the driver, if the driver is missing."""
    if find_spec(package) is None:
        raise StoreError(f"{location.shown} needs the package {package}: pip install 'penstock[{extra}]'")
