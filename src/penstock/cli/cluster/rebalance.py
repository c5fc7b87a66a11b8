"""`penstock cluster rebalance`: spread replicas and leaders over the brokers.

Shows the plan, asks for confirmation and shows progress.

A plan is executed with a bounded number of partitions that move at the same time; at the end the preferred leaders
are elected.
"""

import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Protocol, TypeVar

import typer

from penstock.cli.cluster.description import ClusterDescription, describe_cluster
from penstock.cli.cluster.status import QUORUM_TIMEOUT_S
from penstock.cli.connection import ConnectionOptions, open_cluster
from penstock.cli.connection.offsets import PartitionName, existing_topics
from penstock.cli.errors import EXIT_USAGE, CommandError
from penstock.cli.options import AsJson, Yes
from penstock.cli.output import confirm, human_bytes, note, plural, print_json, print_table
from penstock.client.admin.cluster import (
    alter_reassignments,
    elect_preferred_leaders,
    list_reassignments,
    replica_sizes,
)
from penstock.client.errors import ClientError, Unavailable
from penstock.client.retry import Deadline
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.connection import Connection
from penstock.client.wire.metadata import TopicPartition
from penstock.client.wire.topics import ConfigResourceType, alter_configs
from penstock.cluster.reassignment_plan import (
    BrokerRack,
    ImpossiblePlan,
    PartitionMove,
    PartitionReplicas,
    ReassignmentPlan,
    plan_reassignment,
)

Reply = TypeVar("Reply")

THROTTLE_SETTING = "penstock.reassignment.bytes.per.second"
POLL_S = 0.5
#: How long the verb waits for a controller before it fails; moves that have started continue without it.
CONTROLLER_WAIT_MS = 60_000


class MoveProgress(Protocol):
    def done(self, moved: int, total: int) -> None: ...


def execute_plan(
    cluster: Cluster, plan: ReassignmentPlan, under_way: Sequence[PartitionName], *, at_once: int
) -> None:
    """Returns when all moves are complete. Raises CommandError when the cluster refused some."""
    refused: dict[TopicPartition, str] = {}
    # Moves that copy no data finish at once, so they go first: leaders are spread before data is.
    waiting = deque(sorted(plan.moves, key=lambda move: move.moved_bytes > 0))
    moving: set[TopicPartition] = set(under_way)
    total = len(waiting) + len(moving)
    try:
        with _show_progress() as progress:
            while waiting or moving:
                started = _next_moves(waiting, at_once - len(moving))
                refused |= _start_moves(cluster, started)
                moving |= {_partition_name(move) for move in started} - refused.keys()
                moving &= _retry_request(cluster, list_reassignments).keys()
                progress.done(total - len(waiting) - len(moving), total)
                if moving:
                    time.sleep(POLL_S)
    except KeyboardInterrupt:
        note(
            "interrupted: moves that have started go on; run it again to continue, or with --cancel to cancel them"
        )
        raise
    # Where the preferred replica is not in sync yet, the controller elects it later.
    _retry_request(cluster, elect_preferred_leaders)
    _report_refused(refused, total)


def cancel_reassignments(cluster: Cluster, view: ClusterDescription, *, yes: bool) -> None:
    names = [partition.name for partition in view.partitions if partition.moving is not None]
    if not names:
        note("nothing is being reassigned")
        return
    confirm(f"Cancel the reassignment of {plural(len(names), 'partition')}?", yes=yes)
    refused = _retry_request(
        cluster, lambda connection: alter_reassignments(connection, dict.fromkeys(names))
    )
    _report_refused(refused, len(names))


@contextmanager
def throttled(cluster: Cluster, bytes_per_second: int | None) -> Iterator[None]:
    """Limits the copying of every broker inside the context; afterwards brokers use their own settings again."""
    if bytes_per_second is None:
        yield
        return
    _set_throttle(cluster, bytes_per_second)
    try:
        yield
    finally:
        _set_throttle(cluster, None)


# -- steps ------------------------------------------------------------------------------------------------


def _next_moves(waiting: "deque[PartitionMove]", room: int) -> list[PartitionMove]:
    """The next moves to start: all that copy no data, and as many others as there is room for."""
    started = []
    while waiting and (room > 0 or waiting[0].moved_bytes == 0):
        room -= waiting[0].moved_bytes > 0
        started.append(waiting.popleft())
    return started


def _start_moves(cluster: Cluster, moves: Collection[PartitionMove]) -> dict[TopicPartition, str]:
    if not moves:
        return {}
    targets: dict[TopicPartition, Sequence[int] | None] = {
        _partition_name(move): move.after for move in moves
    }
    return _retry_request(cluster, lambda connection: alter_reassignments(connection, targets))


def _retry_request(cluster: Cluster, call: Callable[[Connection], Reply]) -> Reply:
    """Retries with any reachable broker until a timeout: brokers may fail and the controller may change meanwhile."""
    try:
        return cluster.call_any(call, deadline=Deadline(CONTROLLER_WAIT_MS))
    except Unavailable as error:
        raise CommandError(
            f"the controller does not answer: {error}", hint="run it again to continue"
        ) from None


def _partition_name(move: PartitionMove) -> PartitionName:
    return PartitionName(move.topic, move.partition)


def _report_refused(refused: dict[TopicPartition, str], total: int) -> None:
    for partition, reason in list(refused.items())[:10]:
        note(f"{PartitionName(*partition)}: {reason}")
    if refused:
        raise CommandError(f"the controller refused to move {len(refused)} of {plural(total, 'partition')}")
    note("done")


def _set_throttle(cluster: Cluster, bytes_per_second: int | None) -> None:
    value = None if bytes_per_second is None else str(bytes_per_second)
    changes = {THROTTLE_SETTING: value}
    alter_configs(cluster, ConfigResourceType.BROKER, "", changes, deadline=Deadline(CONTROLLER_WAIT_MS))


# -- progress ---------------------------------------------------------------------------------------------


@contextmanager
def _show_progress() -> Iterator[MoveProgress]:
    if not sys.stderr.isatty():
        yield _ProgressLines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress

    columns = (TextColumn("moving"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with RichProgress(*columns, console=Console(stderr=True)) as bar:
        yield _ProgressBar(bar, bar.add_task("moving", total=None))


class _ProgressBar:
    def __init__(self, bar: Any, task: Any) -> None:
        self._bar = bar
        self._task = task

    def done(self, moved: int, total: int) -> None:
        self._bar.update(self._task, completed=moved, total=total)


class _ProgressLines:
    def __init__(self) -> None:
        self._last = -1

    def done(self, moved: int, total: int) -> None:
        if moved != self._last:
            note(f"{moved} of {plural(total, 'partition')} moved")
        self._last = moved


MOVES_SHOWN_MAX = 40

BrokerIds = list[int] | None


def rebalance(
    connection: ConnectionOptions,
    add: Annotated[
        BrokerIds,
        typer.Option(
            "--add-broker",
            metavar="ID",
            help="Use this broker and those that hold replicas already. Repeatable.",
        ),
    ] = None,
    remove: Annotated[
        BrokerIds,
        typer.Option(
            "--remove-broker", metavar="ID", help="Move all replicas away from this broker. Repeatable."
        ),
    ] = None,
    topics: Annotated[
        list[str] | None,
        typer.Option("--topic", "-t", metavar="NAME", help="Only this topic. Repeatable."),
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
    cancel: Annotated[bool, typer.Option("--cancel", help="Cancel the ongoing reassignments.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the plan.")] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Spread replicas and leaders evenly over brokers and racks.

    You can interrupt it safely: moves that have started go on, and running it again continues.
    """
    with open_cluster(connection) as cluster:
        view = describe_cluster(cluster, quorum_timeout_s=QUORUM_TIMEOUT_S)
        if cancel:
            cancel_reassignments(cluster, view, yes=yes)
            return
        plan = _make_plan(cluster, view, add or [], remove or [], topics or [], replication_factor)
        under_way = [partition.name for partition in view.partitions if partition.moving is not None]
        if as_json:
            print_json(_plan_document(plan, under_way))
        else:
            _print_plan(plan, under_way)
        if dry_run or not (plan.moves or under_way):
            return
        if plan.moves:
            copying = human_bytes(plan.moved_bytes)
            confirm(f"Reassign {plural(len(plan.moves), 'partition')}, copying about {copying}?", yes=yes)
        with throttled(cluster, throttle):
            execute_plan(cluster, plan, under_way, at_once=at_once)


# -- planning ---------------------------------------------------------------------------------------------


def _make_plan(
    cluster: Cluster,
    view: ClusterDescription,
    add: list[int],
    remove: list[int],
    topics: list[str],
    replication_factor: int | None,
) -> ReassignmentPlan:
    chosen = existing_topics(cluster, topics)
    partitions = [partition for partition in view.partitions if not chosen or partition.name.topic in chosen]
    _check_broker_ids(view, add, remove)
    sizes = partition_sizes(cluster, view)
    current = [
        PartitionReplicas(
            partition.name.topic,
            partition.name.partition,
            partition.target_replicas,
            partition.leader,
            sizes.get(partition.name, 0),
        )
        for partition in partitions
    ]
    try:
        return plan_reassignment(
            current, _usable_brokers(view, add), remove=remove, replication_factor=replication_factor
        )
    except ImpossiblePlan as error:
        raise CommandError(
            str(error), hint="start more brokers, or give a smaller --replication-factor"
        ) from None


def _usable_brokers(view: ClusterDescription, add: list[int]) -> list[BrokerRack]:
    """Active brokers; with --add-broker, only the named brokers and those that already hold replicas."""
    active = [broker for broker in view.brokers if not broker.fenced]
    in_use = {id for partition in view.partitions for id in partition.target_replicas}
    return [
        BrokerRack(broker.id, broker.rack or broker.host)
        for broker in active
        if not add or broker.id in in_use or broker.id in add
    ]


def _check_broker_ids(view: ClusterDescription, add: list[int], remove: list[int]) -> None:
    active = {broker.id for broker in view.brokers if not broker.fenced}
    for broker in add:
        if broker not in active:
            raise CommandError(
                f"broker {broker} is not active", hint="`penstock cluster status` shows the active brokers"
            )
    held = {id for partition in view.partitions for id in partition.replicas}
    for broker in remove:
        if broker not in held | {known.id for known in view.brokers}:
            raise CommandError(
                f"broker {broker} does not exist", hint="`penstock cluster status` shows all brokers"
            )
    if both := set(add) & set(remove):
        raise CommandError(
            f"broker {both.pop()} is in both --add-broker and --remove-broker", exit_code=EXIT_USAGE
        )


def partition_sizes(cluster: Cluster, view: ClusterDescription) -> dict[TopicPartition, int]:
    """Returns the size of each partition's largest replica, without the partitions that no broker reports."""
    sizes: dict[TopicPartition, int] = {}
    for broker in view.brokers:
        if broker.fenced:
            continue
        try:
            found = replica_sizes(cluster.connection(broker.id))
        except ClientError:
            note(f"broker {broker.id} does not report its sizes; the plan does not count its replicas")
            continue
        for partition, size in found.items():
            sizes[partition] = max(size, sizes.get(partition, 0))
    return sizes


# -- showing ----------------------------------------------------------------------------------------------


def _plan_document(plan: ReassignmentPlan, under_way: list[PartitionName]) -> dict[str, Any]:
    return {
        "moves": [move._asdict() for move in plan.moves],
        "moved_bytes": plan.moved_bytes,
        "before": [load._asdict() for load in plan.before],
        "after": [load._asdict() for load in plan.after],
        "under_way": [each._asdict() for each in under_way],
    }


def _print_plan(plan: ReassignmentPlan, under_way: list[PartitionName]) -> None:
    if under_way:
        note(f"{plural(len(under_way), 'partition')} already being reassigned")
    if not plan.moves:
        note("nothing to move: replicas and leaders are spread evenly")
        return
    rows = [
        [
            move.topic,
            move.partition,
            _comma_separated(move.before),
            _comma_separated(move.after),
            human_bytes(move.moved_bytes),
        ]
        for move in plan.moves[:MOVES_SHOWN_MAX]
    ]
    print_table(["topic", "partition", "replicas now", "replicas then", "to copy"], rows)
    if len(plan.moves) > MOVES_SHOWN_MAX:
        note(f"and {len(plan.moves) - MOVES_SHOWN_MAX} more; --json shows all")
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


def _comma_separated(ids: tuple[int, ...]) -> str:
    return ",".join(map(str, ids))
