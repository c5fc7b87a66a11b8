"""Disk space: a reserve for the writes that free space, and refusal of all other records while the disk is full.

Deleting topics and records writes first: a record in the metadata log, a checkpoint. On a full disk those writes
would fail like any other. So a small file (`penstock-reserve`) is kept and deleted when a write finds no space.
From then on records are refused at once, until there is room for the reserve and as much again.
"""

import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from errno import EDQUOT, ENOSPC
from pathlib import Path
from typing import Final, TypeVar

RESERVE_FILE: Final = "penstock-reserve"
RESERVE_BYTES: Final = 1 << 20
_MARGIN_BYTES: Final = 64 << 10
#: The errors of a full disk or quota.
NO_SPACE_ERRNOS: Final = frozenset({ENOSPC, EDQUOT})

_logger = logging.getLogger("penstock.log")
_Result = TypeVar("_Result")


class DiskSpace:
    """The free space of one data folder. Thread-safe."""

    def __init__(self, directory: Path, reserve_bytes: int = RESERVE_BYTES) -> None:
        self._path = directory / RESERVE_FILE
        self._reserve_bytes = reserve_bytes
        self._lock = threading.Lock()
        #: Whether records are refused.
        self.is_full = False
        #: How often the disk has had room again after it was full.
        self.recoveries = 0
        if not self._has_reserve() and not self._make_reserve():
            self._now_full("no room for the reserve")

    @property
    def recovery_bytes(self) -> int:
        """How many bytes must be free before a full disk takes records again."""
        return max(2 * self._reserve_bytes, _MARGIN_BYTES)

    def refuse(self) -> bool:
        """Returns whether records must be refused. Checks for free space again if there was none."""
        if self.is_full:
            self.look()
        return self.is_full

    def ran_out(self, error: OSError, recoveries: int | None = None) -> None:
        """A write found no space: deletes the reserve, for the writes that free space. Logs it once.

        A thread may report its failed write late. It passes `recoveries` as read before the write: if the disk has had
        room since then, the failure is ignored.
        """
        with self._lock:
            if recoveries is not None and recoveries != self.recoveries:
                return
            with suppress(OSError):
                self._path.unlink()
            if not self.is_full:
                self._now_full(str(error))

    def look(self) -> None:
        """Accepts records again once there is room for the reserve and as much again."""
        with self._lock:
            if self.is_full and self._free_bytes() >= self.recovery_bytes and self._make_reserve():
                self.is_full = False
                self.recoveries += 1
                extra = {"folder": str(self._path.parent)}
                _logger.warning("disk has room again; records are accepted", extra=extra)

    def with_reserve(self, write: Callable[[], _Result]) -> _Result:
        """Runs a small write that must succeed, and retries it once after deleting the reserve. Raises OSError."""
        recoveries = self.recoveries
        try:
            return write()
        except OSError as error:
            if error.errno not in NO_SPACE_ERRNOS:
                raise
            self.ran_out(error, recoveries)
        return write()

    def _now_full(self, reason: str) -> None:
        self.is_full = True
        _logger.error(
            "disk full: records are refused until there is room; delete topics or records, or shorten retention",
            extra={"folder": str(self._path.parent), "reason": reason},
        )

    def _has_reserve(self) -> bool:
        try:
            return self._path.stat().st_size == self._reserve_bytes
        except OSError:
            return False

    def _free_bytes(self) -> int:
        try:
            found = os.statvfs(self._path.parent)
        except OSError:
            return 0
        return found.f_bavail * found.f_frsize

    def _make_reserve(self) -> bool:
        if not self._reserve_bytes:
            return True
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.posix_fallocate(fd, 0, self._reserve_bytes)
                os.ftruncate(fd, self._reserve_bytes)
            finally:
                os.close(fd)
        except OSError:
            with suppress(OSError):
                self._path.unlink()
            return False
        return True
