"""Making a log durable in three steps: begin on the loop, run in a thread, done on the loop."""

import os
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


class FlushTicket:
    """`run` blocks and belongs in a thread. An OSError from it must end the process: never run it again."""

    __slots__ = ("_directory", "_epochs", "_sync_directory", "_tail", "generation", "rolled", "upto")

    def __init__(
        self,
        *,
        directory: Path,
        upto: LogPosition,
        generation: int,
        tail: SharedFile,
        rolled: tuple[Rolled, ...],
        epoch_entries: list[tuple[int, int]] | None,
        sync_directory: bool,
    ) -> None:
        self.upto = upto
        self.generation = generation
        self.rolled = rolled
        self._directory = directory
        self._tail = tail.hold()
        self._epochs = epoch_entries
        self._sync_directory = sync_directory
        for item in rolled:
            if item.file is not None:
                item.file.hold()

    def run(self) -> None:
        for item in self.rolled:
            _sync_rolled(item)
            item.snapshot.write(self._directory)
        os.fdatasync(self._tail.fd)
        if self._sync_directory:
            sync_directory(self._directory)
        if self._epochs is not None:
            epochs.write(self._directory / EPOCH_CHECKPOINT, self._epochs)

    def release(self) -> None:
        self._tail.drop()
        for item in self.rolled:
            if item.file is not None:
                item.file.drop()


def _sync_rolled(item: Rolled) -> None:
    if item.segment.is_deleted:
        return
    if item.file is not None:
        os.fdatasync(item.file.fd)
    else:
        fd = os.open(item.segment.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.fdatasync(fd)
        finally:
            os.close(fd)
    write_indexes(item.segment)
