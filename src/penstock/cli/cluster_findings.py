"""What is wrong with a cluster, or not as safe as it looks. Pure: a view in, sentences out, the worst first."""

from collections.abc import Iterator
from typing import NamedTuple

from penstock.cli.cluster_view import ClusterView, PartitionView
from penstock.cli.output import plural

ERROR, WARNING = "error", "warning"
#: A voter that has not caught up for so long does not keep the quorum alive.
LAG_RECORDS_MAX = 1000
#: A voter fetches several times a second, whether there is news or not.
GONE_AFTER_MS = 15_000


class Finding(NamedTuple):
    level: str
    message: str


def findings(view: ClusterView) -> list[Finding]:
    found = [*_of_quorum(view), *_of_brokers(view), *_of_partitions(view), *_of_placement(view)]
    return sorted(found, key=lambda finding: finding.level != ERROR)


def _of_quorum(view: ClusterView) -> Iterator[Finding]:
    if not view.tells_quorum:
        return
    if view.quorum is None:
        yield Finding(
            ERROR, "no controller answers: a majority of the voters is not there, or cannot reach each other"
        )
        return
    voters = len(view.quorum.voters)
    if voters == 1 and len(view.brokers) > 1:
        yield Finding(
            WARNING, "one voter holds the metadata: without it nothing changes and nobody fails over"
        )
    elif voters and voters % 2 == 0:
        yield Finding(
            WARNING,
            f"{voters} voters survive the loss of {(voters - 1) // 2}, as {voters - 1} would: use an odd number",
        )
    gone = gone_voters(view)
    yield from _of_gone_voters(gone, voters)
    for voter in view.quorum.voters:
        lag = view.quorum.high_watermark - voter.end_offset
        if lag > LAG_RECORDS_MAX and voter.id not in gone:
            yield Finding(WARNING, f"voter {voter.id} is {plural(lag, 'record')} behind")


def gone_voters(view: ClusterView) -> list[int]:
    """Voters that do not follow the controller any more: fenced as brokers, or not caught up for a while."""
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
            or newest_ms - voter.caught_up_ms > GONE_AFTER_MS
            or (voter.caught_up_ms < 0 and voter.id not in known)
        )
    ]


def _of_gone_voters(gone: list[int], voters: int) -> Iterator[Finding]:
    if not gone:
        return
    spare = (voters - len(gone)) - (voters // 2 + 1)
    is_are, them = ("is", "it does") if len(gone) == 1 else ("are", "they do")
    left = f"the loss of {spare} more is survived" if spare > 0 else "one more loss ends the quorum"
    yield Finding(
        WARNING,
        f"{_ids('voter', gone)} {is_are} gone: {left}; "
        f"if {them} not come back, penstock cluster voters remove {gone[0]}",
    )


def _of_brokers(view: ClusterView) -> Iterator[Finding]:
    fenced = [broker.id for broker in view.brokers if broker.fenced]
    if fenced:
        yield Finding(WARNING, f"fenced, so not in use: {_ids('broker', fenced)}")
    silent = sorted(
        broker.id for broker in view.brokers if broker.id in view.unreachable and not broker.fenced
    )
    if silent:
        yield Finding(
            WARNING, f"not to be reached from here at the advertised address: {_ids('broker', silent)}"
        )
    known = {broker.id for broker in view.brokers}
    gone = sorted({id for partition in view.partitions for id in partition.settled} - known)
    if gone:
        yield Finding(
            WARNING, f"replicas are assigned to what is no broker of the cluster: {_ids('broker', gone)}"
        )


def _of_partitions(view: ClusterView) -> Iterator[Finding]:
    partitions = view.partitions
    yield from _counted(ERROR, "offline: nobody leads them", [p for p in partitions if p.is_offline])
    yield from _counted(
        ERROR,
        "under min.insync.replicas: acks=all is refused",
        [p for p in partitions if p.is_under_min_isr and not p.is_offline],
    )
    yield from _counted(WARNING, "under-replicated", [p for p in partitions if p.is_under_replicated])


def _counted(level: str, what: str, partitions: list[PartitionView]) -> Iterator[Finding]:
    if partitions:
        yield Finding(level, f"{plural(len(partitions), 'partition')} {what}")


def _of_placement(view: ClusterView) -> Iterator[Finding]:
    yield from _of_internal_topics(view)
    replicated = [partition for partition in view.partitions if len(partition.settled) > 1]
    hosts = {broker.rack or broker.host for broker in view.brokers}
    if replicated and len(hosts) == 1:
        yield Finding(
            WARNING, f"all brokers are in one place ({hosts.pop()}): what takes it takes every replica"
        )
        return
    together = [p for p in replicated if len({view.rack_or_host(id) for id in p.settled}) == 1]
    if together:
        yield Finding(
            WARNING,
            f"{plural(len(together), 'partition')} with all replicas in one rack or on one host "
            f"({_named(together)}): penstock cluster rebalance spreads them",
        )


def _of_internal_topics(view: ClusterView) -> Iterator[Finding]:
    for topic, wanted in view.internal_replicas.items():
        low = [p for p in view.partitions if p.place.topic == topic and len(p.in_sync) < wanted]
        if low and len(view.brokers) > 1:
            yield Finding(
                WARNING,
                f"{topic} has fewer than {wanted} copies of {plural(len(low), 'partition')}: "
                f"groups are lost with them. {_why_low(view, wanted)}",
            )
        elif low and wanted > 1:
            yield Finding(WARNING, f"{topic} has 1 of {wanted} copies, as there is one broker")


def _why_low(view: ClusterView, wanted: int) -> str:
    active = sum(not broker.fenced for broker in view.brokers)
    if active < wanted:
        return f"There are {plural(active, 'active broker')}"
    return "The controller adds them as brokers join"


def _named(partitions: list[PartitionView], most: int = 3) -> str:
    names = ", ".join(str(partition.place) for partition in partitions[:most])
    return names if len(partitions) <= most else f"{names}, ..."


def _ids(noun: str, ids: list[int]) -> str:
    return f"{noun if len(ids) == 1 else noun + 's'} {', '.join(map(str, ids))}"
