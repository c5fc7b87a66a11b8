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

from penstock.client.databases import base
from penstock.client.databases.sql import EXPIRED_ROWS_MAX, SqlLedger, SqlStore
from penstock.client.ledgers import POSITIONS_TABLE, Position, PositionAdvance, TopicPartition

__all__ = ("GuardedConnection", "SqliteDatabase", "SqliteLedger", "SqliteStore")


#: Errors of the file or the machine that may go away.
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
#: Those of them that a handler's statement may get without a mistake of the handler.
_MACHINE_ERRORS: Final = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_NOMEM})
_WAL_RETRY_S: Final = 0.01
_COMMIT_REFUSED: Final = (
    "Penstock commits this transaction when the handler returns and rolls it back when the handler raises: "
    "remove commit() and rollback()"
)


class _TransactionGuard:
    """Refuses BEGIN, COMMIT and ROLLBACK while a handler has the connection. Savepoints are allowed."""

    def __init__(self) -> None:
        self.is_guarded = False

    def __call__(self, action: int, *parameters: Any) -> int:
        is_refused = self.is_guarded and action == sqlite3.SQLITE_TRANSACTION
        return sqlite3.SQLITE_DENY if is_refused else sqlite3.SQLITE_OK


class GuardedConnection(sqlite3.Connection):
    """A connection whose transaction the handler cannot end; `with connection:` is a savepoint in it."""

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
            raise base.TransactionSpoiled(why)


class SqliteDatabase:
    """A pool of connections to one file. Raises StoreUnavailable, StoreError."""

    def __init__(self, location: base.DatabaseLocation, table: base.Table) -> None:
        self._path = Path(location.address).absolute()
        self._shown = location.shown
        self._timeout_s = location.busy_timeout_s
        self._may_create = location.may_create
        self._writer = threading.Lock()
        self._idle: list[GuardedConnection] = []
        self._is_closed = False
        self._open_first(table)

    def query(self, statement: str, parameters: Sequence[Any] = ()) -> list[Any]:
        """Returns the rows of a query, outside any transaction."""
        with self.translated_errors(), self._borrowed() as connection:
            return connection.execute(statement, parameters).fetchall()

    @contextmanager
    def transaction(self) -> Iterator[GuardedConnection]:
        """Starts a write transaction. It is the only writer of the file until it ends."""
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
                raise  # a deferred constraint of the user's tables
            raise self._translate(error) from error

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Makes threads wait for each other in order here, because SQLite itself would poll.

        An event loop does not wait: the current writer may be one of its own tasks, which could then never end.
        """
        if not self._writer.acquire(timeout=0 if _is_on_event_loop() else self._timeout_s):
            raise base.StoreUnavailable(
                f"{self._shown} allows one writer at a time, and another one is active"
            )
        try:
            yield
        finally:
            self._writer.release()

    @contextmanager
    def _borrowed(self) -> Iterator[GuardedConnection]:
        if self._is_closed:
            raise base.StoreError(f"{self._shown} is closed")
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
                connection.row_factory, connection.text_factory = None, str  # the handler may have set others
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
            # After a commit here, the group's offset may be committed too: the data must survive a loss of power.
            connection.execute("PRAGMA synchronous=FULL")
        except BaseException:
            connection.close()
            raise
        return connection

    def _use_wal(self, connection: sqlite3.Connection) -> None:
        """Switches to WAL mode. Retries, because SQLite does not wait for other connections when it switches."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                connection.execute("PRAGMA journal_mode=WAL")
                return
            except sqlite3.OperationalError as error:
                if _sqlite_error_code(error) != sqlite3.SQLITE_BUSY or time.monotonic() >= deadline:
                    raise
                time.sleep(_WAL_RETRY_S)

    def _open_first(self, table: base.Table) -> None:
        if not self._path.parent.is_dir():
            raise base.StoreError(f"{self._shown}: directory {self._path.parent} does not exist")
        if not self._may_create and not self._path.exists():
            raise base.StoreError(f"{self._shown}: no such file, and create=false")
        try:
            if not self.query("SELECT 1 FROM sqlite_master WHERE name = ?", [table.name]):
                self._create_table(table)
        except base.StoreUnavailable as error:
            self.close()
            if _sqlite_error_code(error.__cause__) in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY):
                raise base.StoreError(str(error)) from error.__cause__
            raise
        except base.StoreError:
            self.close()
            raise

    def _create_table(self, table: base.Table) -> None:
        if not self._may_create:
            remedy = f"{table.schema_function}('sqlite') returns its SQL"
            raise base.StoreError(f"{self._shown}: table {table.name} is missing, and create=false: {remedy}")
        with self.transaction() as connection, self.translated_errors():
            for statement in table.statements[base.DatabaseKind.SQLITE]:
                connection.execute(statement)

    @contextmanager
    def translated_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise self._translate(error) from error

    def _translate(self, error: BaseException | None) -> base.StoreError:
        code = _sqlite_error_code(error)
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return base.StoreUnavailable(
                f"{self._shown} was locked by another writer for {self._timeout_s:g} s"
            )
        kind = base.StoreUnavailable if code in _TRANSIENT_ERRORS else base.StoreError
        return kind(f"{self._shown}: {error}")


def _sqlite_error_code(error: BaseException | None) -> int | None:
    """Returns the primary result code of an SQLite error."""
    code = getattr(error, "sqlite_errorcode", None)
    return None if code is None else int(code) & 0xFF


def _is_on_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _check_in_transaction(connection: GuardedConnection) -> None:
    """Raises TransactionSpoiled. A conflict with OR ROLLBACK, for example, ends a transaction."""
    try:
        is_open = connection.in_transaction
    except sqlite3.ProgrammingError:
        is_open = False
    if not is_open:
        raise base.TransactionSpoiled(
            "the code in the transaction has ended it, so it cannot be committed as a whole"
        )


def _roll_back(connection: GuardedConnection) -> None:
    """Rolls back. Closes the connection if that fails, so that it is not used again."""
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


_SELECT_SEEN: Final = """\
SELECT id FROM penstock_seen WHERE scope = ? AND expires_at > ? AND id IN (SELECT value FROM json_each(?))"""
_INSERT_SEEN: Final = """\
INSERT INTO penstock_seen (scope, id, expires_at) VALUES (?, ?, ?)
ON CONFLICT (scope, id) DO UPDATE SET expires_at = excluded.expires_at"""
_CLAIM_SEEN: Final = f"{_INSERT_SEEN} WHERE penstock_seen.expires_at <= ?"
_DELETE_EXPIRED: Final = f"""\
DELETE FROM penstock_seen WHERE (scope, id) IN
(SELECT scope, id FROM penstock_seen WHERE expires_at <= ? LIMIT {EXPIRED_ROWS_MAX})"""


class SqliteTransaction:
    def __init__(self, connection: GuardedConnection, store: SqliteStore) -> None:
        self.connection = connection
        self._store = store

    def claim(self, scope: str, id: str, ttl_s: float) -> bool:
        now = self._store.clock()
        with self._store.database.translated_errors():
            cursor = self.connection.execute(
                _CLAIM_SEEN, (base.index_key(scope), base.index_key(id), now + ttl_s, now)
            )
        return cursor.rowcount == 1

    def claim_all(self, scope: str, ids: Sequence[str], ttl_s: float) -> set[str]:
        return {id for id in dict.fromkeys(ids) if self.claim(scope, id, ttl_s)}


class SqliteStore(SqlStore):
    """Ids expire by this machine's clock."""

    database: SqliteDatabase

    def __init__(self, location: base.DatabaseLocation, clock: Callable[[], float] = time.time) -> None:
        super().__init__(SqliteDatabase(location, base.SEEN_TABLE))
        self.clock = clock

    def seen(self, scope: str, ids: Sequence[str]) -> set[str]:
        names = base.index_keys(ids)
        rows = self.database.query(
            _SELECT_SEEN, (base.index_key(scope), self.clock(), json.dumps(list(names)))
        )
        return {names[name] for (name,) in rows}

    def mark(self, scope: str, ids: Sequence[str], ttl_s: float) -> None:
        stored_scope, expires_at = base.index_key(scope), self.clock() + ttl_s
        rows = [(stored_scope, name, expires_at) for name in base.index_keys(ids)]
        if rows:
            with self.database.transaction() as connection, self.database.translated_errors():
                connection.executemany(_INSERT_SEEN, rows)

    def joined(self, connection: GuardedConnection) -> SqliteTransaction:
        return SqliteTransaction(connection, self)

    def _delete_expired(self, now: float | None) -> int:
        expired_at = self.clock() if now is None else now
        with self.database.transaction() as connection, self.database.translated_errors():
            return connection.execute(_DELETE_EXPIRED, (expired_at,)).rowcount


_TAKE_POSITION: Final = """\
INSERT INTO penstock_positions (group_id, topic, partition, next_offset, epoch, owner, updated_at)
VALUES (?, ?, ?, NULL, 1, ?, ?)
ON CONFLICT (group_id, topic, partition) DO UPDATE
SET epoch = penstock_positions.epoch + 1, owner = excluded.owner, updated_at = excluded.updated_at
RETURNING next_offset, epoch"""
_ADVANCE_POSITION: Final = """\
UPDATE penstock_positions SET next_offset = ?, updated_at = ?
WHERE group_id = ? AND topic = ? AND partition = ? AND epoch = ? AND next_offset IS ?"""


class SqliteLedger(SqlLedger):
    placeholder = "?"

    def __init__(self, location: base.DatabaseLocation, clock: Callable[[], float] = time.time) -> None:
        super().__init__(SqliteDatabase(location, POSITIONS_TABLE), location, SqliteStore)
        self._clock = clock

    def take(
        self, group: str, topic_partitions: Sequence[TopicPartition], owner: str
    ) -> dict[TopicPartition, Position]:
        taken: dict[TopicPartition, Position] = {}
        name, now = base.index_key(group), self._clock()
        with self._database.transaction() as connection, self._database.translated_errors():
            for topic_partition in sorted(set(topic_partitions)):
                row = connection.execute(_TAKE_POSITION, (name, *topic_partition, owner, now)).fetchone()
                taken[topic_partition] = Position(*row)
        return taken

    def advance(self, connection: sqlite3.Connection, step: PositionAdvance) -> bool:
        partition = (base.index_key(step.group), *step.topic_partition)
        parameters = (step.to_offset, self._clock(), *partition, step.epoch, step.from_offset)
        with self._database.translated_errors():
            return connection.execute(_ADVANCE_POSITION, parameters).rowcount == 1

    def _tuple_cursor(self, connection: sqlite3.Connection) -> sqlite3.Cursor:
        cursor = connection.cursor()
        cursor.row_factory = None
        return cursor
