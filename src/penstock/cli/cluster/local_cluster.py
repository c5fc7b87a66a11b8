"""A local cluster: its directory, the roles, ports and flags of its nodes, and requests to the process that runs
it.

`cluster.json` in the directory records the nodes and settings of the cluster, and a lock shows whether it runs. Nodes
inherit the lock, so it is held as long as any of them lives, even if the supervisor is gone.

Another shell sends a request to the supervisor as a file in the directory, followed by SIGUSR1; a file with the reply
replaces the request. A user who can write into the directory and signal the process can already do everything that the
process does, so the requests need no other protection.
"""

import asyncio
import fcntl
import json
import os
import shutil
import signal
import socket
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from penstock.broker.config.listeners import NODES_LISTENER, format_address
from penstock.broker.config.node_settings import is_secret, variable_name
from penstock.cli.errors import EXIT_USAGE, CommandError
from penstock.protocol.durable_files import replace_private
from penstock.testing.credentials import CLIENT_LISTENER as SECURE_CLIENT_LISTENER

STATE_FILE = "cluster.json"
LOCK_FILE = "cluster.lock"
BROKER, CONTROLLER = "broker", "controller"
PORT_MAX = 65535
_NODE_PORT_OFFSET = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalNode:
    """A node of the cluster. `founder`: it is one of the initial voters.

    Other nodes reach it at `peer_address`. None: they use the clients' listener, as in earlier releases.
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
    nodes: tuple[LocalNode, ...]
    settings: Mapping[str, str] = field(default_factory=dict)
    cluster_id: str | None = None
    supervisor: int | None = None  # the pid of the process that supervises the nodes
    first_port: int = 0  # nodes listen on this port and the following ones; 0: on free ports
    secure: bool = False  # clients log in over TLS, and access rules apply

    @property
    def bootstrap(self) -> str:
        return ",".join(node.address for node in self.nodes if BROKER in node.roles)

    @property
    def initial_voters(self) -> tuple[LocalNode, ...]:
        return tuple(node for node in self.nodes if node.founder)

    @property
    def shares_listeners(self) -> bool:
        """The cluster dates from a release where nodes and clients shared a listener; its voters have that address."""
        is_made = self.cluster_id is not None and len(self.nodes) > 1
        return is_made and any(node.peer_address is None for node in self.nodes)

    def running(self, pids: Mapping[int, int | None]) -> "LocalCluster":
        return replace(self, nodes=tuple(replace(node, pid=pids.get(node.id)) for node in self.nodes))


class ClusterDirectory:
    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(os.path.expanduser(path)))

    def make(self) -> None:
        """Raises CommandError."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CommandError(f"{self.path}: {error.strerror}") from None

    def lock(self) -> int:
        """Returns the descriptor that holds the lock, for nodes to inherit. Raises CommandError if the cluster runs."""
        try:
            descriptor = os.open(self.path / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise CommandError(f"{self.path}: {error.strerror}") from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise CommandError(
                f"the cluster in {self.path} is running",
                hint=f"`penstock cluster stop --dir {self.path}` stops it",
            ) from None
        return descriptor

    @property
    def is_running(self) -> bool:
        try:
            descriptor = os.open(self.path / LOCK_FILE, os.O_RDWR)
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
        """Raises CommandError for a file that cannot be read."""
        path = self.path / STATE_FILE
        try:
            document = json.loads(path.read_bytes())
            return _decode_cluster(document)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CommandError(f"{path}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError) as error:
            raise CommandError(f"cannot read {path}: {error!r}") from None

    def save(self, cluster: LocalCluster) -> None:
        document = {"cluster_id": cluster.cluster_id, "bootstrap": cluster.bootstrap, **asdict(cluster)}
        replace_private(self.path / STATE_FILE, json.dumps(document, indent=2).encode() + b"\n")


def _decode_cluster(document: dict[str, Any]) -> LocalCluster:
    nodes = (LocalNode(**{**node, "roles": tuple(node["roles"])}) for node in document["nodes"])
    return LocalCluster(
        nodes=tuple(nodes),
        settings=dict(document["settings"]),
        cluster_id=document["cluster_id"],
        supervisor=document["supervisor"],
        first_port=document["first_port"],
        secure=document.get("secure", False),
    )


def free_ports(host: str, count: int) -> list[int]:
    """Ports that no process listens on now, all different."""
    with ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind((host, 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def client_and_node_ports(host: str, first: int, count: int) -> tuple[list[int], list[int]]:
    """Client ports from `first` on, and node ports 10000 above. Free ports where `first` is 0 or the sum too high."""
    if first == 0:
        ports = free_ports(host, 2 * count)
        return ports[:count], ports[count:]
    ports = list(range(first, first + count))
    above = [port + _NODE_PORT_OFFSET for port in ports]
    return ports, above if above[-1] <= PORT_MAX else free_ports(host, count)


def check_ports_free(addresses: Iterable[tuple[str, str, int]], hint: str) -> None:
    """Raises CommandError for the first of (whose, host, port) that another process listens on."""
    for whose, host, port in addresses:
        for family, kind, protocol, _, at in _resolve_address(host, port):
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind(at)
                except OSError as error:
                    raise CommandError(
                        f"{whose} cannot listen on {host}:{port}: {error.strerror}", hint=hint
                    ) from None


def _resolve_address(host: str, port: int) -> list[Any]:
    try:
        return list(socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE))
    except OSError as error:
        raise CommandError(f"{host}: {error.strerror}") from None


HOST = "127.0.0.1"
CLIENT_LISTENER = "PLAINTEXT"
REPLICATION_FACTOR = 3


def controller_count(count: int) -> int:
    """Three controllers survive the loss of one. Two would survive none, so smaller clusters have one."""
    return 3 if count >= 3 else 1


def node_roles(number: int, count: int) -> tuple[str, ...]:
    """Nodes are numbered from 1."""
    return (BROKER, CONTROLLER) if number <= controller_count(count) else (BROKER,)


def grow_cluster(known: LocalCluster | None, count: int | None, members: Sequence[LocalNode]) -> LocalCluster:
    """Returns the known cluster extended by new nodes. `members` describes all nodes as if created now.

    Raises CommandError if `count` is smaller than the number of known nodes.
    """
    if known is None or known.cluster_id is None:
        return LocalCluster(nodes=tuple(members))
    if count is not None and count < len(known.nodes):
        raise CommandError(
            f"the cluster has {len(known.nodes)} nodes, and `start` cannot remove {len(known.nodes) - count}",
            hint="`penstock cluster rebalance --remove-broker ID` moves all replicas away from a node first",
            exit_code=EXIT_USAGE,
        )
    kept = {node.id: node for node in known.nodes}

    def grown_member(node: LocalNode) -> LocalNode:
        before = kept.get(node.id)
        peer_address = (before and before.peer_address) or node.peer_address
        if known.shares_listeners:
            peer_address = None
        if before is None:
            return replace(node, founder=False, peer_address=peer_address)
        return replace(before, roles=node.roles, peer_address=peer_address)

    return replace(known, nodes=tuple(map(grown_member, members)))


def quorum_flags(node: LocalNode, cluster: LocalCluster) -> list[str]:
    """The flags with which a node finds its cluster. Even after it lost its disk it must not create a second one."""
    initial_voters = cluster.initial_voters
    if node.founder and len(initial_voters) > 1:
        return ["--voters", ",".join(f"{founder.id}@{founder.quorum_address}" for founder in initial_voters)]
    others = [
        other.quorum_address for other in cluster.nodes if CONTROLLER in other.roles and other.id != node.id
    ]
    return ["--join", ",".join(others)] if others else []


def replication_settings(count: int) -> dict[str, str]:
    """Settings with which acknowledged records survive the loss of a node, if there are enough nodes."""
    return {
        "default.replication.factor": str(min(REPLICATION_FACTOR, count)),
        "min.insync.replicas": "2" if count >= REPLICATION_FACTOR else "1",
    }


def serve_command(*words: str) -> tuple[str, ...]:
    """The command that runs this installation, even if the shell would find another `penstock`."""
    return (sys.executable, "-P", "-m", "penstock", "serve", *words)


def secret_environment(settings: Mapping[str, str]) -> dict[str, str]:
    """The secrets among the settings of a node, as environment variables, which only its owner can read."""
    return {variable_name(name): value for name, value in settings.items() if is_secret(name)}


def node_flags(
    node: LocalNode, cluster: LocalCluster, config: str | None, settings: Mapping[str, str]
) -> list[str]:
    """The flags of `serve` for a node of `cluster start`. They override the addresses of a settings file.

    They contain no secrets; see `secret_environment`.
    """
    client_listener = SECURE_CLIENT_LISTENER if cluster.secure else CLIENT_LISTENER
    addresses = [f"{client_listener}://{node.address}"]
    texts = {
        **replication_settings(len(cluster.nodes)),
        **settings,
        "penstock.http.listen": node.http or "",
    }
    if len(cluster.nodes) > 1:  # a single node needs no listener for other nodes
        if node.peer_address is not None:
            addresses.append(f"{NODES_LISTENER}://{node.peer_address}")
        texts["inter.broker.listener.name"] = client_listener if node.peer_address is None else NODES_LISTENER
    words = ["--node-id", str(node.id)]
    words += [part for address in addresses for part in ("--listen", address, "--advertise", address)]
    words += ["--data-dir", node.data_dir, "--roles", ",".join(node.roles), *quorum_flags(node, cluster)]
    if config is not None:
        words += ["--config", config]
    for name, value in texts.items():
        if not is_secret(name):
            words += ["--set", f"{name}={value}"]
    return words


def local_nodes(
    folder: Path,
    count: int,
    ports: Sequence[int],
    http_ports: Sequence[int | None],
    peer_ports: Sequence[int],
) -> list[LocalNode]:
    return [
        LocalNode(
            id=number,
            address=format_address(HOST, ports[number - 1]),
            http=None
            if http_ports[number - 1] is None
            else format_address(HOST, http_ports[number - 1] or 0),
            data_dir=str(folder / f"node-{number}"),
            log=str(folder / f"node-{number}.log"),
            roles=node_roles(number, count),
            founder=number <= controller_count(count),
            peer_address=format_address(HOST, peer_ports[number - 1]),
        )
        for number in range(1, count + 1)
    ]


_REQUESTS_DIRECTORY = "requests"
_REQUEST_SUFFIX, _REPLY_SUFFIX = ".request", ".answer"
#: Longer than a node may take to stop and start again.
SUPERVISOR_TIMEOUT_S = 120.0
_POLL_S = 0.05

SupervisorRequest = dict[str, int]


def request_from_supervisor(directory: ClusterDirectory, request: SupervisorRequest) -> str:
    """Returns a sentence about what the supervisor did. Raises CommandError."""
    cluster = directory.load()
    if (
        cluster is None
        or cluster.supervisor is None
        or not holds_cluster_lock(cluster.supervisor, directory.path)
    ):
        raise CommandError(
            f"no supervisor runs the cluster in {directory.path}",
            hint="stop the cluster and start it again",
        )
    folder = directory.path / _REQUESTS_DIRECTORY
    if not folder.is_dir():
        # SIGUSR1 would kill a process that does not handle it.
        raise CommandError(
            f"the process that runs the cluster ({cluster.supervisor}) accepts no requests",
            hint="try again when it has started; if it runs an earlier release, stop the cluster and start it again",
        )
    path = folder / (uuid.uuid4().hex + _REQUEST_SUFFIX)
    _write_atomically(path, request)
    os.kill(cluster.supervisor, signal.SIGUSR1)
    answer = path.with_suffix(_REPLY_SUFFIX)
    deadline = time.monotonic() + SUPERVISOR_TIMEOUT_S
    while not answer.exists():
        if time.monotonic() > deadline or not holds_cluster_lock(cluster.supervisor, directory.path):
            path.unlink(missing_ok=True)
            raise CommandError(f"the process that runs the cluster ({cluster.supervisor}) does not answer")
        time.sleep(_POLL_S)
    reply = json.loads(answer.read_text())
    answer.unlink()
    if reply["error"] is not None:
        raise CommandError(reply["error"], hint=reply["hint"])
    return str(reply["done"])


@contextmanager
def serve_requests(
    directory: ClusterDirectory, carry_out: Callable[[SupervisorRequest], Awaitable[str]]
) -> Iterator[None]:
    """Carries out requests in the supervisor's event loop, one after the other."""
    loop = asyncio.get_running_loop()
    turn = asyncio.Lock()
    tasks: set[asyncio.Task[None]] = set()

    async def answer_all() -> None:
        async with turn:
            for path in sorted((directory.path / _REQUESTS_DIRECTORY).glob("*" + _REQUEST_SUFFIX)):
                reply: dict[str, Any] = {"done": None, "error": None, "hint": None}
                try:
                    reply["done"] = await carry_out(json.loads(path.read_text()))
                except CommandError as failure:
                    reply |= {"error": failure.message, "hint": failure.hint}
                path.unlink(missing_ok=True)
                _write_atomically(path.with_suffix(_REPLY_SUFFIX), reply)

    def begin() -> None:
        task = loop.create_task(answer_all())
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    loop.add_signal_handler(signal.SIGUSR1, begin)
    shutil.rmtree(directory.path / _REQUESTS_DIRECTORY, ignore_errors=True)
    (directory.path / _REQUESTS_DIRECTORY).mkdir()
    try:
        yield
    finally:
        # Keep the signal handler: a process that saw the directory just before may still send SIGUSR1.
        shutil.rmtree(directory.path / _REQUESTS_DIRECTORY, ignore_errors=True)
        for task in tasks:
            task.cancel()


def _write_atomically(path: Path, document: object) -> None:
    """Readers see the whole file or none."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(document))
    os.replace(temporary, path)


def holds_cluster_lock(pid: int, folder: Path) -> bool:
    """Whether the process has the lock file open; only supervisor and nodes do. Outside Linux always true."""
    descriptors = f"/proc/{pid}/fd"
    if sys.platform != "linux":
        return True
    with suppress(OSError):
        return any(
            os.path.samefile(os.path.join(descriptors, name), folder / LOCK_FILE)
            for name in os.listdir(descriptors)
            if os.path.exists(os.path.join(descriptors, name))
        )
    return False
