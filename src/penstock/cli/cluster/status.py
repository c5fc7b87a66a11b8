"""`penstock cluster status`: is it well, and if not, what is wrong."""

import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Annotated, Any

import typer

from penstock.cli.client import Cluster
from penstock.cli.cluster_findings import ERROR, Finding, findings
from penstock.cli.cluster_requests import Broker, QuorumReplica
from penstock.cli.cluster_view import ClusterView, PartitionView, look
from penstock.cli.failure import FAILED, Failure
from penstock.cli.options import DEFAULT_BOOTSTRAP, AsJson, Bootstrap
from penstock.cli.output import Cell, note, print_facts, print_json, print_table

WATCH_EVERY_S = 2.0
QUORUM_TIMEOUT_S = 6.0
ROWS_SHOWN = 20

COUNTS: dict[str, Callable[[PartitionView], bool]] = {
    "offline": lambda partition: partition.is_offline,
    "under_min_isr": lambda partition: partition.is_under_min_isr,
    "under_replicated": lambda partition: partition.is_under_replicated,
    "not_preferred": lambda partition: partition.is_led_by_other,
    "reassigning": lambda partition: partition.moving is not None,
}


def status(
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    as_json: AsJson = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Look again every 2 seconds.")] = False,
) -> None:
    """Show quorum, brokers, and the partitions that are not as they should be.

    Exits with 1 when something is down: a partition without a leader, one that refuses acks=all, or no quorum.
    """
    cluster = Cluster(bootstrap)
    if watch:
        _watch(cluster, as_json)
    if not _show(cluster, as_json):
        raise typer.Exit(FAILED)


def _watch(cluster: Cluster, as_json: bool) -> None:
    """Until Ctrl-C. A cluster that does not answer may come back."""
    while True:
        if sys.stdout.isatty() and not as_json:
            print("\x1b[H\x1b[2J", end="")
        try:
            _show(cluster, as_json)
        except Failure as failure:
            note(f"{time.strftime('%H:%M:%S')} {failure.message}")
        sys.stdout.flush()
        time.sleep(WATCH_EVERY_S)


def _show(cluster: Cluster, as_json: bool) -> bool:
    """Whether all is up."""
    view = look(cluster, quorum_timeout_s=QUORUM_TIMEOUT_S)
    found = findings(view)
    document = as_document(view, found)
    if as_json:
        print_json(document)
    else:
        _print(document)
    return bool(document["up"])


# -- the document -----------------------------------------------------------------------------------------


def as_document(view: ClusterView, found: list[Finding]) -> dict[str, Any]:
    return {
        "cluster_id": view.cluster_id,
        "up": all(finding.level != ERROR for finding in found),
        "findings": [finding._asdict() for finding in found],
        "quorum": _quorum(view),
        "brokers": _brokers(view),
        "partitions": {
            "total": len(view.partitions),
            **{name: sum(map(applies, view.partitions)) for name, applies in COUNTS.items()},
        },
        "troubles": [
            _trouble(partition) for partition in sorted(view.partitions, key=_urgency) if partition.troubles
        ],
    }


def _quorum(view: ClusterView) -> dict[str, Any] | None:
    if view.quorum is None:
        return None
    end = max((voter.end_offset for voter in view.quorum.voters), default=view.quorum.high_watermark)
    return {
        "leader": view.quorum.leader,
        "epoch": view.quorum.epoch,
        "high_watermark": view.quorum.high_watermark,
        "voters": [_replica(replica, end) for replica in view.quorum.voters],
        "observers": [_replica(replica, end) for replica in view.quorum.observers],
    }


def _replica(replica: QuorumReplica, end: int) -> dict[str, Any]:
    return {
        "node": replica.id,
        "end_offset": replica.end_offset,
        "lag": max(0, end - replica.end_offset) if replica.end_offset >= 0 else None,
        "caught_up_ms": None if replica.caught_up_ms < 0 else replica.caught_up_ms,
    }


def _brokers(view: ClusterView) -> list[dict[str, Any]]:
    led = Counter(partition.leader for partition in view.partitions)
    held = Counter(id for partition in view.partitions for id in partition.replicas)
    in_sync = Counter(id for partition in view.partitions for id in partition.in_sync)
    rows = [
        {
            "node": broker.id,
            "host": broker.host,
            "port": broker.port,
            "rack": broker.rack,
            "state": _state(view, broker),
            "leads": led[broker.id],
            "replicas": held[broker.id],
            "in_sync": in_sync[broker.id],
        }
        for broker in sorted(view.brokers)
    ]
    known = {broker.id for broker in view.brokers}
    return rows + [
        {
            "node": id, "host": None, "port": None, "rack": None, "state": "unknown",
            "leads": led[id], "replicas": held[id], "in_sync": in_sync[id],
        }
        for id in sorted(held.keys() - known)
    ]  # fmt: skip


def _state(view: ClusterView, broker: Broker) -> str:
    if broker.fenced:
        return "fenced"
    return "unreachable" if broker.id in view.unreachable else "active"


def _urgency(partition: PartitionView) -> tuple[bool, ...]:
    """The worst first; in the order of COUNTS."""
    return tuple(not applies(partition) for applies in COUNTS.values())


def _trouble(partition: PartitionView) -> dict[str, Any]:
    moving = partition.moving
    return {
        "topic": partition.place.topic,
        "partition": partition.place.partition,
        "leader": None if partition.is_offline else partition.leader,
        "replicas": list(partition.replicas),
        "in_sync": list(partition.in_sync),
        "adding": [] if moving is None else list(moving.adding),
        "removing": [] if moving is None else list(moving.removing),
        "troubles": partition.troubles,
    }


# -- for people -------------------------------------------------------------------------------------------


def _print(document: dict[str, Any]) -> None:
    quorum, partitions = document["quorum"], document["partitions"]
    print_facts(
        [
            ("cluster", document["cluster_id"]),
            ("quorum", _quorum_line(quorum)),
            ("partitions", _partitions_line(partitions)),
        ]
    )
    print()
    voting = _voting(quorum)
    print_table(
        ["node", "address", "rack", "state", "quorum", "lag", "leads", "replicas", "in sync"],
        [_broker_row(broker, voting.pop(broker["node"], None)) for broker in document["brokers"]]
        + [
            [id, None, None, "controller only", role, lag, None, None, None]
            for id, (role, lag) in voting.items()
        ],
    )
    if document["troubles"]:
        print()
        _print_troubles(document["troubles"])
    _print_findings(document["findings"])


def _quorum_line(quorum: dict[str, Any] | None) -> str | None:
    if quorum is None:
        return None
    return f"node {quorum['leader']} leads in epoch {quorum['epoch']}, {len(quorum['voters'])} voting"


def _partitions_line(counts: dict[str, int]) -> str:
    names = {name: count for name, count in counts.items() if name != "total" and count}
    told = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in names.items())
    return f"{counts['total']}" + (f" ({told})" if told else "")


def _voting(quorum: dict[str, Any] | None) -> dict[int, tuple[str, int | None]]:
    """For each node its part in the quorum and how far it is behind."""
    if quorum is None:
        return {}
    voters = {
        voter["node"]: ("leader" if voter["node"] == quorum["leader"] else "voter", voter["lag"])
        for voter in quorum["voters"]
    }
    return {**{observer["node"]: ("observer", observer["lag"]) for observer in quorum["observers"]}, **voters}


def _broker_row(broker: dict[str, Any], voting: tuple[str, int | None] | None) -> list[Cell]:
    address = None if broker["host"] is None else f"{broker['host']}:{broker['port']}"
    role, lag = voting or (None, None)
    counts = [broker["leads"], broker["replicas"], broker["in_sync"]]
    return [broker["node"], address, broker["rack"], broker["state"], role, lag, *counts]


def _print_troubles(troubles: list[dict[str, Any]]) -> None:
    rows = [
        [
            row["topic"], row["partition"], row["leader"], _ids(row["replicas"]), _ids(row["in_sync"]),
            _ids(row["adding"]), _ids(row["removing"]), ", ".join(row["troubles"]),
        ]
        for row in troubles[:ROWS_SHOWN]
    ]  # fmt: skip
    print_table(
        ["topic", "partition", "leader", "replicas", "in sync", "adding", "removing", "trouble"], rows
    )
    if len(troubles) > ROWS_SHOWN:
        note(f"and {len(troubles) - ROWS_SHOWN} more; --json shows all")


def _ids(ids: list[int]) -> str | None:
    return ",".join(map(str, ids)) or None


def _print_findings(found: list[dict[str, str]]) -> None:
    print()
    if not found:
        print("all is well")
    for finding in found:
        print(f"{finding['level']}: {finding['message']}")
