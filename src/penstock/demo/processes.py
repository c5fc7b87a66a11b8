"""The processes that the demo starts: monitored, restarted if they end by themselves, and stopped cleanly.

The broker is `penstock serve` as any user would run it. The Spark process reports the state of its queries, one JSON
document per line.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from penstock.client.errors import ClientError
from penstock.demo.access import BrokerAccess, BrokerSecurity
from penstock.demo.component import Component
from penstock.demo.names import PIPELINES, Folders
from penstock.demo.scene import EventLog, Health

_LOG_BYTES_READ: Final = 16 << 10
_LOG_LINES_SHOWN: Final = 10
#: Other processes of the group, such as the JVM, usually end by themselves within this time.
_GROUP_END_S: Final = 10.0


class ProcessEnded(ClientError):
    """The process ended by itself, while the demo still needs it."""


class ChildProcess(Component):
    """When this process ends for any reason, the child's stdin ends, and the child stops.

    The child's stderr goes to a log file; each line of its stdout goes to `on_line`.
    """

    def __init__(self, name: str, log: Path) -> None:
        super().__init__(name)
        self.log = log
        self.pid: int | None = None
        self._process: subprocess.Popen[str] | None = None
        self._log_start = 0

    @abstractmethod
    def command(self) -> list[str]: ...

    def environment(self) -> dict[str, str]:
        """Variables that the child gets beside those of this process."""
        return {}

    @abstractmethod
    def on_line(self, line: str) -> None:
        """Handles a line of the child's output."""

    def work(self) -> None:
        process = self._launch()
        if self.stopping.is_set():  # `stop` was called before there was a process to terminate
            process.terminate()
        assert process.stdout is not None
        for line in process.stdout:
            self.on_line(line.rstrip("\n"))
        code = process.wait()
        _end_process_group(process.pid)
        if not self.stopping.is_set():
            raise ProcessEnded(f"{self.name} has ended ({_exit_reason(code)}), restarting it; see {self.log}")
        if code:
            raise ProcessEnded(f"{self.name} did not end well ({_exit_reason(code)}); see {self.log}")

    def _launch(self) -> subprocess.Popen[str]:
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            # Its own process group, so that Ctrl-C at the terminal reaches only this process, which stops the child.
            self._process = subprocess.Popen(
                self.command(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                errors="replace",
                process_group=0,
                env={**os.environ, **self.environment()},
            )
        self.pid = self._process.pid
        return self._process

    def send(self, line: str) -> None:
        """Writes a line to the child's stdin, if it is still open."""
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
        """Kills the process and all processes that it started."""
        super().stop()
        if self._process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def last_lines(self) -> list[str]:
        """The last lines that the current process has written to the log."""
        with suppress(OSError), self.log.open("rb") as file:
            file.seek(max(self._log_start, self.log.stat().st_size - _LOG_BYTES_READ))
            return file.read().decode(errors="replace").splitlines()[-_LOG_LINES_SHOWN:]
        return []


def _end_process_group(pid: int) -> None:
    """Waits for the JVM, which outlives its Python process by a moment, and kills it if it takes too long."""
    deadline = time.monotonic() + _GROUP_END_S
    while time.monotonic() < deadline:
        try:
            os.killpg(pid, 0)
        except (ProcessLookupError, PermissionError):
            return
        time.sleep(0.05)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _exit_reason(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


_LISTENING: Final = re.compile(r"listening on (?:\w+://)?(?P<address>\S+:\d+)")
#: The demo's groups have one member each, so there is no reason to wait for others to join.
_BROKER_SETTINGS: Final[Mapping[str, str]] = {"group.initial.rebalance.delay.ms": "0"}


class BrokerProcess(ChildProcess):
    def __init__(
        self, folders: Folders, *, listen: str, http: str | None, security: BrokerSecurity | None = None
    ) -> None:
        super().__init__("broker", folders.logs / "broker.log")
        self._folders = folders
        self._listen = listen
        self._http = http
        self._security = security
        #: Set when the broker accepts requests, or has ended before it did.
        self.decided = threading.Event()
        #: None until the broker has been up once.
        self.address: str | None = None

    @property
    def access(self) -> BrokerAccess:
        """How to reach it, once it is up."""
        assert self.address is not None
        if self._security is None:
            return BrokerAccess(bootstrap=self.address)
        return self._security.access(self.address)

    def command(self) -> list[str]:
        settings, listen, first_user = _BROKER_SETTINGS, self.address or self._listen, list[str]()
        if self._security is not None:
            settings = {**settings, **self._security.settings()}
            listen, first_user = self._security.listener(listen), self._security.flags()
        http = ["--http", self._http] if self._http else []
        return [
            *(sys.executable, "-m", "penstock", "serve", "--stop-with-stdin"),
            *("--listen", listen, "--data-dir", str(self._folders.broker)),
            *http,
            *(word for name, value in settings.items() for word in ("--set", f"{name}={value}")),
            *first_user,
        ]

    def environment(self) -> dict[str, str]:
        return {} if self._security is None else self._security.environment()

    def on_line(self, line: str) -> None:
        if match := _LISTENING.match(line):
            self.address = match["address"]
            self.trouble = None
            self.decided.set()

    def work(self) -> None:
        try:
            super().work()
        finally:
            self.decided.set()


SPARK_PACKAGES: Final = ("pyspark", "pyarrow", "numba", "deltalake")
INSTALL_HINT: Final = "pip install 'penstock[spark]'"
#: Written to the Spark process's stdin.
REPLAY_COMMAND: Final = "replay"


def missing_packages() -> list[str]:
    return [name for name in SPARK_PACKAGES if find_spec(name) is None]


@dataclass(slots=True, kw_only=True)
class QueryState:
    """The reported state of a pipeline."""

    #: Rows that it has read since Spark started.
    rows: int = 0
    batch_ms: int | None = None
    is_running: bool = False
    trouble: str | None = None
    dropped: int = 0


@dataclass(slots=True, kw_only=True)
class SparkState:
    """What the current Spark process has reported."""

    queries: dict[str, QueryState] = field(default_factory=lambda: {name: QueryState() for name in PIPELINES})
    archived: int | None = None
    is_up: bool = False
    is_replaying: bool = False


class SparkProcess(ChildProcess):
    def __init__(self, access: BrokerAccess, folders: Folders, journal: EventLog) -> None:
        super().__init__("Spark", folders.logs / "spark.log")
        self._access = access
        self._folders = folders
        self._journal = journal
        self.state = SparkState()

    @property
    def health(self) -> Health:
        if self.trouble is not None:
            return Health.TROUBLED
        return Health.UP if self.state.is_up else Health.STARTING

    def command(self) -> list[str]:
        self.state = SparkState()
        words = {
            "bootstrap": self._access.bootstrap,
            "properties": self._access.properties,
            "data": str(self._folders.root),
        }
        return [sys.executable, "-m", "penstock.demo.spark_process", json.dumps(words)]

    def on_line(self, line: str) -> None:
        try:
            document = json.loads(line)
        except ValueError:
            return  # printed by a library
        if isinstance(document, dict):
            self._apply(document)

    def _apply(self, report: dict[str, Any]) -> None:
        self.trouble = None
        if (text := report.get("event")) is not None:
            self._journal.add(text, is_trouble=report.get("is_trouble", False))
        if "is_up" in report:
            self.state.is_up = report["is_up"]
        if "is_replaying" in report:
            self.state.is_replaying = report["is_replaying"]
        if "archived" in report:
            self.state.archived = report["archived"]
        if (name := report.get("pipeline")) in self.state.queries:
            for fact in ("rows", "batch_ms", "is_running", "trouble", "dropped"):
                if fact in report:
                    setattr(self.state.queries[name], fact, report[fact])
