"""The application's side of the outbox: its tables, its rows, and adding a row in the caller's transaction.

The caller's connection is a SQLAlchemy session or connection, or one of sqlite3 or psycopg. This module imports none
of these libraries: the caller who passes an object of one has imported it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import sys
import threading
import uuid
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

from penstock.client.deadletters.headers import MESSAGE_ID, Header
from penstock.client.errors import ClientError

__all__ = (
    "NOTIFY_CHANNEL",
    "OUTBOX_TABLE",
    "POSTGRESQL",
    "SQLITE",
    "CallerTransaction",
    "NewOutboxRow",
    "OutboxError",
    "OutboxRow",
    "RelayInterrupted",
    "RowsRefused",
    "add",
    "caller_transaction",
    "create_table",
    "decode_headers",
    "encode_headers",
    "fingerprint",
    "new_row",
    "psycopg_parameters",
    "row_headers",
    "schema",
    "shard_hash",
    "topic_name_error",
)


class OutboxError(ClientError):
    """It cannot work until somebody changes something; the sentence says what."""


class RelayInterrupted(ClientError):
    """A broker, a database or a lock went away. What was under way is settled by beginning anew.

    `cause` is the client library's own error, where it was the one to say so.
    """

    def __init__(self, sentence: str, *, cause: Any = None) -> None:
        super().__init__(sentence)
        self.cause = cause


class RowsRefused(ClientError):
    """The broker does not take these rows, however often they are sent. Their transaction was aborted.

    `culprits` are rows by id with the reason. Where it is empty, it is at least one of those sent together.
    """

    def __init__(self, reason: str, culprits: Mapping[int, str] | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.culprits = dict(culprits or {})


POSTGRESQL: Final = "postgresql"
SQLITE: Final = "sqlite"
OUTBOX_TABLE: Final = "penstock_outbox"
#: Where transactions that added rows are told of.
NOTIFY_CHANNEL: Final = "penstock_outbox"

_NOW_SQLITE: Final = "((julianday('now') - 2440587.5) * 86400.0)"
_POSTGRESQL_COLUMNS: Final = """\
    shard_hash integer NOT NULL CHECK (shard_hash >= 0),
    topic text NOT NULL,
    partition integer,
    key bytea,
    value bytea,
    headers text NOT NULL DEFAULT '[]',
    message_id text NOT NULL,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp()"""
_SQLITE_COLUMNS: Final = f"""\
    shard_hash INTEGER NOT NULL CHECK (shard_hash >= 0),
    topic TEXT NOT NULL,
    partition INTEGER,
    key BLOB,
    value BLOB,
    headers TEXT NOT NULL DEFAULT '[]',
    message_id TEXT NOT NULL,
    created_at REAL NOT NULL DEFAULT {_NOW_SQLITE}"""
#: By which rows behind a rejected one of their key are found.
_REJECTED_INDEX: Final = (
    "CREATE INDEX IF NOT EXISTS penstock_outbox_rejected_hash ON penstock_outbox_rejected (shard_hash)"
)
_RELAY_TABLE: Final = """\
CREATE TABLE IF NOT EXISTS penstock_outbox_relay (
    singleton integer PRIMARY KEY CHECK (singleton = 1),
    identity text NOT NULL,
    name text NOT NULL,
    shards integer NOT NULL
)"""

_STATEMENTS: Final = {
    POSTGRESQL: (
        # Rows come and go: without this, what is deleted is swept up only after a fifth of the table.
        f"""\
CREATE TABLE IF NOT EXISTS {OUTBOX_TABLE} (
    id bigserial PRIMARY KEY,
{_POSTGRESQL_COLUMNS}
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000)""",
        f"""\
CREATE TABLE IF NOT EXISTS penstock_outbox_rejected (
    id bigint PRIMARY KEY,
{_POSTGRESQL_COLUMNS},
    reason text NOT NULL,
    rejected_at timestamptz NOT NULL DEFAULT clock_timestamp()
)""",
        _REJECTED_INDEX,
        _RELAY_TABLE,
    ),
    SQLITE: (
        # AUTOINCREMENT never gives an id twice.
        f"""\
CREATE TABLE IF NOT EXISTS {OUTBOX_TABLE} (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
{_SQLITE_COLUMNS}
)""",
        f"""\
CREATE TABLE IF NOT EXISTS penstock_outbox_rejected (
    id INTEGER PRIMARY KEY,
{_SQLITE_COLUMNS},
    reason TEXT NOT NULL,
    rejected_at REAL NOT NULL DEFAULT {_NOW_SQLITE}
)""",
        _REJECTED_INDEX,
        _RELAY_TABLE,
    ),
}


def schema(dialect: str) -> tuple[str, ...]:
    """The statements that make the tables where they are missing: `postgresql` or `sqlite`. Raises OutboxError."""
    if dialect not in _STATEMENTS:
        raise OutboxError(f"an outbox is in PostgreSQL or SQLite, not in {dialect}")
    return _STATEMENTS[dialect]


HASH_MAX: Final = (1 << 31) - 1
MESSAGE_ID_CHARACTERS_MAX: Final = 1000
_TOPIC_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,249}")
_PARTITION_MAX: Final = (1 << 31) - 1


class NewOutboxRow(NamedTuple):
    """As `add` writes it. The database gives it an id and a time."""

    #: None where nothing says which rows belong together: the database spreads them by transaction.
    shard_hash: int | None
    topic: str
    partition: int | None
    key: bytes | None
    value: bytes | None
    headers: str
    message_id: str


class OutboxRow(NamedTuple):
    """As a relay reads it."""

    id: int
    topic: str
    partition: int | None
    key: bytes | None
    value: bytes | None
    headers: str
    message_id: str


def new_row(
    topic: str,
    value: bytes | None,
    *,
    key: bytes | None,
    headers: Iterable[Header],
    partition: int | None,
    message_id: str,
) -> NewOutboxRow:
    """`message_id` counts unless the headers have one. Raises ValueError for what no broker would take."""
    if (flaw := topic_name_error(topic)) is not None:
        raise ValueError(flaw)
    if partition is not None and not 0 <= partition <= _PARTITION_MAX:
        raise ValueError(f"there is no partition {partition}")
    all_headers = list(headers)
    message_id = _message_id_header(all_headers) or message_id
    if not 0 < len(message_id) <= MESSAGE_ID_CHARACTERS_MAX or "\0" in message_id:
        raise ValueError(f"a message id has 1 to {MESSAGE_ID_CHARACTERS_MAX} characters, none of them NUL")
    rest = encode_headers(header for header in all_headers if header[0] != MESSAGE_ID)
    return NewOutboxRow(shard_hash(topic, key, partition), topic, partition, key, value, rest, message_id)


def topic_name_error(topic: object) -> str | None:
    """Why no topic can have this name."""
    if isinstance(topic, str) and _TOPIC_NAME.fullmatch(topic) and topic not in (".", ".."):
        return None
    return f"{topic!r} is no name of a topic: 1 to 249 letters, digits, full stops, hyphens and underscores"


def _message_id_header(headers: list[Header]) -> str | None:
    given = [value for name, value in headers if name == MESSAGE_ID and value]
    try:
        return given[-1].decode() if given else None
    except UnicodeDecodeError:
        raise ValueError("the message id in the headers is not UTF-8") from None


def shard_hash(topic: str, key: bytes | None, partition: int | None = None) -> int | None:
    """The same for all rows whose order counts: those of a key, or of a partition that was chosen without a key."""
    if key is not None:
        return zlib.crc32(key, zlib.crc32(topic.encode() + b"\0")) & HASH_MAX
    if partition is not None:
        return zlib.crc32(f"{topic}\0partition {partition}".encode()) & HASH_MAX
    return None


def encode_headers(headers: Iterable[Header]) -> str:
    """JSON that people can read: values are text, or base64 where they are none."""
    return json.dumps([[name, _encode_value(value)] for name, value in headers], ensure_ascii=True)


def decode_headers(text: str) -> list[Header]:
    """Raises ValueError for what `headers_text` has not made."""
    try:
        return [(_header_name(name), _decode_value(value)) for name, value in json.loads(text)]
    except (TypeError, KeyError, AttributeError) as flaw:
        raise ValueError(f"headers are a JSON list of names and values: {flaw}") from None


def row_headers(row: OutboxRow) -> list[Header]:
    """As the message has them. Raises ValueError."""
    return [*decode_headers(row.headers), (MESSAGE_ID, row.message_id.encode())]


def fingerprint(message_id: str) -> str:
    """Short enough for markers; with the row's id it says which row was meant."""
    return hashlib.blake2b(message_id.encode(errors="surrogatepass"), digest_size=6).hexdigest()


def _encode_value(value: bytes | None) -> Any:
    if value is None:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(value).decode()}


def _header_name(name: Any) -> str:
    if not isinstance(name, str):
        raise ValueError(f"{name!r} is no name of a header")
    return name


def _decode_value(value: Any) -> bytes | None:
    if isinstance(value, dict):
        return base64.b64decode(value["base64"], validate=True)
    return None if value is None else str.encode(value)


_PARAMETER: Final = re.compile(r":([a-z_]+)")


class CallerTransaction(NamedTuple):
    """Where a statement is run: in the caller's transaction."""

    dialect: str
    run: Callable[[str, Mapping[str, Any]], None]


def caller_transaction(connection: Any, *, in_transaction: bool = True) -> CallerTransaction:
    """Raises TypeError for what is no connection, and OutboxError where each statement would be a transaction."""
    if _is_instance(connection, "sqlalchemy.ext.asyncio", "AsyncSession", "AsyncConnection"):
        raise TypeError(
            "of an asynchronous session: await session.run_sync(lambda session: add(session, ...))"
        )
    if _is_instance(connection, "sqlalchemy.orm", "Session", "scoped_session"):
        connection = connection.connection()
    if _is_instance(connection, "sqlalchemy.engine", "Connection"):
        return _sqlalchemy_transaction(connection, in_transaction)
    if _is_instance(connection, "sqlite3", "Cursor") or _is_instance(connection, "psycopg", "Cursor"):
        connection = connection.connection
    dialect = _connection_dialect(connection)
    if dialect is None:
        kind = f"{type(connection).__module__}.{type(connection).__qualname__}"
        raise TypeError(
            f"a {kind} has no transaction that we know: give a SQLAlchemy Session or Connection, "
            "or a connection or cursor of sqlite3 or psycopg"
        )
    if in_transaction:
        _check_transaction(connection, dialect)
    return CallerTransaction(dialect, lambda sql, values: _execute(connection, dialect, sql, values))


def psycopg_parameters(sql: str) -> str:
    """`:name` as psycopg writes it."""
    return _PARAMETER.sub(r"%(\1)s", sql)


def _sqlalchemy_transaction(connection: Any, in_transaction: bool) -> CallerTransaction:
    from sqlalchemy import text

    dialect = connection.dialect.name
    if dialect not in (POSTGRESQL, SQLITE):
        raise OutboxError(f"an outbox is in PostgreSQL or SQLite, not in {dialect}")
    own = connection.connection.dbapi_connection
    if in_transaction and _connection_dialect(own) is not None:
        _check_transaction(own, dialect)

    def run(sql: str, values: Mapping[str, Any]) -> None:
        connection.execute(text(sql), values).close()

    return CallerTransaction(dialect, run)


def _execute(connection: Any, dialect: str, sql: str, values: Mapping[str, Any]) -> None:
    # A cursor of our own: the caller's may have rows in it that are still to be read.
    cursor = connection.cursor()
    try:
        cursor.execute(psycopg_parameters(sql) if dialect == POSTGRESQL else sql, values)
    finally:
        cursor.close()


def _connection_dialect(connection: Any) -> str | None:
    if _is_instance(connection, "sqlite3", "Connection"):
        return SQLITE
    return POSTGRESQL if _is_instance(connection, "psycopg", "Connection") else None


def _check_transaction(connection: Any, dialect: str) -> None:
    """A row that is committed by itself tells of a change that may never be."""
    if dialect == SQLITE:
        commits_itself = connection.isolation_level is None or getattr(connection, "autocommit", -1) is True
        is_open = connection.in_transaction
    else:
        commits_itself = connection.autocommit
        is_open = connection.info.transaction_status.name != "IDLE"
    if commits_itself and not is_open:
        raise OutboxError(
            "the connection commits every statement by itself, so the message would not be part of your "
            "transaction: begin one first, and add the message inside of it"
        )


def _is_instance(thing: Any, module: str, *names: str) -> bool:
    loaded = sys.modules.get(module)
    kinds = tuple(getattr(loaded, name) for name in names if hasattr(loaded, name))
    return isinstance(thing, kinds)


Headers = Mapping[str, str | bytes | None] | Iterable[tuple[str, str | bytes | None]]

_INSERT: Final = {
    # Messages without a key are spread over the shards by transaction, so that those of one stay together.
    POSTGRESQL: f"""\
INSERT INTO {OUTBOX_TABLE} (shard_hash, topic, partition, key, value, headers, message_id)
VALUES (COALESCE(CAST(:shard_hash AS integer), CAST(txid_current() & {HASH_MAX} AS integer)),
        :topic, :partition, :key, :value, :headers, :message_id)""",
    "sqlite": f"""\
INSERT INTO {OUTBOX_TABLE} (shard_hash, topic, partition, key, value, headers, message_id)
VALUES (:shard_hash, :topic, :partition, :key, :value, :headers, :message_id)""",
}
#: Told when the transaction commits, once however many rows it has.
_NOTIFY: Final = f"\nRETURNING pg_notify('{NOTIFY_CHANNEL}', '')"
#: Of the locks that `serialise` takes: the first half of their number; the hash is the other.
_LOCK_NAMESPACE: Final = 0x70736F62
_KEY_LOCK: Final = f"SELECT pg_advisory_xact_lock({_LOCK_NAMESPACE}, CAST(:shard_hash AS integer))"
_CREATION_LOCK: Final = f"SELECT pg_advisory_xact_lock({_LOCK_NAMESPACE + 1}, 0)"


def add(
    connection: Any,
    topic: str,
    value: object,
    *,
    key: str | bytes | None = None,
    headers: Headers | None = None,
    partition: int | None = None,
    message_id: str | None = None,
    serialise: bool = False,
    notify: bool = True,
) -> str:
    """Publish `value` to `topic` when, and only if, the caller's transaction commits. Returns the message id.

    `connection` is a SQLAlchemy Session or Connection, or a connection or cursor of sqlite3 or psycopg. The value is
    bytes, text, None for a tombstone, or what can be JSON. Nothing is committed here.

    The headers get a message id and a trace context unless they have them: the message in hand, or the current span of
    OpenTelemetry, is what the new one follows from.

    Messages of a key go out in the order in which they were added, if transactions that write the same key are not
    at it at the same time. `serialise` lets the second of them wait for the first (in SQLite it always does).
    Without `notify` a relay of PostgreSQL finds the row at its next look, some seconds later.

    Raises OutboxError, ValueError, PayloadError, and what the database raises.
    """
    from penstock.client.tracing import Spans

    target, key = caller_transaction(connection), _key_bytes(key)
    with Spans().publish(topic, _header_list(headers), key=key) as all_headers:
        row = new_row(
            topic,
            _value_bytes(value),
            key=key,
            headers=all_headers,
            partition=partition,
            message_id=message_id or uuid.uuid4().hex,
        )
        _insert(target, row, serialise=serialise, notify=notify)
    return row.message_id


def create_table(connection: Any) -> None:
    """Make the tables where they are missing, in the caller's transaction. Raises what the database raises."""
    target = caller_transaction(connection, in_transaction=False)
    if target.dialect == POSTGRESQL:
        # Two that find no table at the same time would both make one.
        target.run(_CREATION_LOCK, {})
    for statement in schema(target.dialect):
        target.run(statement, {})


def _insert(target: CallerTransaction, row: NewOutboxRow, *, serialise: bool, notify: bool) -> None:
    if target.dialect != POSTGRESQL:
        # A single writer at a time: a transaction's rows stay together anyway, so its thread is as good a sign.
        values = row._replace(shard_hash=row.shard_hash if row.shard_hash is not None else _thread_hash())
        target.run(_INSERT[target.dialect], values._asdict())
        return
    if serialise and row.shard_hash is not None:
        target.run(_KEY_LOCK, {"shard_hash": row.shard_hash})
    target.run(_INSERT[POSTGRESQL] + (_NOTIFY if notify else ""), row._asdict())


def _thread_hash() -> int:
    return zlib.crc32(f"{os.getpid()} {threading.get_ident()}".encode()) & HASH_MAX


def _value_bytes(value: object) -> bytes | None:
    from penstock.client.payloads import encode

    return None if value is None else encode(value)


def _key_bytes(key: object) -> bytes | None:
    if isinstance(key, str):
        return key.encode()
    if key is None or isinstance(key, bytes):
        return key
    raise TypeError(f"a key is text or bytes, not a {type(key).__qualname__}")


def _header_list(headers: Headers | None) -> list[Header]:
    from penstock.client.app.publisher import header_list

    return header_list(headers)
