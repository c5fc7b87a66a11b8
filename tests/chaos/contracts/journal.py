"""What lives write down, one JSON line in one piece, so that a kill tears none; and reading it while they write."""

import json
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

STARTED, BEGUN, TAKEN, ENTERED, DONE, FAILED = "started", "begun", "taken", "entered", "done", "failed"
COMMITTED, MARKED, DROPPED, UNFINISHED, TRAPPED, IDLE, LEFT, BROKEN = (
    "committed",
    "marked",
    "dropped",
    "unfinished",
    "trapped",
    "idle",
    "left",
    "broken",
)


class Journal:
    """One per life; the lives of a member share the file. Times are of a clock that all processes share."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def note(self, event: str, *told: Any) -> None:
        os.write(self._file, json.dumps([event, time.monotonic(), *told]).encode() + b"\n")


class Line(NamedTuple):
    event: str
    at_s: float
    told: tuple[Any, ...]


class Reader:
    """Goes on where it has stopped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0

    def read(self) -> list[Line]:
        if not self._path.exists():
            return []
        found = []
        with self._path.open("rb") as lines:
            lines.seek(self._at)
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                self._at += len(line)
                event, at_s, *told = json.loads(line)
                found.append(Line(event, at_s, tuple(told)))
        return found
