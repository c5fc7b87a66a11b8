"""Clients in processes of their own, which can be killed and frozen as nodes can."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.chaos.network import ROOT

END_S = 20.0


class ChildProcess:
    """`python -m MODULE ...`, again and again; what it says on stderr goes to a log."""

    def __init__(self, module: str, arguments: list[str], log: Path) -> None:
        self._command = [sys.executable, "-m", module, *arguments]
        self._log = log
        self._process: subprocess.Popen[str] | None = None
        self.is_frozen = False

    @property
    def exit_code(self) -> int | None:
        """Of one that has ended by itself."""
        return None if self._process is None else self._process.poll()

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        assert self._process is not None, "it is not running"
        return self._process.pid

    def launch(self) -> None:
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=log,
                text=True,
                cwd=ROOT,
            )

    def tell(self, words: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(words + "\n")
        self._process.stdin.flush()

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)
        self.is_frozen = True

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)
        self.is_frozen = False

    def show_stack(self) -> None:
        """In its log, if it has registered for that."""
        self._signal(signal.SIGUSR1)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def finish(self) -> int:
        """No more is told to it, and it ends when it has done its work."""
        return self._end(None)

    def _signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def _end(self, number: signal.Signals | None) -> int:
        if self._process is None:
            return 0
        process, self._process = self._process, None
        if number is not None:
            process.send_signal(number)
        self.is_frozen = False
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            return process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()
