"""PostgreSQL through psycopg, in a database that it shares with the user's own tables.

`PostgresDatabase` manages connections and transactions. On top of it are the dedupe store and the ledger: durable,
shared by all machines, and one transaction with the user's own tables.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final, TypeVar

import psycopg
from psycopg import Connection, Cursor
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from penstock.client.databases import base
from penstock.client.databases.sql import EXPIRED_ROWS_MAX, SqlLedger, SqlStore
from penstock.client.ledgers import POSITIONS_TABLE, Position, PositionAdvance, TopicPartition

__all__ = ("PostgresDatabase", "PostgresLedger", "PostgresStore", "connect", "first_line")


T = TypeVar("T")

#: Options in the URL override these. They detect a vanished server within about half a minute.
_CONNECTION_DEFAULTS: Final = {
    "application_name": "penstock",
    "connect_timeout": 10,
    "keepalives_idle": 30,
    "tcp_user_timeout": 30_000,
}
#: Prefixes of SQLSTATE: connection, transaction conflict, resources, shutdown, lock, read-only standby.
_TRANSIENT_SQLSTATES: Final = ("08", "40", "53", "57P", "55P03", "25006")
#: The advisory lock of all processes that create tables of Penstock.
_CREATE_TABLE_LOCK: Final = 0x70656E73746F636B
_IDLE_CONNECTIONS_MAX: Final = 32


def connect(location: base.DatabaseLocation, **defaults: Any) -> Connection:
    """Opens a connection that commits every statement. `defaults` are libpq options that the URL may override.

    Raises StoreError for a URL that libpq cannot read, StoreUnavailable if the server does not answer.
    """
    try:
        options = {**_CONNECTION_DEFAULTS, **defaults, **conninfo_to_dict(location.address)}
    except psycopg.Error as error:
        reason = str(error).replace(location.address, location.shown).strip()
        raise base.StoreError(f"{location.shown}: {reason}") from None
    try:
        return psycopg.connect(**options, autocommit=True)
    except psycopg.Error as error:
        raise base.StoreUnavailable(f"{location.shown} cannot be reached: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    """Returns the first line of an error message of the driver; the others repeat the statement."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class PostgresDatabase:
    """A pool of connections to one database. Raises StoreUnavailable, StoreError."""

    def __init__(self, location: base.DatabaseLocation, table: base.Table) -> None:
        self._location = location
        self._shown = location.shown
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._is_closed = False
        try:
            self._ensure_table(table)
        except base.StoreError:
            self.close()
            raise

    def query(self, statement: str, parameters: Sequence[Any] = ()) -> list[Any]:
        """Runs one statement that may be repeated, in its own transaction, and returns its rows."""

        def run(connection: Connection) -> list[Any]:
            # Never prepare it: a plan from the time when the table was empty would later read the whole table.
            cursor = connection.execute(statement, parameters, prepare=False)
            return cursor.fetchall() if cursor.description else []

        with self.translated_errors(), self._borrowed(run) as (_, rows):
            return rows

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """Rolls back if the block raises. psycopg refuses `commit()` and `rollback()` inside it."""
        stack = ExitStack()

        def begin(connection: Connection) -> None:
            stack.enter_context(connection.transaction())

        with ExitStack() as lease:
            with self.translated_errors():
                connection, _ = lease.enter_context(self._borrowed(begin))
            is_finished = False
            try:
                with stack:
                    yield connection
                    _check_in_transaction(connection)
                    is_finished = True
            except Exception as error:
                raised = self._block_error(connection, error, is_finished)
                if raised is error:
                    raise
                raise raised from error
            if not is_finished:  # psycopg.Rollback ends a block without an exception
                raise base.TransactionSpoiled("the code in the transaction has rolled it back")

    def close(self) -> None:
        self._is_closed = True
        self._close_idle()

    @contextmanager
    def translated_errors(self) -> Iterator[None]:
        try:
            yield
        except psycopg.Error as error:
            raise self._translate(error) from error

    @contextmanager
    def _borrowed(self, first: Callable[[Connection], T]) -> Iterator[tuple[Connection, T]]:
        """Yields a connection and the result of `first`. Replaces a connection that was lost while it was idle."""
        connection, is_old = self._take()
        try:
            try:
                result = first(connection)
            except psycopg.Error:
                if not (is_old and connection.broken):
                    raise
                self._close_idle()
                connection = connect(self._location)
                result = first(connection)
            yield connection, result
        finally:
            self._give_back(connection)

    def _take(self) -> tuple[Connection, bool]:
        if self._is_closed:
            raise base.StoreError(f"{self._shown} is closed")
        with self._lock:
            if self._idle:
                return self._idle.pop(), True
        return connect(self._location), False

    def _give_back(self, connection: Connection) -> None:
        connection.row_factory = tuple_row
        is_clean = connection.info.transaction_status is TransactionStatus.IDLE and connection.autocommit
        with self._lock:
            if is_clean and not self._is_closed and len(self._idle) < _IDLE_CONNECTIONS_MAX:
                self._idle.append(connection)
                return
        connection.close()

    def _close_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _ensure_table(self, table: base.Table) -> None:
        """Creates the table if it is missing. A user without the right to do so can use an existing table."""
        ((encoding, exists),) = self.query(
            "SELECT current_setting('server_encoding'), to_regclass(%s) IS NOT NULL", [table.name]
        )
        if encoding != "UTF8":
            raise base.StoreError(
                f"{self._shown} has the encoding {encoding}: ids may be any text and need UTF8"
            )
        if exists:
            return
        remedy = f"{table.schema_function}('postgresql') returns the SQL of table {table.name}"
        if not self._location.may_create:
            raise base.StoreError(f"{self._shown}: table {table.name} is missing, and create=false: {remedy}")
        try:
            # The lock is needed because CREATE TABLE IF NOT EXISTS may fail when two sessions run it.
            with self.transaction() as connection:
                connection.execute("SELECT pg_advisory_xact_lock(%s)", [_CREATE_TABLE_LOCK])
                for statement in table.statements[base.DatabaseKind.POSTGRESQL]:
                    connection.execute(statement)
        except psycopg.errors.InsufficientPrivilege as error:
            raise base.StoreError(
                f"{self._shown}: {first_line(error)}. Ask its owner to create the table: {remedy}"
            ) from error
        except psycopg.Error as error:
            raise self._translate(error) from error

    def _block_error(self, connection: Connection, error: Exception, is_finished: bool) -> Exception:
        """Returns StoreUnavailable if the database caused the block's error, else the error itself."""
        if connection.broken:
            outcome = "; it is unknown whether the transaction was committed" if is_finished else ""
            return base.StoreUnavailable(f"{self._shown} closed the connection: {first_line(error)}{outcome}")
        if isinstance(error, psycopg.Error) and (error.sqlstate or "").startswith("40"):
            return base.StoreUnavailable(f"{self._shown}: {first_line(error)}")
        return error

    def _translate(self, error: psycopg.Error) -> base.StoreError:
        is_connection_lost = error.sqlstate is None and isinstance(error, psycopg.OperationalError)
        is_transient = is_connection_lost or (error.sqlstate or "").startswith(_TRANSIENT_SQLSTATES)
        kind = base.StoreUnavailable if is_transient else base.StoreError
        return kind(f"{self._shown}: {first_line(error)}")


def _check_in_transaction(connection: Connection) -> None:
    """Raises TransactionSpoiled. After a failed statement, PostgreSQL rolls back on COMMIT without an error."""
    match connection.info.transaction_status:
        case TransactionStatus.INTRANS:
            return
        case TransactionStatus.INERROR:
            raise base.TransactionSpoiled(
                "a statement in the transaction failed and the handler ignored its error, so the transaction cannot be "
                "committed; do not catch the error, or put `with connection.transaction():` around statements that may "
                "fail"
            )
        case _:
            raise base.TransactionSpoiled(
                "the code in the transaction has ended it, so it cannot be committed as a whole"
            )


#: The current time, because now() is the start of the transaction, which may be long ago.
_EXPIRES_AT: Final = "clock_timestamp() + make_interval(secs => %s)"
#: OFFSET 0 makes the server look up each id in the index. Without it the server reads the whole table for every batch
#: until autovacuum has counted its rows.
_SELECT_SEEN: Final = """\
SELECT requested.id FROM unnest(%s::text[]) AS requested (id) CROSS JOIN LATERAL (
    SELECT FROM penstock_seen AS known
    WHERE known.scope = %s AND known.id = requested.id AND known.expires_at > clock_timestamp() OFFSET 0
) AS found"""
_INSERT_SEEN: Final = f"""\
INSERT INTO penstock_seen AS known (scope, id, expires_at)
SELECT %s, id, {_EXPIRES_AT} FROM unnest(%s::text[]) AS new (id)
ON CONFLICT (scope, id) DO UPDATE SET expires_at = excluded.expires_at"""
_CLAIM_SEEN: Final = f"{_INSERT_SEEN} WHERE known.expires_at <= clock_timestamp() RETURNING id"
_DELETE_EXPIRED: Final = f"""\
DELETE FROM penstock_seen AS known USING (
    SELECT scope, id FROM penstock_seen WHERE expires_at <= coalesce(to_timestamp(%s), clock_timestamp())
    ORDER BY expires_at LIMIT {EXPIRED_ROWS_MAX} FOR UPDATE SKIP LOCKED
) AS old WHERE known.scope = old.scope AND known.id = old.id RETURNING 1"""


class PostgresTransaction:
    def __init__(self, connection: Connection, database: PostgresDatabase) -> None:
        self.connection = connection
        self._database = database

    def claim(self, scope: str, id: str, ttl_s: float) -> bool:
        return bool(self.claim_all(scope, [id], ttl_s))

    def claim_all(self, scope: str, ids: Sequence[str], ttl_s: float) -> set[str]:
        names = base.index_keys(ids)
        with self._database.translated_errors():
            cursor = _tuple_cursor(self.connection)
            rows = cursor.execute(_CLAIM_SEEN, (base.index_key(scope), ttl_s, list(names))).fetchall()
        return {names[name] for (name,) in rows}


class PostgresStore(SqlStore):
    """Ids expire by the server's clock."""

    database: PostgresDatabase

    def __init__(self, location: base.DatabaseLocation) -> None:
        super().__init__(PostgresDatabase(location, base.SEEN_TABLE))

    def seen(self, scope: str, ids: Sequence[str]) -> set[str]:
        names = base.index_keys(ids)
        rows = self.database.query(_SELECT_SEEN, (list(names), base.index_key(scope)))
        return {names[name] for (name,) in rows}

    def mark(self, scope: str, ids: Sequence[str], ttl_s: float) -> None:
        if names := list(base.index_keys(ids)):
            self.database.query(_INSERT_SEEN, (base.index_key(scope), ttl_s, names))

    def joined(self, connection: Connection) -> PostgresTransaction:
        return PostgresTransaction(connection, self.database)

    def _delete_expired(self, now: float | None) -> int:
        return len(self.database.query(_DELETE_EXPIRED, (now,)))


#: How long to wait for the transaction of an earlier owner before it is reported.
_TAKE_TIMEOUT_MS: Final = 10_000
#: Sorted, so that members which take the same partitions lock their rows in the same order.
_TAKE_POSITIONS: Final = """\
INSERT INTO penstock_positions AS held (group_id, topic, partition, next_offset, epoch, owner, updated_at)
SELECT %s, topic, partition, NULL, 1, %s, now() FROM unnest(%s::text[], %s::integer[]) AS assigned (topic, partition)
ORDER BY topic COLLATE "C", partition
ON CONFLICT (group_id, topic, partition) DO UPDATE
SET epoch = held.epoch + 1, owner = excluded.owner, updated_at = excluded.updated_at
RETURNING topic, partition, next_offset, epoch"""
_ADVANCE_POSITION: Final = """\
UPDATE penstock_positions SET next_offset = %s, updated_at = now()
WHERE group_id = %s AND topic = %s AND partition = %s AND epoch = %s AND next_offset IS NOT DISTINCT FROM %s"""


class PostgresLedger(SqlLedger):
    placeholder = "%s"

    def __init__(self, location: base.DatabaseLocation) -> None:
        super().__init__(PostgresDatabase(location, POSITIONS_TABLE), location, PostgresStore)

    def take(
        self, group: str, topic_partitions: Sequence[TopicPartition], owner: str
    ) -> dict[TopicPartition, Position]:
        distinct = sorted(set(topic_partitions))
        topics, partitions = [topic for topic, _ in distinct], [partition for _, partition in distinct]
        with self._database.transaction() as connection, self._database.translated_errors():
            connection.execute(f"SET LOCAL lock_timeout = {_TAKE_TIMEOUT_MS}")
            rows = connection.execute(
                _TAKE_POSITIONS, (base.index_key(group), owner, topics, partitions)
            ).fetchall()
        return {(topic, partition): Position(offset, epoch) for topic, partition, offset, epoch in rows}

    def advance(self, connection: Connection, step: PositionAdvance) -> bool:
        partition = (base.index_key(step.group), *step.topic_partition)
        parameters = (step.to_offset, *partition, step.epoch, step.from_offset)
        with self._database.translated_errors():
            return _tuple_cursor(connection).execute(_ADVANCE_POSITION, parameters).rowcount == 1

    def _tuple_cursor(self, connection: Connection) -> Cursor[tuple[Any, ...]]:
        return _tuple_cursor(connection)


def _tuple_cursor(connection: Connection) -> Cursor[tuple[Any, ...]]:
    """Returns a cursor whose rows are tuples, even if the handler has set another row factory on its connection."""
    return connection.cursor(row_factory=tuple_row)
