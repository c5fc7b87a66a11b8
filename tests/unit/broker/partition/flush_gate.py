"""A slow disk: syncs wait until a test lets them through."""

import os
import threading
from pathlib import Path

import pytest


class FlushGate:
    """While it is closed no sync ends, or none of the files in one folder. `begun` counts those that wait."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._open = threading.Event()
        self._open.set()
        self._held: set[int] | None = None
        self.begun = 0
        real = os.fdatasync

        def fdatasync(fd: int) -> None:
            if not self._open.is_set() and (self._held is None or os.fstat(fd).st_ino in self._held):
                self.begun += 1
                assert self._open.wait(60)
            real(fd)

        monkeypatch.setattr(os, "fdatasync", fdatasync)

    def close(self, folder: Path | None = None) -> None:
        self._held = None if folder is None else {path.stat().st_ino for path in folder.iterdir()}
        self._open.clear()
        self.begun = 0

    def open(self) -> None:
        self._open.set()
