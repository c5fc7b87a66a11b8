"""Ledgers: a group's positions in the user's database, so that a result and its position are one transaction.

`open_ledger(url)` opens one in SQLite or PostgreSQL and imports its driver only then. A member that is assigned a
partition takes its position in the ledger, which fences the previous owner: a position moves by compare-and-set on the
offset and the epoch of its owner. `schema` returns the SQL of the table: the ledger runs it where the table is
missing, and users put it into their migrations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple, Protocol

from penstock.client.databases.base import (
    DatabaseKind,
    DedupeStore,
    StoreError,
    Table,
    parse_database_url,
    table_statements,
)
from penstock.client.errors import ClientError
from penstock.client.stores import require_driver

__all__ = (
    "POSITIONS_TABLE",
    "Ledger",
    "LedgerFenced",
    "LedgerTransaction",
    "Position",
    "PositionAdvance",
    "PositionOwner",
    "PositionsTable",
    "TopicPartition",
    "open_ledger",
    "schema",
)


#: Topic and partition.
TopicPartition = tuple[str, int]


class LedgerFenced(ClientError):
    """Somebody else has taken the place, or has moved its position: nothing of the transaction is kept."""


class Position(NamedTuple):
    #: The next offset to handle; None where nothing was handled yet.
    offset: int | None
    #: Of the ownership that has just begun.
    epoch: int


class PositionOwner(NamedTuple):
    """A row of the table, for whoever is fenced."""

    offset: int | None
    epoch: int
    owner: str


class PositionAdvance(NamedTuple):
    group: str
    topic_partition: TopicPartition
    from_offset: int | None
    to_offset: int
    epoch: int


class Ledger(Protocol):
    """Any number of threads may use one ledger. Every method raises StoreUnavailable, StoreError."""

    def positions(
        self, group: str, topic_partitions: Sequence[TopicPartition]
    ) -> dict[TopicPartition, int | None]:
        """The next offset of each; None where nothing was handled yet."""

    def take(
        self, group: str, topic_partitions: Sequence[TopicPartition], owner: str
    ) -> dict[TopicPartition, Position]:
        """On assignment: from now on every older owner of these places is fenced.

        A transaction of an older owner that has advanced is waited for, and its position is the one returned.
        """

    def transaction(self) -> AbstractContextManager[LedgerTransaction]:
        """Committed when the block ends, rolled back when it raises.

        Raises StoreUnavailable when the database went away: nobody knows then whether it was committed, and `positions`
        tells. Raises TransactionSpoiled, and rolls back, where a commit would not have kept what the block did.
        """

    def marks(self) -> DedupeStore:
        """Ids in the same database, to be claimed in transactions of the ledger. It is closed with the ledger."""

    def close(self) -> None:
        """Nothing is open afterwards."""


class PositionsTable(Protocol):
    """The table of positions in one dialect of SQL, inside a transaction."""

    def move(self, connection: Any, step: PositionAdvance) -> bool:
        """Whether position and epoch were as the step says, and the position was moved."""

    def holder(self, connection: Any, step: PositionAdvance) -> PositionOwner | None: ...


class LedgerTransaction:
    """Open until its block ends. What is done through `connection` and the steps are kept together, or not at all.

    The row of a place is locked from `advance` to the end of the block, so advance last, after the work.
    """

    def __init__(self, connection: Any, positions: PositionsTable) -> None:
        #: Of the driver: `sqlite3` or `psycopg`. Its transaction is not the user's to end.
        self.connection = connection
        #: Why this transaction will not be committed, whatever the block does with the exception.
        self.fenced: LedgerFenced | None = None
        self._positions = positions

    def advance(
        self, group: str, topic_partition: TopicPartition, from_offset: int | None, to_offset: int, epoch: int
    ) -> None:
        """Compare and set. Raises Fenced when another owner or another position is there."""
        assert to_offset > (-1 if from_offset is None else from_offset), (
            f"{topic_partition}: {from_offset} to {to_offset}"
        )
        step = PositionAdvance(group, topic_partition, from_offset, to_offset, epoch)
        if not self._positions.move(self.connection, step):
            self.fenced = LedgerFenced(_fenced_reason(step, self._positions.holder(self.connection, step)))
            raise self.fenced


def _fenced_reason(step: PositionAdvance, holder: PositionOwner | None) -> str:
    topic, partition = step.topic_partition
    where = f"{topic}[{partition}] of {step.group}"
    if holder is None:
        return f"{where}: nobody has taken it, or its row was deleted"
    if holder.epoch != step.epoch:
        return f"{where} was taken over by {holder.owner} (epoch {holder.epoch}, ours was {step.epoch})"
    return f"{where} is at {holder.offset}, not at {step.from_offset}"


POSITIONS_TABLE: Final = Table(
    name="penstock_positions",
    schema_function="penstock.client.ledgers.schema",
    statements={
        DatabaseKind.SQLITE: (
            """\
CREATE TABLE IF NOT EXISTS penstock_positions (
    group_id TEXT NOT NULL,
    topic TEXT NOT NULL,
    partition INTEGER NOT NULL,
    next_offset INTEGER,
    epoch INTEGER NOT NULL,
    owner TEXT NOT NULL,
    updated_at REAL NOT NULL,
    PRIMARY KEY (group_id, topic, partition)
) WITHOUT ROWID""",
        ),
        DatabaseKind.POSTGRESQL: (
            """\
CREATE TABLE IF NOT EXISTS penstock_positions (
    group_id text COLLATE "C" NOT NULL,
    topic text COLLATE "C" NOT NULL,
    partition integer NOT NULL,
    next_offset bigint,
    epoch bigint NOT NULL,
    owner text NOT NULL,
    updated_at timestamptz NOT NULL,
    PRIMARY KEY (group_id, topic, partition)
)""",
        ),
    },
)


def schema(dialect: str) -> tuple[str, ...]:
    """The statements that make a ledger's table in "sqlite" or "postgresql"."""
    return table_statements(POSITIONS_TABLE, dialect)


def open_ledger(url: str, *, clock: Callable[[], float] = time.time) -> Ledger:
    """Connects, and makes the table where it is missing. `clock` is for SQLite; servers have their own.

    Raises StoreUnavailable when nobody answers, StoreError for what cannot be.
    """
    location = parse_database_url(url)
    match location.kind:
        case DatabaseKind.SQLITE:
            from penstock.client.databases.sqlite import SqliteLedger

            return SqliteLedger(location, clock)
        case DatabaseKind.POSTGRESQL:
            require_driver(location, "psycopg", "postgres")
            from penstock.client.databases.postgres import PostgresLedger

            return PostgresLedger(location)
        case DatabaseKind.REDIS:
            raise StoreError(
                f"{location.shown}: a ledger shares transactions with results, which Redis cannot: "
                "use SQLite or PostgreSQL"
            )
