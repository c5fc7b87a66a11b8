"""A PostgreSQL database that stores and ledgers share with the user's own tables, through psycopg."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final, TypeVar

import psycopg
from psycopg import Connection
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from penstock.client.stores.base import StoreError, StoreUnavailable, TransactionSpoiled
from penstock.client.stores.locating import Kind, Location
from penstock.client.stores.tables import Table

__all__ = ["PostgresDatabase"]

T = TypeVar("T")

#: URLs may say otherwise. A server that has vanished is noticed within about half a minute.
_DEFAULTS: Final = {
    "application_name": "penstock",
    "connect_timeout": 10,
    "keepalives_idle": 30,
    "tcp_user_timeout": 30_000,
}
#: By the first letters of SQLSTATE: connection, conflict of transactions, resources, shutdown, lock, read-only standby.
_PASSING: Final = ("08", "40", "53", "57P", "55P03", "25006")
#: For all who create tables of ours at the same time, in whatever program.
_CREATING_LOCK: Final = 0x70656E73746F636B
_IDLE_MAX: Final = 32


class PostgresDatabase:
    """Connections to one database, made as threads need them. Raises StoreUnavailable, StoreError."""

    def __init__(self, location: Location, table: Table) -> None:
        self._shown = location.shown
        self._options = _options(location)
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._is_closed = False
        try:
            self._ensure(table, location.may_create)
        except StoreError:
            self.close()
            raise

    def ask(self, statement: str, parameters: Sequence[Any] = ()) -> list[Any]:
        """The rows of one statement that may be repeated, in a transaction of its own."""

        def run(connection: Connection) -> list[Any]:
            # Never prepared: a plan made while our table was empty would read all of it when it no longer is.
            cursor = connection.execute(statement, parameters, prepare=False)
            return cursor.fetchall() if cursor.description else []

        with self.errors_told(), self._borrowed(run) as (_, rows):
            return rows

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """Rolled back if the block raises. psycopg refuses `commit()` and `rollback()` inside it."""
        stack = ExitStack()

        def begin(connection: Connection) -> None:
            stack.enter_context(connection.transaction())

        with ExitStack() as lease:
            with self.errors_told():
                connection, _ = lease.enter_context(self._borrowed(begin))
            is_finished = False
            try:
                with stack:
                    yield connection
                    _check_open(connection)
                    is_finished = True
            except Exception as error:
                verdict = self._verdict(connection, error, is_finished)
                if verdict is error:
                    raise
                raise verdict from error
            if not is_finished:  # psycopg.Rollback ends a block in silence
                raise TransactionSpoiled("the code in the transaction has rolled it back")

    def close(self) -> None:
        self._is_closed = True
        self._close_idle()

    @contextmanager
    def errors_told(self) -> Iterator[None]:
        """For statements of ours."""
        try:
            yield
        except psycopg.Error as error:
            raise self._told(error) from error

    @contextmanager
    def _borrowed(self, first: Callable[[Connection], T]) -> Iterator[tuple[Connection, T]]:
        """A connection and what `first` did with it; a connection that was lost while it lay idle is replaced."""
        connection, is_old = self._take()
        try:
            try:
                result = first(connection)
            except psycopg.Error:
                if not (is_old and connection.broken):
                    raise
                self._close_idle()
                connection = self._connect()
                result = first(connection)
            yield connection, result
        finally:
            self._give_back(connection)

    def _take(self) -> tuple[Connection, bool]:
        if self._is_closed:
            raise StoreError(f"{self._shown} is closed")
        with self._lock:
            if self._idle:
                return self._idle.pop(), True
        return self._connect(), False

    def _give_back(self, connection: Connection) -> None:
        connection.row_factory = tuple_row
        is_clean = connection.info.transaction_status is TransactionStatus.IDLE and connection.autocommit
        with self._lock:
            if is_clean and not self._is_closed and len(self._idle) < _IDLE_MAX:
                self._idle.append(connection)
                return
        connection.close()

    def _close_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _connect(self) -> Connection:
        try:
            return psycopg.connect(**self._options, autocommit=True)
        except psycopg.Error as error:
            raise StoreUnavailable(f"{self._shown} cannot be reached: {_line(error)}") from error

    def _ensure(self, table: Table, may_create: bool) -> None:
        """Who may not create tables can still use one that is there."""
        ((encoding, is_there),) = self.ask(
            "SELECT current_setting('server_encoding'), to_regclass(%s) IS NOT NULL", [table.name]
        )
        if encoding != "UTF8":
            raise StoreError(f"{self._shown} has the encoding {encoding}: ids may be any text, and need UTF8")
        if is_there:
            return
        remedy = f"{table.told_by}('postgresql') has the SQL for a table {table.name}"
        if not may_create:
            raise StoreError(f"{self._shown}: there is no table {table.name}, and create=false: {remedy}")
        try:
            self._create(table)
        except psycopg.errors.InsufficientPrivilege as error:
            raise StoreError(f"{self._shown}: {_line(error)}. Let its owner create it: {remedy}") from error
        except psycopg.Error as error:
            raise self._told(error) from error

    def _create(self, table: Table) -> None:
        """One at a time: IF NOT EXISTS alone may fail when two do it."""
        with self.transaction() as connection:
            connection.execute("SELECT pg_advisory_xact_lock(%s)", [_CREATING_LOCK])
            for statement in table.statements[Kind.POSTGRESQL]:
                connection.execute(statement)

    def _verdict(self, connection: Connection, error: Exception, is_finished: bool) -> Exception:
        """What to raise for what the block raised: it is the database's fault, or the block's own."""
        if connection.broken:
            fate = "; whether the transaction was committed is not known" if is_finished else ""
            return StoreUnavailable(f"{self._shown} went away: {_line(error)}{fate}")
        if isinstance(error, psycopg.Error) and (error.sqlstate or "").startswith("40"):
            return StoreUnavailable(f"{self._shown}: {_line(error)}")
        return error

    def _told(self, error: psycopg.Error) -> StoreError:
        is_lost = error.sqlstate is None and isinstance(error, psycopg.OperationalError)
        is_passing = is_lost or (error.sqlstate or "").startswith(_PASSING)
        kind = StoreUnavailable if is_passing else StoreError
        return kind(f"{self._shown}: {_line(error)}")


def _options(location: Location) -> dict[str, Any]:
    try:
        return {**_DEFAULTS, **conninfo_to_dict(location.address)}
    except psycopg.Error as error:
        reason = str(error).replace(location.address, location.shown).strip()
        raise StoreError(f"{location.shown}: {reason}") from None


def _check_open(connection: Connection) -> None:
    """Raises TransactionSpoiled. PostgreSQL answers a COMMIT after a failed statement with a rollback, and no error."""
    match connection.info.transaction_status:
        case TransactionStatus.INTRANS:
            return
        case TransactionStatus.INERROR:
            raise TransactionSpoiled(
                "a statement in the transaction failed and its error was passed over: nothing of it can be kept; "
                "let the error go on, or use `with connection.transaction():` around what may fail"
            )
        case _:
            raise TransactionSpoiled(
                "the code in the transaction has ended it: its results are not kept together"
            )


def _line(error: Exception) -> str:
    """Drivers tell a story; its first line is enough."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
