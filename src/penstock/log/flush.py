"""Makes a log durable in three steps: begin on the event loop, run in a thread, finish on the event loop.

`begin_writeback` asks the kernel to start writing dirty pages now, without waiting for them and without making them
durable. Otherwise Linux lets dirty pages grow to a tenth of memory and then makes the next writer wait for the
disk, which here is the event loop. Where the system call does not exist, it does nothing.
"""

import errno
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from penstock.log import leader_epochs
from penstock.log.checkpoints import SyncedOffsetSlot
from penstock.log.data_directory import LEADER_EPOCH_CHECKPOINT_FILE
from penstock.log.index_files import write_indexes
from penstock.log.leader_epochs import LeaderEpochCache
from penstock.log.producer_snapshots import ProducerSnapshot
from penstock.log.segment import LogOffsetMetadata, LogSegment
from penstock.log.segment_files import NO_DESCRIPTORS_ERRNOS, SharedFile
from penstock.protocol.durable_files import sync_directory

_SYNC_FILE_RANGE_WRITE: Final = 2


def begin_writeback(fd: int) -> None:
    """Blocks if the disk's queue is full, so it belongs in a thread. fsync reports the errors."""
    call = _sync_file_range()
    if call is not None:
        call(fd, 0, 0, _SYNC_FILE_RANGE_WRITE)  # length 0: to the end of the file


@cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    import ctypes

    try:
        call = ctypes.CDLL(None, use_errno=True).sync_file_range
    except (OSError, AttributeError):
        return None
    call.argtypes = (ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong, ctypes.c_uint)
    call.restype = ctypes.c_int
    return call


#: Rolled segments that wait for a flush keep their write descriptor, because only that one is sure to report a failed
#: write-back. Beyond this many, segments are reopened for their sync.
HELD_FILES_MAX: Final = 32

_NO_SPACE_ERRNOS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_logger = logging.getLogger("penstock.log")


class RolledSegment(NamedTuple):
    """A segment that is closed but not yet durable."""

    segment: LogSegment
    file: SharedFile | None


class FlushGate:
    """Held by a flush while it runs. A job of an earlier generation finds nothing left to do."""

    __slots__ = ("generation", "lock")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.generation = 0

    def next_generation(self) -> None:
        """Invalidates earlier jobs, because files are truncated or closed. Waits for the flush in progress."""
        with self.lock:
            self.generation += 1


@dataclass(slots=True, kw_only=True)
class FlushJob:
    """`run` blocks and belongs in a thread. An OSError from it must end the process: never run it again.

    What recovery can rebuild (indexes, snapshots, epochs) may wait while the disk is full.
    """

    upto: LogOffsetMetadata
    generation: int
    directory: Path
    gate: FlushGate
    tail: SharedFile
    rolled: tuple[RolledSegment, ...]
    snapshots: tuple[ProducerSnapshot, ...]
    epoch_entries: list[tuple[int, int]] | None
    directory_changed: bool
    slot: SyncedOffsetSlot | None = None
    complete: bool = False
    #: A file could not be opened for lack of descriptors: nothing counts as synced, and the flush is retried.
    postponed: bool = False

    def run(self) -> None:
        with self.gate.lock:
            if self.gate.generation == self.generation:
                try:
                    self.sync()
                except OSError as error:
                    # Only an open fails with these errors, never a sync.
                    if error.errno not in NO_DESCRIPTORS_ERRNOS:
                        raise
                    self.postponed = True

    def sync(self) -> None:
        for item in self.rolled:
            if item.file is not None:
                os.fdatasync(item.file.fd)
            else:
                _sync_closed(item.segment)
        os.fdatasync(self.tail.fd)
        if self.slot is not None:
            self.slot.note(self.upto.offset)
        try:
            self._write_metadata_files()
            self.complete = True
        except OSError as error:
            if error.errno not in _NO_SPACE_ERRNOS:
                raise
            _logger.debug("no space to flush", extra={"log": str(self.directory), "reason": str(error)})
        if self.directory_changed:
            sync_directory(self.directory)

    def _write_metadata_files(self) -> None:
        for item in self.rolled:
            if not item.segment.is_deleted:
                write_indexes(item.segment)
        for snapshot in self.snapshots:
            snapshot.write(self.directory)
        if self.epoch_entries is not None:
            leader_epochs.write(self.directory / LEADER_EPOCH_CHECKPOINT_FILE, self.epoch_entries)

    def hold_files(self) -> None:
        """Keeps the descriptors open until `release_files`, whatever the log does meanwhile."""
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
    """What of a log is not durable yet. The event loop appends; compaction releases segments in its thread."""

    __slots__ = (
        "_flush_job",
        "_held",
        "_lock",
        "_slot",
        "_snapshots",
        "directory_changed",
        "gate",
        "recovery_point",
        "synced",
    )

    def __init__(self, synced: LogOffsetMetadata, slot: SyncedOffsetSlot | None = None) -> None:
        self.synced = synced
        self._slot = slot
        if slot is not None:
            slot.note(synced.offset)
        self.recovery_point = synced.offset
        self.directory_changed = False
        self.gate = FlushGate()
        self._held: list[RolledSegment] = []
        #: The producer state at the end of rolled segments; it is needed even after the segments are deleted.
        self._snapshots: list[ProducerSnapshot] = []
        self._flush_job: FlushJob | None = None
        self._lock = threading.Lock()

    @property
    def rolled_count(self) -> int:
        return max(len(self._held), len(self._snapshots))

    def add(self, rolled: RolledSegment, snapshot: ProducerSnapshot) -> None:
        with self._lock:
            self._held.append(rolled)
            self._snapshots.append(snapshot)
            surplus = len(self._held) - HELD_FILES_MAX - 1
            if surplus >= 0 and (file := self._held[surplus].file) is not None:
                file.drop()
                self._held[surplus] = self._held[surplus]._replace(file=None)
        self.directory_changed = True

    def begin(
        self, directory: Path, end: LogOffsetMetadata, tail: SharedFile, epoch_cache: LeaderEpochCache
    ) -> FlushJob:
        assert self._flush_job is None, "a flush is under way"
        with self._lock:
            self._flush_job = flush_job = FlushJob(
                upto=end,
                generation=self.gate.generation,
                directory=directory,
                gate=self.gate,
                tail=tail,
                rolled=tuple(self._held),
                snapshots=tuple(self._snapshots),
                epoch_entries=epoch_cache.entries() if epoch_cache.dirty else None,
                directory_changed=self.directory_changed,
                slot=self._slot,
            )
            flush_job.hold_files()
        epoch_cache.dirty = self.directory_changed = False
        return flush_job

    def done(self, flush_job: FlushJob, epoch_cache: LeaderEpochCache) -> list[LogSegment]:
        """Returns the segments that are durable now and were not before."""
        if flush_job is not self._flush_job:
            return []  # the log was closed meanwhile
        self._flush_job = None
        flushed = [item.segment for item in flush_job.rolled]
        with self._lock:
            flush_job.release_files()
        if flush_job.generation == self.gate.generation and not flush_job.postponed:
            self.synced = flush_job.upto
        if not flush_job.complete:
            epoch_cache.dirty = self.directory_changed = True
            return []
        self.recovery_point = self.synced.offset
        written = {snapshot.offset for snapshot in flush_job.snapshots}
        self._snapshots = [snapshot for snapshot in self._snapshots if snapshot.offset not in written]
        self.release_segments(flushed)
        return [segment for segment in flushed if not segment.is_deleted]

    def release_segments(self, segments: Sequence[LogSegment]) -> None:
        leaving = set(segments)
        with self._lock:
            for item in self._held:
                if item.segment in leaving and item.file is not None:
                    item.file.drop()
            self._held = [item for item in self._held if item.segment not in leaving]

    def drop_snapshots_before(self, offset: int) -> ProducerSnapshot | None:
        """Everything before the offset is gone. Returns the snapshot there, unless it is on disk already."""
        self._snapshots = [snapshot for snapshot in self._snapshots if snapshot.offset >= offset]
        return next((snapshot for snapshot in self._snapshots if snapshot.offset == offset), None)

    def lower_synced_offset(self, offset: int) -> None:
        """Call it before the log is truncated, and in a new generation: no flush may record a higher offset then."""
        if self._slot is not None:
            self._slot.lower(offset)

    def truncate_to(self, end: LogOffsetMetadata) -> None:
        """Nothing at or beyond this position is in the log any more, so none of it is durable."""
        self.release_segments(
            [item.segment for item in self._held if item.segment.base_offset >= end.segment_base]
        )
        self._snapshots = [snapshot for snapshot in self._snapshots if snapshot.offset <= end.offset]
        if self.synced.offset > end.offset:
            self.synced = end
        self.recovery_point = min(self.recovery_point, end.offset)
        self.directory_changed = True

    def stop(self) -> None:
        """Waits for the flush in progress; a job that has not started will find nothing to do."""
        self.gate.next_generation()
        if self._flush_job is not None:
            with self._lock:
                self._flush_job.release_files()
            self._flush_job = None

    def release_all_segments(self) -> None:
        self._snapshots = []
        self.release_segments([item.segment for item in self._held])


def _sync_closed(segment: LogSegment) -> None:
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
