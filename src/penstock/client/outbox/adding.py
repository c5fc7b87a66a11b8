"""The application's side: a message becomes a row in the transaction of whoever adds it."""

from __future__ import annotations

import os
import threading
import uuid
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, Final

from penstock.client.letters import Header
from penstock.client.outbox.connections import Target, target_of
from penstock.client.outbox.rows import HASH_MAX, NewRow, new_row
from penstock.client.outbox.schema import CHANNEL, POSTGRESQL, TABLE, schema

__all__ = ["add", "create_table"]

Headers = Mapping[str, str | bytes | None] | Iterable[tuple[str, str | bytes | None]]

_INSERT: Final = {
    # Messages without a key are spread over the shards by transaction, so that those of one stay together.
    POSTGRESQL: f"""\
INSERT INTO {TABLE} (shard_hash, topic, partition, key, value, headers, message_id)
VALUES (COALESCE(CAST(:shard_hash AS integer), CAST(txid_current() & {HASH_MAX} AS integer)),
        :topic, :partition, :key, :value, :headers, :message_id)""",
    "sqlite": f"""\
INSERT INTO {TABLE} (shard_hash, topic, partition, key, value, headers, message_id)
VALUES (:shard_hash, :topic, :partition, :key, :value, :headers, :message_id)""",
}
#: Told when the transaction commits, once however many rows it has.
_NOTIFY: Final = f"\nRETURNING pg_notify('{CHANNEL}', '')"
#: Of the locks that `serialise` takes: the first half of their number; the hash is the other.
_LOCK_CLASS: Final = 0x70736F62
_SERIALISE: Final = f"SELECT pg_advisory_xact_lock({_LOCK_CLASS}, CAST(:shard_hash AS integer))"
_CREATION_LOCK: Final = f"SELECT pg_advisory_xact_lock({_LOCK_CLASS + 1}, 0)"


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

    target, key = target_of(connection), _key_of(key)
    with Spans().publish(topic, _header_list(headers), key=key) as told:
        row = new_row(
            topic,
            _bytes_of(value),
            key=key,
            headers=told,
            partition=partition,
            message_id=message_id or uuid.uuid4().hex,
        )
        _insert(target, row, serialise=serialise, notify=notify)
    return row.message_id


def create_table(connection: Any) -> None:
    """Make the tables where they are missing, in the caller's transaction. Raises what the database raises."""
    target = target_of(connection, in_transaction=False)
    if target.dialect == POSTGRESQL:
        # Two that find no table at the same time would both make one.
        target.run(_CREATION_LOCK, {})
    for statement in schema(target.dialect):
        target.run(statement, {})


def _insert(target: Target, row: NewRow, *, serialise: bool, notify: bool) -> None:
    if target.dialect != POSTGRESQL:
        # A single writer at a time: a transaction's rows stay together anyway, so its thread is as good a sign.
        values = row._replace(shard_hash=row.shard_hash if row.shard_hash is not None else _thread_hash())
        target.run(_INSERT[target.dialect], values._asdict())
        return
    if serialise and row.shard_hash is not None:
        target.run(_SERIALISE, {"shard_hash": row.shard_hash})
    target.run(_INSERT[POSTGRESQL] + (_NOTIFY if notify else ""), row._asdict())


def _thread_hash() -> int:
    return zlib.crc32(f"{os.getpid()} {threading.get_ident()}".encode()) & HASH_MAX


def _bytes_of(value: object) -> bytes | None:
    from penstock.client.payloads import encode

    return None if value is None else encode(value)


def _key_of(key: object) -> bytes | None:
    if isinstance(key, str):
        return key.encode()
    if key is None or isinstance(key, bytes):
        return key
    raise TypeError(f"a key is text or bytes, not a {type(key).__qualname__}")


def _header_list(headers: Headers | None) -> list[Header]:
    from penstock.client.app.publishing import header_list

    return header_list(headers)
