"""`penstock` with a clock and a disk that misbehave when told to, by files in the folder `failures` beside its data.

`failures/clock` holds the error of the wall clock in seconds; while `failures/sync` exists, every sync is an I/O error.
"""

import errno
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LOOK_EVERY_S = 0.02


class Failures:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._wrong_ns = 0
        self._sync_fails = False

    def begin(self) -> None:
        really = time.time_ns
        time.time_ns = lambda: really() + self._wrong_ns
        time.time = lambda: time.time_ns() / 1e9
        os.fsync = self._failing(os.fsync)
        os.fdatasync = self._failing(os.fdatasync)
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            clock = self._folder / "clock"
            self._wrong_ns = int(float(clock.read_text() or 0) * 1e9) if clock.exists() else 0
            self._sync_fails = (self._folder / "sync").exists()
            time.sleep(LOOK_EVERY_S)

    def _failing(self, really: Callable[[Any], None]) -> Callable[[Any], None]:
        def sync(file: Any) -> None:
            if self._sync_fails:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            really(file)

        return sync


def failures_of(data_dir: Path) -> Path:
    return data_dir.parent / "failures"


if __name__ == "__main__":
    data = next(word.partition("=")[2] for word in sys.argv if word.startswith("log.dirs="))
    Failures(failures_of(Path(data))).begin()
    from penstock.cli import main

    sys.exit(main())
