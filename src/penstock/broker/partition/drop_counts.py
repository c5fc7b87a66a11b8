"""How many records this node has dropped, by partition, policy and reason, kept across restarts.

Each node counts what it dropped while it led a partition; the sum over all nodes is what was dropped. A node keeps its
counts when it loses the leadership or the replica, until the topic is deleted.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final
from uuid import UUID

from penstock.log.checkpoints import CorruptCheckpoint, read_checkpoint, write_checkpoint
from penstock.security.overflow import DropCounts, DroppedBy, DropReason

DROP_COUNTS_FILE: Final = "penstock-dropped-records"

logger = logging.getLogger("penstock.overflow")

Key = tuple[UUID, int]  # topic id and partition


class DropLedger:
    """The counts of one data directory. On the event loop, except `save`, which blocks."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / DROP_COUNTS_FILE
        self._counts: dict[Key, DropCounts] = {}
        self._is_dirty = False
        try:
            self._load()
        except CorruptCheckpoint as error:
            self._counts.clear()
            logger.error("the counts of dropped records are lost", extra={"reason": str(error)})

    def __iter__(self) -> Iterator[tuple[Key, DropCounts]]:
        return iter(list(self._counts.items()))

    @property
    def is_dirty(self) -> bool:
        return self._is_dirty

    def of(self, topic_id: UUID, index: int) -> DropCounts:
        return self._counts.get((topic_id, index), Counter())

    def add(self, key: Key, by: DroppedBy, reason: DropReason, records: int) -> None:
        counts = self._counts.get(key)
        if counts is None:
            counts = self._counts[key] = Counter()
        counts[by, reason] += records
        self._is_dirty = True

    def keep(self, exists: Callable[[UUID], bool]) -> None:
        """Forget the topics that no longer exist."""
        gone = [key for key in self._counts if not exists(key[0])]
        for key in gone:
            del self._counts[key]
        self._is_dirty = self._is_dirty or bool(gone)

    def rows(self) -> list[str]:
        """Return what `save` has to write now; until the next change the ledger is clean."""
        self._is_dirty = False
        return [
            f"{topic_id} {index} {by} {reason} {count}"
            for (topic_id, index), counts in self._counts.items()
            for (by, reason), count in counts.items()
        ]

    def save(self, rows: list[str]) -> None:
        """Blocking. Raises OSError; then the counts are dirty again."""
        try:
            write_checkpoint(self._path, rows)
        except OSError:
            self._is_dirty = True
            raise

    def _load(self) -> None:
        for row in read_checkpoint(self._path):
            try:
                topic_id, index, by, reason, count = row.split(" ")
                counts = self._counts.setdefault((UUID(topic_id), int(index)), Counter())
                counts[DroppedBy(by), DropReason(reason)] = int(count)
            except ValueError:
                raise CorruptCheckpoint(f"{self._path} has a malformed row: {row!r}") from None
