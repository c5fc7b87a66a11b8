"""SQLite, in a file that it shares with the user's own tables: one writer at a time, many readers.

`SqliteDatabase` manages connections and transactions. On top of it are the dedupe store (the default, for the members
of a group on one machine) and the ledger (positions beside the results of handlers on that machine).
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal
from urllib.parse import quote

from penstock.client.databases.base import (
    SEEN_TABLE,
    DatabaseKind,
    DatabaseLocation,
    StoreError,
    StoreUnavailable,
    Table,
    TransactionSpoiled,
    index_key,
    index_keys,
)
from penstock.client.ledgers import (
    POSITIONS_TABLE,
    LedgerTransaction,
    Position,
    PositionAdvance,
    PositionOwner,
    TopicPartition,
)

__all__ = ("GuardedConnection", "SqliteDatabase", "SqliteLedger", "SqliteStore")


#: Of the file or the machine, and over some time.
_TRANSIENT_ERRORS: Final = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_PROTOCOL,
    }
)
#: Those of them that a statement of a handler can meet through no fault of its own.
_MACHINE_ERRORS: Final = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_NOMEM})
_WAL_RETRY_S: Final = 0.01
_COMMIT_REFUSED: Final = (
    "this transaction is committed when the handler returns and rolled back when it raises: "
    "leave out commit() and rollback()"
)


class _TransactionGuard:
    """Refuses BEGIN, COMMIT and ROLLBACK in whatever form while the connection is lent. Savepoints are allowed."""

    def __init__(self) -> None:
        self.is_guarded = False

    def __call__(self, action: int, *parameters: Any) -> int:
        is_refused = self.is_guarded and action == sqlite3.SQLITE_TRANSACTION
        return sqlite3.SQLITE_DENY if is_refused else sqlite3.SQLITE_OK


class GuardedConnection(sqlite3.Connection):
    """A connection whose transaction is not its user's to end; `with connection:` is a savepoint in it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.guard = _TransactionGuard()
        self.set_authorizer(self.guard)

    def commit(self) -> None:
        self._refuse_if_guarded()
        super().commit()

    def rollback(self) -> None:
        self._refuse_if_guarded()
        super().rollback()

    def executescript(self, script: str, /) -> sqlite3.Cursor:
        self._refuse_if_guarded("executescript() commits first: use execute()")
        return super().executescript(script)

    def __enter__(self) -> GuardedConnection:
        if self.guard.is_guarded:
            self.execute("SAVEPOINT penstock_block")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> Literal[False]:
        if not self.guard.is_guarded:
            return super().__exit__(kind, error, trace)
        if error is not None:
            self.execute("ROLLBACK TO penstock_block")
        self.execute("RELEASE penstock_block")
        return False

    def _refuse_if_guarded(self, why: str = _COMMIT_REFUSED) -> None:
        if self.guard.is_guarded:
            raise TransactionSpoiled(why)


class SqliteDatabase:
    """Connections to one file, made as threads need them. Raises StoreUnavailable, StoreError."""

    def __init__(self, location: DatabaseLocation, table: Table) -> None:
        self._path = Path(location.address).absolute()
        self._shown = location.shown
        self._timeout_s = location.busy_timeout_s
        self._may_create = location.may_create
        self._writer = threading.Lock()
        self._idle: list[GuardedConnection] = []
        self._is_closed = False
        self._open_first(table)

    def query(self, statement: str, parameters: Sequence[Any] = ()) -> list[Any]:
        """The rows of a query, outside any transaction."""
        with self.translated_errors(), self._borrowed() as connection:
            return connection.execute(statement, parameters).fetchall()

    @contextmanager
    def transaction(self) -> Iterator[GuardedConnection]:
        """The only one that writes, from its first moment to its end."""
        with self._writing(), self._borrowed() as connection:
            with self.translated_errors():
                connection.execute("BEGIN IMMEDIATE")
            connection.guard.is_guarded = True
            try:
                yield connection
                _check_in_transaction(connection)
            except BaseException as error:
                _roll_back(connection)
                if _sqlite_error_code(error) in _MACHINE_ERRORS:
                    raise self._translate(error) from error
                raise
            self._commit(connection)

    def close(self) -> None:
        self._is_closed = True
        while self._idle:
            self._idle.pop().close()

    def _commit(self, connection: GuardedConnection) -> None:
        connection.guard.is_guarded = False
        try:
            connection.commit()
        except sqlite3.Error as error:
            _roll_back(connection)
            if isinstance(error, sqlite3.IntegrityError):
                raise  # a constraint of the user's tables that is looked at last
            raise self._translate(error) from error

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Threads wait here for each other, in order, rather than in SQLite, which sleeps and looks again.

        An event loop does not wait: the writer may be one of its own tasks, which could then never end.
        """
        if not self._writer.acquire(timeout=0 if _is_on_event_loop() else self._timeout_s):
            raise StoreUnavailable(f"{self._shown} has one writer at a time, and another one is at work")
        try:
            yield
        finally:
            self._writer.release()

    @contextmanager
    def _borrowed(self) -> Iterator[GuardedConnection]:
        if self._is_closed:
            raise StoreError(f"{self._shown} is closed")
        try:
            connection = self._idle.pop()
        except IndexError:
            with self.translated_errors():
                connection = self._connect()
        try:
            yield connection
        finally:
            if self._is_closed or not _is_usable(connection):
                connection.close()
            else:
                connection.row_factory, connection.text_factory = None, str  # the user may have set others
                self._idle.append(connection)

    def _connect(self) -> GuardedConnection:
        mode = "rwc" if self._may_create else "rw"
        connection = sqlite3.connect(
            f"file:{quote(str(self._path))}?mode={mode}",
            uri=True,
            timeout=self._timeout_s,
            isolation_level=None,
            check_same_thread=False,
            factory=GuardedConnection,
        )
        try:
            self._use_wal(connection)
            connection.execute(
                "PRAGMA synchronous=FULL"
            )  # a position may be committed on the word of this commit
        except BaseException:
            connection.close()
            raise
        return connection

    def _use_wal(self, connection: sqlite3.Connection) -> None:
        """SQLite does not wait for others when it changes the journal of a new file: so we do."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                connection.execute("PRAGMA journal_mode=WAL")
                return
            except sqlite3.OperationalError as error:
                if _sqlite_error_code(error) != sqlite3.SQLITE_BUSY or time.monotonic() >= deadline:
                    raise
                time.sleep(_WAL_RETRY_S)

    def _open_first(self, table: Table) -> None:
        if not self._path.parent.is_dir():
            raise StoreError(f"{self._shown}: there is no folder {self._path.parent}")
        if not self._may_create and not self._path.exists():
            raise StoreError(f"{self._shown}: there is no such file, and create=false")
        try:
            if self._may_create:
                self._create(table)
            elif not self.query("SELECT 1 FROM sqlite_master WHERE name = ?", [table.name]):
                remedy = f"{table.schema_function}('sqlite') has its SQL"
                raise StoreError(f"{self._shown}: there is no table {table.name}, and create=false: {remedy}")
        except StoreUnavailable as error:
            self.close()
            if _sqlite_error_code(error.__cause__) in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY):
                raise StoreError(str(error)) from error.__cause__
            raise
        except StoreError:
            self.close()
            raise

    def _create(self, table: Table) -> None:
        missing = self.query("SELECT count(*) = 0 FROM sqlite_master WHERE name = ?", [table.name])[0][0]
        if missing:
            with self.transaction() as connection, self.translated_errors():
                for statement in table.statements[DatabaseKind.SQLITE]:
                    connection.execute(statement)

    @contextmanager
    def translated_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise self._translate(error) from error

    def _translate(self, error: BaseException | None) -> StoreError:
        code = _sqlite_error_code(error)
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return StoreUnavailable(f"{self._shown} was locked by another writer for {self._timeout_s:g} s")
        kind = StoreUnavailable if code in _TRANSIENT_ERRORS else StoreError
        return kind(f"{self._shown}: {error}")


def _sqlite_error_code(error: BaseException | None) -> int | None:
    """The primary code of an error of SQLite."""
    code = getattr(error, "sqlite_errorcode", None)
    return None if code is None else int(code) & 0xFF


def _is_on_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _check_in_transaction(connection: GuardedConnection) -> None:
    """Raises TransactionSpoiled. An error such as a conflict with OR ROLLBACK ends a transaction without a word."""
    try:
        is_open = connection.in_transaction
    except sqlite3.ProgrammingError:
        is_open = False
    if not is_open:
        raise TransactionSpoiled(
            "the code in the transaction has ended it: its results are not kept together"
        )


def _roll_back(connection: GuardedConnection) -> None:
    """A connection on which this fails is not used again."""
    connection.guard.is_guarded = False
    try:
        if connection.in_transaction:
            connection.rollback()
    except sqlite3.Error:
        connection.close()


def _is_usable(connection: GuardedConnection) -> bool:
    try:
        return not connection.in_transaction
    except sqlite3.ProgrammingError:
        return False


_EXPIRED_ROWS_MAX: Final = 1000
_SELECT_SEEN: Final = """\
SELECT id FROM penstock_seen WHERE scope = ? AND expires_at > ? AND id IN (SELECT value FROM json_each(?))"""
_INSERT_SEEN: Final = """\
INSERT INTO penstock_seen (scope, id, expires_at) VALUES (?, ?, ?)
ON CONFLICT (scope, id) DO UPDATE SET expires_at = excluded.expires_at"""
_CLAIM_SEEN: Final = f"{_INSERT_SEEN} WHERE penstock_seen.expires_at <= ?"
_DELETE_EXPIRED: Final = f"""\
DELETE FROM penstock_seen WHERE (scope, id) IN
(SELECT scope, id FROM penstock_seen WHERE expires_at <= ? LIMIT {_EXPIRED_ROWS_MAX})"""


class SqliteTransaction:
    def __init__(self, connection: GuardedConnection, store: SqliteStore) -> None:
        self.connection = connection
        self._store = store

    def claim(self, scope: str, id: str, ttl_s: float) -> bool:
        now = self._store.clock()
        with self._store.database.translated_errors():
            cursor = self.connection.execute(_CLAIM_SEEN, (index_key(scope), index_key(id), now + ttl_s, now))
        return cursor.rowcount == 1

    def claim_all(self, scope: str, ids: Sequence[str], ttl_s: float) -> set[str]:
        return {id for id in dict.fromkeys(ids) if self.claim(scope, id, ttl_s)}


class SqliteStore:
    """Time is this machine's: a file has no clock of its own."""

    shares_transactions = True

    def __init__(self, location: DatabaseLocation, clock: Callable[[], float] = time.time) -> None:
        self.database = SqliteDatabase(location, SEEN_TABLE)
        self.clock = clock

    def seen(self, scope: str, ids: Sequence[str]) -> set[str]:
        names = index_keys(ids)
        rows = self.database.query(_SELECT_SEEN, (index_key(scope), self.clock(), json.dumps(list(names))))
        return {names[name] for (name,) in rows}

    def mark(self, scope: str, ids: Sequence[str], ttl_s: float) -> None:
        kept, expires_at = index_key(scope), self.clock() + ttl_s
        rows = [(kept, name, expires_at) for name in index_keys(ids)]
        if rows:
            with self.database.transaction() as connection, self.database.translated_errors():
                connection.executemany(_INSERT_SEEN, rows)

    def claim(self, scope: str, id: str, ttl_s: float) -> bool:
        with self.transaction() as transaction:
            return transaction.claim(scope, id, ttl_s)

    @contextmanager
    def transaction(self) -> Iterator[SqliteTransaction]:
        with self.database.transaction() as connection:
            yield SqliteTransaction(connection, self)

    def joined(self, connection: GuardedConnection) -> SqliteTransaction:
        return SqliteTransaction(connection, self)

    def expire(self, now: float | None = None) -> int:
        """In small steps, so that nobody waits long for the file."""
        moment = self.clock() if now is None else now
        total = 0
        while True:
            with self.database.transaction() as connection, self.database.translated_errors():
                count = connection.execute(_DELETE_EXPIRED, (moment,)).rowcount
            total += count
            if count < _EXPIRED_ROWS_MAX:
                return total

    def close(self) -> None:
        self.database.close()


_WHERE_PARTITION: Final = "WHERE group_id = ? AND topic = ? AND partition = ?"
_SELECT_POSITIONS: Final = "SELECT topic, partition, next_offset FROM penstock_positions WHERE group_id = ?"
_TAKE_POSITION: Final = """\
INSERT INTO penstock_positions (group_id, topic, partition, next_offset, epoch, owner, updated_at)
VALUES (?, ?, ?, NULL, 1, ?, ?)
ON CONFLICT (group_id, topic, partition) DO UPDATE
SET epoch = penstock_positions.epoch + 1, owner = excluded.owner, updated_at = excluded.updated_at"""
_SELECT_OWNER: Final = f"SELECT next_offset, epoch, owner FROM penstock_positions {_WHERE_PARTITION}"
_ADVANCE_POSITION: Final = f"""\
UPDATE penstock_positions SET next_offset = ?, updated_at = ? {_WHERE_PARTITION} AND epoch = ? AND next_offset IS ?"""


class SqliteLedger:
    def __init__(self, location: DatabaseLocation, clock: Callable[[], float] = time.time) -> None:
        self._database = SqliteDatabase(location, POSITIONS_TABLE)
        self._location = location
        self._marks: SqliteStore | None = None
        self._clock = clock

    def positions(
        self, group: str, topic_partitions: Sequence[TopicPartition]
    ) -> dict[TopicPartition, int | None]:
        rows = self._database.query(_SELECT_POSITIONS, (index_key(group),))
        known = {(topic, partition): offset for topic, partition, offset in rows}
        return {topic_partition: known.get(topic_partition) for topic_partition in topic_partitions}

    def take(
        self, group: str, topic_partitions: Sequence[TopicPartition], owner: str
    ) -> dict[TopicPartition, Position]:
        taken: dict[TopicPartition, Position] = {}
        name, now = index_key(group), self._clock()
        with self._database.transaction() as connection, self._database.translated_errors():
            for topic_partition in sorted(set(topic_partitions)):
                connection.execute(_TAKE_POSITION, (name, *topic_partition, owner, now))
                offset, epoch, _ = connection.execute(_SELECT_OWNER, (name, *topic_partition)).fetchone()
                taken[topic_partition] = Position(offset, epoch)
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

    def move(self, connection: sqlite3.Connection, step: PositionAdvance) -> bool:
        changed = (step.to_offset, self._clock())
        parameters = (*changed, index_key(step.group), *step.topic_partition, step.epoch, step.from_offset)
        with self._database.translated_errors():
            return connection.execute(_ADVANCE_POSITION, parameters).rowcount == 1

    def holder(self, connection: sqlite3.Connection, step: PositionAdvance) -> PositionOwner | None:
        with self._database.translated_errors():
            cursor = connection.cursor()
            cursor.row_factory = None  # the user may have set another
            row = cursor.execute(_SELECT_OWNER, (index_key(step.group), *step.topic_partition)).fetchone()
        return PositionOwner(*row) if row else None
