"""Which node of a local cluster does what, listens where and finds the others how. Decides; starts nothing."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from penstock.broker.listeners import NODES, format_address
from penstock.cli.cluster_folder import BROKER, CONTROLLER, LocalCluster, Member
from penstock.cli.failure import WRONG_USAGE, Failure

HOST = "127.0.0.1"
LISTENER = "PLAINTEXT"
REPLICAS = 3


def controllers_among(count: int) -> int:
    """Three survive the loss of one. Two would be lost with either of them, so it is one until there are three."""
    return 3 if count >= 3 else 1


def roles_of(number: int, count: int) -> tuple[str, ...]:
    """The first node is number 1."""
    return (BROKER, CONTROLLER) if number <= controllers_among(count) else (BROKER,)


def grown(known: LocalCluster | None, count: int | None, members: Sequence[Member]) -> LocalCluster:
    """The cluster that was there, with the nodes that are new; `members` are all as they would be now."""
    if known is None or known.cluster_id is None:
        return LocalCluster(nodes=tuple(members))
    if count is not None and count < len(known.nodes):
        raise Failure(
            f"the cluster has {len(known.nodes)} nodes and cannot lose {len(known.nodes) - count} by starting",
            hint="penstock cluster rebalance --remove-broker ID empties a node first",
            exit_code=WRONG_USAGE,
        )
    kept = {node.id: node for node in known.nodes}

    def grown_member(node: Member) -> Member:
        before = kept.get(node.id)
        peer_address = (before and before.peer_address) or node.peer_address
        if known.shares_listeners:
            peer_address = None
        if before is None:
            return replace(node, founder=False, peer_address=peer_address)
        return replace(before, roles=node.roles, peer_address=peer_address)

    return replace(known, nodes=tuple(map(grown_member, members)))


def quorum_flags(node: Member, cluster: LocalCluster) -> list[str]:
    """How a node finds its cluster, also after it has lost its disk: it must never found a second one."""
    founders = cluster.founders
    if node.founder and len(founders) > 1:
        return ["--voters", ",".join(f"{founder.id}@{founder.quorum_address}" for founder in founders)]
    others = [
        other.quorum_address for other in cluster.nodes if CONTROLLER in other.roles and other.id != node.id
    ]
    return ["--join", ",".join(others)] if others else []


def settings_for(count: int) -> dict[str, str]:
    """What makes acknowledged mean kept when a node dies, where there are nodes enough for it."""
    return {
        "default.replication.factor": str(min(REPLICAS, count)),
        "min.insync.replicas": "2" if count >= REPLICAS else "1",
    }


def serve_command(*words: str) -> tuple[str, ...]:
    """This very program, whatever the shell would find under its name."""
    return (sys.executable, "-P", "-m", "penstock", "serve", *words)


def node_words(
    node: Member, cluster: LocalCluster, config: str | None, settings: Mapping[str, str]
) -> list[str]:
    """The flags of `serve` for a node of `cluster start`. What a settings file says of addresses is overruled."""
    addresses = [f"{LISTENER}://{node.address}"]
    texts = {
        **settings_for(len(cluster.nodes)),
        **settings,
        "penstock.http.listen": node.http or "",
    }
    if len(cluster.nodes) > 1:  # a node alone has no listener for others
        if node.peer_address is not None:
            addresses.append(f"{NODES}://{node.peer_address}")
        texts["inter.broker.listener.name"] = LISTENER if node.peer_address is None else NODES
    words = ["--node-id", str(node.id)]
    words += [part for address in addresses for part in ("--listen", address, "--advertise", address)]
    words += ["--data-dir", node.data_dir, "--roles", ",".join(node.roles), *quorum_flags(node, cluster)]
    if config is not None:
        words += ["--config", config]
    for name, value in texts.items():
        words += ["--set", f"{name}={value}"]
    return words


def local_members(
    folder: Path,
    count: int,
    ports: Sequence[int],
    http_ports: Sequence[int | None],
    peer_ports: Sequence[int],
) -> list[Member]:
    return [
        Member(
            id=number,
            address=format_address(HOST, ports[number - 1]),
            http=None
            if http_ports[number - 1] is None
            else format_address(HOST, http_ports[number - 1] or 0),
            data_dir=str(folder / f"node-{number}"),
            log=str(folder / f"node-{number}.log"),
            roles=roles_of(number, count),
            founder=number <= controllers_among(count),
            peer_address=format_address(HOST, peer_ports[number - 1]),
        )
        for number in range(1, count + 1)
    ]
