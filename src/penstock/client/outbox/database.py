"""What a relay asks of a database, in SQL that PostgreSQL and SQLite share. Each has a file of its own for the rest."""

from __future__ import annotations

import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple

from penstock.client.outbox.rows import Row, fingerprint
from penstock.client.outbox.schema import TABLE

__all__ = ["Agreement", "Database", "Rejected", "ShardStatus"]

_MESSAGE: Final = "shard_hash, topic, partition, key, value, headers, message_id, created_at"
_OVERHEAD_BYTES: Final = 100
#: Rows whose key has a rejected row wait for it.
_NOT_HELD: Final = """\
NOT EXISTS (SELECT 1 FROM penstock_outbox_rejected AS rejected
            WHERE rejected.shard_hash = waiting.shard_hash AND rejected.topic = waiting.topic
              AND rejected.key = waiting.key)"""
#: By id, and never from where an earlier batch ended: a smaller id may be committed after a greater one.
_BATCH: Final = f"""\
SELECT id, topic, partition, key, value, headers, message_id FROM (
    SELECT chosen.*, SUM(size_bytes) OVER (ORDER BY id) - size_bytes AS bytes_before FROM (
        SELECT id, topic, partition, key, value, headers, message_id,
               COALESCE({{length}}(value), 0) + COALESCE({{length}}(key), 0) + {_OVERHEAD_BYTES} AS size_bytes
        FROM {TABLE} AS waiting
        WHERE shard_hash % {{shards}} = {{shard}} {{and_not_held}}
        ORDER BY id LIMIT {{rows}}
    ) AS chosen
) AS counted WHERE bytes_before < {{size_bytes}} ORDER BY id"""


class Agreement(NamedTuple):
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


class Rejected(NamedTuple):
    id: int
    topic: str
    key: bytes | None
    message_id: str
    reason: str
    age_s: float


class Database(ABC):
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

    def agreement(self) -> Agreement | None:
        found = self.query("SELECT identity, name, shards FROM penstock_outbox_relay")
        return Agreement(*found[0]) if found else None

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

    def batch(self, shard: int, shards: int, *, rows_max: int, bytes_max: int, holds_keys: bool) -> list[Row]:
        """The first rows of a shard, at least one if there is any."""
        sql = _BATCH.format(
            length=self.length,
            shards=shards,
            shard=shard,
            rows=rows_max,
            size_bytes=bytes_max,
            and_not_held=f"AND {_NOT_HELD}" if holds_keys else "",
        )
        return [Row(*found) for found in self.query(sql)]

    def delete(self, ids: Iterable[int]) -> int:
        """How many there were."""
        return len(self.query(f"DELETE FROM {TABLE} WHERE id IN ({_list(ids)}) RETURNING id"))

    def delete_published(self, told: Mapping[int, str]) -> int:
        """Of the rows that a marker names, those that are still there and are the ones that it means."""
        if not told:
            return 0
        with self.transaction():
            found = self.query(f"SELECT id, message_id FROM {TABLE} WHERE id IN ({_list(told)})")
            meant = [number for number, message_id in found if fingerprint(message_id) == told[number]]
            return self.delete(meant) if meant else 0

    # What cannot be

    def reject(self, number: int, reason: str) -> None:
        with self.transaction():
            self.query(
                f"INSERT INTO penstock_outbox_rejected (id, {_MESSAGE}, reason) "
                f"SELECT id, {_MESSAGE}, :reason FROM {TABLE} WHERE id = :id",
                {"id": number, "reason": reason},
            )
            self.delete([number])

    def rejected(self) -> list[Rejected]:
        age = self.age.format("rejected_at")
        sql = f"SELECT id, topic, key, message_id, reason, {age} FROM penstock_outbox_rejected ORDER BY id"
        return [Rejected(*found) for found in self.query(sql)]

    def retry(self, ids: Sequence[int]) -> int:
        """Back into the outbox under the same ids, so that they are before what came later. How many there were."""
        with self.transaction():
            self.query(
                f"INSERT INTO {TABLE} (id, {_MESSAGE}) "
                f"SELECT id, {_MESSAGE} FROM penstock_outbox_rejected WHERE id IN ({_list(ids)})"
            )
            return self.discard(ids)

    def discard(self, ids: Sequence[int]) -> int:
        """Give up what was rejected. How many there were."""
        sql = f"DELETE FROM penstock_outbox_rejected WHERE id IN ({_list(ids)}) RETURNING id"
        return len(self.query(sql))

    # What is there

    def status(self, shards: int) -> list[ShardStatus]:
        oldest = self.age.format("MIN(created_at)")
        waiting = self._by_shard(f"SELECT shard_hash % {shards}, COUNT(*), {oldest} FROM {TABLE} GROUP BY 1")
        held = self._by_shard(
            f"SELECT shard_hash % {shards}, COUNT(*) FROM {TABLE} AS waiting WHERE NOT ({_NOT_HELD}) GROUP BY 1"
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


def _list(ids: Iterable[int]) -> str:
    return ", ".join(str(int(number)) for number in ids)
