"""A database by its URL, and its tables where they are missing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from penstock.client.outbox.adding import create_table
from penstock.client.outbox.databases.base import Database
from penstock.client.outbox.errors import OutboxError
from penstock.client.outbox.schema import POSTGRESQL, SQLITE
from penstock.client.stores.base import StoreError
from penstock.client.stores.locating import Kind, Location, locate

__all__ = ["dialect_of", "make_tables", "open_database"]

#: As SQLAlchemy writes URLs.
_DRIVER: Final = re.compile(r"\A(\w+)\+\w+(?=://)")
_KINDS: Final = ("sqlite", "postgresql", "postgres:")
_EXAMPLES: Final = "sqlite:///shop.db, sqlite:////var/lib/shop.db or postgresql://user@host/database"


def dialect_of(url: str) -> str:
    """Raises OutboxError."""
    return SQLITE if _located(url).kind is Kind.SQLITE else POSTGRESQL


def open_database(url: str) -> Database:
    """Raises OutboxError, and Disturbed for a server that does not answer."""
    place = _located(url)
    if place.kind is Kind.SQLITE:
        from penstock.client.outbox.databases.sqlite import SqliteDatabase

        return SqliteDatabase(Path(place.address), busy_timeout_s=place.busy_timeout_s)
    from penstock.client.outbox.databases.postgres import PostgresDatabase

    return PostgresDatabase(place.address)


def make_tables(url: str) -> None:
    """And the database itself, if it is a file. Raises OutboxError, Disturbed."""
    place = _located(url)
    if place.kind is Kind.SQLITE:
        _make_in_sqlite(Path(place.address))
    else:
        _make_in_postgres(place.address)


def _located(url: str) -> Location:
    if not url.startswith(_KINDS):
        raise OutboxError(f"an outbox is in SQLite or PostgreSQL: give a URL such as {_EXAMPLES}")
    try:
        return locate(_DRIVER.sub(r"\1", url))
    except StoreError as error:
        raise OutboxError(str(error)) from None


def _make_in_sqlite(path: Path) -> None:
    import sqlite3

    try:
        with sqlite3.connect(path) as connection:
            create_table(connection)
        connection.close()
    except sqlite3.Error as error:
        raise OutboxError(f"{path}: {error}") from None


def _make_in_postgres(url: str) -> None:
    from penstock.client.outbox.databases.postgres import connect, explained

    with connect(url) as connection:
        import psycopg

        try:
            with connection.transaction():
                create_table(connection)
        except psycopg.Error as error:
            raise explained(error) from None
