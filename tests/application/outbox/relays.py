"""Relays in processes of their own, which tests kill, freeze and thaw."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.application.outbox.child import Job
from tests.chaos.network import ROOT
from tests.waiting import eventually

END_S = 60.0


class RelayProcess:
    """Stops the relay when the block ends."""

    def __init__(self, job: Job, log: Path) -> None:
        self.job = job
        with log.open("a") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.application.outbox.child", job.as_text()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=ROOT,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.kill()

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def end(self) -> int:
        """Of itself: an exit code, or the number of a signal below zero."""
        return self._process.wait(END_S)

    def stop(self) -> int:
        self._process.send_signal(signal.SIGTERM)
        return self.end()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def await_frozen(self) -> None:
        eventually(lambda: self.is_frozen or self.has_ended, within_s=END_S, what="freezing")
        assert not self.has_ended, "it ended before it froze"

    @property
    def is_frozen(self) -> bool:
        try:
            words = Path(f"/proc/{self._process.pid}/stat").read_text()
        except FileNotFoundError:
            return False
        return words.rpartition(")")[2].split()[0] == "T"

    def thaw(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)
