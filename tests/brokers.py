"""The one way that tests and benchmarks start brokers in processes of their own: `penstock serve`.

`BrokerProcess` is one broker, `ClusterProcesses` are several. (A broker inside the process of a test is
`penstock.testing.EmbeddedBroker`, or `tests.unit.broker.raw_client.running` for tests that look inside it.)

Node N of a cluster listens on 127.0.0.(100+N). Behind a proxy its clients and peers know it as 127.0.0.(10+N), where
the proxy listens; the node also connects to its peers from that address, so that the proxy can tell nodes apart.

`PENSTOCK_TEST_BOOTSTRAP=host:port` points the suite at a broker that already runs (tests that must restart or tune
it are skipped), and `PENSTOCK_TEST_EXECUTABLE` names another program that takes the same `serve` flags.
"""

import collections
import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tests.crash import power
from tests.ports import free_address, free_port

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
    """A broker that the suite did not start: only its address."""

    bootstrap_servers: str

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.bootstrap_servers.split(",")[0].rpartition(":")
        return host.strip("[]"), int(port)


class Readiness:
    """Of one run of a process: the address it listens on, from its output; None if it ended before that."""

    def __init__(self) -> None:
        self.known = threading.Event()
        self.address: str | None = None


class BrokerProcess:
    """`penstock serve`; its port and data folder stay the same through stop, kill and restart."""

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
        """Start without waiting, because nodes of a new cluster become ready only together."""
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
        """Send SIGTERM, as an operator would; returns the exit code."""
        return self._end(signal.SIGTERM)

    def kill(self) -> int:
        """Send SIGKILL; returns the exit code."""
        return self._end(signal.SIGKILL)

    def kill_before_checkpoint(self) -> None:
        """Kill it and delete the recovery point, so that the next start checks the logs from their beginning."""
        self.kill()
        (self.data_dir / RECOVERY_POINT_CHECKPOINT).unlink(missing_ok=True)

    def restart(self) -> "BrokerProcess":
        self.stop()
        return self.start()

    def _command(self) -> list[str]:
        given = ["--listen", self._listen, "--data-dir", str(self.data_dir)]
        return [*executable(), "serve", *given, *set_flags(self.settings)]

    def _environment(self) -> dict[str, str]:
        return environment()

    def _read(self, process: subprocess.Popen[str], readiness: "Readiness") -> None:
        """Read the output to its end, so that a full pipe never blocks the broker."""
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


# Failures are detected and repaired quickly enough for tests with hundreds of failures.
CLUSTER_SETTINGS = {
    "broker.heartbeat.interval.ms": "300",
    "broker.session.timeout.ms": "1500",
    "controller.quorum.election.timeout.ms": "500",
    "controller.quorum.fetch.timeout.ms": "1000",
    "controller.quorum.election.backoff.max.ms": "300",
    "default.replication.factor": "3",
    "min.insync.replicas": "2",
    "offsets.topic.replication.factor": "3",
    "penstock.controlled.shutdown.timeout.ms": "5000",
    "replica.fetch.backoff.ms": "100",
    "replica.fetch.wait.max.ms": "300",
    "replica.lag.time.max.ms": "1500",
    "replica.socket.timeout.ms": "1500",
}
CLIENTS, NODES = "CLIENT", "NODES"


class Doors(Protocol):
    """A proxy before the nodes."""

    def open(self, node: int, host: str, behind: tuple[str, int]) -> int: ...


class NodeProcess(BrokerProcess):
    """One node of a cluster. It records its syncs in a journal, so that a test can take away what was not synced."""

    def __init__(self, node_id: int, folder: Path, settings: Mapping[str, str], doors: Doors | None) -> None:
        super().__init__(folder / "data", settings, log=folder / "log")
        folder.mkdir(parents=True, exist_ok=True)
        self.node_id = node_id
        self.flags: tuple[str, ...] = ()  # of `serve`, beside the settings
        self.journal = folder / "journal"
        self.is_frozen = False
        self._listeners = {name: free_address(f"127.0.0.{100 + node_id}") for name in (CLIENTS, NODES)}
        self.host = f"127.0.0.{10 + node_id}" if doors else f"127.0.0.{100 + node_id}"
        self._advertised = {
            name: (self.host, doors.open(node_id, self.host, address) if doors else address[1])
            for name, address in self._listeners.items()
        }

    @property
    def bootstrap_servers(self) -> str:
        return _text(self._advertised[CLIENTS])

    def add_listener(self, name: str) -> None:
        address = free_address(self.host)
        self._listeners[name] = self._advertised[name] = address

    def remove_listener(self, name: str) -> None:
        del self._listeners[name], self._advertised[name]

    def address_at(self, listener: str) -> str:
        return _text(self._advertised[listener])

    @property
    def peer_address(self) -> str:
        return _text(self._advertised[NODES])

    @property
    def direct_address(self) -> tuple[str, int]:
        """Past the proxy: for observers, not for the clients under test."""
        return self._listeners[CLIENTS]

    @property
    def direct_peer_address(self) -> tuple[str, int]:
        """Past the proxy, of the listener for nodes, which is open while a node starts."""
        return self._listeners[NODES]

    @property
    def is_running(self) -> bool:
        return self._process is not None

    @property
    def exit_code(self) -> int | None:
        """Of a node that has ended on its own."""
        return None if self._process is None else self._process.poll()

    def launch(self) -> "NodeProcess":
        power.condense(self.journal)
        self.journal.touch()
        super().launch()
        return self

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        self.is_frozen = True

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)
        self.is_frozen = False

    def lose_power(self, chance: random.Random) -> int:
        """Kill it and drop what was not synced; returns how many bytes the disk lost."""
        self.kill()
        return power.lose_power(self.data_dir, self.journal, chance)

    def _command(self) -> list[str]:
        is_other = "PENSTOCK_TEST_EXECUTABLE" in os.environ
        program = executable() if is_other else [sys.executable, power.__file__]
        flags = {
            "listeners": _listed(self._listeners),
            "advertised.listeners": _listed(self._advertised),
            "log.dirs": str(self.data_dir),
            "node.id": str(self.node_id),
        }
        settings = {"inter.broker.listener.name": NODES, **self.settings, **flags}
        return [*program, "serve", *self.flags, *set_flags(settings)]

    def _environment(self) -> dict[str, str]:
        return {**environment(), power.JOURNAL: str(self.journal)}


class ClusterProcesses:
    """Nodes 1 to N with the same settings."""

    def __init__(
        self,
        folder: Path,
        *,
        count: int = 3,
        settings: Mapping[str, str] | None = None,
        doors: Doors | None = None,
    ) -> None:
        given = {**(CLUSTER_SETTINGS if count > 1 else {}), **(settings or {})}
        self.nodes = {n: NodeProcess(n, folder / f"node-{n}", given, doors) for n in range(1, count + 1)}
        if count > 1:
            voters = ",".join(f"{node.node_id}@{node.peer_address}" for node in self.nodes.values())
            for node in self.nodes.values():
                node.settings |= {"controller.quorum.voters": voters, "penstock.peer.bind.host": node.host}

    @property
    def bootstrap_servers(self) -> str:
        return ",".join(node.bootstrap_servers for node in self.nodes.values())

    @property
    def direct_servers(self) -> str:
        return ",".join(_text(node.direct_address) for node in self.nodes.values())

    def start(self) -> "ClusterProcesses":
        self.launch(self.nodes)
        for node in self.nodes.values():
            node.await_ready()
        return self

    def launch(self, ids: Iterable[int]) -> None:
        for node_id in ids:
            self.nodes[node_id].launch()

    def stop(self) -> dict[int, int]:
        """Stop one node after the other; returns their exit codes."""
        return {node_id: node.stop() for node_id, node in self.nodes.items()}

    def kill(self) -> None:
        for node in self.nodes.values():
            node.kill()


def _listed(addresses: Mapping[str, tuple[str, int]]) -> str:
    return ",".join(f"{name}://{_text(address)}" for name, address in addresses.items())


def _text(address: tuple[str, int]) -> str:
    return f"{address[0]}:{address[1]}"


def set_flags(settings: Mapping[str, str]) -> list[str]:
    return [part for item in settings.items() for part in ("--set", "=".join(item))]


def executable() -> list[str]:
    """The command of the installed package, or the module where it is not installed."""
    if named := os.environ.get("PENSTOCK_TEST_EXECUTABLE"):
        return [named]
    installed = Path(sys.executable).with_name("penstock")
    return [str(installed)] if installed.exists() else [sys.executable, "-m", "penstock"]


def external_bootstrap() -> str | None:
    return os.environ.get("PENSTOCK_TEST_BOOTSTRAP")


def environment() -> dict[str, str]:
    """Without PENSTOCK_ variables, so that only the test configures the broker."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
