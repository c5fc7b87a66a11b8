"""The one way that tests start a broker: the real command in a process of its own.

`PENSTOCK_TEST_BOOTSTRAP=host:port` points the suite at a broker that already runs (tests that must restart or tune
it are skipped), and `PENSTOCK_TEST_EXECUTABLE` names another program that takes the same `serve` flags.
"""

import collections
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.ports import free_port

from penstock.log.checkpoints import RECOVERY_POINT_CHECKPOINT

READY_LINE = re.compile(r"listening on (?:\w+://)?(?P<host>\[[^\]]+\]|[^\s:]+):(?P<port>\d+)")
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 60.0
KEPT_LINES = 200

# Housekeeping and failure detection at a pace that tests can wait for; clients keep the defaults of their libraries.
TEST_SETTINGS = {
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "500",
    "log.cleaner.backoff.ms": "100",
    "log.retention.check.interval.ms": "200",
    # Once a day: a group without members and offsets would go away while a test still looks at it.
    "offsets.retention.check.interval.ms": "86400000",
    "offsets.topic.num.partitions": "4",
    "offsets.topic.replication.factor": "1",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "100",
    "transaction.state.log.num.partitions": "4",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningBroker:
    """A broker that someone else runs: all that a client needs to know."""

    bootstrap_servers: str

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.bootstrap_servers.split(",")[0].rpartition(":")
        return host.strip("[]"), int(port)


class Readiness:
    """What the output of one life of a process has told: the address, or that there will be none."""

    def __init__(self) -> None:
        self.known = threading.Event()
        self.address: str | None = None


class BrokerProcess:
    """`penstock serve` with a data folder, which it keeps through stop, kill and restart, as it keeps its port."""

    def __init__(
        self, data_dir: Path, settings: Mapping[str, str] | None = None, log: Path | None = None
    ) -> None:
        self.data_dir = data_dir
        self.settings = {**TEST_SETTINGS, **(settings or {})}
        self.output: collections.deque[str] = collections.deque(maxlen=KEPT_LINES)
        self.log = log  # a file that gets all of the output, where the last lines are not enough
        self._listen = f"localhost:{free_port()}"
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._readiness = Readiness()

    def __repr__(self) -> str:
        state = f"pid {self._process.pid}" if self._process else "stopped"
        return f"<BrokerProcess {self._listen} in {self.data_dir} ({state})>"

    @property
    def bootstrap_servers(self) -> str:
        return self._listen

    @property
    def address(self) -> tuple[str, int]:
        return RunningBroker(bootstrap_servers=self._listen).address

    @property
    def pid(self) -> int:
        assert self._process is not None, "the broker is not running"
        return self._process.pid

    def start(self) -> "BrokerProcess":
        return self.launch().await_ready()

    def launch(self) -> "BrokerProcess":
        """Start it without waiting: nodes of a new cluster are ready only together."""
        assert self._process is None, f"{self} is already running"
        self.output.clear()
        self._process = subprocess.Popen(
            self._command(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self._environment(),
        )
        self._readiness = Readiness()
        reading = (self._process, self._readiness)
        self._reader = threading.Thread(target=self._read, args=reading, name="broker-output", daemon=True)
        self._reader.start()
        return self

    def await_ready(self) -> "BrokerProcess":
        self._readiness.known.wait(START_TIMEOUT_S)
        if self._readiness.address is None:
            self.kill()
            raise AssertionError(f"the broker did not start:\n{''.join(self.output)}")
        self._listen = self._readiness.address
        return self

    @property
    def is_ready(self) -> bool:
        return self._process is not None and self._readiness.address is not None

    def stop(self) -> int:
        """Ask it to end, as an operator would; returns the exit code."""
        return self._end(signal.SIGTERM)

    def kill(self) -> int:
        """End it without any chance to tidy up."""
        return self._end(signal.SIGKILL)

    def kill_before_checkpoint(self) -> None:
        """As if no recovery point had been saved yet: the next start checks the logs from their beginning."""
        self.kill()
        (self.data_dir / RECOVERY_POINT_CHECKPOINT).unlink(missing_ok=True)

    def restart(self) -> "BrokerProcess":
        self.stop()
        return self.start()

    def _command(self) -> list[str]:
        flags = [part for name, value in self.settings.items() for part in ("--set", f"{name}={value}")]
        return [*executable(), "serve", "--listen", self._listen, "--data-dir", str(self.data_dir), *flags]

    def _environment(self) -> dict[str, str]:
        return environment()

    def _read(self, process: subprocess.Popen[str], readiness: "Readiness") -> None:
        """Read the output for as long as it lasts, so that a full pipe never stops the broker."""
        assert process.stdout is not None
        with process.stdout as lines, (self.log or Path(os.devnull)).open("a", buffering=1) as log:
            for line in lines:
                self.output.append(line)
                log.write(line)
                if readiness.address is None and (match := READY_LINE.search(line)):
                    readiness.address = f"{match['host']}:{match['port']}"
                    readiness.known.set()
        readiness.known.set()

    def _end(self, signal_number: signal.Signals) -> int:
        if self._process is None:
            return 0
        process, self._process = self._process, None
        process.send_signal(signal_number)
        try:
            return process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise AssertionError(f"the broker did not stop:\n{''.join(self.output)}") from None
        finally:
            if self._reader is not None:
                self._reader.join(STOP_TIMEOUT_S)


def executable() -> list[str]:
    """The command as a user gets it by installing the package."""
    if named := os.environ.get("PENSTOCK_TEST_EXECUTABLE"):
        return [named]
    return [str(Path(sys.executable).with_name("penstock"))]


def external_bootstrap() -> str | None:
    return os.environ.get("PENSTOCK_TEST_BOOTSTRAP")


def environment() -> dict[str, str]:
    """Only what the test says may configure the broker, not what happens to be set outside."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
