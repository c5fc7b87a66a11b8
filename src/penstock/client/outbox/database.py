"""The relay's side of the database: SQL that PostgreSQL and SQLite share, and opening a database by its URL.

`penstock.client.outbox.dialects` has what differs between the two.
"""

from __future__ import annotations

import re
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
#: By id, and never from where an earlier batch ended: a smaller id may be committed after a greater one.
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
    """What all relays of a database have in common."""

    #: Tells this database from others.
    identity: str
    name: str
    shards: int


class ShardStatus(NamedTuple):
    shard: int
    waiting: int
    #: Of those waiting, behind a rejected row of their key.
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
    """One connection, of one thread. Methods raise Disturbed where it is lost, OutboxError where it cannot work."""

    #: Functions of this kind of database: the size of bytes, and the age in seconds of a moment.
    length: str
    age: str

    @abstractmethod
    def query(self, sql: str, values: Mapping[str, Any] | None = None) -> list[tuple[Any, ...]]:
        """Parameters are written `:name`."""

    @abstractmethod
    def transaction(self) -> AbstractContextManager[object]:
        """What is run inside is committed together."""

    @abstractmethod
    def wait(self, seconds: float, stopping: threading.Event) -> None:
        """Return when rows may have been added, when it is time to look anyway, or when it is time to stop."""

    @abstractmethod
    def close(self) -> None: ...

    # Who may publish

    @abstractmethod
    def hold_table(self, *, alone: bool) -> bool:
        """Together with all who hold it likewise, or alone. Does not wait."""

    @abstractmethod
    def release_table(self) -> None: ...

    @abstractmethod
    def hold_shard(self, shard: int) -> bool:
        """Does not wait."""

    @abstractmethod
    def check_held(self) -> None:
        """Raises Disturbed if a lock is ours no more."""

    @abstractmethod
    def is_shard_held(self, shard: int) -> bool:
        """By whomever."""

    def agreement(self) -> RelayAgreement | None:
        found = self.query("SELECT identity, name, shards FROM penstock_outbox_relay")
        return RelayAgreement(*found[0]) if found else None

    def agree(self, name: str, shards: int) -> None:
        """Only who holds the table alone may."""
        values = {"identity": uuid.uuid4().hex, "name": name, "shards": shards}
        self.query(
            "INSERT INTO penstock_outbox_relay (singleton, identity, name, shards) "
            "VALUES (1, :identity, :name, :shards) "
            "ON CONFLICT (singleton) DO UPDATE SET name = :name, shards = :shards",
            values,
        )

    # What is published

    def batch(
        self, shard: int, shards: int, *, rows_max: int, bytes_max: int, holds_keys: bool
    ) -> list[OutboxRow]:
        """The first rows of a shard, at least one if there is any."""
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
        """How many there were."""
        return len(self.query(f"DELETE FROM {OUTBOX_TABLE} WHERE id IN ({_id_list(ids)}) RETURNING id"))

    def delete_published(self, fingerprints: Mapping[int, str]) -> int:
        """Of the rows that a marker names, those that are still there and are the ones that it means."""
        if not fingerprints:
            return 0
        with self.transaction():
            found = self.query(
                f"SELECT id, message_id FROM {OUTBOX_TABLE} WHERE id IN ({_id_list(fingerprints)})"
            )
            meant = [
                number for number, message_id in found if fingerprint(message_id) == fingerprints[number]
            ]
            return self.delete(meant) if meant else 0

    # What cannot be

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
        """Back into the outbox under the same ids, so that they are before what came later. How many there were."""
        with self.transaction():
            self.query(
                f"INSERT INTO {OUTBOX_TABLE} (id, {_MESSAGE_COLUMNS}) "
                f"SELECT id, {_MESSAGE_COLUMNS} FROM penstock_outbox_rejected WHERE id IN ({_id_list(ids)})"
            )
            return self.discard(ids)

    def discard(self, ids: Sequence[int]) -> int:
        """Give up what was rejected. How many there were."""
        sql = f"DELETE FROM penstock_outbox_rejected WHERE id IN ({_id_list(ids)}) RETURNING id"
        return len(self.query(sql))

    # What is there

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


#: As SQLAlchemy writes URLs.
_DRIVER_SUFFIX: Final = re.compile(r"\A(\w+)\+\w+(?=://)")
_URL_SCHEMES: Final = ("sqlite", "postgresql", "postgres:")
_URL_EXAMPLES: Final = "sqlite:///shop.db, sqlite:////var/lib/shop.db or postgresql://user@host/database"


def url_dialect(url: str) -> str:
    """Raises OutboxError."""
    return SQLITE if _parse_url(url).kind is DatabaseKind.SQLITE else POSTGRESQL


def open_database(url: str) -> OutboxDatabase:
    """Raises OutboxError, and Disturbed for a server that does not answer."""
    location = _parse_url(url)
    if location.kind is DatabaseKind.SQLITE:
        from penstock.client.outbox.dialects import SqliteOutbox

        return SqliteOutbox(Path(location.address), busy_timeout_s=location.busy_timeout_s)
    from penstock.client.outbox.dialects import PostgresOutbox

    return PostgresOutbox(location.address)


def create_tables(url: str) -> None:
    """And the database itself, if it is a file. Raises OutboxError, Disturbed."""
    location = _parse_url(url)
    if location.kind is DatabaseKind.SQLITE:
        _create_sqlite_tables(Path(location.address))
    else:
        _create_postgres_tables(location.address)


def _parse_url(url: str) -> DatabaseLocation:
    if not url.startswith(_URL_SCHEMES):
        raise OutboxError(f"an outbox is in SQLite or PostgreSQL: give a URL such as {_URL_EXAMPLES}")
    try:
        return parse_database_url(_DRIVER_SUFFIX.sub(r"\1", url))
    except StoreError as error:
        raise OutboxError(str(error)) from None


def _create_sqlite_tables(path: Path) -> None:
    import sqlite3

    try:
        with sqlite3.connect(path) as connection:
            create_table(connection)
        connection.close()
    except sqlite3.Error as error:
        raise OutboxError(f"{path}: {error}") from None


def _create_postgres_tables(url: str) -> None:
    from penstock.client.outbox.dialects import connect_postgres, postgres_error

    with connect_postgres(url) as connection:
        import psycopg

        try:
            with connection.transaction():
                create_table(connection)
        except psycopg.Error as error:
            raise postgres_error(error) from None
