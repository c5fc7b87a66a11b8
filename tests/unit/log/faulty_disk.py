"""A disk that fails at one chosen call, or at every call from there on."""

import builtins
import errno
import os
from collections import Counter

from penstock.protocol import durable_files


class FaultyDisk:
    """Counts the calls that change something; `fail_at` is a kind of call and the number of the one that raises ENOSPC.

    Each kind is counted by itself: in which order files of a folder are worked on is for the file system to say.
    """

    def __init__(self, fail_at: tuple[str, int] | None = None, *, lasting: bool = False) -> None:
        self.calls: Counter[str] = Counter()
        self.failed: list[str] = []
        self._fail_at = fail_at
        self._lasting = lasting
        self._mended = False

    def install(self, patched) -> None:
        for name in ("fsync", "fdatasync"):
            patched.setattr(os, name, self._failing(name, lambda fd: None))
        for name in ("rename", "replace", "ftruncate", "truncate", "mkdir", "utime"):
            patched.setattr(os, name, self._failing(name, getattr(os, name)))
        patched.setattr(os, "pwrite", self._short(os.pwrite))
        patched.setattr(os, "open", self._creating(os.open))
        patched.setattr(durable_files, "open", self._opening, raising=False)

    def mend(self) -> None:
        """From here on nothing fails, nor is counted."""
        self._mended = True

    def _is_due(self, name: str) -> bool:
        if self._mended:
            return False
        self.calls[name] += 1
        due = (name, self.calls[name]) == self._fail_at or (self._lasting and bool(self.failed))
        if due:
            self.failed.append(name)
        return due

    def _failing(self, name, real):
        def call(*args, **options):
            if self._is_due(name):
                raise OSError(errno.ENOSPC, f"No space left on device ({name})")
            return real(*args, **options)

        return call

    def _short(self, real):
        def pwrite(fd, data, position):
            if self._is_due("pwrite"):
                real(fd, bytes(data)[: len(data) // 2], position)
                raise OSError(errno.ENOSPC, "No space left on device (pwrite)")
            return real(fd, data, position)

        return pwrite

    def _creating(self, real):
        def call(path, flags, *args, **options):
            if flags & os.O_CREAT and self._is_due("open"):
                raise OSError(errno.ENOSPC, "No space left on device (open)")
            return real(path, flags, *args, **options)

        return call

    def _opening(self, path, mode, **options):
        if self._is_due("create"):
            raise OSError(errno.ENOSPC, "No space left on device (create)")
        return _File(builtins.open(path, mode, **options), self)


class _File:
    """A file whose write may get half of the way."""

    def __init__(self, file, disk: FaultyDisk) -> None:
        self._file, self._disk = file, disk

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._file.close()

    def fileno(self):
        return self._file.fileno()

    def write(self, data):
        if self._disk._is_due("write"):
            self._file.write(bytes(data)[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device (write)")
        return self._file.write(data)
