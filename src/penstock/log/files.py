"""Read descriptors shared by all logs: a bounded pool that is safe while other threads are reading."""

import os
import resource
import threading
from collections import OrderedDict
from errno import EIO, ENOENT, EOPNOTSUPP
from pathlib import Path
from typing import Final

from penstock.log.aborted import AbortedIndex
from penstock.log.index import OFFSET_ENTRY_BYTES, TIME_ENTRY_BYTES, OffsetIndex, TimeIndex
from penstock.log.names import LOG, SEGMENT_FILES
from penstock.log.segment import Segment
from penstock.log.space import DiskSpace
from penstock.log.tail import NO_DESCRIPTORS, TailPool

DESCRIPTORS_MAX: Final = 512
INDEX_BYTES_MAX: Final = 64 << 20
_LIMIT_MAX: Final = 1 << 18

_NOWAIT: Final = getattr(os, "RWF_NOWAIT", 0)
_READ_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC


def open_files_limit() -> int:
    """How many files the system lets this process have open; a bound of ours where it says nothing."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _LIMIT_MAX if soft == resource.RLIM_INFINITY else min(soft, _LIMIT_MAX)


class _OpenFile:
    __slots__ = ("fd", "forgotten", "pins")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.pins = 0
        self.forgotten = False


class FilePool:
    """The least recently used descriptors and loaded indexes go first; those in use never go."""

    def __init__(
        self,
        *,
        descriptors_max: int = DESCRIPTORS_MAX,
        index_bytes_max: int = INDEX_BYTES_MAX,
        tails_max: int = DESCRIPTORS_MAX,
        space: DiskSpace | None = None,
    ) -> None:
        assert descriptors_max > 0
        self.tails = TailPool(tails_max, space)
        self.space = space
        self._lock = threading.Lock()
        self._open: OrderedDict[Segment, _OpenFile] = OrderedDict()
        self._indexed: OrderedDict[Segment, int] = OrderedDict()
        self._indexed_bytes = 0
        self._descriptors_max = descriptors_max
        self._index_bytes_max = index_bytes_max
        self._nowait_works = bool(_NOWAIT)

    def __len__(self) -> int:
        return len(self._open)

    def pin(self, segment: Segment) -> _OpenFile:
        """A descriptor that stays open until `unpin`, whatever happens to the segment meanwhile."""
        with self._lock:
            file = self._open.get(segment)
            if file is None:
                file = self._opened(segment)
            else:
                self._open.move_to_end(segment)
            file.pins += 1
            return file

    def unpin(self, file: _OpenFile) -> None:
        with self._lock:
            file.pins -= 1
            if file.forgotten and file.pins == 0:
                os.close(file.fd)

    def read(self, fd: int, size: int, position: int, nowait: bool) -> bytes | bytearray:
        """Exactly `size` bytes; `nowait` raises BlockingIOError for what is not in the page cache."""
        if not (nowait and self._nowait_works):
            data = os.pread(fd, size, position)
            if len(data) != size:
                raise OSError(EIO, f"only {len(data)} of {size} bytes are left at {position}")
            return data
        buffer = bytearray(size)
        try:
            count = os.preadv(fd, (buffer,), position, _NOWAIT)
        except OSError as error:
            if error.errno != EOPNOTSUPP:
                raise
            # Memory file systems never wait and so never learnt to say that they would.
            self._nowait_works = False
            return self.read(fd, size, position, nowait)
        if count != size:
            raise BlockingIOError
        return buffer

    def forget(self, segment: Segment) -> None:
        """The segment has left its log: what a late reader opens of it does not stay open."""
        with self._lock:
            segment.retired = True
            self._forget(segment)

    def rename(self, segment: Segment, suffix: str) -> None:
        """Give every file of a segment another suffix, the log itself last. Raises OSError, and has done nothing."""
        with self._lock:
            before, segment.suffix = segment.suffix, suffix
            try:
                for kind in SEGMENT_FILES:
                    _rename(segment.file(kind, before), segment.file(kind), optional=kind != LOG)
            except OSError:
                for kind in SEGMENT_FILES:
                    _rename(segment.file(kind), segment.file(kind, before), optional=True)
                segment.suffix = before
                raise

    def index_loaded(self, segment: Segment, offsets: OffsetIndex, times: TimeIndex) -> None:
        """Keep indexes that can be loaded again, as long as all of them fit the bound."""
        with self._lock:
            segment.offsets, segment.times = offsets, times
            self._account(segment)

    def aborted_loaded(self, segment: Segment, aborted: AbortedIndex) -> None:
        """As `index_loaded`."""
        with self._lock:
            segment.aborted = aborted
            self._account(segment)

    def _account(self, segment: Segment) -> None:
        if segment.retired:
            return
        size = 0
        if segment.offsets is not None and segment.times is not None:
            size += len(segment.offsets) * OFFSET_ENTRY_BYTES + len(segment.times) * TIME_ENTRY_BYTES
        if segment.aborted is not None:
            size += len(segment.aborted.data)
        self._indexed_bytes += size - self._indexed.pop(segment, 0)
        self._indexed[segment] = size
        while self._indexed_bytes > self._index_bytes_max and len(self._indexed) > 1:
            oldest, oldest_bytes = self._indexed.popitem(last=False)
            oldest.offsets = oldest.times = oldest.aborted = None
            self._indexed_bytes -= oldest_bytes

    def keep_index(self, segment: Segment) -> None:
        """The segment is about to be written: its index is no longer a copy of a file."""
        with self._lock:
            self._indexed_bytes -= self._indexed.pop(segment, 0)

    def close(self) -> None:
        with self._lock:
            for segment in list(self._open):
                self._forget(segment)

    def _forget(self, segment: Segment) -> None:
        self._indexed_bytes -= self._indexed.pop(segment, 0)
        file = self._open.pop(segment, None)
        if file is not None:
            file.forgotten = True
            if file.pins == 0:
                os.close(file.fd)

    def _opened(self, segment: Segment) -> _OpenFile:
        """Under the lock that renames take too, so that the name still means this segment."""
        if segment.is_deleted:
            # A later segment of the same base offset may have been given this name since.
            raise FileNotFoundError(ENOENT, "the segment has left its log", str(segment.path))
        try:
            file = _OpenFile(os.open(segment.path, _READ_FLAGS))
        except OSError as error:
            if error.errno not in NO_DESCRIPTORS:
                raise
            self._close_idle(len(self._open))
            file = _OpenFile(os.open(segment.path, _READ_FLAGS))
        if segment.retired:
            file.forgotten = True
        else:
            self._close_idle(len(self._open) + 1 - self._descriptors_max)
            self._open[segment] = file
        return file

    def close_idle(self) -> None:
        """The process has no descriptors left: whatever is not in use is closed. On the loop."""
        with self._lock:
            self._close_idle(len(self._open))
        self.tails.close_idle()

    def _close_idle(self, count: int) -> None:
        """The least recently used; those in use stay, and the pool is larger than its bound for so long."""
        if count <= 0:
            return
        idle = [segment for segment, file in self._open.items() if file.pins == 0]
        for segment in idle[:count]:
            os.close(self._open.pop(segment).fd)


def _rename(source: Path, target: Path, *, optional: bool) -> None:
    """Indexes are caches and may be missing; a log may not."""
    try:
        os.rename(source, target)
    except FileNotFoundError:
        if not optional:
            raise
