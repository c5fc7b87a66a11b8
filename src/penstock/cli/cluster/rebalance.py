"""`penstock cluster rebalance`: spread replicas and leaders over the brokers; shows the plan, asks, shows progress."""

from typing import Annotated, Any

import typer

from penstock.cli.client import Cluster, Place
from penstock.cli.cluster_view import ClusterView, look
from penstock.cli.failure import WRONG_USAGE, Failure
from penstock.cli.options import DEFAULT_BOOTSTRAP, AsJson, Bootstrap, Yes
from penstock.cli.output import confirm, human_bytes, note, plural, print_json, print_table
from penstock.cli.reassigning import cancel_all, carry_out, limited
from penstock.cluster.rebalance import (
    BrokerPlace,
    ImpossiblePlan,
    PartitionPlace,
    RebalancePlan,
    plan_rebalance,
)

MOVES_SHOWN = 40
QUORUM_TIMEOUT_S = 6.0

Ids = list[int] | None


def rebalance(
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    add: Annotated[
        Ids, typer.Option("--add-broker", metavar="ID", help="Put replicas on this one and those in use.")
    ] = None,
    remove: Annotated[
        Ids, typer.Option("--remove-broker", metavar="ID", help="Leave nothing on this one.")
    ] = None,
    topics: Annotated[
        list[str] | None,
        typer.Option("--topic", "-t", metavar="NAME", help="Only this topic; may be repeated."),
    ] = None,
    replication_factor: Annotated[
        int | None, typer.Option("--replication-factor", "-r", min=1, help="Replicas of each partition.")
    ] = None,
    throttle: Annotated[
        int | None,
        typer.Option(
            "--throttle", min=1, metavar="BYTES", help="Bytes per second that each broker may copy."
        ),
    ] = None,
    at_once: Annotated[
        int, typer.Option("--at-once", min=1, help="Partitions that move at the same time.")
    ] = 20,
    cancel: Annotated[bool, typer.Option("--cancel", help="Take back the moves that are under way.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the plan.")] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Spread replicas and leaders evenly over brokers and racks.

    Breaking it off is safe: what is under way goes on, and running it again continues.
    """
    cluster = Cluster(bootstrap)
    view = look(cluster, quorum_timeout_s=QUORUM_TIMEOUT_S)
    if cancel:
        cancel_all(cluster, view, yes=yes)
        return
    plan = _plan(cluster, view, add or [], remove or [], topics or [], replication_factor)
    under_way = [partition.place for partition in view.partitions if partition.moving is not None]
    if as_json:
        print_json(_document(plan, under_way))
    else:
        _print(plan, under_way)
    if dry_run or not (plan.moves or under_way):
        return
    _confirm(plan, yes)
    with limited(cluster, throttle):
        carry_out(cluster, plan, under_way, at_once=at_once)


def _confirm(plan: RebalancePlan, yes: bool) -> None:
    if plan.moves:
        copying = human_bytes(plan.moved_bytes)
        confirm(f"Reassign {plural(len(plan.moves), 'partition')}, copying about {copying}?", yes=yes)


# -- planning ---------------------------------------------------------------------------------------------


def _plan(
    cluster: Cluster,
    view: ClusterView,
    add: list[int],
    remove: list[int],
    topics: list[str],
    replication_factor: int | None,
) -> RebalancePlan:
    chosen = set(cluster.topics(topics) if topics else ())
    partitions = [partition for partition in view.partitions if not chosen or partition.place.topic in chosen]
    _refuse_unknown(view, add, remove)
    sizes = partition_sizes(view)
    places = [
        PartitionPlace(
            partition.place.topic,
            partition.place.partition,
            partition.settled,
            partition.leader,
            sizes.get(partition.place, 0),
        )
        for partition in partitions
    ]
    try:
        return plan_rebalance(
            places, _usable(view, add), remove=remove, replication_factor=replication_factor
        )
    except ImpossiblePlan as error:
        raise Failure(str(error), hint="start more brokers, or ask for fewer replicas") from None


def _usable(view: ClusterView, add: list[int]) -> list[BrokerPlace]:
    """Active brokers; with --add-broker, only those named and those that hold something already."""
    active = [broker for broker in view.brokers if not broker.fenced]
    in_use = {id for partition in view.partitions for id in partition.settled}
    return [
        BrokerPlace(broker.id, broker.rack or broker.host)
        for broker in active
        if not add or broker.id in in_use or broker.id in add
    ]


def _refuse_unknown(view: ClusterView, add: list[int], remove: list[int]) -> None:
    active = {broker.id for broker in view.brokers if not broker.fenced}
    for broker in add:
        if broker not in active:
            raise Failure(f"broker {broker} is not an active one", hint="penstock cluster status shows them")
    held = {id for partition in view.partitions for id in partition.replicas}
    for broker in remove:
        if broker not in held | {known.id for known in view.brokers}:
            raise Failure(f"there is no broker {broker}", hint="penstock cluster status shows them")
    if both := set(add) & set(remove):
        raise Failure(f"broker {both.pop()} cannot be added and removed", exit_code=WRONG_USAGE)


def partition_sizes(view: ClusterView) -> dict[Place, int]:
    """The largest copy of each; what no broker tells counts as nothing."""
    from penstock.cli.wire import partition_bytes

    sizes: dict[Place, int] = {}
    for broker in view.brokers:
        if broker.fenced:
            continue
        try:
            found = partition_bytes((broker.host, broker.port))
        except OSError:
            note(f"broker {broker.id} does not tell how much it holds; the plan goes without")
            continue
        for (topic, index), size in found.items():
            place = Place(topic, index)
            sizes[place] = max(size, sizes.get(place, 0))
    return sizes


# -- showing ----------------------------------------------------------------------------------------------


def _document(plan: RebalancePlan, under_way: list[Place]) -> dict[str, Any]:
    return {
        "moves": [move._asdict() for move in plan.moves],
        "moved_bytes": plan.moved_bytes,
        "before": [load._asdict() for load in plan.before],
        "after": [load._asdict() for load in plan.after],
        "under_way": [place._asdict() for place in under_way],
    }


def _print(plan: RebalancePlan, under_way: list[Place]) -> None:
    if under_way:
        note(f"{plural(len(under_way), 'partition')} being reassigned already")
    if not plan.moves:
        note("nothing to move: replicas and leaders are spread evenly")
        return
    rows = [
        [move.topic, move.partition, _ids(move.before), _ids(move.after), human_bytes(move.moved_bytes)]
        for move in plan.moves[:MOVES_SHOWN]
    ]
    print_table(["topic", "partition", "replicas now", "replicas then", "to copy"], rows)
    if len(plan.moves) > MOVES_SHOWN:
        note(f"and {len(plan.moves) - MOVES_SHOWN} more; --json shows all")
    print()
    loads = [
        [
            now.broker_id, now.rack or None, now.replicas, then.replicas, now.leaders, then.leaders,
            human_bytes(now.size_bytes), human_bytes(then.size_bytes),
        ]
        for now, then in zip(plan.before, plan.after, strict=True)
    ]  # fmt: skip
    columns = ["broker", "rack", "replicas", "then", "leaders", "then", "size", "then"]
    print_table(columns, loads)


def _ids(ids: tuple[int, ...]) -> str:
    return ",".join(map(str, ids))
