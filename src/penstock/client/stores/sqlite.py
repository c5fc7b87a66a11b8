"""Marks in a SQLite file: the default, for the members of a group on one machine."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from penstock.client.stores.locating import Location
from penstock.client.stores.naming import stored, stored_ids
from penstock.client.stores.sqlite_database import LentConnection, SqliteDatabase
from penstock.client.stores.tables import SEEN

__all__ = ["SqliteStore"]

_EXPIRED_ROWS_MAX: Final = 1000
_SEEN: Final = """\
SELECT id FROM penstock_seen WHERE scope = ? AND expires_at > ? AND id IN (SELECT value FROM json_each(?))"""
_MARK: Final = """\
INSERT INTO penstock_seen (scope, id, expires_at) VALUES (?, ?, ?)
ON CONFLICT (scope, id) DO UPDATE SET expires_at = excluded.expires_at"""
_CLAIM: Final = f"{_MARK} WHERE penstock_seen.expires_at <= ?"
_EXPIRE: Final = f"""\
DELETE FROM penstock_seen WHERE (scope, id) IN
(SELECT scope, id FROM penstock_seen WHERE expires_at <= ? LIMIT {_EXPIRED_ROWS_MAX})"""


class SqliteTransaction:
    def __init__(self, connection: LentConnection, store: SqliteStore) -> None:
        self.connection = connection
        self._store = store

    def claim(self, scope: str, id: str, ttl_s: float) -> bool:
        now = self._store.clock()
        with self._store.database.errors_told():
            cursor = self.connection.execute(_CLAIM, (stored(scope), stored(id), now + ttl_s, now))
        return cursor.rowcount == 1

    def claim_all(self, scope: str, ids: Sequence[str], ttl_s: float) -> set[str]:
        return {id for id in dict.fromkeys(ids) if self.claim(scope, id, ttl_s)}


class SqliteStore:
    """Time is this machine's: a file has no clock of its own."""

    shares_transactions = True

    def __init__(self, location: Location, clock: Callable[[], float] = time.time) -> None:
        self.database = SqliteDatabase(location, SEEN)
        self.clock = clock

    def seen(self, scope: str, ids: Sequence[str]) -> set[str]:
        names = stored_ids(ids)
        rows = self.database.ask(_SEEN, (stored(scope), self.clock(), json.dumps(list(names))))
        return {names[name] for (name,) in rows}

    def mark(self, scope: str, ids: Sequence[str], ttl_s: float) -> None:
        kept, expires_at = stored(scope), self.clock() + ttl_s
        rows = [(kept, name, expires_at) for name in stored_ids(ids)]
        if rows:
            with self.database.transaction() as connection, self.database.errors_told():
                connection.executemany(_MARK, rows)

    def claim(self, scope: str, id: str, ttl_s: float) -> bool:
        with self.transaction() as transaction:
            return transaction.claim(scope, id, ttl_s)

    @contextmanager
    def transaction(self) -> Iterator[SqliteTransaction]:
        with self.database.transaction() as connection:
            yield SqliteTransaction(connection, self)

    def joined(self, connection: LentConnection) -> SqliteTransaction:
        return SqliteTransaction(connection, self)

    def expire(self, now: float | None = None) -> int:
        """In small steps, so that nobody waits long for the file."""
        moment = self.clock() if now is None else now
        total = 0
        while True:
            with self.database.transaction() as connection, self.database.errors_told():
                count = connection.execute(_EXPIRE, (moment,)).rowcount
            total += count
            if count < _EXPIRED_ROWS_MAX:
                return total

    def close(self) -> None:
        self.database.close()
