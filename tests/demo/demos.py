"""The demo in processes of its own; tests read its output."""

import os
import re
import signal
import subprocess
import threading
import uuid
from contextlib import suppress
from pathlib import Path

from tests.brokers import environment, executable
from tests.spark.class_archive import QUICK_JAVA

_COUNT = re.compile(r"([a-z][\w./-]*) ([\d,]+)")
_TELLS_TOTALS = re.compile(r" · ")
_TELLS_LAGS = re.compile(r"^ +lag: ")
_LISTENS = re.compile(r"the broker is up on (\S+)")
STOP_TIMEOUT_S = 100.0
#: Inherited by every process that the demo starts, so that tests find all of them.
_MARK = "DEMO_OF_TEST"


class Demo:
    def __init__(self, data: Path, *flags: str) -> None:
        self._mark = uuid.uuid4().hex
        self.lines: list[str] = []
        self._process = subprocess.Popen(
            [
                *executable(),
                "demo",
                "--listen",
                "localhost:0",
                "--data-dir",
                str(data),
                "--every",
                "0.5",
                *flags,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment() | QUICK_JAVA | {_MARK: self._mark},
        )
        self._reader = threading.Thread(target=self._read, name="demo-output", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        """For as long as it lasts, so that a full pipe never stops it."""
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                self.lines.append(line)

    @property
    def output(self) -> str:
        return "".join(self.lines)

    @property
    def counts(self) -> dict[str, int]:
        """Totals by topic, and of shipping, as they were told last."""
        return self._numbers(_TELLS_TOTALS)

    @property
    def lags(self) -> dict[str, int]:
        """By reader."""
        return self._numbers(_TELLS_LAGS)

    def _numbers(self, telling: re.Pattern[str]) -> dict[str, int]:
        return {
            name: int(count.replace(",", ""))
            for line in tuple(self.lines)
            if telling.search(line)
            for name, count in _COUNT.findall(line)
        }

    @property
    def bootstrap_servers(self) -> str | None:
        found = _LISTENS.search(self.output)
        return None if found is None else found[1]

    def processes(self) -> dict[int, str]:
        """All that belong to it and are alive, with their command lines."""
        found = {}
        for folder in Path("/proc").iterdir():
            try:
                if f"{_MARK}={self._mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                    command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    found[int(folder.name)] = command
            except (OSError, ValueError):
                continue  # gone meanwhile, or not ours to look at
        return {pid: command for pid, command in found.items() if command}

    def pid_of(self, word: str) -> int:
        (pid,) = [pid for pid, command in self.processes().items() if f" {word} " in command]
        return pid

    def stop(self) -> int:
        """As an operator would; returns the exit code."""
        self._process.send_signal(signal.SIGTERM)
        return self.ended()

    def ended(self) -> int:
        """Wait until it has; returns the exit code."""
        try:
            return self._process.wait(STOP_TIMEOUT_S)
        finally:
            self.kill()
            self._reader.join(STOP_TIMEOUT_S)

    def crash(self) -> None:
        """End it without any chance to end others."""
        self._process.kill()
        self._process.wait()

    def kill(self) -> None:
        """What is left of it, where a test has failed."""
        if self._process.poll() is None:
            self.crash()
            for pid in self.processes():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
