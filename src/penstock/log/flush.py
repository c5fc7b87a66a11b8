"""Making a log durable in three steps: begin on the loop, run in a thread, done on the loop."""

import errno
import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from penstock.log import epochs
from penstock.log.checkpoints import sync_directory
from penstock.log.epochs import EpochCache
from penstock.log.lookup import write_indexes
from penstock.log.names import EPOCH_CHECKPOINT
from penstock.log.positions import LogPosition
from penstock.log.segment import Segment
from penstock.log.snapshots import Snapshot
from penstock.log.synced_offsets import SyncedSlot
from penstock.log.tail import NO_DESCRIPTORS, SharedFile

#: Rolled segments that wait for a flush keep their write descriptor, which is the one that reports a failed
#: write-back for sure; beyond this many they are reopened.
HELD_FILES_MAX: Final = 32

_NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_logger = logging.getLogger("penstock.log")


class Rolled(NamedTuple):
    """A segment that is closed but not yet durable."""

    segment: Segment
    file: SharedFile | None


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


@dataclass(slots=True, kw_only=True)
class FlushTicket:
    """`run` blocks and belongs in a thread. An OSError from it must end the process: never run it again.

    What recovery could find out by itself (indexes, snapshots, epochs) may wait while the disk is full.
    """

    upto: LogPosition
    generation: int
    directory: Path
    gate: FlushGate
    tail: SharedFile
    rolled: tuple[Rolled, ...]
    snapshots: tuple[Snapshot, ...]
    epoch_entries: list[tuple[int, int]] | None
    names_changed: bool
    slot: SyncedSlot | None = None
    complete: bool = False
    #: A file could not be opened for want of descriptors: nothing counts as synced, and it is to be tried again.
    postponed: bool = False

    def run(self) -> None:
        with self.gate.lock:
            if self.gate.generation == self.generation:
                try:
                    self.sync()
                except OSError as error:
                    # No sync fails like this, only an open.
                    if error.errno not in NO_DESCRIPTORS:
                        raise
                    self.postponed = True

    def sync(self) -> None:
        for item in self.rolled:
            _sync_rolled(item)
        os.fdatasync(self.tail.fd)
        if self.slot is not None:
            self.slot.note(self.upto.offset)
        try:
            self._write_notes()
            self.complete = True
        except OSError as error:
            if error.errno not in _NO_SPACE:
                raise
            _logger.debug("no space to flush", extra={"log": str(self.directory), "reason": str(error)})
        if self.names_changed:
            sync_directory(self.directory)

    def _write_notes(self) -> None:
        for item in self.rolled:
            if not item.segment.is_deleted:
                write_indexes(item.segment)
        for snapshot in self.snapshots:
            snapshot.write(self.directory)
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


class FlushState:
    """What of a log is not durable yet. Appending belongs to the loop; compaction lets go in its thread."""

    __slots__ = (
        "_held",
        "_lock",
        "_slot",
        "_snapshots",
        "_ticket",
        "gate",
        "names_changed",
        "recovery_point",
        "synced",
    )

    def __init__(self, synced: LogPosition, slot: SyncedSlot | None = None) -> None:
        self.synced = synced
        self._slot = slot
        if slot is not None:
            slot.note(synced.offset)
        self.recovery_point = synced.offset
        self.names_changed = False
        self.gate = FlushGate()
        self._held: list[Rolled] = []
        #: The producers as they were at the end of rolled segments; what is known of them outlives the segments.
        self._snapshots: list[Snapshot] = []
        self._ticket: FlushTicket | None = None
        self._lock = threading.Lock()

    @property
    def rolled_count(self) -> int:
        return max(len(self._held), len(self._snapshots))

    def add(self, rolled: Rolled, snapshot: Snapshot) -> None:
        with self._lock:
            self._held.append(rolled)
            self._snapshots.append(snapshot)
            surplus = len(self._held) - HELD_FILES_MAX - 1
            if surplus >= 0 and (file := self._held[surplus].file) is not None:
                file.drop()
                self._held[surplus] = self._held[surplus]._replace(file=None)
        self.names_changed = True

    def begin(
        self, directory: Path, end: LogPosition, tail: SharedFile, epoch_cache: EpochCache
    ) -> FlushTicket:
        assert self._ticket is None, "a flush is under way"
        with self._lock:
            self._ticket = ticket = FlushTicket(
                upto=end,
                generation=self.gate.generation,
                directory=directory,
                gate=self.gate,
                tail=tail,
                rolled=tuple(self._held),
                snapshots=tuple(self._snapshots),
                epoch_entries=epoch_cache.entries() if epoch_cache.dirty else None,
                names_changed=self.names_changed,
                slot=self._slot,
            )
            ticket.hold_files()
        epoch_cache.dirty = self.names_changed = False
        return ticket

    def done(self, ticket: FlushTicket, epoch_cache: EpochCache) -> list[Segment]:
        """Returns the segments that are durable now and were not before."""
        if ticket is not self._ticket:
            return []  # the log was closed meanwhile
        self._ticket = None
        flushed = [item.segment for item in ticket.rolled]
        with self._lock:
            ticket.release_files()
        if ticket.generation == self.gate.generation and not ticket.postponed:
            self.synced = ticket.upto
        if not ticket.complete:
            epoch_cache.dirty = self.names_changed = True
            return []
        self.recovery_point = self.synced.offset
        written = {snapshot.offset for snapshot in ticket.snapshots}
        self._snapshots = [snapshot for snapshot in self._snapshots if snapshot.offset not in written]
        self.let_go(flushed)
        return [segment for segment in flushed if not segment.is_deleted]

    def let_go(self, segments: Sequence[Segment]) -> None:
        leaving = set(segments)
        with self._lock:
            for item in self._held:
                if item.segment in leaving and item.file is not None:
                    item.file.drop()
            self._held = [item for item in self._held if item.segment not in leaving]

    def starts_at(self, offset: int) -> Snapshot | None:
        """Everything before has gone. Returns the producers there, unless they are on disk already."""
        self._snapshots = [snapshot for snapshot in self._snapshots if snapshot.offset >= offset]
        return next((snapshot for snapshot in self._snapshots if snapshot.offset == offset), None)

    def lower_note(self, offset: int) -> None:
        """Before the log is cut there, and in a new generation: no flush may note what is about to go."""
        if self._slot is not None:
            self._slot.lower(offset)

    def cut_to(self, end: LogPosition) -> None:
        """Nothing at or beyond an offset is there any more, so nothing of it can be durable."""
        self.let_go([item.segment for item in self._held if item.segment.base_offset >= end.segment_base])
        self._snapshots = [snapshot for snapshot in self._snapshots if snapshot.offset <= end.offset]
        if self.synced.offset > end.offset:
            self.synced = end
        self.recovery_point = min(self.recovery_point, end.offset)
        self.names_changed = True

    def stop(self) -> None:
        """Waits for the flush that is under way; one that has not started will find nothing to do."""
        self.gate.next_generation()
        if self._ticket is not None:
            with self._lock:
                self._ticket.release_files()
            self._ticket = None

    def let_go_of_all(self) -> None:
        self._snapshots = []
        self.let_go([item.segment for item in self._held])


def _sync_rolled(item: Rolled) -> None:
    if item.file is not None:
        os.fdatasync(item.file.fd)
    else:
        _sync_closed(item.segment)


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
