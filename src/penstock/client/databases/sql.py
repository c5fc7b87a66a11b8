"""The dedupe store and the ledger in SQL: what SQLite and PostgreSQL have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, Protocol

from penstock.client.databases.base import DatabaseLocation, Transaction, index_key
from penstock.client.ledgers import LedgerTransaction, PositionAdvance, PositionOwner, TopicPartition

__all__ = ("EXPIRED_ROWS_MAX", "SqlDatabase", "SqlLedger", "SqlStore")

#: How many expired rows one statement deletes, so that it blocks other writers only for a short time.
EXPIRED_ROWS_MAX: Final = 1000


class SqlDatabase(Protocol):
    """A pool of connections to one database. Every method raises StoreUnavailable, StoreError."""

    def query(self, statement: str, parameters: Sequence[Any] = ()) -> list[Any]:
        """Runs one statement that may be repeated, and returns its rows."""

    def transaction(self) -> AbstractContextManager[Any]:
        """Yields a connection in a transaction: committed when the block ends, rolled back when it raises."""

    def translated_errors(self) -> AbstractContextManager[None]:
        """Turns errors of the driver into StoreUnavailable and StoreError, for statements of this package."""

    def close(self) -> None: ...


class SqlStore(ABC):
    """A `DedupeStore` in the table penstock_seen."""

    shares_transactions = True

    def __init__(self, database: SqlDatabase) -> None:
        self.database = database

    @abstractmethod
    def seen(self, scope: str, ids: Sequence[str]) -> set[str]: ...

    @abstractmethod
    def mark(self, scope: str, ids: Sequence[str], ttl_s: float) -> None: ...

    @abstractmethod
    def joined(self, connection: Any) -> Transaction: ...

    @abstractmethod
    def _delete_expired(self, now: float | None) -> int:
        """Deletes up to EXPIRED_ROWS_MAX rows, and returns their number."""

    def claim(self, scope: str, id: str, ttl_s: float) -> bool:
        with self.transaction() as transaction:
            return transaction.claim(scope, id, ttl_s)

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        with self.database.transaction() as connection:
            yield self.joined(connection)

    def expire(self, now: float | None = None) -> int:
        total = 0
        while True:
            count = self._delete_expired(now)
            total += count
            if count < EXPIRED_ROWS_MAX:
                return total

    def close(self) -> None:
        self.database.close()


class SqlLedger(ABC):
    """A `Ledger` in the table penstock_positions."""

    #: How the driver writes a parameter.
    placeholder: str

    def __init__(
        self,
        database: SqlDatabase,
        location: DatabaseLocation,
        open_marks: Callable[[DatabaseLocation], SqlStore],
    ) -> None:
        self._database = database
        self._location = location
        self._open_marks = open_marks
        self._marks: SqlStore | None = None

    def positions(
        self, group: str, topic_partitions: Sequence[TopicPartition]
    ) -> dict[TopicPartition, int | None]:
        statement = f"SELECT topic, partition, next_offset FROM penstock_positions WHERE group_id = {self.placeholder}"
        rows = self._database.query(statement, (index_key(group),))
        known = {(topic, partition): offset for topic, partition, offset in rows}
        return {topic_partition: known.get(topic_partition) for topic_partition in topic_partitions}

    @contextmanager
    def transaction(self) -> Iterator[LedgerTransaction]:
        with self._database.transaction() as connection:
            transaction = LedgerTransaction(connection, self)
            yield transaction
            if transaction.fenced:
                raise transaction.fenced

    def marks(self) -> SqlStore:
        self._marks = self._marks or self._open_marks(self._location)
        return self._marks

    def close(self) -> None:
        if self._marks is not None:
            self._marks.close()
        self._database.close()

    @abstractmethod
    def advance(self, connection: Any, step: PositionAdvance) -> bool: ...

    @abstractmethod
    def _tuple_cursor(self, connection: Any) -> Any:
        """Returns a cursor whose rows are tuples. The handler may have set another row factory on its connection."""

    def owner(self, connection: Any, step: PositionAdvance) -> PositionOwner | None:
        mark = self.placeholder
        statement = (
            "SELECT next_offset, epoch, owner FROM penstock_positions "
            f"WHERE group_id = {mark} AND topic = {mark} AND partition = {mark}"
        )
        with self._database.translated_errors():
            cursor = self._tuple_cursor(connection)
            row = cursor.execute(statement, (index_key(step.group), *step.topic_partition)).fetchone()
        return PositionOwner(*row) if row else None
