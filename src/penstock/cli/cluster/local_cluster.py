"""The folder of a local cluster: `cluster.json` says what it is made of, and a lock says whether it runs.

Nodes inherit the lock, so it is held for as long as any of them lives, whatever became of their supervisor.
"""

import fcntl
import json
import os
import socket
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from penstock.cli.failure import Failure
from penstock.log.checkpoints import replace_durably

STATE = "cluster.json"
LOCK = "cluster.lock"
BROKER, CONTROLLER = "broker", "controller"
PORT_MAX = 65535
_NODE_PORTS_ABOVE = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A node of the cluster; `founder`: it was there when the cluster was made.

    Other nodes reach it at `peer_address`; None where they share the clients' listener, as in earlier releases.
    """

    id: int
    address: str
    http: str | None
    data_dir: str
    log: str | None
    roles: tuple[str, ...]
    founder: bool
    pid: int | None = None
    peer_address: str | None = None

    @property
    def quorum_address(self) -> str:
        return self.peer_address or self.address


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCluster:
    nodes: tuple[Member, ...]
    settings: Mapping[str, str] = field(default_factory=dict)
    cluster_id: str | None = None
    supervisor: int | None = None  # the pid of who watches over the nodes
    first_port: int = 0  # nodes have this and the next ones; 0: whatever was free

    @property
    def bootstrap(self) -> str:
        return ",".join(node.address for node in self.nodes if BROKER in node.roles)

    @property
    def founders(self) -> tuple[Member, ...]:
        return tuple(node for node in self.nodes if node.founder)

    @property
    def shares_listeners(self) -> bool:
        """It was made when nodes and clients used the same listener, which its voters are recorded with."""
        is_made = self.cluster_id is not None and len(self.nodes) > 1
        return is_made and any(node.peer_address is None for node in self.nodes)

    def running(self, pids: Mapping[int, int | None]) -> "LocalCluster":
        return replace(self, nodes=tuple(replace(node, pid=pids.get(node.id)) for node in self.nodes))


class ClusterFolder:
    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(os.path.expanduser(path)))

    def make(self) -> None:
        """Raises Failure."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Failure(f"{self.path}: {error.strerror}") from None

    def lock(self) -> int:
        """The descriptor that holds it, to be handed on to nodes. Raises Failure when the cluster runs."""
        try:
            descriptor = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise Failure(f"{self.path}: {error.strerror}") from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise Failure(
                f"the cluster in {self.path} is running",
                hint=f"penstock cluster stop --dir {self.path} stops it",
            ) from None
        return descriptor

    @property
    def is_running(self) -> bool:
        try:
            descriptor = os.open(self.path / LOCK, os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(descriptor)
        return False

    def load(self) -> LocalCluster | None:
        """Raises Failure for a file that cannot be read."""
        path = self.path / STATE
        try:
            document = json.loads(path.read_bytes())
            return _decode(document)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise Failure(f"{path}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError) as error:
            raise Failure(f"{path} is not what this release has written: {error!r}") from None

    def save(self, cluster: LocalCluster) -> None:
        document = {"cluster_id": cluster.cluster_id, "bootstrap": cluster.bootstrap, **asdict(cluster)}
        replace_durably(self.path / STATE, json.dumps(document, indent=2).encode() + b"\n")


def _decode(document: dict[str, Any]) -> LocalCluster:
    nodes = (Member(**{**node, "roles": tuple(node["roles"])}) for node in document["nodes"])
    return LocalCluster(
        nodes=tuple(nodes),
        settings=dict(document["settings"]),
        cluster_id=document["cluster_id"],
        supervisor=document["supervisor"],
        first_port=document["first_port"],
    )


def free_ports(host: str, count: int) -> list[int]:
    """Ports that nobody listens on now, all different."""
    with ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind((host, 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def client_and_node_ports(host: str, first: int, count: int) -> tuple[list[int], list[int]]:
    """Ports for clients from `first` on, and for nodes 10000 above them; 0 and what is too high are free ones."""
    if first == 0:
        ports = free_ports(host, 2 * count)
        return ports[:count], ports[count:]
    ports = list(range(first, first + count))
    above = [port + _NODE_PORTS_ABOVE for port in ports]
    return ports, above if above[-1] <= PORT_MAX else free_ports(host, count)


def refuse_taken(addresses: Iterable[tuple[str, str, int]], hint: str) -> None:
    """Raises Failure naming the first of (whose, host, port) that somebody else listens on."""
    for whose, host, port in addresses:
        for family, kind, protocol, _, at in _resolved(host, port):
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind(at)
                except OSError as error:
                    raise Failure(
                        f"{whose} cannot listen on {host}:{port}: {error.strerror}", hint=hint
                    ) from None


def _resolved(host: str, port: int) -> list[Any]:
    try:
        return list(socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE))
    except OSError as error:
        raise Failure(f"{host}: {error.strerror}") from None
