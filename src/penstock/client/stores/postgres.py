"""Marks in a PostgreSQL table: durable, shared by all machines, and one transaction with the user's own tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from psycopg import Connection
from psycopg.rows import tuple_row

from penstock.client.stores.locating import Location
from penstock.client.stores.naming import stored, stored_ids
from penstock.client.stores.postgres_database import PostgresDatabase
from penstock.client.stores.tables import SEEN

__all__ = ["PostgresStore"]

_EXPIRED_ROWS_MAX: Final = 1000
#: The clock and not the start of the transaction, which may lie far back.
_EXPIRY: Final = "clock_timestamp() + make_interval(secs => %s)"
#: OFFSET 0 has each id looked up in the index. Without it the whole table is read for every batch, until the server
#: has had time to count how large the table has become.
_SEEN: Final = """\
SELECT asked.id FROM unnest(%s::text[]) AS asked (id) CROSS JOIN LATERAL (
    SELECT FROM penstock_seen AS known
    WHERE known.scope = %s AND known.id = asked.id AND known.expires_at > clock_timestamp() OFFSET 0
) AS found"""
_MARK: Final = f"""\
INSERT INTO penstock_seen AS known (scope, id, expires_at)
SELECT %s, id, {_EXPIRY} FROM unnest(%s::text[]) AS new (id)
ON CONFLICT (scope, id) DO UPDATE SET expires_at = excluded.expires_at"""
_CLAIM: Final = f"{_MARK} WHERE known.expires_at <= clock_timestamp() RETURNING id"
_EXPIRE: Final = f"""\
DELETE FROM penstock_seen AS known USING (
    SELECT scope, id FROM penstock_seen WHERE expires_at <= coalesce(to_timestamp(%s), clock_timestamp())
    ORDER BY expires_at LIMIT {_EXPIRED_ROWS_MAX} FOR UPDATE SKIP LOCKED
) AS old WHERE known.scope = old.scope AND known.id = old.id RETURNING 1"""


class PostgresTransaction:
    def __init__(self, connection: Connection, database: PostgresDatabase) -> None:
        self.connection = connection
        self._database = database

    def claim(self, scope: str, id: str, ttl_s: float) -> bool:
        return bool(self.claim_all(scope, [id], ttl_s))

    def claim_all(self, scope: str, ids: Sequence[str], ttl_s: float) -> set[str]:
        names = stored_ids(ids)
        with self._database.errors_told():
            cursor = self.connection.cursor(row_factory=tuple_row)  # the user may have set another
            rows = cursor.execute(_CLAIM, (stored(scope), ttl_s, list(names))).fetchall()
        return {names[name] for (name,) in rows}


class PostgresStore:
    """Time is the server's."""

    shares_transactions = True

    def __init__(self, location: Location) -> None:
        self._database = PostgresDatabase(location, SEEN)

    def seen(self, scope: str, ids: Sequence[str]) -> set[str]:
        names = stored_ids(ids)
        rows = self._database.ask(_SEEN, (list(names), stored(scope)))
        return {names[name] for (name,) in rows}

    def mark(self, scope: str, ids: Sequence[str], ttl_s: float) -> None:
        if names := list(stored_ids(ids)):
            self._database.ask(_MARK, (stored(scope), ttl_s, names))

    def claim(self, scope: str, id: str, ttl_s: float) -> bool:
        with self.transaction() as transaction:
            return transaction.claim(scope, id, ttl_s)

    @contextmanager
    def transaction(self) -> Iterator[PostgresTransaction]:
        with self._database.transaction() as connection:
            yield PostgresTransaction(connection, self._database)

    def joined(self, connection: Connection) -> PostgresTransaction:
        return PostgresTransaction(connection, self._database)

    def expire(self, now: float | None = None) -> int:
        """In small steps that wait for nobody."""
        total = 0
        while True:
            count = len(self._database.ask(_EXPIRE, (now,)))
            total += count
            if count < _EXPIRED_ROWS_MAX:
                return total

    def close(self) -> None:
        self._database.close()
