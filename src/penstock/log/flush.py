"""Making a log durable in three steps: begin on the loop, run in a thread, done on the loop."""

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from penstock.log import epochs
from penstock.log.checkpoints import sync_directory
from penstock.log.lookup import write_indexes
from penstock.log.names import EPOCH_CHECKPOINT
from penstock.log.positions import LogPosition
from penstock.log.segment import Segment
from penstock.log.snapshots import Snapshot
from penstock.log.tail import SharedFile

#: Rolled segments that wait for a flush keep their write descriptor, which is the one that reports a failed
#: write-back for sure; beyond this many they are reopened.
HELD_FILES_MAX: Final = 32


class Rolled(NamedTuple):
    """A segment that is closed but not yet durable, and the producers as they were at its end."""

    segment: Segment
    file: SharedFile | None
    snapshot: Snapshot


class FlushGate:
    """What a flush holds while it works. A ticket of another generation finds nothing left to do."""

    __slots__ = ("generation", "lock")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.generation = 0

    def next_generation(self) -> None:
        """The files have been cut or closed. Waits for the flush that is under way."""
        with self.lock:
            self.generation += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushTicket:
    """`run` blocks and belongs in a thread. An OSError from it must end the process: never run it again."""

    upto: LogPosition
    generation: int
    directory: Path
    gate: FlushGate
    tail: SharedFile
    rolled: tuple[Rolled, ...]
    epoch_entries: list[tuple[int, int]] | None
    names_changed: bool

    def run(self) -> None:
        with self.gate.lock:
            if self.gate.generation == self.generation:
                self.sync()

    def sync(self) -> None:
        for item in self.rolled:
            _sync_rolled(item)
            item.snapshot.write(self.directory)
        os.fdatasync(self.tail.fd)
        if self.names_changed:
            sync_directory(self.directory)
        if self.epoch_entries is not None:
            epochs.write(self.directory / EPOCH_CHECKPOINT, self.epoch_entries)

    def hold_files(self) -> None:
        """The descriptors stay open until `release_files`, whatever the log does meanwhile."""
        self.tail.hold()
        for item in self.rolled:
            if item.file is not None:
                item.file.hold()

    def release_files(self) -> None:
        self.tail.drop()
        for item in self.rolled:
            if item.file is not None:
                item.file.drop()


def _sync_rolled(item: Rolled) -> None:
    if item.file is not None:
        os.fdatasync(item.file.fd)
    else:
        _sync_closed(item.segment)
    if not item.segment.is_deleted:
        write_indexes(item.segment)


def _sync_closed(segment: Segment) -> None:
    try:
        fd = os.open(segment.path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        if segment.is_deleted:
            return
        raise
    try:
        os.fdatasync(fd)
    finally:
        os.close(fd)
