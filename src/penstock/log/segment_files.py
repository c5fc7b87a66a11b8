"""The end of a log: the one file being written, and what keeps a failed write from leaving a trace."""

import logging
import os
import threading
from errno import EMFILE, ENFILE, ENOSPC
from typing import Final

from penstock.log.segment import Segment
from penstock.log.space import NO_SPACE, DiskSpace
from penstock.protocol.errors import ApiError, ErrorCode

_logger = logging.getLogger("penstock.log")
#: What the system says when a process, or the machine, has no descriptors left.
NO_DESCRIPTORS: Final = frozenset({EMFILE, ENFILE})
DESCRIPTORS_MAX: Final = 512

_WRITE_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC


class SharedFile:
    """A write descriptor that closes when the log and every flush under way have let go of it."""

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

    It closes descriptors only on the thread that writes, and so never under a write.
    """

    def __init__(self, descriptors_max: int = DESCRIPTORS_MAX, space: DiskSpace | None = None) -> None:
        assert descriptors_max > 0
        self.space = space
        self._open: dict[Tail, None] = {}
        self._descriptors_max = descriptors_max
        self._lock = threading.Lock()
        self._writer: int | None = None

    def __len__(self) -> int:
        return len(self._open)

    def written_by_this_thread(self) -> None:
        """Elsewhere, and until this is called, the pool grows beyond its bound rather than close anything."""
        self._writer = threading.get_ident()

    def open(self, tail: "Tail", flags: int) -> SharedFile:
        """Raises OSError."""
        with self._lock:
            surplus = len(self._open) + 1 - self._descriptors_max
            if surplus > 0:
                # More than one at a time, so that looking for them is paid for by many.
                self._close_idle(max(surplus, self._descriptors_max // 16))
            try:
                fd = os.open(tail.segment.path, flags, 0o644)
            except OSError as error:
                if error.errno not in NO_DESCRIPTORS:
                    raise
                self._close_idle(len(self._open))
                fd = os.open(tail.segment.path, flags, 0o644)
            self._open[tail] = None
        return SharedFile(fd)

    def forget(self, tail: "Tail") -> None:
        with self._lock:
            self._open.pop(tail, None)

    def close_idle(self) -> None:
        """The process has no descriptors left."""
        with self._lock:
            self._close_idle(len(self._open))

    def _close_idle(self, count: int) -> None:
        """Those not used since the last look go first; those with a sync under way stay."""
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

    A partition that is idle keeps no descriptor: the pool closes those that have not been used for longest.
    """

    __slots__ = ("_pool", "_refusal", "_uses_reserve", "file", "is_used", "segment")

    def __init__(
        self, segment: Segment, pool: "TailPool", *, fresh: bool = False, uses_reserve: bool = False
    ) -> None:
        """`uses_reserve`: it is written to on a full disk, too. Raises OSError."""
        self.segment = segment
        self.file: SharedFile | None = None
        #: Since the pool has last looked for descriptors to close.
        self.is_used = True
        self._pool = pool
        self._refusal: str | None = None
        self._uses_reserve = uses_reserve
        if fresh:
            self.file = pool.open(self, _WRITE_FLAGS | os.O_TRUNC)

    def write(self, batch: memoryview | bytes | bytearray) -> None:
        """One write of the whole batch at the end, or an ApiError and the file as it was. On the loop."""
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
        """After a write that has failed and was undone. Raises ApiError."""
        space = self._pool.space
        if space is not None and error.errno in NO_SPACE:
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
        """The file without its tail, for who still has to sync it: the next segment is written now."""
        self._pool.forget(self)
        return self.file

    def close(self) -> None:
        """Nothing may be written through a descriptor number that could soon be another file's."""
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
