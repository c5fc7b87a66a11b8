"""The relay's side of the database: SQL that PostgreSQL and SQLite share, and opening a database by its URL.

`penstock.client.outbox.dialects` has what differs between the two.
"""

from __future__ import annotations

import re
import sqlite3
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final, NamedTuple

from penstock.client.databases.base import DatabaseKind, DatabaseLocation, StoreError, parse_database_url
from penstock.client.outbox.messages import (
    OUTBOX_TABLE,
    POSTGRESQL,
    SQLITE,
    OutboxError,
    OutboxRow,
    create_table,
    fingerprint,
)

__all__ = (
    "OutboxDatabase",
    "RejectedRow",
    "RelayAgreement",
    "ShardStatus",
    "create_tables",
    "open_database",
    "url_dialect",
)


_MESSAGE_COLUMNS: Final = "shard_hash, topic, partition, key, value, headers, message_id, created_at"
_ROW_OVERHEAD_BYTES: Final = 100
#: Rows whose key has a rejected row wait for it.
_NOT_HELD: Final = """\
NOT EXISTS (SELECT 1 FROM penstock_outbox_rejected AS rejected
            WHERE rejected.shard_hash = waiting.shard_hash AND rejected.topic = waiting.topic
              AND rejected.key = waiting.key)"""
#: Always reads from the smallest id, because a smaller id may be committed after a greater one.
_SELECT_BATCH: Final = f"""\
SELECT id, topic, partition, key, value, headers, message_id FROM (
    SELECT chosen.*, SUM(size_bytes) OVER (ORDER BY id) - size_bytes AS bytes_before FROM (
        SELECT id, topic, partition, key, value, headers, message_id,
               COALESCE({{length}}(value), 0) + COALESCE({{length}}(key), 0) + {_ROW_OVERHEAD_BYTES} AS size_bytes
        FROM {OUTBOX_TABLE} AS waiting
        WHERE shard_hash % {{shards}} = {{shard}} {{and_not_held}}
        ORDER BY id LIMIT {{rows}}
    ) AS chosen
) AS counted WHERE bytes_before < {{size_bytes}} ORDER BY id"""


class RelayAgreement(NamedTuple):
    """The values that all relays of a database share."""

    #: The id of this database.
    identity: str
    name: str
    shards: int


class ShardStatus(NamedTuple):
    shard: int
    waiting: int
    #: How many of the waiting rows are behind a rejected row of their key.
    held: int
    rejected: int
    oldest_s: float | None
    is_relayed: bool


class RejectedRow(NamedTuple):
    id: int
    topic: str
    key: bytes | None
    message_id: str
    reason: str
    age_s: float


class OutboxDatabase(ABC):
    """One connection, used by one thread. Methods raise RelayInterrupted if it is lost, OutboxError if it cannot work.

    The relay needs one session for its locks, so it does not use the connection pools of `penstock.client.databases`.
    """

    #: SQL functions of the dialect: the length of bytes, and the age of a timestamp in seconds.
    length: str
    age: str

    @abstractmethod
    def query(self, sql: str, values: Mapping[str, Any] | None = None) -> list[tuple[Any, ...]]:
        """Runs a statement with parameters such as `:name`, and returns its rows."""

    @abstractmethod
    def transaction(self) -> AbstractContextManager[object]:
        """Commits all statements of the block together."""

    @abstractmethod
    def wait(self, seconds: float, stopping: threading.Event) -> None:
        """Returns when rows may have been added, after `seconds`, or when `stopping` is set."""

    @abstractmethod
    def close(self) -> None: ...

    # Locks and agreement

    @abstractmethod
    def hold_table(self, *, alone: bool) -> bool:
        """Takes the table's lock, shared with other relays or `alone`. Does not wait; returns whether it succeeded."""

    @abstractmethod
    def release_table(self) -> None: ...

    @abstractmethod
    def hold_shard(self, shard: int) -> bool:
        """Takes the shard's lock. Does not wait; returns whether it succeeded."""

    @abstractmethod
    def check_held(self) -> None:
        """Raises RelayInterrupted if this relay has lost one of its locks."""

    @abstractmethod
    def is_shard_held(self, shard: int) -> bool:
        """Whether any relay holds the shard's lock."""

    def agreement(self) -> RelayAgreement | None:
        found = self.query("SELECT identity, name, shards FROM penstock_outbox_relay")
        return RelayAgreement(*found[0]) if found else None

    def agree(self, name: str, shards: int) -> None:
        """Records the agreement. The caller must hold the table alone."""
        values = {"identity": uuid.uuid4().hex, "name": name, "shards": shards}
        self.query(
            "INSERT INTO penstock_outbox_relay (singleton, identity, name, shards) "
            "VALUES (1, :identity, :name, :shards) "
            "ON CONFLICT (singleton) DO UPDATE SET name = :name, shards = :shards",
            values,
        )

    # Rows to publish

    def batch(
        self, shard: int, shards: int, *, rows_max: int, bytes_max: int, holds_keys: bool
    ) -> list[OutboxRow]:
        """Returns the first rows of a shard: at least one, if there is any."""
        sql = _SELECT_BATCH.format(
            length=self.length,
            shards=shards,
            shard=shard,
            rows=rows_max,
            size_bytes=bytes_max,
            and_not_held=f"AND {_NOT_HELD}" if holds_keys else "",
        )
        return [OutboxRow(*found) for found in self.query(sql)]

    def delete(self, ids: Iterable[int]) -> int:
        """Deletes rows, and returns how many there were."""
        return len(self.query(f"DELETE FROM {OUTBOX_TABLE} WHERE id IN ({_id_list(ids)}) RETURNING id"))

    def delete_published(self, fingerprints: Mapping[int, str]) -> int:
        """Deletes the rows that a marker names, if they still exist and their fingerprints match."""
        if not fingerprints:
            return 0
        with self.transaction():
            found = self.query(
                f"SELECT id, message_id FROM {OUTBOX_TABLE} WHERE id IN ({_id_list(fingerprints)})"
            )
            matching = [
                number for number, message_id in found if fingerprint(message_id) == fingerprints[number]
            ]
            return self.delete(matching) if matching else 0

    # Rejected rows

    def reject(self, number: int, reason: str) -> None:
        with self.transaction():
            self.query(
                f"INSERT INTO penstock_outbox_rejected (id, {_MESSAGE_COLUMNS}, reason) "
                f"SELECT id, {_MESSAGE_COLUMNS}, :reason FROM {OUTBOX_TABLE} WHERE id = :id",
                {"id": number, "reason": reason},
            )
            self.delete([number])

    def rejected(self) -> list[RejectedRow]:
        age = self.age.format("rejected_at")
        sql = f"SELECT id, topic, key, message_id, reason, {age} FROM penstock_outbox_rejected ORDER BY id"
        return [RejectedRow(*found) for found in self.query(sql)]

    def retry(self, ids: Sequence[int]) -> int:
        """Moves rejected rows back into the outbox, and returns how many there were.

        They keep their ids, so that they stay before later rows.
        """
        with self.transaction():
            self.query(
                f"INSERT INTO {OUTBOX_TABLE} (id, {_MESSAGE_COLUMNS}) "
                f"SELECT id, {_MESSAGE_COLUMNS} FROM penstock_outbox_rejected WHERE id IN ({_id_list(ids)})"
            )
            return self.discard(ids)

    def discard(self, ids: Sequence[int]) -> int:
        """Deletes rejected rows, and returns how many there were."""
        sql = f"DELETE FROM penstock_outbox_rejected WHERE id IN ({_id_list(ids)}) RETURNING id"
        return len(self.query(sql))

    # Status

    def status(self, shards: int) -> list[ShardStatus]:
        oldest = self.age.format("MIN(created_at)")
        waiting = self._by_shard(
            f"SELECT shard_hash % {shards}, COUNT(*), {oldest} FROM {OUTBOX_TABLE} GROUP BY 1"
        )
        held = self._by_shard(
            f"SELECT shard_hash % {shards}, COUNT(*) FROM {OUTBOX_TABLE} AS waiting WHERE NOT ({_NOT_HELD}) GROUP BY 1"
        )
        rejected = self._by_shard(
            f"SELECT shard_hash % {shards}, COUNT(*) FROM penstock_outbox_rejected GROUP BY 1"
        )
        return [
            ShardStatus(
                shard,
                waiting.get(shard, (0, None))[0],
                held.get(shard, (0,))[0],
                rejected.get(shard, (0,))[0],
                waiting.get(shard, (0, None))[1],
                self.is_shard_held(shard),
            )
            for shard in range(shards)
        ]

    def _by_shard(self, sql: str) -> dict[int, tuple[Any, ...]]:
        return {shard: tuple(rest) for shard, *rest in self.query(sql)}


def _id_list(ids: Iterable[int]) -> str:
    return ", ".join(str(int(number)) for number in ids)


#: SQLAlchemy puts the driver's name into its URLs.
_DRIVER_SUFFIX: Final = re.compile(r"\A(\w+)\+\w+(?=://)")
_URL_SCHEMES: Final = ("sqlite", "postgresql", "postgres:")
_URL_EXAMPLES: Final = "sqlite:///shop.db, sqlite:////var/lib/shop.db or postgresql://user@host/database"


def url_dialect(url: str) -> str:
    """Raises OutboxError."""
    return SQLITE if _parse_url(url).kind is DatabaseKind.SQLITE else POSTGRESQL


def open_database(url: str) -> OutboxDatabase:
    """Raises OutboxError, or RelayInterrupted if the server does not answer."""
    # The dialects import this module.
    from penstock.client.outbox.dialects import PostgresOutbox, SqliteOutbox

    location = _parse_url(url)
    if location.kind is DatabaseKind.SQLITE:
        return SqliteOutbox(Path(location.address), busy_timeout_s=location.busy_timeout_s)
    return PostgresOutbox(location)


def create_tables(url: str) -> None:
    """Creates missing tables, and the file of an SQLite database. Raises OutboxError, RelayInterrupted."""
    from penstock.client.outbox.dialects import connect_postgres, translated_errors

    location = _parse_url(url)
    if location.kind is DatabaseKind.SQLITE:
        _create_sqlite_tables(Path(location.address))
        return
    with connect_postgres(location) as connection, translated_errors(), connection.transaction():
        create_table(connection)


def _parse_url(url: str) -> DatabaseLocation:
    if not url.startswith(_URL_SCHEMES):
        raise OutboxError(f"an outbox needs SQLite or PostgreSQL: use a URL such as {_URL_EXAMPLES}")
    try:
        return parse_database_url(_DRIVER_SUFFIX.sub(r"\1", url))
    except StoreError as error:
        raise OutboxError(str(error)) from None


def _create_sqlite_tables(path: Path) -> None:
    try:
        with sqlite3.connect(path) as connection:
            create_table(connection)
        connection.close()
    except sqlite3.Error as error:
        raise OutboxError(f"{path}: {error}") from None
