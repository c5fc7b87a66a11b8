"""Positions in a SQLite file, beside the results of handlers on the same machine."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from penstock.client.ledgers.base import Holder, LedgerTransaction, Place, Position, Step
from penstock.client.ledgers.tables import POSITIONS
from penstock.client.stores.locating import Location
from penstock.client.stores.naming import stored
from penstock.client.stores.sqlite import SqliteStore
from penstock.client.stores.sqlite_database import SqliteDatabase

__all__ = ["SqliteLedger"]

_ONE: Final = "WHERE group_id = ? AND topic = ? AND partition = ?"
_READ: Final = "SELECT topic, partition, next_offset FROM penstock_positions WHERE group_id = ?"
_TAKE: Final = """\
INSERT INTO penstock_positions (group_id, topic, partition, next_offset, epoch, owner, updated_at)
VALUES (?, ?, ?, NULL, 1, ?, ?)
ON CONFLICT (group_id, topic, partition) DO UPDATE
SET epoch = penstock_positions.epoch + 1, owner = excluded.owner, updated_at = excluded.updated_at"""
_HOLDER: Final = f"SELECT next_offset, epoch, owner FROM penstock_positions {_ONE}"
_MOVE: Final = f"""\
UPDATE penstock_positions SET next_offset = ?, updated_at = ? {_ONE} AND epoch = ? AND next_offset IS ?"""


class SqliteLedger:
    def __init__(self, location: Location, clock: Callable[[], float] = time.time) -> None:
        self._database = SqliteDatabase(location, POSITIONS)
        self._location = location
        self._marks: SqliteStore | None = None
        self._clock = clock

    def positions(self, group: str, places: Sequence[Place]) -> dict[Place, int | None]:
        rows = self._database.ask(_READ, (stored(group),))
        known = {(topic, partition): offset for topic, partition, offset in rows}
        return {place: known.get(place) for place in places}

    def take(self, group: str, places: Sequence[Place], owner: str) -> dict[Place, Position]:
        taken: dict[Place, Position] = {}
        name, now = stored(group), self._clock()
        with self._database.transaction() as connection, self._database.errors_told():
            for place in sorted(set(places)):
                connection.execute(_TAKE, (name, *place, owner, now))
                offset, epoch, _ = connection.execute(_HOLDER, (name, *place)).fetchone()
                taken[place] = Position(offset, epoch)
        return taken

    @contextmanager
    def transaction(self) -> Iterator[LedgerTransaction]:
        with self._database.transaction() as connection:
            transaction = LedgerTransaction(connection, self)
            yield transaction
            if transaction.fenced:
                raise transaction.fenced

    def marks(self) -> SqliteStore:
        self._marks = self._marks or SqliteStore(self._location)
        return self._marks

    def close(self) -> None:
        if self._marks is not None:
            self._marks.close()
        self._database.close()

    def move(self, connection: sqlite3.Connection, step: Step) -> bool:
        changed = (step.to_offset, self._clock())
        told = (*changed, stored(step.group), *step.place, step.epoch, step.from_offset)
        with self._database.errors_told():
            return connection.execute(_MOVE, told).rowcount == 1

    def holder(self, connection: sqlite3.Connection, step: Step) -> Holder | None:
        with self._database.errors_told():
            cursor = connection.cursor()
            cursor.row_factory = None  # the user may have set another
            row = cursor.execute(_HOLDER, (stored(step.group), *step.place)).fetchone()
        return Holder(*row) if row else None
