"""A disk that takes its time: syncs wait until a test lets them through."""

import os
import threading

import pytest


class FlushGate:
    """`with gate.held():` no sync ends before the block does, unless `let_through` says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._open = threading.Event()
        self._open.set()
        self.begun = 0
        real = os.fdatasync

        def fdatasync(fd: int) -> None:
            self.begun += 1
            assert self._open.wait(60)
            real(fd)

        monkeypatch.setattr(os, "fdatasync", fdatasync)

    def close(self) -> None:
        self._open.clear()
        self.begun = 0

    def open(self) -> None:
        self._open.set()
