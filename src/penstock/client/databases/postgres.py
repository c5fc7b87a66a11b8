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

__all__ = ("PostgresDatabase", "PostgresLedger", "PostgresStore")


T = TypeVar("T")

#: URLs may say otherwise. A server that has vanished is noticed within about half a minute.
_CONNECTION_DEFAULTS: Final = {
    "application_name": "penstock",
    "connect_timeout": 10,
    "keepalives_idle": 30,
    "tcp_user_timeout": 30_000,
}
#: By the first letters of SQLSTATE: connection, conflict of transactions, resources, shutdown, lock, read-only standby.
_TRANSIENT_SQLSTATES: Final = ("08", "40", "53", "57P", "55P03", "25006")
#: For all who create tables of ours at the same time, in whatever program.
_CREATE_TABLE_LOCK: Final = 0x70656E73746F636B
_IDLE_CONNECTIONS_MAX: Final = 32


class PostgresDatabase:
    """Connections to one database, made as threads need them. Raises StoreUnavailable, StoreError."""

    def __init__(self, location: DatabaseLocation, table: Table) -> None:
        self._shown = location.shown
        self._options = _connection_options(location)
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._is_closed = False
        try:
            self._ensure(table, location.may_create)
        except StoreError:
            self.close()
            raise

    def query(self, statement: str, parameters: Sequence[Any] = ()) -> list[Any]:
        """The rows of one statement that may be repeated, in a transaction of its own."""

        def run(connection: Connection) -> list[Any]:
            # Never prepared: a plan made while our table was empty would read all of it when it no longer is.
            cursor = connection.execute(statement, parameters, prepare=False)
            return cursor.fetchall() if cursor.description else []

        with self.translated_errors(), self._borrowed(run) as (_, rows):
            return rows

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """Rolled back if the block raises. psycopg refuses `commit()` and `rollback()` inside it."""
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
    def translated_errors(self) -> Iterator[None]:
        """For statements of ours."""
        try:
            yield
        except psycopg.Error as error:
            raise self._translate(error) from error

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
            if is_clean and not self._is_closed and len(self._idle) < _IDLE_CONNECTIONS_MAX:
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
            raise StoreUnavailable(f"{self._shown} cannot be reached: {_first_line(error)}") from error

    def _ensure(self, table: Table, may_create: bool) -> None:
        """Who may not create tables can still use one that is there."""
        ((encoding, is_there),) = self.query(
            "SELECT current_setting('server_encoding'), to_regclass(%s) IS NOT NULL", [table.name]
        )
        if encoding != "UTF8":
            raise StoreError(f"{self._shown} has the encoding {encoding}: ids may be any text, and need UTF8")
        if is_there:
            return
        remedy = f"{table.schema_function}('postgresql') has the SQL for a table {table.name}"
        if not may_create:
            raise StoreError(f"{self._shown}: there is no table {table.name}, and create=false: {remedy}")
        try:
            self._create(table)
        except psycopg.errors.InsufficientPrivilege as error:
            raise StoreError(
                f"{self._shown}: {_first_line(error)}. Let its owner create it: {remedy}"
            ) from error
        except psycopg.Error as error:
            raise self._translate(error) from error

    def _create(self, table: Table) -> None:
        """One at a time: IF NOT EXISTS alone may fail when two do it."""
        with self.transaction() as connection:
            connection.execute("SELECT pg_advisory_xact_lock(%s)", [_CREATE_TABLE_LOCK])
            for statement in table.statements[DatabaseKind.POSTGRESQL]:
                connection.execute(statement)

    def _verdict(self, connection: Connection, error: Exception, is_finished: bool) -> Exception:
        """What to raise for what the block raised: it is the database's fault, or the block's own."""
        if connection.broken:
            fate = "; whether the transaction was committed is not known" if is_finished else ""
            return StoreUnavailable(f"{self._shown} went away: {_first_line(error)}{fate}")
        if isinstance(error, psycopg.Error) and (error.sqlstate or "").startswith("40"):
            return StoreUnavailable(f"{self._shown}: {_first_line(error)}")
        return error

    def _translate(self, error: psycopg.Error) -> StoreError:
        is_lost = error.sqlstate is None and isinstance(error, psycopg.OperationalError)
        is_passing = is_lost or (error.sqlstate or "").startswith(_TRANSIENT_SQLSTATES)
        kind = StoreUnavailable if is_passing else StoreError
        return kind(f"{self._shown}: {_first_line(error)}")


def _connection_options(location: DatabaseLocation) -> dict[str, Any]:
    try:
        return {**_CONNECTION_DEFAULTS, **conninfo_to_dict(location.address)}
    except psycopg.Error as error:
        reason = str(error).replace(location.address, location.shown).strip()
        raise StoreError(f"{location.shown}: {reason}") from None


def _check_in_transaction(connection: Connection) -> None:
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


def _first_line(error: Exception) -> str:
    """Drivers tell a story; its first line is enough."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


_EXPIRED_ROWS_MAX: Final = 1000
#: The clock and not the start of the transaction, which may lie far back.
_EXPIRES_AT: Final = "clock_timestamp() + make_interval(secs => %s)"
#: OFFSET 0 has each id looked up in the index. Without it the whole table is read for every batch, until the server
#: has had time to count how large the table has become.
_SELECT_SEEN: Final = """\
SELECT asked.id FROM unnest(%s::text[]) AS asked (id) CROSS JOIN LATERAL (
    SELECT FROM penstock_seen AS known
    WHERE known.scope = %s AND known.id = asked.id AND known.expires_at > clock_timestamp() OFFSET 0
) AS found"""
_INSERT_SEEN: Final = f"""\
INSERT INTO penstock_seen AS known (scope, id, expires_at)
SELECT %s, id, {_EXPIRES_AT} FROM unnest(%s::text[]) AS new (id)
ON CONFLICT (scope, id) DO UPDATE SET expires_at = excluded.expires_at"""
_CLAIM_SEEN: Final = f"{_INSERT_SEEN} WHERE known.expires_at <= clock_timestamp() RETURNING id"
_DELETE_EXPIRED: Final = f"""\
DELETE FROM penstock_seen AS known USING (
    SELECT scope, id FROM penstock_seen WHERE expires_at <= coalesce(to_timestamp(%s), clock_timestamp())
    ORDER BY expires_at LIMIT {_EXPIRED_ROWS_MAX} FOR UPDATE SKIP LOCKED
) AS old WHERE known.scope = old.scope AND known.id = old.id RETURNING 1"""


class PostgresTransaction:
    def __init__(self, connection: Connection, database: PostgresDatabase) -> None:
        self.connection = connection
        self._database = database

    def claim(self, scope: str, id: str, ttl_s: float) -> bool:
        return bool(self.claim_all(scope, [id], ttl_s))

    def claim_all(self, scope: str, ids: Sequence[str], ttl_s: float) -> set[str]:
        names = index_keys(ids)
        with self._database.translated_errors():
            cursor = self.connection.cursor(row_factory=tuple_row)  # the user may have set another
            rows = cursor.execute(_CLAIM_SEEN, (index_key(scope), ttl_s, list(names))).fetchall()
        return {names[name] for (name,) in rows}


class PostgresStore:
    """Time is the server's."""

    shares_transactions = True

    def __init__(self, location: DatabaseLocation) -> None:
        self._database = PostgresDatabase(location, SEEN_TABLE)

    def seen(self, scope: str, ids: Sequence[str]) -> set[str]:
        names = index_keys(ids)
        rows = self._database.query(_SELECT_SEEN, (list(names), index_key(scope)))
        return {names[name] for (name,) in rows}

    def mark(self, scope: str, ids: Sequence[str], ttl_s: float) -> None:
        if names := list(index_keys(ids)):
            self._database.query(_INSERT_SEEN, (index_key(scope), ttl_s, names))

    def claim(self, scope: str, id: str, ttl_s: float) -> bool:
        with self.transaction() as transaction:
            return transaction.claim(scope, id, ttl_s)

    @contextmanager
    def transaction(self) -> Iterator[PostgresTransaction]:
        with self._database.transaction() as connection:
            yield PostgresTransaction(connection, self._database)

    def joined(self, connection: Connection) -> PostgresTransaction:
        return PostgresTransaction(connection, self._database)

    def expire(self, now: float | None = None) -> int:
        """In small steps that wait for nobody."""
        total = 0
        while True:
            count = len(self._database.query(_DELETE_EXPIRED, (now,)))
            total += count
            if count < _EXPIRED_ROWS_MAX:
                return total

    def close(self) -> None:
        self._database.close()


#: An older owner that hangs in the middle of its transaction is reported, not waited for in silence.
_TAKE_TIMEOUT_MS: Final = 10_000
_WHERE_PARTITION: Final = "WHERE group_id = %s AND topic = %s AND partition = %s"
_SELECT_POSITIONS: Final = "SELECT topic, partition, next_offset FROM penstock_positions WHERE group_id = %s"
#: Sorted, so that two who take the same places lock them in the same order.
_TAKE_POSITIONS: Final = """\
INSERT INTO penstock_positions AS held (group_id, topic, partition, next_offset, epoch, owner, updated_at)
SELECT %s, topic, partition, NULL, 1, %s, now() FROM unnest(%s::text[], %s::integer[]) AS place (topic, partition)
ORDER BY topic COLLATE "C", partition
ON CONFLICT (group_id, topic, partition) DO UPDATE
SET epoch = held.epoch + 1, owner = excluded.owner, updated_at = excluded.updated_at
RETURNING topic, partition, next_offset, epoch"""
_SELECT_OWNER: Final = f"SELECT next_offset, epoch, owner FROM penstock_positions {_WHERE_PARTITION}"
_ADVANCE_POSITION: Final = f"""\
UPDATE penstock_positions SET next_offset = %s, updated_at = now()
{_WHERE_PARTITION} AND epoch = %s AND next_offset IS NOT DISTINCT FROM %s"""


class PostgresLedger:
    def __init__(self, location: DatabaseLocation) -> None:
        self._database = PostgresDatabase(location, POSITIONS_TABLE)
        self._location = location
        self._marks: PostgresStore | None = None

    def positions(
        self, group: str, topic_partitions: Sequence[TopicPartition]
    ) -> dict[TopicPartition, int | None]:
        rows = self._database.query(_SELECT_POSITIONS, (index_key(group),))
        known = {(topic, partition): offset for topic, partition, offset in rows}
        return {topic_partition: known.get(topic_partition) for topic_partition in topic_partitions}

    def take(
        self, group: str, topic_partitions: Sequence[TopicPartition], owner: str
    ) -> dict[TopicPartition, Position]:
        once = sorted(set(topic_partitions))
        topics, partitions = [topic for topic, _ in once], [partition for _, partition in once]
        with self._database.transaction() as connection, self._database.translated_errors():
            connection.execute(f"SET LOCAL lock_timeout = {_TAKE_TIMEOUT_MS}")
            rows = connection.execute(
                _TAKE_POSITIONS, (index_key(group), owner, topics, partitions)
            ).fetchall()
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

    def move(self, connection: Connection, step: PositionAdvance) -> bool:
        parameters = (
            step.to_offset,
            index_key(step.group),
            *step.topic_partition,
            step.epoch,
            step.from_offset,
        )
        with self._database.translated_errors():
            return _tuple_cursor(connection).execute(_ADVANCE_POSITION, parameters).rowcount == 1

    def holder(self, connection: Connection, step: PositionAdvance) -> PositionOwner | None:
        with self._database.translated_errors():
            row = (
                _tuple_cursor(connection)
                .execute(_SELECT_OWNER, (index_key(step.group), *step.topic_partition))
                .fetchone()
            )
        return PositionOwner(*row) if row else None


def _tuple_cursor(connection: Connection) -> Cursor[tuple[Any, ...]]:
    """The user may have set another kind of rows."""
    return connection.cursor(row_factory=tuple_row)
