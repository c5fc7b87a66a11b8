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
    """The outbox cannot work until the operator changes something; the message says what."""


class RelayInterrupted(ClientError):
    """The relay lost a broker, a database or a lock. It restarts, which settles its open transaction.

    `cause` is the error of the client library, if it reported one.
    """

    def __init__(self, sentence: str, *, cause: Any = None) -> None:
        super().__init__(sentence)
        self.cause = cause


class RowsRefused(ClientError):
    """The broker refuses these rows, and a retry cannot help. Their transaction was aborted.

    `culprits` maps the ids of the refused rows to the reason. If it is empty, at least one of the rows that were sent
    together was refused.
    """

    def __init__(self, reason: str, culprits: Mapping[int, str] | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.culprits = dict(culprits or {})


POSTGRESQL: Final = "postgresql"
SQLITE: Final = "sqlite"
OUTBOX_TABLE: Final = "penstock_outbox"
#: The channel that notifies relays of transactions that added rows.
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
#: Finds the rows that wait behind a rejected row of their key.
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
        # All rows are deleted soon: by default, autovacuum would run only after a fifth of the table has changed.
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
        # AUTOINCREMENT never assigns an id twice.
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
    """Returns the statements that create missing tables in `postgresql` or `sqlite`. Raises OutboxError."""
    if dialect not in _STATEMENTS:
        raise OutboxError(f"an outbox needs PostgreSQL or SQLite, not {dialect}")
    return _STATEMENTS[dialect]


HASH_MAX: Final = (1 << 31) - 1
MESSAGE_ID_CHARACTERS_MAX: Final = 1000
_TOPIC_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,249}")
_PARTITION_MAX: Final = (1 << 31) - 1


class NewOutboxRow(NamedTuple):
    """A row as `add` inserts it. The database assigns the id and the time."""

    #: None without key and partition: the database then spreads rows over the shards by transaction.
    shard_hash: int | None
    topic: str
    partition: int | None
    key: bytes | None
    value: bytes | None
    headers: str
    message_id: str


class OutboxRow(NamedTuple):
    """A row as a relay reads it."""

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
    """A message id in the headers overrides `message_id`. Raises ValueError for values that brokers refuse."""
    if (flaw := topic_name_error(topic)) is not None:
        raise ValueError(flaw)
    if partition is not None and not 0 <= partition <= _PARTITION_MAX:
        raise ValueError(f"{partition} is not a valid partition number")
    all_headers = list(headers)
    message_id = _message_id_header(all_headers) or message_id
    if not 0 < len(message_id) <= MESSAGE_ID_CHARACTERS_MAX or "\0" in message_id:
        raise ValueError(
            f"a message id has 1 to {MESSAGE_ID_CHARACTERS_MAX} characters, and none of them is NUL"
        )
    encoded = encode_headers(header for header in all_headers if header[0] != MESSAGE_ID)
    return NewOutboxRow(shard_hash(topic, key, partition), topic, partition, key, value, encoded, message_id)


def topic_name_error(topic: object) -> str | None:
    """Returns why the topic name is invalid; None if it is valid."""
    if isinstance(topic, str) and _TOPIC_NAME.fullmatch(topic) and topic not in (".", ".."):
        return None
    return f"{topic!r} is not a topic name: use 1 to 249 letters, digits, full stops, hyphens and underscores"


def _message_id_header(headers: list[Header]) -> str | None:
    given = [value for name, value in headers if name == MESSAGE_ID and value]
    try:
        return given[-1].decode() if given else None
    except UnicodeDecodeError:
        raise ValueError("the message id in the headers is not UTF-8") from None


def shard_hash(topic: str, key: bytes | None, partition: int | None = None) -> int | None:
    """Returns the same number for all rows of a key, or of a partition that was chosen without a key.

    Rows with the same number go to the same shard, which keeps their order.
    """
    if key is not None:
        return zlib.crc32(key, zlib.crc32(topic.encode() + b"\0")) & HASH_MAX
    if partition is not None:
        return zlib.crc32(f"{topic}\0partition {partition}".encode()) & HASH_MAX
    return None


def encode_headers(headers: Iterable[Header]) -> str:
    """Returns readable JSON: values are text, or base64 if they are not UTF-8."""
    return json.dumps([[name, _encode_value(value)] for name, value in headers], ensure_ascii=True)


def decode_headers(text: str) -> list[Header]:
    """Raises ValueError for text that `encode_headers` has not written."""
    try:
        return [(_header_name(name), _decode_value(value)) for name, value in json.loads(text)]
    except (TypeError, KeyError, AttributeError) as flaw:
        raise ValueError(f"headers must be a JSON list of names and values: {flaw}") from None


def row_headers(row: OutboxRow) -> list[Header]:
    """Returns the headers of the message, with the message id. Raises ValueError."""
    return [*decode_headers(row.headers), (MESSAGE_ID, row.message_id.encode())]


def fingerprint(message_id: str) -> str:
    """Returns a short hash for markers; together with the row's id it identifies the row."""
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
        raise ValueError(f"{name!r} is not a header name")
    return name


def _decode_value(value: Any) -> bytes | None:
    if isinstance(value, dict):
        return base64.b64decode(value["base64"], validate=True)
    return None if value is None else str.encode(value)


_PARAMETER: Final = re.compile(r":([a-z_]+)")


class CallerTransaction(NamedTuple):
    """Runs statements in the caller's transaction."""

    dialect: str
    run: Callable[[str, Mapping[str, Any]], None]


def caller_transaction(connection: Any, *, in_transaction: bool = True) -> CallerTransaction:
    """Raises TypeError for an unknown kind of connection, and OutboxError if it commits every statement."""
    if _is_instance(connection, "sqlalchemy.ext.asyncio", "AsyncSession", "AsyncConnection"):
        raise TypeError(
            "with an asynchronous session, use await session.run_sync(lambda session: add(session, ...))"
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
            f"{kind} is not supported: pass a SQLAlchemy Session or Connection, or a connection or cursor of sqlite3 "
            "or psycopg"
        )
    if in_transaction:
        _check_transaction(connection, dialect)
    return CallerTransaction(dialect, lambda sql, values: _execute(connection, dialect, sql, values))


def psycopg_parameters(sql: str) -> str:
    """Rewrites `:name` parameters for psycopg."""
    return _PARAMETER.sub(r"%(\1)s", sql)


def _sqlalchemy_transaction(connection: Any, in_transaction: bool) -> CallerTransaction:
    from sqlalchemy import text

    dialect = connection.dialect.name
    if dialect not in (POSTGRESQL, SQLITE):
        raise OutboxError(f"an outbox needs PostgreSQL or SQLite, not {dialect}")
    own = connection.connection.dbapi_connection
    if in_transaction and _connection_dialect(own) is not None:
        _check_transaction(own, dialect)

    def run(sql: str, values: Mapping[str, Any]) -> None:
        connection.execute(text(sql), values).close()

    return CallerTransaction(dialect, run)


def _execute(connection: Any, dialect: str, sql: str, values: Mapping[str, Any]) -> None:
    # A new cursor, because the caller's may have rows that are not read yet.
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
    """Raises OutboxError if the row would be committed without the caller's changes."""
    if dialect == SQLITE:
        commits_itself = connection.isolation_level is None or getattr(connection, "autocommit", -1) is True
        is_open = connection.in_transaction
    else:
        commits_itself = connection.autocommit
        is_open = connection.info.transaction_status.name != "IDLE"
    if commits_itself and not is_open:
        raise OutboxError(
            "the connection commits every statement, so the message would not be part of your transaction: begin a "
            "transaction first, and add the message inside it"
        )


def _is_instance(thing: Any, module: str, *names: str) -> bool:
    loaded = sys.modules.get(module)
    kinds = tuple(getattr(loaded, name) for name in names if hasattr(loaded, name))
    return isinstance(thing, kinds)


Headers = Mapping[str, str | bytes | None] | Iterable[tuple[str, str | bytes | None]]

_INSERT: Final = {
    # Messages without a key are spread over the shards by transaction, so that those of one transaction stay together.
    POSTGRESQL: f"""\
INSERT INTO {OUTBOX_TABLE} (shard_hash, topic, partition, key, value, headers, message_id)
VALUES (COALESCE(CAST(:shard_hash AS integer), CAST(txid_current() & {HASH_MAX} AS integer)),
        :topic, :partition, :key, :value, :headers, :message_id)""",
    SQLITE: f"""\
INSERT INTO {OUTBOX_TABLE} (shard_hash, topic, partition, key, value, headers, message_id)
VALUES (:shard_hash, :topic, :partition, :key, :value, :headers, :message_id)""",
}
#: PostgreSQL sends the notification when the transaction commits, once for all of its rows.
_NOTIFY: Final = f"\nRETURNING pg_notify('{NOTIFY_CHANNEL}', '')"
#: The first half of the number of `serialise` locks; the hash is the second half.
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
    """Publishes `value` to `topic` if and when the caller's transaction commits. Returns the message id.

    `connection` is a SQLAlchemy Session or Connection, or a connection or cursor of sqlite3 or psycopg. The value is
    bytes, text, None for a tombstone, or an object that can be JSON. This function does not commit.

    It adds a message id and a trace context to the headers unless they are there. The new trace context continues that
    of the message being handled, or the current span of OpenTelemetry.

    Messages of a key are published in the order in which they were added, unless two transactions write the same key at
    the same time. With `serialise` the second transaction waits for the first (in SQLite it always does). Without
    `notify` a relay on PostgreSQL finds the row at its next poll, some seconds later.

    Raises OutboxError, ValueError, PayloadError, and errors of the database.
    """
    from penstock.client.app.publisher import header_list
    from penstock.client.payloads import encode
    from penstock.client.tracing import Spans

    target, key = caller_transaction(connection), _key_bytes(key)
    with Spans().publish(topic, header_list(headers), key=key) as all_headers:
        row = new_row(
            topic,
            None if value is None else encode(value),
            key=key,
            headers=all_headers,
            partition=partition,
            message_id=message_id or uuid.uuid4().hex,
        )
        _insert(target, row, serialise=serialise, notify=notify)
    return row.message_id


def create_table(connection: Any) -> None:
    """Creates missing tables in the caller's transaction. Raises errors of the database."""
    target = caller_transaction(connection, in_transaction=False)
    if target.dialect == POSTGRESQL:
        # Two sessions that find no table at the same time would both create it.
        target.run(_CREATION_LOCK, {})
    for statement in schema(target.dialect):
        target.run(statement, {})


def _insert(target: CallerTransaction, row: NewOutboxRow, *, serialise: bool, notify: bool) -> None:
    if target.dialect != POSTGRESQL:
        # SQLite has one writer at a time, so the thread identifies the transaction well enough.
        values = row._replace(shard_hash=row.shard_hash if row.shard_hash is not None else _thread_hash())
        target.run(_INSERT[target.dialect], values._asdict())
        return
    if serialise and row.shard_hash is not None:
        target.run(_KEY_LOCK, {"shard_hash": row.shard_hash})
    target.run(_INSERT[POSTGRESQL] + (_NOTIFY if notify else ""), row._asdict())


def _thread_hash() -> int:
    return zlib.crc32(f"{os.getpid()} {threading.get_ident()}".encode()) & HASH_MAX


def _key_bytes(key: object) -> bytes | None:
    if isinstance(key, str):
        return key.encode()
    if key is None or isinstance(key, bytes):
        return key
    raise TypeError(f"a key must be str or bytes, not {type(key).__qualname__}")
