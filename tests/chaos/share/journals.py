"""Reads the journals of workers while they are written."""

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from tests.chaos.share.worker import GOT, STARTED, STORED, UNKNOWN


class RecordPosition(NamedTuple):
    partition: int
    offset: int


class Delivery(NamedTuple):
    """One delivery of a record to a worker. `stored_s` is when the worker's acknowledgement was known to be stored."""

    number: int
    delivery: int  # the delivery count
    fate: str
    asked_s: float
    stored_s: float | None


class Journals:
    """All deliveries so far, by position. `read` continues where it stopped."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._at: dict[Path, int] = dict.fromkeys(paths, 0)
        self._open: dict[Path, list[tuple[RecordPosition, int]]] = {}
        self.deliveries: dict[RecordPosition, list[Delivery]] = defaultdict(list)
        self.delivered = 0
        self.stored = 0
        self.starts = 0
        self.unknown: list[str] = []

    def read(self) -> None:
        for path in self._at:
            if not path.exists():
                continue
            with path.open("rb") as lines:
                lines.seek(self._at[path])
                for line in lines:
                    if not line.endswith(b"\n"):
                        break
                    self._at[path] += len(line)
                    self._take(path, *json.loads(line))

    def _take(self, path: Path, event: str, asked_s: float, at_s: float, rows: list[Any]) -> None:
        if event == GOT:
            self._open[path] = [self._delivered(asked_s, *row) for row in rows]
        elif event == STORED:
            self._settle(path, set(rows), at_s)
        elif event == UNKNOWN:
            self.unknown += rows
        elif event == STARTED:
            self.starts += 1
            self._open.pop(path, None)

    def _delivered(
        self, asked_s: float, partition: int, offset: int, number: int, count: int, fate: str
    ) -> tuple[RecordPosition, int]:
        self.delivered += 1
        had = self.deliveries[RecordPosition(partition, offset)]
        had.append(Delivery(number, count, fate, asked_s, None))
        return RecordPosition(partition, offset), len(had) - 1

    def _settle(self, path: Path, partitions: set[int], at_s: float) -> None:
        for position, index in self._open.pop(path, []):
            if position.partition in partitions:
                self.stored += 1
                had = self.deliveries[position]
                had[index] = had[index]._replace(stored_s=at_s)
