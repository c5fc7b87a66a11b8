"""The one way that tests start a cluster: real nodes in processes of their own, each on an address of its own.

Node N listens behind 127.0.0.(100+N) and is known to everyone as 127.0.0.(10+N), where doors of a proxy stand; it
calls its peers from that address too, so that the proxy knows who calls. Without a proxy the two are the same.
"""

import os
import random
import signal
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from tests.brokers import BrokerProcess, environment, executable
from tests.crash import power
from tests.ports import free_address

# Failure is noticed, and mended, at a pace that a test with hundreds of failures can wait for.
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
    """What stands before a node: a proxy, or nothing."""

    def open(self, node: int, host: str, behind: tuple[str, int]) -> int: ...


class NodeProcess(BrokerProcess):
    """One node, which keeps its folder, its addresses and the journal of its syncs through everything."""

    def __init__(self, node_id: int, folder: Path, settings: Mapping[str, str], doors: Doors | None) -> None:
        super().__init__(folder / "data", settings, log=folder / "log")
        folder.mkdir(parents=True, exist_ok=True)
        self.node_id = node_id
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

    @property
    def peer_address(self) -> str:
        return _text(self._advertised[NODES])

    @property
    def direct_address(self) -> tuple[str, int]:
        """Past the proxy: for those who look at the cluster, not for those who are tested."""
        return self._listeners[CLIENTS]

    @property
    def direct_peer_address(self) -> tuple[str, int]:
        """The same of the listener for nodes, which is open while a node starts."""
        return self._listeners[NODES]

    @property
    def is_running(self) -> bool:
        return self._process is not None

    @property
    def exit_code(self) -> int | None:
        """Of a node that has ended without being told to."""
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
        """Returns how many bytes the disk lost."""
        self.kill()
        return power.lose_power(self.data_dir, self.journal, chance)

    def _command(self) -> list[str]:
        is_other = "PENSTOCK_TEST_EXECUTABLE" in os.environ
        program = executable() if is_other else [sys.executable, power.__file__]
        flags = {
            "listeners": _listed(self._listeners),
            "advertised.listeners": _listed(self._advertised),
            "inter.broker.listener.name": NODES,
            "log.dirs": str(self.data_dir),
            "node.id": str(self.node_id),
        }
        sets = [part for item in {**self.settings, **flags}.items() for part in ("--set", "=".join(item))]
        return [*program, "serve", *sets]

    def _environment(self) -> dict[str, str]:
        return {**environment(), power.JOURNAL: str(self.journal)}


class ClusterProcesses:
    """Nodes 1 to N, the same settings for all."""

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
        """One after the other; returns exit codes."""
        return {node_id: node.stop() for node_id, node in self.nodes.items()}

    def kill(self) -> None:
        for node in self.nodes.values():
            node.kill()


def _listed(addresses: Mapping[str, tuple[str, int]]) -> str:
    return ",".join(f"{name}://{_text(address)}" for name, address in addresses.items())


def _text(address: tuple[str, int]) -> str:
    return f"{address[0]}:{address[1]}"
