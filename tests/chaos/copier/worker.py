"""`python -m tests.chaos.copier.worker JOB`: consume, transform, produce, in transactions, until it is killed.

A round is copied whole or not at all: records and positions are committed together, and after an abort the copier goes
back to what is committed. A copier whose library never returns from a call, which happens when the broker that it waits
for dies, exits and is started again. What it did is written to a journal, one JSON line per event.
"""

import faulthandler
import importlib
import json
import signal
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

SOURCE, TARGET = "source", "target"
SOURCES, TARGETS = 6, 4  # partitions: a transaction reads a few, and writes to all
KEYS = 60
STUCK_S = 12.0  # a client library that does not return from a call for so long never will
GROUP = "copiers"
LIBRARIES = {
    "confluent": "tests.chaos.copier.with_confluent",
    "kafka-python": "tests.chaos.copier.with_kafka_python",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a copier is told. Its transactional id fences the copier that had it before."""

    servers: str
    slot: int
    library: str
    journal: str
    protocol: str = "classic"  # of the group
    batch: int = 100
    transaction_timeout_ms: int = 10_000
    session_timeout_ms: int = 4_000

    @property
    def transactional_id(self) -> str:
        return f"copier-{self.slot}"

    @property
    def instance_id(self) -> str | None:
        """Every other copier is a static member, whose heir need not wait for the end of its session."""
        return f"copier-{self.slot}" if self.slot % 2 else None

    def as_text(self) -> str:
        return json.dumps(asdict(self))


class Item(NamedTuple):
    partition: int
    offset: int
    key: bytes
    value: bytes


class MustAbort(Exception):
    """This transaction cannot be committed; the next one can."""


class Copier(Protocol):
    def poll(self) -> list[Item]:
        """What is new, of partitions that are this copier's."""

    def copy(self, items: list[Item]) -> None:
        """In one transaction. Raises MustAbort; what else it raises ends the copier."""

    def abort(self) -> None: ...

    def rewind(self) -> None:
        """To what is committed."""

    def close(self) -> None: ...


class Journal:
    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def add(self, event: str, count: int = 0, words: str = "") -> None:
        self._file.write(json.dumps([time.time(), event, count, words]) + "\n")


def source_of(number: int) -> int:
    return number % KEYS % SOURCES


def target_of(key: bytes) -> int:
    return int(key) % TARGETS


def next_offsets(items: Iterable[Item]) -> dict[int, int]:
    return {item.partition: item.offset + 1 for item in items}


def run(copier: Copier, journal: Journal, stopping: threading.Event) -> None:
    while not stopping.is_set():
        faulthandler.dump_traceback_later(STUCK_S, exit=True)
        items = copier.poll()
        if not items:
            continue
        try:
            copier.copy(items)
            journal.add("committed", len(items))
        except MustAbort as error:
            journal.add("aborted", len(items), str(error))
            copier.abort()
            copier.rewind()
    copier.close()


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    journal = Journal(Path(job.journal))
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    faulthandler.register(signal.SIGUSR1)  # where does it stand?
    try:
        library: Any = importlib.import_module(LIBRARIES[job.library])
        copier: Copier = library.connect(job)
        journal.add("started")
        run(copier, journal, stopping)
    except Exception as error:
        journal.add("gave up", 0, f"{type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    main()
