"""`penstock cluster status`: is the cluster healthy, and if not, what is wrong.

`check_health` is pure: it takes a description of the cluster and returns findings as sentences, the worst first. It
also reports placements that are less safe than they look.
"""

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import typer

from penstock.cli.cluster.description import ClusterDescription, PartitionDescription, describe_cluster
from penstock.cli.connection import ConnectionOptions, open_cluster
from penstock.cli.errors import EXIT_FAILURE, CommandError
from penstock.cli.options import AsJson, Watch
from penstock.cli.output import (
    WATCH_EVERY_S,
    Cell,
    clear_screen,
    note,
    plural,
    print_facts,
    print_json,
    print_table,
)
from penstock.client.admin.cluster import BrokerDescription, QuorumReplica

ERROR, WARNING = "error", "warning"
#: A voter further behind than this is reported: until it catches up, it does not help to keep the quorum available.
VOTER_LAG_RECORDS_MAX = 1000
#: Voters fetch several times a second even without new records, so a voter that is silent for this long is lost.
VOTER_LOST_AFTER_MS = 15_000


class HealthFinding(NamedTuple):
    level: str
    message: str


def check_health(view: ClusterDescription) -> list[HealthFinding]:
    found = [
        *_quorum_findings(view),
        *_broker_findings(view),
        *_partition_findings(view),
        *_placement_findings(view),
    ]
    return sorted(found, key=lambda finding: finding.level != ERROR)


def _quorum_findings(view: ClusterDescription) -> Iterator[HealthFinding]:
    if not view.knows_quorum:
        return
    if view.quorum is None:
        yield HealthFinding(
            ERROR, "no controller answers: no majority of the voters is running and connected"
        )
        return
    voters = len(view.quorum.voters)
    if voters == 1 and len(view.brokers) > 1:
        yield HealthFinding(
            WARNING,
            "one voter holds the metadata: without it no metadata can change and no partition can fail over",
        )
    elif voters and voters % 2 == 0:
        yield HealthFinding(
            WARNING,
            f"{voters} voters survive the loss of {(voters - 1) // 2}, as {voters - 1} would; use an odd number",
        )
    gone = lost_voters(view)
    yield from _lost_voter_findings(gone, voters)
    for voter in view.quorum.voters:
        lag = view.quorum.high_watermark - voter.end_offset
        if lag > VOTER_LAG_RECORDS_MAX and voter.id not in gone:
            yield HealthFinding(WARNING, f"voter {voter.id} is {plural(lag, 'record')} behind")


def lost_voters(view: ClusterDescription) -> list[int]:
    """Voters that no longer follow the controller: they are fenced as brokers, or have not caught up for a while."""
    if view.quorum is None:
        return []
    fenced = {broker.id for broker in view.brokers if broker.fenced}
    newest_ms = max((voter.caught_up_ms for voter in view.quorum.voters), default=-1)
    known = {broker.id for broker in view.brokers}
    return [
        voter.id
        for voter in view.quorum.voters
        if voter.id != view.quorum.leader
        and (
            voter.id in fenced
            or newest_ms - voter.caught_up_ms > VOTER_LOST_AFTER_MS
            or (voter.caught_up_ms < 0 and voter.id not in known)
        )
    ]


def _lost_voter_findings(gone: list[int], voters: int) -> Iterator[HealthFinding]:
    if not gone:
        return
    spare = (voters - len(gone)) - (voters // 2 + 1)
    is_are, they_do = ("is", "it does") if len(gone) == 1 else ("are", "they do")
    left = f"the quorum survives the loss of {spare} more" if spare > 0 else "one more loss ends the quorum"
    yield HealthFinding(
        WARNING,
        f"{_noun_with_ids('voter', gone)} {is_are} gone: {left}; "
        f"if {they_do} not come back, run `penstock cluster voters remove {gone[0]}`",
    )


def _broker_findings(view: ClusterDescription) -> Iterator[HealthFinding]:
    fenced = [broker.id for broker in view.brokers if broker.fenced]
    if fenced:
        yield HealthFinding(WARNING, f"fenced, and so not in use: {_noun_with_ids('broker', fenced)}")
    silent = sorted(
        broker.id for broker in view.brokers if broker.id in view.unreachable and not broker.fenced
    )
    if silent:
        yield HealthFinding(
            WARNING,
            f"not reachable from here at the advertised address: {_noun_with_ids('broker', silent)}",
        )
    known = {broker.id for broker in view.brokers}
    gone = sorted({id for partition in view.partitions for id in partition.target_replicas} - known)
    if gone:
        yield HealthFinding(
            WARNING,
            f"replicas are assigned to brokers that the cluster does not know: {_noun_with_ids('broker', gone)}",
        )


def _partition_findings(view: ClusterDescription) -> Iterator[HealthFinding]:
    partitions = view.partitions
    yield from _count_finding(ERROR, "offline: they have no leader", [p for p in partitions if p.is_offline])
    yield from _count_finding(
        ERROR,
        "under min.insync.replicas: acks=all is refused",
        [p for p in partitions if p.is_under_min_isr and not p.is_offline],
    )
    yield from _count_finding(WARNING, "under-replicated", [p for p in partitions if p.is_under_replicated])


def _count_finding(level: str, what: str, partitions: list[PartitionDescription]) -> Iterator[HealthFinding]:
    if partitions:
        yield HealthFinding(level, f"{plural(len(partitions), 'partition')} {what}")


def _placement_findings(view: ClusterDescription) -> Iterator[HealthFinding]:
    yield from _internal_topic_findings(view)
    replicated = [partition for partition in view.partitions if len(partition.target_replicas) > 1]
    hosts = {broker.rack or broker.host for broker in view.brokers}
    if replicated and len(hosts) == 1:
        yield HealthFinding(
            WARNING,
            f"all brokers are in one rack or on one host ({hosts.pop()}): all replicas can be lost together",
        )
        return
    together = [p for p in replicated if len({view.rack_or_host(id) for id in p.target_replicas}) == 1]
    if together:
        yield HealthFinding(
            WARNING,
            f"{plural(len(together), 'partition')} with all replicas in one rack or on one host "
            f"({_partition_names(together)}): `penstock cluster rebalance` spreads them",
        )


def _internal_topic_findings(view: ClusterDescription) -> Iterator[HealthFinding]:
    for topic, wanted in view.internal_replicas.items():
        low = [p for p in view.partitions if p.name.topic == topic and len(p.in_sync) < wanted]
        if low and len(view.brokers) > 1:
            yield HealthFinding(
                WARNING,
                f"{topic} has fewer than {wanted} in-sync replicas of {plural(len(low), 'partition')}: "
                f"their data can be lost. {_low_replication_reason(view, wanted)}",
            )
        elif low and wanted > 1:
            yield HealthFinding(WARNING, f"{topic} has 1 of {wanted} replicas, because there is one broker")


def _low_replication_reason(view: ClusterDescription, wanted: int) -> str:
    active = sum(not broker.fenced for broker in view.brokers)
    if active < wanted:
        return f"The cluster has {plural(active, 'active broker')}"
    return "The controller adds replicas as brokers join"


def _partition_names(partitions: list[PartitionDescription], most: int = 3) -> str:
    names = ", ".join(str(partition.name) for partition in partitions[:most])
    return names if len(partitions) <= most else f"{names}, ..."


def _noun_with_ids(noun: str, ids: list[int]) -> str:
    return f"{noun if len(ids) == 1 else noun + 's'} {', '.join(map(str, ids))}"


QUORUM_TIMEOUT_S = 6.0
ROWS_SHOWN_MAX = 20

PARTITION_CONDITIONS: dict[str, Callable[[PartitionDescription], bool]] = {
    "offline": lambda partition: partition.is_offline,
    "under_min_isr": lambda partition: partition.is_under_min_isr,
    "under_replicated": lambda partition: partition.is_under_replicated,
    "not_preferred": lambda partition: partition.is_not_led_by_preferred,
    "reassigning": lambda partition: partition.moving is not None,
}


def status(connection: ConnectionOptions, as_json: AsJson = False, watch: Watch = False) -> None:
    """Show the quorum, the brokers, and the partitions that need attention.

    Exits with 1 when something is down: a partition without a leader, one that refuses acks=all, or no quorum.
    """
    while watch:  # until Ctrl-C, also while the cluster does not answer, because it may come back
        clear_screen(as_json)
        try:
            _show(connection, as_json)
        except CommandError as failure:
            note(f"{time.strftime('%H:%M:%S')} {failure.message}")
        sys.stdout.flush()
        time.sleep(WATCH_EVERY_S)
    if not _show(connection, as_json):
        raise typer.Exit(EXIT_FAILURE)


def _show(connection: ConnectionOptions, as_json: bool) -> bool:
    """Returns whether there are no errors."""
    with open_cluster(connection) as cluster:
        view = describe_cluster(cluster, quorum_timeout_s=QUORUM_TIMEOUT_S)
    document = status_document(view, check_health(view))
    if as_json:
        print_json(document)
    else:
        _print_status(document)
    return bool(document["up"])


# -- the document -----------------------------------------------------------------------------------------


def status_document(view: ClusterDescription, found: list[HealthFinding]) -> dict[str, Any]:
    return {
        "cluster_id": view.cluster_id,
        "up": all(finding.level != ERROR for finding in found),
        "findings": [finding._asdict() for finding in found],
        "quorum": _quorum_document(view),
        "brokers": _broker_documents(view),
        "partitions": {
            "total": len(view.partitions),
            **{name: sum(map(applies, view.partitions)) for name, applies in PARTITION_CONDITIONS.items()},
        },
        "troubles": [
            _trouble_document(partition)
            for partition in sorted(view.partitions, key=_urgency)
            if partition.troubles
        ],
    }


def _quorum_document(view: ClusterDescription) -> dict[str, Any] | None:
    if view.quorum is None:
        return None
    end = max((voter.end_offset for voter in view.quorum.voters), default=view.quorum.high_watermark)
    return {
        "leader": view.quorum.leader,
        "epoch": view.quorum.epoch,
        "high_watermark": view.quorum.high_watermark,
        "voters": [_replica_document(replica, end) for replica in view.quorum.voters],
        "observers": [_replica_document(replica, end) for replica in view.quorum.observers],
    }


def _replica_document(replica: QuorumReplica, end: int) -> dict[str, Any]:
    return {
        "node": replica.id,
        "end_offset": replica.end_offset,
        "lag": max(0, end - replica.end_offset) if replica.end_offset >= 0 else None,
        "caught_up_ms": None if replica.caught_up_ms < 0 else replica.caught_up_ms,
    }


def _broker_documents(view: ClusterDescription) -> list[dict[str, Any]]:
    led = Counter(partition.leader for partition in view.partitions)
    held = Counter(id for partition in view.partitions for id in partition.replicas)
    in_sync = Counter(id for partition in view.partitions for id in partition.in_sync)
    rows = [
        {
            "node": broker.id,
            "host": broker.host,
            "port": broker.port,
            "rack": broker.rack,
            "state": _broker_state(view, broker),
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


def _broker_state(view: ClusterDescription, broker: BrokerDescription) -> str:
    if broker.fenced:
        return "fenced"
    return "unreachable" if broker.id in view.unreachable else "active"


def _urgency(partition: PartitionDescription) -> tuple[bool, ...]:
    """A sort key, worst first, in the order of PARTITION_CONDITIONS."""
    return tuple(not applies(partition) for applies in PARTITION_CONDITIONS.values())


def _trouble_document(partition: PartitionDescription) -> dict[str, Any]:
    moving = partition.moving
    return {
        "topic": partition.name.topic,
        "partition": partition.name.partition,
        "leader": None if partition.is_offline else partition.leader,
        "replicas": list(partition.replicas),
        "in_sync": list(partition.in_sync),
        "adding": [] if moving is None else list(moving.adding),
        "removing": [] if moving is None else list(moving.removing),
        "troubles": partition.troubles,
    }


# -- output for people ------------------------------------------------------------------------------------


def _print_status(document: dict[str, Any]) -> None:
    quorum, partitions = document["quorum"], document["partitions"]
    print_facts(
        [
            ("cluster", document["cluster_id"]),
            ("quorum", _quorum_line(quorum)),
            ("partitions", _partitions_line(partitions)),
        ]
    )
    print()
    voting = _quorum_roles(quorum)
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
    return f"node {quorum['leader']} leads in epoch {quorum['epoch']}, {len(quorum['voters'])} voters"


def _partitions_line(counts: dict[str, int]) -> str:
    names = {name: count for name, count in counts.items() if name != "total" and count}
    conditions = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in names.items())
    return f"{counts['total']}" + (f" ({conditions})" if conditions else "")


def _quorum_roles(quorum: dict[str, Any] | None) -> dict[int, tuple[str, int | None]]:
    """The role of each node in the quorum, and its lag."""
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
            *(row[name] for name in ("topic", "partition", "leader")),
            *(
                ",".join(map(str, row[name])) or None
                for name in ("replicas", "in_sync", "adding", "removing")
            ),
            ", ".join(row["troubles"]),
        ]
        for row in troubles[:ROWS_SHOWN_MAX]
    ]
    print_table(
        ["topic", "partition", "leader", "replicas", "in sync", "adding", "removing", "trouble"], rows
    )
    if len(troubles) > ROWS_SHOWN_MAX:
        note(f"and {len(troubles) - ROWS_SHOWN_MAX} more; --json shows all")


def _print_findings(found: list[dict[str, str]]) -> None:
    print()
    if not found:
        print("no problems found")
    for finding in found:
        print(f"{finding['level']}: {finding['message']}")
