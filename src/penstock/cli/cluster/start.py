"""`penstock cluster start` and `stop`: a local cluster, each node in a process of its own."""

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from penstock.broker.listeners import parse_address
from penstock.cli import cluster_control, notify
from penstock.cli.cluster_folder import (
    CONTROLLER,
    PORT_MAX,
    ClusterFolder,
    LocalCluster,
    Member,
    client_and_node_ports,
    free_ports,
    refuse_taken,
)
from penstock.cli.cluster_plan import HOST, grown, local_members, node_words, serve_command, settings_for
from penstock.cli.failure import WRONG_USAGE, Failure
from penstock.cli.flags import LIFELINE
from penstock.cli.options import pairs
from penstock.cli.output import note, plural
from penstock.cli.supervisor import STOP_DEADLINE_S, Node, Supervisor, Watcher

DEFAULT_NODES = 3
DEFAULT_PORT = 9092
NODES_MAX = 100
VOTING_PATIENCE_S = 15.0

Folder = Annotated[str, typer.Option("--dir", "-d", metavar="DIR", help="Folder of the cluster.")]


def start(
    folder: Folder,
    nodes: Annotated[
        int | None,
        typer.Option("--nodes", "-n", min=1, max=NODES_MAX, help="How many; 3, or as many as there were."),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option("--port", min=0, max=65535, help="Port of the first node, 9092; 0 picks free ones."),
    ] = None,
    http_port: Annotated[
        int | None,
        typer.Option(
            "--http-port", min=0, max=65535, help="Serve /metrics, /health and /ready from this one on."
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", metavar="FILE", exists=True, dir_okay=False, help="Settings of all nodes (TOML)."
        ),
    ] = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A setting of all nodes.")
    ] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Start a node again when it ends.")] = False,
) -> None:
    """Run a local cluster until Ctrl-C or SIGTERM.

    Started again on the same folder, the same cluster comes back; with more --nodes it grows, also while it runs.
    """
    place = ClusterFolder(folder)
    place.make()
    if nodes is not None and place.is_running and _is_larger(place, nodes):
        note(cluster_control.ask(place, {"nodes": nodes}))
        return
    lock = place.lock()
    known = place.load()
    settings = {**(known.settings if known else {}), **pairs(sets or [], "--set")}
    cluster = replace(
        _planned(place, known, nodes, port, http_port), settings=settings, supervisor=os.getpid()
    )
    _refuse_taken_ports(cluster)
    place.save(cluster)
    config_path = None if config is None else str(config.absolute())

    def command(node: Member, among: LocalCluster) -> Node:
        words = node_words(node, among, config_path, settings)
        return Node(node.id, serve_command(*words, LIFELINE), None if node.log is None else Path(node.log))

    commands = [command(node, cluster) for node in cluster.nodes]
    note(f"starting {plural(len(cluster.nodes), 'node')} in {_short(place.path)}")
    raise typer.Exit(
        supervise(place, cluster, commands, lock, restart=restart, ready=_announce, command=command)
    )


def _is_larger(place: ClusterFolder, nodes: int) -> bool:
    known = place.load()
    return known is not None and known.cluster_id is not None and nodes > len(known.nodes)


def restart_node(
    node: Annotated[int, typer.Argument(metavar="ID", min=1, help="The node's id.")], folder: Folder
) -> None:
    """Restart one node of a local cluster that runs, or start it again when it has ended."""
    place = ClusterFolder(folder)
    known = place.load()
    if known is None:
        raise Failure(f"{place.path} is not the folder of a cluster", exit_code=WRONG_USAGE)
    if node not in {each.id for each in known.nodes}:
        raise Failure(f"the cluster has no node {node}", exit_code=WRONG_USAGE)
    if not place.is_running:
        raise Failure("the cluster is not running", hint=f"penstock cluster start --dir {place.path}")
    note(cluster_control.ask(place, {"restart": node}))


def supervise(
    place: ClusterFolder,
    cluster: LocalCluster,
    commands: list[Node],
    lock: int,
    *,
    restart: bool,
    ready: Callable[[LocalCluster], None],
    command: Callable[[Member, LocalCluster], Node] | None = None,
) -> int:
    """Run the nodes and keep `cluster.json` true. Returns an exit code; raises Failure.

    Others may ask for the restart of a node, and with a `command` for each node that may join, for that.
    """
    now = cluster

    def pids_changed(pids: dict[int, int | None]) -> None:
        nonlocal now
        now = now.running(pids)
        place.save(now)

    async def all_ready() -> None:
        nonlocal now
        found = await asyncio.to_thread(_cluster_id, now)
        now = replace(now, cluster_id=now.cluster_id or found)
        place.save(now)
        ready(now)
        notify.ready()

    watcher = Watcher(pids_changed=pids_changed, all_ready=all_ready, say=note)

    async def carry_out(supervisor: Supervisor, request: dict[str, int]) -> str:
        nonlocal now
        if "restart" in request:
            await supervisor.restart(request["restart"])
            return f"node {request['restart']} is back"
        if command is None:
            raise Failure(
                "workers cannot grow while they run", hint="stop the node, and serve with more --workers"
            )
        larger = _joined(place, now, request["nodes"])
        added = larger.nodes[len(now.nodes) :]
        for node in added:
            now = replace(now, nodes=(*now.nodes, node))
            try:
                await supervisor.add(command(node, larger))
            except Failure:
                now = replace(now, nodes=now.nodes[:-1])
                place.save(now)
                raise
            place.save(now)
        return f"{', '.join(f'node {node.id}' for node in added)} joined; {len(now.nodes)} nodes are up"

    async def run() -> int:
        supervisor = Supervisor(commands, watcher, restart=restart, inherited=(lock,))
        with cluster_control.answering(place, lambda request: carry_out(supervisor, request)):
            return await supervisor.run()

    try:
        return asyncio.run(run())
    finally:
        place.save(replace(now.running({}), supervisor=None))


def stop(
    folder: Folder,
    timeout_s: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", help="Kill what has not stopped by then.")
    ] = STOP_DEADLINE_S + 5,
) -> None:
    """Stop the local cluster of a folder, from another shell."""
    place = ClusterFolder(folder)
    cluster = place.load()
    if cluster is None:
        raise Failure(f"{place.path} is not the folder of a cluster", exit_code=WRONG_USAGE)
    if not place.is_running:
        note("it is not running")
        return
    import signal

    # Where the supervisor is gone, its nodes have noticed and are stopping already.
    _signal(cluster.supervisor, signal.SIGTERM, place.path)
    if not _has_stopped(place, timeout_s):
        note(f"not stopped within {timeout_s:g} s, killing; the next start recovers")
        for node in cluster.nodes:
            _signal(node.pid, signal.SIGKILL, place.path)
        if not _has_stopped(place, timeout_s):
            raise Failure(f"the cluster in {place.path} does not stop")
    note("stopped")


# -- planning ---------------------------------------------------------------------------------------------


def _planned(
    place: ClusterFolder,
    known: LocalCluster | None,
    nodes: int | None,
    port: int | None,
    http_port: int | None,
) -> LocalCluster:
    founded = known if known is not None and known.cluster_id is not None else None
    count = nodes or (len(founded.nodes) if founded else DEFAULT_NODES)
    first = port if port is not None else founded.first_port if founded else DEFAULT_PORT
    _check_ports(first, count)
    ports, peer_ports = client_and_node_ports(HOST, first, count)
    http_ports: list[int | None] = [None] * count
    if http_port is not None:
        _check_ports(http_port, count)
        http_ports = [
            *(free_ports(HOST, count) if http_port == 0 else range(http_port, http_port + count)),
        ]
    members = local_members(place.path, count, ports, http_ports, peer_ports)
    return replace(grown(known, nodes, members), first_port=first)


def _joined(place: ClusterFolder, now: LocalCluster, count: int) -> LocalCluster:
    """The cluster with so many nodes, those that run unchanged. Raises Failure where that cannot be."""
    http, kept = now.nodes[0].http, len(now.nodes)
    larger = _planned(place, now, count, None, None if http is None else parse_address(http)[1])
    same_roles = all(
        before.roles == after.roles for before, after in zip(now.nodes, larger.nodes, strict=False)
    )
    if not same_roles or settings_for(kept) != settings_for(count) or kept == 1:
        raise Failure(
            f"{plural(kept, 'node')} cannot become {count} while running: roles and settings change",
            hint=f"penstock cluster stop --dir {place.path}, then start it with --nodes {count}",
        )
    _refuse_taken_ports(replace(larger, nodes=larger.nodes[kept:]))
    return larger


def _check_ports(first: int, count: int) -> None:
    if first + count - 1 > PORT_MAX:
        raise Failure(f"{count} ports from {first} on do not exist", exit_code=WRONG_USAGE)


def _refuse_taken_ports(cluster: LocalCluster) -> None:
    wanted = []
    for node in cluster.nodes:
        wanted.append((f"node {node.id}", *parse_address(node.address)))
        if node.peer_address is not None and len(cluster.nodes) > 1:
            wanted.append((f"node {node.id}", *parse_address(node.peer_address)))
        if node.http is not None:
            wanted.append((f"node {node.id}", *parse_address(node.http)))
    is_new = cluster.cluster_id is None
    refuse_taken(
        wanted,
        hint="--port names another first port, and 0 free ones"
        if is_new
        else "a cluster keeps its addresses; free the port and start again",
    )


def _cluster_id(cluster: LocalCluster) -> str | None:
    """Known at once; what takes a moment, and is waited for, is that all its controllers vote."""
    from penstock.cli.cluster_requests import cluster_id, quorum

    controllers = {node.id for node in cluster.nodes if CONTROLLER in node.roles}
    found, deadline = None, time.monotonic() + VOTING_PATIENCE_S
    while time.monotonic() < deadline:
        for address in (parse_address(node.address) for node in cluster.nodes):
            with suppress(OSError):
                found = cluster_id(address)
                if controllers <= {voter.id for voter in quorum(address, timeout_s=2).voters}:
                    return found
        time.sleep(0.1)
    note("not all controllers vote yet; penstock cluster status tells")
    return found


# -- telling ----------------------------------------------------------------------------------------------

_READY = """
  {what} up; data and logs are in {folder}. Ctrl-C stops the cluster cleanly.

  Try, in another terminal:

    export PENSTOCK_BOOTSTRAP={bootstrap}
    {command} cluster status
    {command} topic create orders --partitions 6
    echo 'hello' | {command} produce orders

  Any Kafka client works: bootstrap.servers={bootstrap}
"""


def _announce(cluster: LocalCluster) -> None:
    """One line per node, which scripts may wait for, then what to type."""
    from penstock.cli.welcome import command

    for node in cluster.nodes:
        metrics = "" if node.http is None else f", metrics on http://{node.http}/metrics"
        print(f"node {node.id} listening on {node.address} ({' and '.join(node.roles)}){metrics}")
    if len(cluster.nodes) == 2:
        note("two nodes have one controller between them: three survive the loss of one")
    folder = _short(Path(cluster.nodes[0].data_dir).parent)
    what = "1 node is" if len(cluster.nodes) == 1 else f"{len(cluster.nodes)} nodes are"
    print(_READY.format(what=what, folder=folder, bootstrap=cluster.bootstrap, command=command()), flush=True)


def _short(path: Path) -> str:
    return min(os.path.relpath(path), str(path), key=len)


# -- stopping from another shell --------------------------------------------------------------------------


def _signal(pid: int | None, number: int, folder: Path) -> None:
    """A pid that by now belongs to something else is left alone."""
    if pid is not None and cluster_control.is_ours(pid, folder):
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _has_stopped(place: ClusterFolder, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while place.is_running:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
