"""The files of segments: open descriptors, and the renames that replace segments.

`FilePool` bounds the read descriptors of all logs and is safe while other threads read. `Tail` is the one file of a
log that is open for writing; a write that fails leaves no trace in it.

Segments are replaced with Kafka's protocol. `.cleaned` files are still being written and are removed at start;
`.swap` files are complete and take the place of the old segments; `.deleted` files wait to be removed. Files are
renamed from `.cleaned` to `.swap` from the highest base offset down, so a remaining `.cleaned` file shows that the
swap files at or above it are incomplete.
"""

import logging
import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Sequence
from errno import EIO, EMFILE, ENFILE, ENOENT, ENOSPC, EOPNOTSUPP
from pathlib import Path
from typing import Final

from penstock.log.data_directory import (
    CLEANED_SUFFIX,
    COMPACTED_MARKER_FILE,
    DELETED_SUFFIX,
    LOG_SUFFIX,
    SEGMENT_FILE_SUFFIXES,
    SWAP_SUFFIX,
    offset_file_name,
    parse_offset_file_name,
)
from penstock.log.disk_space import NO_SPACE_ERRNOS, DiskSpace
from penstock.log.indexes import (
    OFFSET_ENTRY_BYTES,
    TIME_ENTRY_BYTES,
    OffsetIndex,
    TimeIndex,
    TransactionIndex,
)
from penstock.log.segment import LogSegment, iter_batch_headers
from penstock.protocol.durable_files import sync_directory
from penstock.protocol.errors import ApiError, ErrorCode

_logger = logging.getLogger("penstock.log")
#: The errors of a process, or a machine, that has no descriptors left.
NO_DESCRIPTORS_ERRNOS: Final = frozenset({EMFILE, ENFILE})
TAIL_DESCRIPTORS_MAX: Final = 512

_WRITE_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC


class SharedFile:
    """A write descriptor that closes when the log and every flush in progress have released it."""

    __slots__ = ("_users", "fd")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._users = 1

    def hold(self) -> "SharedFile":
        self._users += 1
        return self

    @property
    def is_idle(self) -> bool:
        return self._users == 1

    def drop(self) -> None:
        self._users -= 1
        if self._users == 0:
            os.close(self.fd)


class TailPool:
    """Bounds how many logs are open for writing.

    It closes descriptors only on the thread that writes, and so never during a write.
    """

    def __init__(self, descriptors_max: int = TAIL_DESCRIPTORS_MAX, space: DiskSpace | None = None) -> None:
        assert descriptors_max > 0
        self.space = space
        self._open: dict[Tail, None] = {}
        self._descriptors_max = descriptors_max
        self._lock = threading.Lock()
        self._writer: int | None = None

    def __len__(self) -> int:
        return len(self._open)

    def written_by_this_thread(self) -> None:
        """Before this call, and on other threads, the pool exceeds its bound instead of closing descriptors."""
        self._writer = threading.get_ident()

    def open(self, tail: "Tail", flags: int) -> SharedFile:
        """Raises OSError."""
        with self._lock:
            surplus = len(self._open) + 1 - self._descriptors_max
            if surplus > 0:
                # Several at a time, so that the cost of the search is spread over many opens.
                self._close_idle(max(surplus, self._descriptors_max // 16))
            try:
                fd = os.open(tail.segment.path, flags, 0o644)
            except OSError as error:
                if error.errno not in NO_DESCRIPTORS_ERRNOS:
                    raise
                self._close_idle(len(self._open))
                fd = os.open(tail.segment.path, flags, 0o644)
            self._open[tail] = None
        return SharedFile(fd)

    def forget(self, tail: "Tail") -> None:
        with self._lock:
            self._open.pop(tail, None)

    def close_idle(self) -> None:
        """For a process that has no descriptors left."""
        with self._lock:
            self._close_idle(len(self._open))

    def _close_idle(self, count: int) -> None:
        """Closes those unused since the last call first; those with a sync in progress stay open."""
        if threading.get_ident() != self._writer:
            return
        for spares_used in (True, False):
            for tail in list(self._open):
                if count <= 0:
                    return
                if tail.is_used and spares_used:
                    tail.is_used = False
                elif tail.file is not None and tail.file.is_idle:
                    tail.file.drop()
                    tail.file = None
                    del self._open[tail]
                    count -= 1


class Tail:
    """The active segment, opened for writing when it is first written to.

    An idle partition keeps no descriptor: the pool closes those that have not been used for longest.
    """

    __slots__ = ("_pool", "_refusal", "_uses_reserve", "file", "is_used", "segment")

    def __init__(
        self, segment: LogSegment, pool: "TailPool", *, fresh: bool = False, uses_reserve: bool = False
    ) -> None:
        """`uses_reserve` allows writes on a full disk. Raises OSError."""
        self.segment = segment
        self.file: SharedFile | None = None
        #: Whether it was used since the pool last looked for descriptors to close.
        self.is_used = True
        self._pool = pool
        self._refusal: str | None = None
        self._uses_reserve = uses_reserve
        if fresh:
            self.file = pool.open(self, _WRITE_FLAGS | os.O_TRUNC)

    def write(self, batch: memoryview | bytes | bytearray) -> None:
        """Appends the whole batch in one write, or raises ApiError with the file unchanged. On the event loop."""
        if self._refusal is not None:
            raise ApiError(ErrorCode.kafka_storage_error, self._refusal)
        space = self._pool.space
        if space is not None and space.is_full and not self._uses_reserve and space.refuse():
            raise ApiError(ErrorCode.kafka_storage_error, "the disk is full")
        file = self.file
        if file is None:
            try:
                file = self.opened()
            except OSError as error:
                raise ApiError(ErrorCode.kafka_storage_error, f"cannot open the log: {error}") from None
        self.is_used = True
        try:
            written = os.pwrite(file.fd, batch, self.segment.size)
            if written != len(batch):
                raise OSError(ENOSPC, f"only {written} of {len(batch)} bytes were written")
        except OSError as error:
            self._undo(file, error)
            self._write_from_reserve(file, batch, error)

    def _write_from_reserve(
        self, file: SharedFile, batch: memoryview | bytes | bytearray, error: OSError
    ) -> None:
        """Retries a failed write, which has been undone, if the log may use the reserve. Raises ApiError."""
        space = self._pool.space
        if space is not None and error.errno in NO_SPACE_ERRNOS:
            space.ran_out(error)
            if self._uses_reserve and self._refusal is None:
                try:
                    if os.pwrite(file.fd, batch, self.segment.size) == len(batch):
                        return
                    self._undo(file, error)
                except OSError as failure:
                    self._undo(file, failure)
        else:
            _logger.warning("append failed", extra={"file": str(self.segment.path), "reason": str(error)})
        raise ApiError(ErrorCode.kafka_storage_error, f"cannot write to the log: {error}") from None

    def opened(self) -> SharedFile:
        """Raises OSError."""
        if self.file is None:
            self.file = self._pool.open(self, _WRITE_FLAGS)
        return self.file

    def released(self) -> SharedFile | None:
        """Detaches the file, which still has to be synced: writes go to the next segment now."""
        self._pool.forget(self)
        return self.file

    def close(self) -> None:
        """Prevents later writes, because another file may soon get the descriptor's number."""
        self._refusal = "the log is closed"
        self._pool.forget(self)
        if self.file is not None:
            self.file.drop()

    def _undo(self, file: SharedFile, failure: OSError) -> None:
        try:
            os.ftruncate(file.fd, self.segment.size)
        except OSError as error:
            self._refusal = (
                f"a failed write could not be undone ({error}); the log takes no more until it is reopened"
            )
            _logger.error(
                "log refuses appends",
                extra={"file": str(self.segment.path), "reason": self._refusal, "after": str(failure)},
            )


DESCRIPTORS_MAX: Final = 512
INDEX_BYTES_MAX: Final = 64 << 20
_OPEN_FILES_LIMIT_MAX: Final = 1 << 18

_NOWAIT: Final = getattr(os, "RWF_NOWAIT", 0)
_READ_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC


def open_files_limit() -> int:
    """Returns how many files this process may have open; our own bound if the system has none."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _OPEN_FILES_LIMIT_MAX if soft == resource.RLIM_INFINITY else min(soft, _OPEN_FILES_LIMIT_MAX)


class _OpenFile:
    __slots__ = ("fd", "forgotten", "pins")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.pins = 0
        self.forgotten = False


class FilePool:
    """Closes the least recently used descriptors and indexes first, and never those in use."""

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
        self._open: OrderedDict[LogSegment, _OpenFile] = OrderedDict()
        self._indexed: OrderedDict[LogSegment, int] = OrderedDict()
        self._indexed_bytes = 0
        self._descriptors_max = descriptors_max
        self._index_bytes_max = index_bytes_max
        self._nowait_works = bool(_NOWAIT)

    def __len__(self) -> int:
        return len(self._open)

    def pin(self, segment: LogSegment) -> _OpenFile:
        """Returns a descriptor that stays open until `unpin`, whatever happens to the segment meanwhile."""
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
        """Reads exactly `size` bytes; `nowait` raises BlockingIOError if they are not in the page cache."""
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
            # Memory file systems never wait, and do not support the flag.
            self._nowait_works = False
            return self.read(fd, size, position, nowait)
        if count != size:
            raise BlockingIOError
        return buffer

    def forget(self, segment: LogSegment) -> None:
        """The segment has left its log: if a late reader opens it, the descriptor is closed after use."""
        with self._lock:
            segment.retired = True
            self._forget(segment)

    def rename(self, segment: LogSegment, suffix: str) -> None:
        """Gives every file of a segment another suffix, the log file last. Raises OSError, with nothing changed."""
        with self._lock:
            before, segment.suffix = segment.suffix, suffix
            try:
                for kind in SEGMENT_FILE_SUFFIXES:
                    _rename_file(segment.file(kind, before), segment.file(kind), optional=kind != LOG_SUFFIX)
            except OSError:
                for kind in SEGMENT_FILE_SUFFIXES:
                    _rename_file(segment.file(kind), segment.file(kind, before), optional=True)
                segment.suffix = before
                raise

    def index_loaded(self, segment: LogSegment, offsets: OffsetIndex, times: TimeIndex) -> None:
        """Keeps indexes that can be loaded again, as long as all of them fit the bound."""
        with self._lock:
            segment.offsets, segment.times = offsets, times
            self._account(segment)

    def transaction_index_loaded(self, segment: LogSegment, aborted: TransactionIndex) -> None:
        """As `index_loaded`."""
        with self._lock:
            segment.aborted = aborted
            self._account(segment)

    def _account(self, segment: LogSegment) -> None:
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

    def keep_index(self, segment: LogSegment) -> None:
        """The segment is about to be written: its index is no longer a copy of a file, so it must stay in memory."""
        with self._lock:
            self._indexed_bytes -= self._indexed.pop(segment, 0)

    def close(self) -> None:
        with self._lock:
            for segment in list(self._open):
                self._forget(segment)

    def _forget(self, segment: LogSegment) -> None:
        self._indexed_bytes -= self._indexed.pop(segment, 0)
        file = self._open.pop(segment, None)
        if file is not None:
            file.forgotten = True
            if file.pins == 0:
                os.close(file.fd)

    def _opened(self, segment: LogSegment) -> _OpenFile:
        """Runs under the lock that renames also take, so that the name still belongs to this segment."""
        if segment.is_deleted:
            # A later segment with the same base offset may have this name by now.
            raise FileNotFoundError(ENOENT, "the segment has left its log", str(segment.path))
        try:
            file = _OpenFile(os.open(segment.path, _READ_FLAGS))
        except OSError as error:
            if error.errno not in NO_DESCRIPTORS_ERRNOS:
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
        """For a process that has no descriptors left: closes all that are not in use. On the event loop."""
        with self._lock:
            self._close_idle(len(self._open))
        self.tails.close_idle()

    def _close_idle(self, count: int) -> None:
        """Closes the least recently used. Those in use stay open, even if the pool exceeds its bound meanwhile."""
        if count <= 0:
            return
        idle = [segment for segment, file in self._open.items() if file.pins == 0]
        for segment in idle[:count]:
            os.close(self._open.pop(segment).fd)


def _rename_file(source: Path, target: Path, *, optional: bool) -> None:
    """Indexes are caches and may be missing; a log file may not."""
    try:
        os.rename(source, target)
    except FileNotFoundError:
        if not optional:
            raise


def commit_swap(new: Sequence[LogSegment], files: FilePool) -> None:
    """A crash before this leaves the old segments in place; a crash after it, the new ones. Raises OSError."""
    try:
        (new[0].directory / COMPACTED_MARKER_FILE).touch()
        for segment in sorted(new, key=lambda s: s.base_offset, reverse=True):
            assert segment.suffix == CLEANED_SUFFIX, segment
            files.rename(segment, SWAP_SUFFIX)
        sync_directory(new[0].directory)
    except OSError:
        _remove_new_segments(new)
        raise


def _remove_new_segments(new: Sequence[LogSegment]) -> None:
    """Removes .swap files first: a remaining one would replace segments at the next start."""
    for suffix in (SWAP_SUFFIX, CLEANED_SUFFIX):
        for segment in new:
            for kind in SEGMENT_FILE_SUFFIXES:
                segment.file(kind, suffix).unlink(missing_ok=True)


def finish_swap(old: Sequence[LogSegment], new: Sequence[LogSegment], files: FilePool) -> list[Path]:
    """Renames the new files to the names of the old ones. Returns the files to unlink."""
    for segment in old:
        files.rename(segment, DELETED_SUFFIX)
    for segment in new:
        files.rename(segment, "")
    sync_directory(new[0].directory)
    return existing_files(old)


def existing_files(segments: Sequence[LogSegment]) -> list[Path]:
    paths = (segment.file(kind) for segment in segments for kind in SEGMENT_FILE_SUFFIXES)
    return [path for path in paths if path.exists()]


def finish_interrupted_swap(directory: Path) -> list[int]:
    """Restores plain segment files before a folder is loaded. Returns the base offsets of deleted segments."""
    leftover = _list_leftover_files(directory)
    if not leftover:
        return []
    first_cleaned = min((offset for offset, _, suffix in leftover if suffix == CLEANED_SUFFIX), default=None)
    for offset, kind, suffix in leftover:
        incomplete = suffix == SWAP_SUFFIX and first_cleaned is not None and offset >= first_cleaned
        if suffix != SWAP_SUFFIX or incomplete:
            _logger.info("leftover removed", extra={"file": offset_file_name(offset, kind, suffix)})
            (directory / offset_file_name(offset, kind, suffix)).unlink()
    _rename_swap_files(directory)
    sync_directory(directory)
    return [offset for offset, kind, suffix in leftover if (kind, suffix) == (LOG_SUFFIX, DELETED_SUFFIX)]


def _rename_swap_files(directory: Path) -> None:
    swaps = [item for item in _list_leftover_files(directory) if item[2] == SWAP_SUFFIX]
    if not swaps:
        return
    first = min(offset for offset, _, _ in swaps)
    end = max(
        (_end_offset_of_swap(directory, offset) for offset, kind, _ in swaps if kind == LOG_SUFFIX),
        default=first,
    )
    for offset, kind, suffix in _list_offset_files(directory):
        if suffix == "" and kind in SEGMENT_FILE_SUFFIXES and first <= offset < end:
            (directory / offset_file_name(offset, kind)).unlink()
    for offset, kind, _ in sorted(swaps, key=lambda item: SEGMENT_FILE_SUFFIXES.index(item[1])):
        _logger.info("interrupted swap finished", extra={"file": offset_file_name(offset, kind)})
        os.replace(
            directory / offset_file_name(offset, kind, SWAP_SUFFIX),
            directory / offset_file_name(offset, kind),
        )


def _end_offset_of_swap(directory: Path, base_offset: int) -> int:
    path = directory / offset_file_name(base_offset, LOG_SUFFIX, SWAP_SUFFIX)
    fd = os.open(path, os.O_RDONLY)
    try:
        last = base_offset - 1
        for _, header in iter_batch_headers(fd, 0, os.fstat(fd).st_size):
            last = header.last_offset
        # Even an empty segment replaces the one with its name.
        return max(last, base_offset) + 1
    finally:
        os.close(fd)


def _list_leftover_files(directory: Path) -> list[tuple[int, str, str]]:
    return [
        item
        for item in _list_offset_files(directory)
        if item[2] in (DELETED_SUFFIX, CLEANED_SUFFIX, SWAP_SUFFIX)
    ]


def _list_offset_files(directory: Path) -> list[tuple[int, str, str]]:
    parsed = (parse_offset_file_name(name) for name in os.listdir(directory))
    return [item for item in parsed if item is not None]
