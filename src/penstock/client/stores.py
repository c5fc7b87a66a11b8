"""The store that a URL names, with its driver imported only now."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.util import find_spec

from penstock.client.stores.base import DedupeStore, StoreError
from penstock.client.stores.locating import Kind, Location, locate

__all__ = ["open_store", "require_driver"]


def open_store(url: str, *, clock: Callable[[], float] = time.time) -> DedupeStore:
    """Connects, and makes the table where it is missing. `clock` is for SQLite; servers have their own.

    Raises StoreUnavailable when nobody answers, StoreError for what cannot be.
    """
    location = locate(url)
    match location.kind:
        case Kind.SQLITE:
            from penstock.client.stores.sqlite import SqliteStore

            return SqliteStore(location, clock)
        case Kind.POSTGRESQL:
            require_driver(location, "psycopg", "postgres")
            from penstock.client.stores.postgres import PostgresStore

            return PostgresStore(location)
        case Kind.REDIS:
            require_driver(location, "redis", "redis")
            from penstock.client.stores.redis import RedisStore

            return RedisStore(location)


def require_driver(location: Location, package: str, extra: str) -> None:
    """Raises StoreError that says what to install."""
    if find_spec(package) is None:
        raise StoreError(f"{location.shown} needs the package {package}: pip install 'penstock[{extra}]'")
