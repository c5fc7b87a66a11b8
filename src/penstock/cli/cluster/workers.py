"""`penstock serve --workers N`: as many nodes as cores, under one supervisor.

Ids, ports and folders count up from those of the first; all share the rack of their host, so that no two replicas of
a partition end up on it while other hosts have room.
"""

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace

from penstock.broker.listeners import NODES, Listener, format_address
from penstock.broker.settings import Settings
from penstock.cli.cluster_folder import (
    BROKER,
    CONTROLLER,
    ClusterFolder,
    LocalCluster,
    Member,
    client_and_node_ports,
)
from penstock.cli.cluster_plan import HOST, controllers_among, grown, quorum_flags, roles_of, serve_command
from penstock.cli.failure import WRONG_USAGE, Failure
from penstock.cli.flags import LIFELINE, WORKERS
from penstock.cli.supervisor import Node

WORKERS_MAX = 64
#: What differs from worker to worker and is written anew for each.
_OWN = frozenset(
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
    | {WORKERS, LIFELINE, "--welcome"}
)


def count_of(flags: Mapping[str, Sequence[str]]) -> int:
    """How many nodes are wanted. Raises Failure."""
    text = flags.get(WORKERS, ["1"])[-1]
    if not text.isdecimal() or not 1 <= int(text) <= WORKERS_MAX:
        raise Failure(
            f"--workers takes a number from 1 to {WORKERS_MAX}, not {text!r}", exit_code=WRONG_USAGE
        )
    return int(text)


def start(flags: Mapping[str, Sequence[str]], settings: Settings) -> int:
    """Raises Failure."""
    from penstock.cli.cluster_start import supervise

    count = count_of(flags)
    place = ClusterFolder(settings.data_dir)
    place.make()
    lock = place.lock()
    cluster = planned(settings, count, place.load())
    commands = [
        Node(node.id, serve_command(*words(node, cluster, settings, flags)), None) for node in cluster.nodes
    ]
    return supervise(
        place,
        replace(cluster, supervisor=os.getpid()),
        commands,
        lock,
        restart=True,
        ready=lambda _: print(f"{count} nodes are up", flush=True),
    )


def planned(settings: Settings, count: int, known: LocalCluster | None) -> LocalCluster:
    """Who the workers are. Free ports are chosen once and kept."""
    first = settings.listeners[0]
    if first.port == 0 and len(settings.listeners) > 1:
        raise Failure("--workers with several listeners needs their ports", exit_code=WRONG_USAGE)
    ports, peer_ports = client_and_node_ports("", first.port, count)
    members = [_member(settings, number, count, ports[number], peer_ports[number]) for number in range(count)]
    if first.port == 0 or known is None:
        return grown(known, None, members)
    kept = {node.id: node.founder for node in known.nodes}
    is_founded = known.cluster_id is not None
    nodes = (replace(node, founder=kept.get(node.id, False)) if is_founded else node for node in members)
    if known.shares_listeners and settings.inter_broker_listener is None:
        nodes = (replace(node, peer_address=None) for node in nodes)
    return LocalCluster(nodes=tuple(nodes), cluster_id=known.cluster_id)


def _member(settings: Settings, number: int, count: int, port: int, peer_port: int) -> Member:
    id = settings.node_id + number
    at = settings.advertised[0]
    advertised = at.port + number if at.port else port
    http = settings.http_address
    return Member(
        id=id,
        address=format_address(at.host, advertised),
        http=None if http is None else format_address(http[0], http[1] + number if http[1] else 0),
        data_dir=os.path.join(settings.data_dir, f"worker-{number + 1}"),
        log=None,
        roles=_roles(settings, id, number + 1, count),
        founder=id in settings.founders if settings.founders else number < controllers_among(count),
        peer_address=_peer_address(settings, number, port, peer_port),
    )


def _peer_address(settings: Settings, number: int, port: int, peer_port: int) -> str:
    """Where the settings put the listener for nodes; where they do not, no other host needs to reach it."""
    for at in settings.advertised:
        if at.name == settings.inter_broker_listener:
            return format_address(at.host, at.port + number if at.port else port)
    return format_address(HOST, peer_port)


def _roles(settings: Settings, id: int, number: int, count: int) -> tuple[str, ...]:
    """As told; else those that found the cluster are its controllers, and who joins one is none."""
    if settings.source("process.roles").kind != "default":
        return tuple(role for role in (BROKER, CONTROLLER) if role in _told(settings))
    if settings.founders:
        return (BROKER, CONTROLLER) if id in settings.founders else (BROKER,)
    return (BROKER,) if settings.bootstrap_servers else roles_of(number, count)


def _told(settings: Settings) -> tuple[str, ...]:
    roles = settings["process.roles"]
    assert isinstance(roles, tuple)
    return roles


def words(
    node: Member, cluster: LocalCluster, settings: Settings, flags: Mapping[str, Sequence[str]]
) -> list[str]:
    """The flags of `serve` for one worker: what was written, and in place of what differs its own."""
    number = node.id - settings.node_id
    written = [
        part
        for name, values in flags.items()
        if name not in _OWN
        for value in values
        for part in (name, value)
    ]
    own = ["--node-id", str(node.id), "--data-dir", node.data_dir, "--roles", ",".join(node.roles)]
    own += ["--rack", settings.rack or socket.gethostname(), LIFELINE]
    own += [part for at in settings.listeners for part in ("--listen", _shifted(at, number, node))]
    if settings.inter_broker_listener is None and len(cluster.nodes) > 1:
        if node.peer_address is None:
            own += ["--set", f"inter.broker.listener.name={settings.listeners[0].name}"]
        else:
            own += ["--listen", f"{NODES}://{node.peer_address}"]
    if settings.source("advertised.listeners").kind != "default":
        own += [part for at in settings.advertised for part in ("--advertise", _shifted(at, number, node))]
    if node.http is not None:
        own += ["--http", node.http]
    return [*written, *own, *_place(node, cluster, settings)]


def _shifted(at: Listener, number: int, node: Member) -> str:
    """A listener of this worker: the next port for the next worker, or the one that was chosen for it."""
    port = at.port + number if at.port else int(node.address.rpartition(":")[2])
    return str(at._replace(port=port))


def _place(node: Member, cluster: LocalCluster, settings: Settings) -> list[str]:
    if settings.bootstrap_servers:
        return ["--join", ",".join(format_address(*at) for at in settings.bootstrap_servers)]
    if settings.founders:
        return ["--voters", ",".join(f"{id}@{format_address(*at)}" for id, at in settings.founders.items())]
    return quorum_flags(node, cluster)
