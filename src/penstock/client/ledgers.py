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
    """Another member owns the partition now, or its position has changed: the transaction is rolled back."""


class Position(NamedTuple):
    #: The next offset to handle; None if nothing was handled yet.
    offset: int | None
    #: The epoch of the new owner.
    epoch: int


class PositionOwner(NamedTuple):
    """The current owner of a partition, for the error message of a fenced member."""

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
        """Returns the next offset of each partition; None if nothing was handled yet."""

    def take(
        self, group: str, topic_partitions: Sequence[TopicPartition], owner: str
    ) -> dict[TopicPartition, Position]:
        """Makes `owner` the owner of newly assigned partitions, and fences all earlier owners.

        If an earlier owner has an open transaction that has advanced a position, this waits for its end and returns the
        position that it leaves.
        """

    def transaction(self) -> AbstractContextManager[LedgerTransaction]:
        """Commits when the block ends; rolls back when it raises.

        Raises StoreUnavailable if the connection is lost. It is then unknown whether the transaction was committed;
        `positions` shows it. Raises TransactionSpoiled, and rolls back, if a commit would not keep all of the block's
        changes.
        """

    def marks(self) -> DedupeStore:
        """Returns a dedupe store in the same database, for claims in the ledger's transactions.

        `close` closes it too.
        """

    def close(self) -> None:
        """Closes all connections."""


class PositionsTable(Protocol):
    """Statements on the table of positions inside a transaction, in one dialect of SQL."""

    def advance(self, connection: Any, step: PositionAdvance) -> bool:
        """Moves the position if position and epoch are as the step says. Returns whether they were."""

    def owner(self, connection: Any, step: PositionAdvance) -> PositionOwner | None: ...


class LedgerTransaction:
    """A transaction that is open until its block ends. It commits changes through `connection` and positions together.

    `advance` locks the row of the partition until the block ends, so call it last.
    """

    def __init__(self, connection: Any, positions: PositionsTable) -> None:
        #: A connection of `sqlite3` or `psycopg`. The user must not end its transaction.
        self.connection = connection
        #: Set if a position could not be advanced. The transaction is then rolled back, even if the block has caught
        #: the exception.
        self.fenced: LedgerFenced | None = None
        self._positions = positions

    def advance(
        self, group: str, topic_partition: TopicPartition, from_offset: int | None, to_offset: int, epoch: int
    ) -> None:
        """Moves the position by compare-and-set. Raises LedgerFenced if owner or position have changed."""
        assert to_offset > (-1 if from_offset is None else from_offset), (
            f"{topic_partition}: {from_offset} to {to_offset}"
        )
        step = PositionAdvance(group, topic_partition, from_offset, to_offset, epoch)
        if not self._positions.advance(self.connection, step):
            self.fenced = LedgerFenced(_fenced_reason(step, self._positions.owner(self.connection, step)))
            raise self.fenced


def _fenced_reason(step: PositionAdvance, owner: PositionOwner | None) -> str:
    topic, partition = step.topic_partition
    where = f"{topic}[{partition}] of {step.group}"
    if owner is None:
        return f"{where} has no owner in the ledger, or its row was deleted"
    if owner.epoch != step.epoch:
        return f"{where} was taken over by {owner.owner} (epoch {owner.epoch}, ours was {step.epoch})"
    return f"{where} is at {owner.offset}, not at {step.from_offset}"


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
    """Returns the statements that create a ledger's table in "sqlite" or "postgresql"."""
    return table_statements(POSITIONS_TABLE, dialect)


def open_ledger(url: str, *, clock: Callable[[], float] = time.time) -> Ledger:
    """Connects, and creates the table if it is missing. `clock` is for SQLite; servers have their own clock.

    Raises StoreUnavailable if the server does not answer, StoreError if the URL or the database cannot be used.
    """
    # The adapters import this module, and their drivers are optional.
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
                f"{location.shown}: a ledger commits positions and results in one transaction, "
                "which Redis cannot do: use SQLite or PostgreSQL"
            )
