"""`penstock serve --workers N`: N nodes, for example one per core, under one supervisor.

Node ids, ports and directories count up from those of the first node. All workers have the rack of their host, so
that no two replicas of a partition are placed on it while other hosts have room.
"""

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace

from penstock.broker.config.listeners import NODES_LISTENER, Listener, format_address
from penstock.broker.config.node_settings import NodeSettings, is_secret
from penstock.cli.cluster.local_cluster import (
    BROKER,
    CONTROLLER,
    HOST,
    ClusterDirectory,
    LocalCluster,
    LocalNode,
    client_and_node_ports,
    controller_count,
    grow_cluster,
    node_roles,
    quorum_flags,
    secret_environment,
    serve_command,
)
from penstock.cli.cluster.supervisor import NodeCommand
from penstock.cli.errors import EXIT_USAGE, CommandError
from penstock.cli.serve import STOP_WITH_STDIN_FLAG, WORKERS_FLAG

WORKERS_MAX = 64
#: Flags that are not passed on as given: each worker gets its own value, or none.
_PER_WORKER_FLAGS = frozenset(
    {
        "--listen",
        "--advertise",
        "--data-dir",
        "--node-id",
        "--roles",
        "--voters",
        "--join",
        "--rack",
        "--http",
    }
    | {WORKERS_FLAG, STOP_WITH_STDIN_FLAG, "--welcome"}
)


def worker_count(flags: Mapping[str, Sequence[str]]) -> int:
    """How many nodes to run. Raises CommandError."""
    text = flags.get(WORKERS_FLAG, ["1"])[-1]
    if not text.isdecimal() or not 1 <= int(text) <= WORKERS_MAX:
        raise CommandError(
            f"--workers takes a number from 1 to {WORKERS_MAX}, not {text!r}", exit_code=EXIT_USAGE
        )
    return int(text)


def start_workers(flags: Mapping[str, Sequence[str]], settings: NodeSettings) -> int:
    """Raises CommandError."""
    from penstock.cli.cluster.start import run_supervisor

    count = worker_count(flags)
    directory = ClusterDirectory(settings.data_dir)
    directory.make()
    lock = directory.lock()
    cluster = plan_workers(settings, count, directory.load())
    commands = [
        NodeCommand(
            node.id,
            serve_command(*worker_flags(node, cluster, settings, flags)),
            None,
            secret_environment(_set_flags(flags)),
        )
        for node in cluster.nodes
    ]
    return run_supervisor(
        directory,
        replace(cluster, supervisor=os.getpid()),
        commands,
        lock,
        restart=True,
        ready=lambda _: print(f"{count} nodes are up", flush=True),
    )


def _set_flags(flags: Mapping[str, Sequence[str]]) -> dict[str, str]:
    pairs = (text.partition("=") for text in flags.get("--set", ()))
    return {name.strip(): value for name, _, value in pairs}


def plan_workers(settings: NodeSettings, count: int, known: LocalCluster | None) -> LocalCluster:
    """The workers as nodes of a cluster. Free ports are chosen once and then kept."""
    first = settings.listeners[0]
    if first.port == 0 and len(settings.listeners) > 1:
        raise CommandError(
            "--workers with several listeners cannot use port 0",
            hint="give each listener a port",
            exit_code=EXIT_USAGE,
        )
    ports, peer_ports = client_and_node_ports("", first.port, count)
    members = [
        _worker_node(settings, number, count, ports[number], peer_ports[number]) for number in range(count)
    ]
    if first.port == 0 or known is None:
        return grow_cluster(known, None, members)
    kept = {node.id: node.founder for node in known.nodes}
    is_founded = known.cluster_id is not None
    nodes = (replace(node, founder=kept.get(node.id, False)) if is_founded else node for node in members)
    if known.shares_listeners and settings.inter_broker_listener is None:
        nodes = (replace(node, peer_address=None) for node in nodes)
    return LocalCluster(nodes=tuple(nodes), cluster_id=known.cluster_id)


def _worker_node(settings: NodeSettings, number: int, count: int, port: int, peer_port: int) -> LocalNode:
    id = settings.node_id + number
    at = settings.advertised[0]
    advertised = at.port + number if at.port else port
    http = settings.http_address
    return LocalNode(
        id=id,
        address=format_address(at.host, advertised),
        http=None if http is None else format_address(http[0], http[1] + number if http[1] else 0),
        data_dir=os.path.join(settings.data_dir, f"worker-{number + 1}"),
        log=None,
        roles=_worker_roles(settings, id, number + 1, count),
        founder=id in settings.initial_voters
        if settings.initial_voters
        else number < controller_count(count),
        peer_address=_peer_address(settings, number, port, peer_port),
    )


def _peer_address(settings: NodeSettings, number: int, port: int, peer_port: int) -> str:
    """The address of the configured inter-broker listener. Without one, no other host needs to reach the worker."""
    for at in settings.advertised:
        if at.name == settings.inter_broker_listener:
            return format_address(at.host, at.port + number if at.port else port)
    return format_address(HOST, peer_port)


def _worker_roles(settings: NodeSettings, id: int, number: int, count: int) -> tuple[str, ...]:
    """The configured roles. By default the initial voters are controllers; workers that join a cluster are not."""
    if settings.source("process.roles").kind != "default":
        configured = settings["process.roles"]
        assert isinstance(configured, tuple)
        return tuple(role for role in (BROKER, CONTROLLER) if role in configured)
    if settings.initial_voters:
        return (BROKER, CONTROLLER) if id in settings.initial_voters else (BROKER,)
    return (BROKER,) if settings.bootstrap_servers else node_roles(number, count)


def worker_flags(
    node: LocalNode, cluster: LocalCluster, settings: NodeSettings, flags: Mapping[str, Sequence[str]]
) -> list[str]:
    """The flags of `serve` for one worker: the given ones, with the per-worker flags replaced."""
    number = node.id - settings.node_id
    written = [
        part
        for name, values in flags.items()
        if name not in _PER_WORKER_FLAGS
        for value in values
        if not (name == "--set" and is_secret(value.partition("=")[0].strip()))
        for part in (name, value)
    ]
    own = ["--node-id", str(node.id), "--data-dir", node.data_dir, "--roles", ",".join(node.roles)]
    own += ["--rack", settings.rack or socket.gethostname(), STOP_WITH_STDIN_FLAG]
    own += [part for at in settings.listeners for part in ("--listen", _worker_listener(at, number, node))]
    if settings.inter_broker_listener is None and len(cluster.nodes) > 1:
        if node.peer_address is None:
            own += ["--set", f"inter.broker.listener.name={settings.listeners[0].name}"]
        else:
            own += ["--listen", f"{NODES_LISTENER}://{node.peer_address}"]
    if settings.source("advertised.listeners").kind != "default":
        own += [
            part for at in settings.advertised for part in ("--advertise", _worker_listener(at, number, node))
        ]
    if node.http is not None:
        own += ["--http", node.http]
    return [*written, *own, *_worker_quorum_flags(node, cluster, settings)]


def _worker_listener(at: Listener, number: int, node: LocalNode) -> str:
    """A listener of this worker: ports count up from the configured one, or are the free port chosen before."""
    port = at.port + number if at.port else int(node.address.rpartition(":")[2])
    return str(at._replace(port=port))


def _worker_quorum_flags(node: LocalNode, cluster: LocalCluster, settings: NodeSettings) -> list[str]:
    if settings.bootstrap_servers:
        return ["--join", ",".join(format_address(*at) for at in settings.bootstrap_servers)]
    if settings.initial_voters:
        return [
            "--voters",
            ",".join(f"{id}@{format_address(*at)}" for id, at in settings.initial_voters.items()),
        ]
    return quorum_flags(node, cluster)
