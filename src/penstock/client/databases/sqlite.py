"""A SQLite file that stores and ledgers share with the user's own tables: one writer at a time, many readers."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal
from urllib.parse import quote

from penstock.client.stores.base import StoreError, StoreUnavailable, TransactionSpoiled
from penstock.client.stores.locating import Kind, Location
from penstock.client.stores.tables import Table

__all__ = ["LentConnection", "SqliteDatabase"]

#: Of the file or the machine, and over some time.
_PASSING: Final = frozenset(
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
_OF_THE_MACHINE: Final = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_NOMEM})
_WAL_REST_S: Final = 0.01
_NOT_YOURS: Final = (
    "this transaction is committed when the handler returns and rolled back when it raises: "
    "leave out commit() and rollback()"
)


class _Guard:
    """Refuses BEGIN, COMMIT and ROLLBACK in whatever form while the connection is lent. Savepoints are allowed."""

    def __init__(self) -> None:
        self.is_lent = False

    def __call__(self, action: int, *told: Any) -> int:
        is_refused = self.is_lent and action == sqlite3.SQLITE_TRANSACTION
        return sqlite3.SQLITE_DENY if is_refused else sqlite3.SQLITE_OK


class LentConnection(sqlite3.Connection):
    """A connection whose transaction is not its user's to end; `with connection:` is a savepoint in it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.guard = _Guard()
        self.set_authorizer(self.guard)

    def commit(self) -> None:
        self._refuse_if_lent()
        super().commit()

    def rollback(self) -> None:
        self._refuse_if_lent()
        super().rollback()

    def executescript(self, script: str, /) -> sqlite3.Cursor:
        self._refuse_if_lent("executescript() commits first: use execute()")
        return super().executescript(script)

    def __enter__(self) -> LentConnection:
        if self.guard.is_lent:
            self.execute("SAVEPOINT penstock_block")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> Literal[False]:
        if not self.guard.is_lent:
            return super().__exit__(kind, error, trace)
        if error is not None:
            self.execute("ROLLBACK TO penstock_block")
        self.execute("RELEASE penstock_block")
        return False

    def _refuse_if_lent(self, why: str = _NOT_YOURS) -> None:
        if self.guard.is_lent:
            raise TransactionSpoiled(why)


class SqliteDatabase:
    """Connections to one file, made as threads need them. Raises StoreUnavailable, StoreError."""

    def __init__(self, location: Location, table: Table) -> None:
        self._path = Path(location.address).absolute()
        self._shown = location.shown
        self._timeout_s = location.busy_timeout_s
        self._may_create = location.may_create
        self._writer = threading.Lock()
        self._idle: list[LentConnection] = []
        self._is_closed = False
        self._open_first(table)

    def ask(self, statement: str, parameters: Sequence[Any] = ()) -> list[Any]:
        """The rows of a query, outside any transaction."""
        with self.errors_told(), self._borrowed() as connection:
            return connection.execute(statement, parameters).fetchall()

    @contextmanager
    def transaction(self) -> Iterator[LentConnection]:
        """The only one that writes, from its first moment to its end."""
        with self._writing(), self._borrowed() as connection:
            with self.errors_told():
                connection.execute("BEGIN IMMEDIATE")
            connection.guard.is_lent = True
            try:
                yield connection
                _check_open(connection)
            except BaseException as error:
                _roll_back(connection)
                if code_of(error) in _OF_THE_MACHINE:
                    raise self._told(error) from error
                raise
            self._commit(connection)

    def close(self) -> None:
        self._is_closed = True
        while self._idle:
            self._idle.pop().close()

    def _commit(self, connection: LentConnection) -> None:
        connection.guard.is_lent = False
        try:
            connection.commit()
        except sqlite3.Error as error:
            _roll_back(connection)
            if isinstance(error, sqlite3.IntegrityError):
                raise  # a constraint of the user's tables that is looked at last
            raise self._told(error) from error

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Threads wait here for each other, in order, rather than in SQLite, which sleeps and looks again.

        An event loop does not wait: the writer may be one of its own tasks, which could then never end.
        """
        if not self._writer.acquire(timeout=0 if _is_on_loop() else self._timeout_s):
            raise StoreUnavailable(f"{self._shown} has one writer at a time, and another one is at work")
        try:
            yield
        finally:
            self._writer.release()

    @contextmanager
    def _borrowed(self) -> Iterator[LentConnection]:
        if self._is_closed:
            raise StoreError(f"{self._shown} is closed")
        try:
            connection = self._idle.pop()
        except IndexError:
            with self.errors_told():
                connection = self._connect()
        try:
            yield connection
        finally:
            if self._is_closed or not _is_usable(connection):
                connection.close()
            else:
                connection.row_factory, connection.text_factory = None, str  # the user may have set others
                self._idle.append(connection)

    def _connect(self) -> LentConnection:
        mode = "rwc" if self._may_create else "rw"
        connection = sqlite3.connect(
            f"file:{quote(str(self._path))}?mode={mode}",
            uri=True,
            timeout=self._timeout_s,
            isolation_level=None,
            check_same_thread=False,
            factory=LentConnection,
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
                if code_of(error) != sqlite3.SQLITE_BUSY or time.monotonic() >= deadline:
                    raise
                time.sleep(_WAL_REST_S)

    def _open_first(self, table: Table) -> None:
        if not self._path.parent.is_dir():
            raise StoreError(f"{self._shown}: there is no folder {self._path.parent}")
        if not self._may_create and not self._path.exists():
            raise StoreError(f"{self._shown}: there is no such file, and create=false")
        try:
            if self._may_create:
                self._create(table)
            elif not self.ask("SELECT 1 FROM sqlite_master WHERE name = ?", [table.name]):
                remedy = f"{table.told_by}('sqlite') has its SQL"
                raise StoreError(f"{self._shown}: there is no table {table.name}, and create=false: {remedy}")
        except StoreUnavailable as error:
            self.close()
            if code_of(error.__cause__) in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY):
                raise StoreError(str(error)) from error.__cause__
            raise
        except StoreError:
            self.close()
            raise

    def _create(self, table: Table) -> None:
        missing = self.ask("SELECT count(*) = 0 FROM sqlite_master WHERE name = ?", [table.name])[0][0]
        if missing:
            with self.transaction() as connection, self.errors_told():
                for statement in table.statements[Kind.SQLITE]:
                    connection.execute(statement)

    @contextmanager
    def errors_told(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise self._told(error) from error

    def _told(self, error: BaseException | None) -> StoreError:
        code = code_of(error)
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return StoreUnavailable(f"{self._shown} was locked by another writer for {self._timeout_s:g} s")
        kind = StoreUnavailable if code in _PASSING else StoreError
        return kind(f"{self._shown}: {error}")


def code_of(error: BaseException | None) -> int | None:
    """The primary code of an error of SQLite."""
    code = getattr(error, "sqlite_errorcode", None)
    return None if code is None else int(code) & 0xFF


def _is_on_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _check_open(connection: LentConnection) -> None:
    """Raises TransactionSpoiled. An error such as a conflict with OR ROLLBACK ends a transaction without a word."""
    try:
        is_open = connection.in_transaction
    except sqlite3.ProgrammingError:
        is_open = False
    if not is_open:
        raise TransactionSpoiled(
            "the code in the transaction has ended it: its results are not kept together"
        )


def _roll_back(connection: LentConnection) -> None:
    """A connection on which this fails is not used again."""
    connection.guard.is_lent = False
    try:
        if connection.in_transaction:
            connection.rollback()
    except sqlite3.Error:
        connection.close()


def _is_usable(connection: LentConnection) -> bool:
    try:
        return not connection.in_transaction
    except sqlite3.ProgrammingError:
        return False
