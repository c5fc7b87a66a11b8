"""Positions in a PostgreSQL table, beside the results of handlers on all machines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from psycopg import Connection, Cursor
from psycopg.rows import tuple_row

from penstock.client.ledgers.base import Holder, LedgerTransaction, Place, Position, Step
from penstock.client.ledgers.tables import POSITIONS
from penstock.client.stores.locating import Location
from penstock.client.stores.naming import stored
from penstock.client.stores.postgres import PostgresStore
from penstock.client.stores.postgres_database import PostgresDatabase

__all__ = ["PostgresLedger"]

#: An older owner that hangs in the middle of its transaction is reported, not waited for in silence.
_TAKE_TIMEOUT_MS: Final = 10_000
_ONE: Final = "WHERE group_id = %s AND topic = %s AND partition = %s"
_READ: Final = "SELECT topic, partition, next_offset FROM penstock_positions WHERE group_id = %s"
#: Sorted, so that two who take the same places lock them in the same order.
_TAKE: Final = """\
INSERT INTO penstock_positions AS held (group_id, topic, partition, next_offset, epoch, owner, updated_at)
SELECT %s, topic, partition, NULL, 1, %s, now() FROM unnest(%s::text[], %s::integer[]) AS place (topic, partition)
ORDER BY topic COLLATE "C", partition
ON CONFLICT (group_id, topic, partition) DO UPDATE
SET epoch = held.epoch + 1, owner = excluded.owner, updated_at = excluded.updated_at
RETURNING topic, partition, next_offset, epoch"""
_HOLDER: Final = f"SELECT next_offset, epoch, owner FROM penstock_positions {_ONE}"
_MOVE: Final = f"""\
UPDATE penstock_positions SET next_offset = %s, updated_at = now()
{_ONE} AND epoch = %s AND next_offset IS NOT DISTINCT FROM %s"""


class PostgresLedger:
    def __init__(self, location: Location) -> None:
        self._database = PostgresDatabase(location, POSITIONS)
        self._location = location
        self._marks: PostgresStore | None = None

    def positions(self, group: str, places: Sequence[Place]) -> dict[Place, int | None]:
        rows = self._database.ask(_READ, (stored(group),))
        known = {(topic, partition): offset for topic, partition, offset in rows}
        return {place: known.get(place) for place in places}

    def take(self, group: str, places: Sequence[Place], owner: str) -> dict[Place, Position]:
        once = sorted(set(places))
        topics, partitions = [topic for topic, _ in once], [partition for _, partition in once]
        with self._database.transaction() as connection, self._database.errors_told():
            connection.execute(f"SET LOCAL lock_timeout = {_TAKE_TIMEOUT_MS}")
            rows = connection.execute(_TAKE, (stored(group), owner, topics, partitions)).fetchall()
        return {(topic, partition): Position(offset, epoch) for topic, partition, offset, epoch in rows}

    @contextmanager
    def transaction(self) -> Iterator[LedgerTransaction]:
        with self._database.transaction() as connection:
            transaction = LedgerTransaction(connection, self)
            yield transaction
            if transaction.fenced:
                raise transaction.fenced

    def marks(self) -> PostgresStore:
        self._marks = self._marks or PostgresStore(self._location)
        return self._marks

    def close(self) -> None:
        if self._marks is not None:
            self._marks.close()
        self._database.close()

    def move(self, connection: Connection, step: Step) -> bool:
        told = (step.to_offset, stored(step.group), *step.place, step.epoch, step.from_offset)
        with self._database.errors_told():
            return _cursor(connection).execute(_MOVE, told).rowcount == 1

    def holder(self, connection: Connection, step: Step) -> Holder | None:
        with self._database.errors_told():
            row = _cursor(connection).execute(_HOLDER, (stored(step.group), *step.place)).fetchone()
        return Holder(*row) if row else None


def _cursor(connection: Connection) -> Cursor[tuple[Any, ...]]:
    """The user may have set another kind of rows."""
    return connection.cursor(row_factory=tuple_row)
