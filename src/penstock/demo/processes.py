"""Processes that the demo starts: watched, started again where they end by themselves, and stopped in good order."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from abc import abstractmethod
from contextlib import suppress
from pathlib import Path
from typing import Final

from penstock.client.errors import ClientError
from penstock.demo.parts import Part

_LOG_BYTES_READ: Final = 16 << 10
_LOG_LINES_SHOWN: Final = 10
#: What a process leaves behind ends by itself within this time.
_LEFTOVERS_S: Final = 10.0


class HasEnded(ClientError):
    """By itself, while the demo wants it."""


class Child(Part):
    """It hears of our end by the end of its stdin, however we end; its errors go to a log, its lines to `heard`."""

    def __init__(self, name: str, log: Path) -> None:
        super().__init__(name)
        self.log = log
        self.pid: int | None = None
        self._process: subprocess.Popen[str] | None = None
        self._log_start = 0

    @abstractmethod
    def command(self) -> list[str]: ...

    @abstractmethod
    def heard(self, line: str) -> None:
        """A line of its output."""

    def work(self) -> None:
        process = self._launch()
        if self.stopping.is_set():  # by somebody who did not see it yet
            process.terminate()
        assert process.stdout is not None
        for line in process.stdout:
            self.heard(line.rstrip("\n"))
        code = process.wait()
        _end_group(process.pid)
        if not self.stopping.is_set():
            raise HasEnded(f"{self.name} has ended ({_ending(code)}), it is started again; see {self.log}")
        if code:
            raise HasEnded(f"{self.name} did not end well ({_ending(code)}); see {self.log}")

    def _launch(self) -> subprocess.Popen[str]:
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            # A group of its own: a Ctrl-C at the terminal is ours to pass on, in our own time.
            self._process = subprocess.Popen(
                self.command(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                errors="replace",
                process_group=0,
            )
        self.pid = self._process.pid
        return self._process

    def tell(self, line: str) -> None:
        """A line for its stdin; nobody may be there to read it."""
        process = self._process
        if process is not None and process.stdin is not None:
            with suppress(OSError, ValueError):
                process.stdin.write(line + "\n")
                process.stdin.flush()

    def stop(self) -> None:
        super().stop()
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def kill(self) -> None:
        """With all that it started itself."""
        super().stop()
        if self._process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def last_lines(self) -> list[str]:
        """Of its log, of its present life."""
        with suppress(OSError), self.log.open("rb") as file:
            file.seek(max(self._log_start, self.log.stat().st_size - _LOG_BYTES_READ))
            return file.read().decode(errors="replace").splitlines()[-_LOG_LINES_SHOWN:]
        return []


def _end_group(pid: int) -> None:
    """A Java machine outlives by a moment the process that it belongs to, and must not outlive the demo."""
    deadline = time.monotonic() + _LEFTOVERS_S
    while time.monotonic() < deadline:
        try:
            os.killpg(pid, 0)
        except (ProcessLookupError, PermissionError):
            return
        time.sleep(0.05)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _ending(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
