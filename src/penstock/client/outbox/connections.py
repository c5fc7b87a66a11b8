"""Connections as applications have them: SQLAlchemy's sessions and connections, and those of sqlite3 and psycopg.

None of the libraries is imported: whoever gives us an object of theirs has done so.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from penstock.client.outbox.errors import OutboxError
from penstock.client.outbox.schema import POSTGRESQL, SQLITE

__all__ = ["Target", "named", "target_of"]

_PARAMETER: Final = re.compile(r":([a-z_]+)")


class Target(NamedTuple):
    """Where a statement is run: in the caller's transaction."""

    dialect: str
    run: Callable[[str, Mapping[str, Any]], None]


def target_of(connection: Any, *, in_transaction: bool = True) -> Target:
    """Raises TypeError for what is no connection, and OutboxError where each statement would be a transaction."""
    if _is(connection, "sqlalchemy.ext.asyncio", "AsyncSession", "AsyncConnection"):
        raise TypeError(
            "of an asynchronous session: await session.run_sync(lambda session: add(session, ...))"
        )
    if _is(connection, "sqlalchemy.orm", "Session", "scoped_session"):
        connection = connection.connection()
    if _is(connection, "sqlalchemy.engine", "Connection"):
        return _of_sqlalchemy(connection, in_transaction)
    if _is(connection, "sqlite3", "Cursor") or _is(connection, "psycopg", "Cursor"):
        connection = connection.connection
    dialect = _dialect_of(connection)
    if dialect is None:
        kind = f"{type(connection).__module__}.{type(connection).__qualname__}"
        raise TypeError(
            f"a {kind} has no transaction that we know: give a SQLAlchemy Session or Connection, "
            "or a connection or cursor of sqlite3 or psycopg"
        )
    if in_transaction:
        _check_transaction(connection, dialect)
    return Target(dialect, lambda sql, values: _run(connection, dialect, sql, values))


def named(sql: str) -> str:
    """`:name` as psycopg writes it."""
    return _PARAMETER.sub(r"%(\1)s", sql)


def _of_sqlalchemy(connection: Any, in_transaction: bool) -> Target:
    from sqlalchemy import text

    dialect = connection.dialect.name
    if dialect not in (POSTGRESQL, SQLITE):
        raise OutboxError(f"an outbox is in PostgreSQL or SQLite, not in {dialect}")
    own = connection.connection.dbapi_connection
    if in_transaction and _dialect_of(own) is not None:
        _check_transaction(own, dialect)

    def run(sql: str, values: Mapping[str, Any]) -> None:
        connection.execute(text(sql), values).close()

    return Target(dialect, run)


def _run(connection: Any, dialect: str, sql: str, values: Mapping[str, Any]) -> None:
    # A cursor of our own: the caller's may have rows in it that are still to be read.
    cursor = connection.cursor()
    try:
        cursor.execute(named(sql) if dialect == POSTGRESQL else sql, values)
    finally:
        cursor.close()


def _dialect_of(connection: Any) -> str | None:
    if _is(connection, "sqlite3", "Connection"):
        return SQLITE
    return POSTGRESQL if _is(connection, "psycopg", "Connection") else None


def _check_transaction(connection: Any, dialect: str) -> None:
    """A row that is committed by itself tells of a change that may never be."""
    if dialect == SQLITE:
        commits_itself = connection.isolation_level is None or getattr(connection, "autocommit", -1) is True
        is_open = connection.in_transaction
    else:
        commits_itself = connection.autocommit
        is_open = connection.info.transaction_status.name != "IDLE"
    if commits_itself and not is_open:
        raise OutboxError(
            "the connection commits every statement by itself, so the message would not be part of your "
            "transaction: begin one first, and add the message inside of it"
        )


def _is(thing: Any, module: str, *names: str) -> bool:
    loaded = sys.modules.get(module)
    kinds = tuple(getattr(loaded, name) for name in names if hasattr(loaded, name))
    return isinstance(thing, kinds)
