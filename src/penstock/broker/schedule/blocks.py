"""Blocks of due times in a file without a name: what is in it can be made anew from the log, so nobody keeps it."""

from __future__ import annotations

import os
import tempfile
import threading
import weakref
from pathlib import Path

from penstock.scheduling.ladder import BLOCK_ENTRIES
from penstock.scheduling.records import DUE_BYTES

_BLOCK_BYTES = BLOCK_ENTRIES * DUE_BYTES


class BlockFile:
    """Blocks of one size, in any thread. The file is closed when nobody can use it any more, and not before: a thread
    may outlive the shard that it works for."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._fd: int | None = None
        self._free: list[int] = []
        self._end = 0
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<BlockFile of {self._end} blocks, {len(self._free)} free>"

    def write(self, block: bytes) -> int:
        assert len(block) == _BLOCK_BYTES
        with self._lock:
            if self._fd is None:
                self._fd, path = tempfile.mkstemp(prefix=".schedule-", dir=self._directory)
                os.unlink(path)
                weakref.finalize(self, os.close, self._fd)
            if self._free:
                block_id = self._free.pop()
            else:
                block_id, self._end = self._end, self._end + 1
        os.pwrite(self._fd, block, block_id * _BLOCK_BYTES)
        return block_id

    def read(self, block_id: int) -> bytes:
        assert self._fd is not None
        return os.pread(self._fd, _BLOCK_BYTES, block_id * _BLOCK_BYTES)

    def free(self, block_id: int) -> None:
        with self._lock:
            self._free.append(block_id)
