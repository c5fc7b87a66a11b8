"""What clients asked and were told, in the order in which it happened, as JSON lines.

An operation is invoked, and then is ok, has failed (it did certainly not happen), or is info (unknown). Sends and
polls of many records are one operation each, so that the history of millions of records stays readable.
"""

import json
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

Kind = Literal["invoke", "ok", "fail", "info"]
Action = Literal["send", "poll", "seek", "commit", "committed", "fault", "heal"]


UNKNOWN = -1  # the offset of a send that is ok, where the producer was only told that it was there already


class Op(NamedTuple):
    """`values` are [partition, value] of sends that begin or fail, [partition, offset, value] of records that are there
    (sends that are ok, polls), [partition, offset] of commits and seeks, and free text of faults."""

    process: str
    type: Kind
    f: Action
    topic: str
    values: list[Any]
    time_s: float = 0.0


class History:
    """Any thread may add; the file is the order."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("w", buffering=1 << 16)
        self._lock = threading.Lock()
        self._start_s = time.monotonic()
        self.count = 0

    def add(self, process: str, kind: Kind, action: Action, topic: str, values: list[Any]) -> None:
        with self._lock:
            row = (process, kind, action, topic, values, round(time.monotonic() - self._start_s, 4))
            self._file.write(json.dumps(row, separators=(",", ":")) + "\n")
            self.count += 1

    def close(self) -> None:
        with self._lock:
            self._file.close()


def read(path: Path) -> Iterator[Op]:
    with path.open() as lines:
        yield from parse(lines)


def parse(lines: Iterable[str]) -> Iterator[Op]:
    for line in lines:
        yield Op(*json.loads(line))
