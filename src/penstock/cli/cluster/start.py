"""`penstock cluster start`, `stop` and `restart`: a local cluster, with each node in its own process."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

import typer

from penstock.broker.config.listeners import parse_address
from penstock.cli import os_process
from penstock.cli.cluster import local_cluster
from penstock.cli.cluster.local_cluster import (
    CONTROLLER,
    HOST,
    PORT_MAX,
    ClusterDirectory,
    LocalCluster,
    LocalNode,
    check_ports_free,
    client_and_node_ports,
    free_ports,
    grow_cluster,
    local_nodes,
    node_flags,
    replication_settings,
    secret_environment,
    serve_command,
)
from penstock.cli.cluster.security import Access, ClusterSecurity
from penstock.cli.cluster.supervisor import STOP_DEADLINE_S, NodeCommand, Supervisor, SupervisorCallbacks
from penstock.cli.connection.contexts import BOOTSTRAP_SETTING
from penstock.cli.connection.options import BOOTSTRAP_VARIABLE, parse_client_settings
from penstock.cli.errors import EXIT_USAGE, CommandError
from penstock.cli.options import expand_options, parse_pairs
from penstock.cli.output import note, plural
from penstock.cli.serve import STOP_WITH_STDIN_FLAG
from penstock.client.admin.cluster import describe_quorum
from penstock.client.errors import ClientError
from penstock.client.retry import Deadline
from penstock.client.wire.cluster import Cluster

DEFAULT_NODES = 3
DEFAULT_PORT = 9092
NODES_MAX = 100
VOTERS_WAIT_S = 15.0
QUORUM_TIMEOUT_MS = 2_000

Folder = Annotated[str, typer.Option("--dir", "-d", metavar="DIR", help="Directory of the cluster.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOptions:
    """The nodes of a local cluster, their ports and settings."""

    nodes: Annotated[
        int | None,
        typer.Option(
            "--nodes", "-n", min=1, max=NODES_MAX, help="Number of nodes. Default: 3, or as many as before."
        ),
    ] = None
    port: Annotated[
        int | None,
        typer.Option(
            "--port", min=0, max=65535, help="Port of the first node. Default: 9092. 0 picks free ports."
        ),
    ] = None
    http_port: Annotated[
        int | None,
        typer.Option(
            "--http-port",
            min=0,
            max=65535,
            help="Port of /metrics, /health and /ready of the first node; the others count up.",
        ),
    ] = None
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="TOML file with settings of all nodes.",
        ),
    ] = None
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="A setting of all nodes. Repeatable."),
    ] = None
    restart: Annotated[bool, typer.Option("--restart", help="Restart a node when it ends.")] = False
    secure: Annotated[
        bool,
        typer.Option(
            "--secure",
            help="Clients need TLS and a password, and access rules apply. Makes certificates and the user admin in "
            "DIR/security, and a context that is named like DIR. Later starts stay secure.",
        ),
    ] = False


@expand_options
def start(folder: Folder, options: StartOptions) -> None:
    """Run a local cluster until Ctrl-C or SIGTERM.

    A later start with the same directory brings back the same cluster. With more --nodes it grows, also while it runs.
    """
    directory = ClusterDirectory(folder)
    directory.make()
    if options.nodes is not None and directory.is_running and _is_larger(directory, options.nodes):
        note(local_cluster.request_from_supervisor(directory, {"nodes": options.nodes}))
        return
    lock = directory.lock()
    known = directory.load()
    cluster = replace(
        _plan_cluster(directory, known, options.nodes, options.port, options.http_port),
        settings={**(known.settings if known else {}), **parse_pairs(options.sets or [], "--set")},
        supervisor=os.getpid(),
        secure=options.secure or (known is not None and known.secure),
    )
    _check_cluster_ports(cluster)
    security = ClusterSecurity.of(directory, cluster)
    directory.save(cluster)
    config_path = None if options.config is None else str(options.config.absolute())

    def command(node: LocalNode, among: LocalCluster) -> NodeCommand:
        return _node_command(node, among, config_path, security, cluster.settings)

    def ready(now: LocalCluster) -> None:
        _print_ready(now, None if security is None else security.announce(now.bootstrap))

    note(f"starting {plural(len(cluster.nodes), 'node')} in {_short_path(directory.path)}")
    raise typer.Exit(
        run_supervisor(
            directory,
            cluster,
            [command(node, cluster) for node in cluster.nodes],
            lock,
            restart=options.restart,
            ready=ready,
            command=command,
            client_settings={} if security is None else security.client_settings,
        )
    )


def _node_command(
    node: LocalNode,
    among: LocalCluster,
    config_path: str | None,
    security: ClusterSecurity | None,
    settings: Mapping[str, str],
) -> NodeCommand:
    all_settings = {**({} if security is None else security.node_settings(node, among)), **settings}
    words = node_flags(node, among, config_path, all_settings)
    if security is not None:
        words += security.first_user_flags(node)
    return NodeCommand(
        node.id,
        serve_command(*words, STOP_WITH_STDIN_FLAG),
        None if node.log is None else Path(node.log),
        secret_environment(all_settings),
    )


def _is_larger(directory: ClusterDirectory, nodes: int) -> bool:
    known = directory.load()
    return known is not None and known.cluster_id is not None and nodes > len(known.nodes)


def restart_node(
    node: Annotated[int, typer.Argument(metavar="ID", min=1, help="The node's id.")], folder: Folder
) -> None:
    """Restart a node of a running local cluster, or start it again after it has ended."""
    directory = ClusterDirectory(folder)
    known = directory.load()
    if known is None:
        raise CommandError(f"{directory.path} is not the directory of a cluster", exit_code=EXIT_USAGE)
    if node not in {each.id for each in known.nodes}:
        raise CommandError(f"the cluster has no node {node}", exit_code=EXIT_USAGE)
    if not directory.is_running:
        raise CommandError(
            "the cluster is not running", hint=f"`penstock cluster start --dir {directory.path}` starts it"
        )
    note(local_cluster.request_from_supervisor(directory, {"restart": node}))


def run_supervisor(
    directory: ClusterDirectory,
    cluster: LocalCluster,
    commands: list[NodeCommand],
    lock: int,
    *,
    restart: bool,
    ready: Callable[[LocalCluster], None],
    command: Callable[[LocalNode, LocalCluster], NodeCommand] | None = None,
    client_settings: Mapping[str, str] = MappingProxyType({}),
) -> int:
    """Run the nodes and keep `cluster.json` up to date. Returns an exit code; raises CommandError.

    Another shell may request the restart of a node. If `command` is given, which makes the command of a new node, it
    may also request that nodes join.
    """
    now = cluster

    def pids_changed(pids: dict[int, int | None]) -> None:
        nonlocal now
        now = now.running(pids)
        directory.save(now)

    async def all_ready() -> None:
        nonlocal now
        found = await asyncio.to_thread(_wait_for_voters, now, client_settings)
        now = replace(now, cluster_id=now.cluster_id or found)
        directory.save(now)
        ready(now)
        os_process.notify_ready()

    watcher = SupervisorCallbacks(pids_changed=pids_changed, all_ready=all_ready, report=note)

    async def carry_out(supervisor: Supervisor, request: dict[str, int]) -> str:
        nonlocal now
        if "restart" in request:
            await supervisor.restart(request["restart"])
            return f"node {request['restart']} is back"
        if command is None:
            raise CommandError(
                "workers cannot be added while they run",
                hint="stop the node, and start it with more --workers",
            )
        larger = _grow_running_cluster(directory, now, request["nodes"])
        added = larger.nodes[len(now.nodes) :]
        for node in added:
            now = replace(now, nodes=(*now.nodes, node))
            try:
                await supervisor.add(command(node, larger))
            except CommandError:
                now = replace(now, nodes=now.nodes[:-1])
                directory.save(now)
                raise
            directory.save(now)
        return f"{', '.join(f'node {node.id}' for node in added)} joined; {len(now.nodes)} nodes are up"

    async def run() -> int:
        supervisor = Supervisor(commands, watcher, restart=restart, inherited=(lock,))
        with local_cluster.serve_requests(directory, lambda request: carry_out(supervisor, request)):
            return await supervisor.run()

    try:
        return asyncio.run(run())
    finally:
        directory.save(replace(now.running({}), supervisor=None))


def stop(
    folder: Folder,
    timeout_s: Annotated[
        float,
        typer.Option(
            "--timeout", metavar="SECONDS", help="Kill nodes that have not stopped after this time."
        ),
    ] = STOP_DEADLINE_S + 5,
) -> None:
    """Stop the local cluster of a directory, from another shell."""
    directory = ClusterDirectory(folder)
    cluster = directory.load()
    if cluster is None:
        raise CommandError(f"{directory.path} is not the directory of a cluster", exit_code=EXIT_USAGE)
    if not directory.is_running:
        note("the cluster is not running")
        return
    # If the supervisor is gone, its nodes have noticed and are already stopping.
    _signal_process(cluster.supervisor, signal.SIGTERM, directory.path)
    if not _wait_until_stopped(directory, timeout_s):
        note(f"not stopped within {timeout_s:g} s, killing; the next start recovers")
        for node in cluster.nodes:
            _signal_process(node.pid, signal.SIGKILL, directory.path)
        if not _wait_until_stopped(directory, timeout_s):
            raise CommandError(f"the cluster in {directory.path} does not stop")
    note("stopped")


# -- planning ---------------------------------------------------------------------------------------------


def _plan_cluster(
    directory: ClusterDirectory,
    known: LocalCluster | None,
    nodes: int | None,
    port: int | None,
    http_port: int | None,
) -> LocalCluster:
    founded = known if known is not None and known.cluster_id is not None else None
    count = nodes or (len(founded.nodes) if founded else DEFAULT_NODES)
    first = port if port is not None else founded.first_port if founded else DEFAULT_PORT
    _check_port_range(first, count)
    ports, peer_ports = client_and_node_ports(HOST, first, count)
    http_ports: list[int | None] = [None] * count
    if http_port is not None:
        _check_port_range(http_port, count)
        http_ports = [
            *(free_ports(HOST, count) if http_port == 0 else range(http_port, http_port + count)),
        ]
    members = local_nodes(directory.path, count, ports, http_ports, peer_ports)
    return replace(grow_cluster(known, nodes, members), first_port=first)


def _grow_running_cluster(directory: ClusterDirectory, now: LocalCluster, count: int) -> LocalCluster:
    """The cluster with `count` nodes; running nodes stay unchanged. Raises CommandError if that is not possible."""
    http, kept = now.nodes[0].http, len(now.nodes)
    larger = _plan_cluster(directory, now, count, None, None if http is None else parse_address(http)[1])
    same_roles = all(
        before.roles == after.roles for before, after in zip(now.nodes, larger.nodes, strict=False)
    )
    if not same_roles or replication_settings(kept) != replication_settings(count) or kept == 1:
        raise CommandError(
            f"{plural(kept, 'node')} cannot become {count} while running: roles and settings change",
            hint=f"penstock cluster stop --dir {directory.path}, then start it with --nodes {count}",
        )
    _check_cluster_ports(replace(larger, nodes=larger.nodes[kept:]))
    return larger


def _check_port_range(first: int, count: int) -> None:
    if first + count - 1 > PORT_MAX:
        raise CommandError(
            f"{count} ports from {first} on exceed the highest port, {PORT_MAX}", exit_code=EXIT_USAGE
        )


def _check_cluster_ports(cluster: LocalCluster) -> None:
    wanted = []
    for node in cluster.nodes:
        wanted.append((f"node {node.id}", *parse_address(node.address)))
        if node.peer_address is not None and len(cluster.nodes) > 1:
            wanted.append((f"node {node.id}", *parse_address(node.peer_address)))
        if node.http is not None:
            wanted.append((f"node {node.id}", *parse_address(node.http)))
    is_new = cluster.cluster_id is None
    check_ports_free(
        wanted,
        hint="--port gives another first port, and --port 0 picks free ports"
        if is_new
        else "a cluster keeps its addresses; free the port and start it again",
    )


def _wait_for_voters(cluster: LocalCluster, client_settings: Mapping[str, str]) -> str | None:
    """Returns the cluster id once all controllers are voters, which takes a moment after the nodes are ready."""
    controllers = {node.id for node in cluster.nodes if CONTROLLER in node.roles}
    found, deadline = None, Deadline(VOTERS_WAIT_S * 1000)
    settings = parse_client_settings({**client_settings, BOOTSTRAP_SETTING: cluster.bootstrap})
    with Cluster(settings) as client:
        while not deadline.is_over:
            with suppress(ClientError):
                found = client.cluster_id
                quorum = client.call_any(
                    lambda connection: describe_quorum(connection, timeout_ms=QUORUM_TIMEOUT_MS),
                    deadline=Deadline(QUORUM_TIMEOUT_MS),
                )
                if controllers <= {voter.id for voter in quorum.voters}:
                    return found
            time.sleep(0.1)
    note("not all controllers are voters yet; `penstock cluster status` shows the quorum")
    return found


# -- messages ---------------------------------------------------------------------------------------------

_READY_TEMPLATE = """
  {what} up; data and logs are in {folder}. Ctrl-C stops the cluster cleanly.

  Try, in another terminal:

    export {variable}
    {command} cluster status
    {command} topic create orders --partitions 6
    echo 'hello' | {command} produce orders

  Any Kafka client works with {clients}
"""


def _print_ready(cluster: LocalCluster, access: Access | None) -> None:
    """Print one line per node, which scripts may wait for, then commands to try."""
    for node in cluster.nodes:
        metrics = "" if node.http is None else f", metrics on http://{node.http}/metrics"
        print(f"node {node.id} listening on {node.address} ({' and '.join(node.roles)}){metrics}")
    if len(cluster.nodes) == 2:
        note("two nodes have one controller; three nodes survive the loss of one")
    folder = _short_path(Path(cluster.nodes[0].data_dir).parent)
    what = "1 node is" if len(cluster.nodes) == 1 else f"{len(cluster.nodes)} nodes are"
    print(
        _READY_TEMPLATE.format(
            what=what,
            folder=folder,
            variable=f"{BOOTSTRAP_VARIABLE}={cluster.bootstrap}" if access is None else access.variable,
            clients=f"{BOOTSTRAP_SETTING}={cluster.bootstrap}" if access is None else access.clients,
            command=os_process.penstock_command(),
        ),
        flush=True,
    )


def _short_path(path: Path) -> str:
    return min(os.path.relpath(path), str(path), key=len)


# -- stopping from another shell --------------------------------------------------------------------------


def _signal_process(pid: int | None, number: int, folder: Path) -> None:
    """Do nothing if the pid now belongs to another program."""
    if pid is not None and local_cluster.holds_cluster_lock(pid, folder):
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _wait_until_stopped(directory: ClusterDirectory, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while directory.is_running:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
