"""Carrying out a plan: a bounded number of partitions on the move, progress, and preferred leaders at the end."""

import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from penstock.cli.client import Cluster, Place
from penstock.cli.cluster_requests import an_address, elect_preferred, reassign, reassignments, set_everywhere
from penstock.cli.cluster_view import ClusterView
from penstock.cli.failure import Failure
from penstock.cli.output import confirm, note, plural
from penstock.cli.wire import Address
from penstock.cluster.rebalance import Move, RebalancePlan

Answer = TypeVar("Answer")

LIMIT = "penstock.reassignment.bytes.per.second"
LOOK_EVERY_S = 0.5
#: How long no controller may answer before the verb gives up; the moves themselves do not.
PATIENCE_S = 60.0


class Progress(Protocol):
    def done(self, moved: int, total: int) -> None: ...


def carry_out(cluster: Cluster, plan: RebalancePlan, under_way: Sequence[Place], *, at_once: int) -> None:
    """Returns when all has arrived. Raises Failure when something was refused."""
    refused: dict[Place, str] = {}
    # What copies nothing is over at once, so leaders are spread before data is.
    waiting = deque(sorted(plan.moves, key=lambda move: move.moved_bytes > 0))
    moving = set(under_way)
    total = len(waiting) + len(moving)
    try:
        with _progress() as progress:
            while waiting or moving:
                started = _next(waiting, at_once - len(moving))
                refused |= _ask(cluster, started)
                moving |= {_place(move) for move in started} - refused.keys()
                moving &= _still_moving(cluster)
                progress.done(total - len(waiting) - len(moving), total)
                if moving:
                    time.sleep(LOOK_EVERY_S)
    except KeyboardInterrupt:
        note(
            "broken off: what is under way goes on; run it again to continue, or with --cancel to take it back"
        )
        raise
    # Where the preferred replica is not in sync yet, the controller sees to it later.
    _patiently(cluster, elect_preferred)
    _report(refused, total)


def cancel_all(cluster: Cluster, view: ClusterView, *, yes: bool) -> None:
    places = [partition.place for partition in view.partitions if partition.moving is not None]
    if not places:
        note("nothing is being reassigned")
        return
    confirm(f"Take back the moves of {plural(len(places), 'partition')}?", yes=yes)
    refused = _patiently(cluster, lambda address: reassign(address, dict.fromkeys(places)))
    _report(refused, len(places))


@contextmanager
def limited(cluster: Cluster, bytes_per_second: int | None) -> Iterator[None]:
    """A bound on what is copied, for as long as this lasts; then nodes go by their own settings again."""
    if bytes_per_second is None:
        yield
        return
    _set_limit(cluster, bytes_per_second)
    try:
        yield
    finally:
        _set_limit(cluster, None)


# -- steps ------------------------------------------------------------------------------------------------


def _next(waiting: "deque[Move]", room: int) -> list[Move]:
    """The next to start: whatever copies nothing, and as many others as there is room for."""
    started = []
    while waiting and (room > 0 or waiting[0].moved_bytes == 0):
        room -= waiting[0].moved_bytes > 0
        started.append(waiting.popleft())
    return started


def _ask(cluster: Cluster, moves: Collection[Move]) -> dict[Place, str]:
    if not moves:
        return {}
    targets = {_place(move): move.after for move in moves}
    return _patiently(cluster, lambda address: reassign(address, targets))


def _still_moving(cluster: Cluster) -> set[Place]:
    return set(_patiently(cluster, reassignments))


def _patiently(cluster: Cluster, call: Callable[[Address], Answer]) -> Answer:
    """A broker may go and a controller may change while data moves: ask another, until it takes too long."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return call(an_address(cluster))
        except (OSError, Failure) as error:
            if time.monotonic() > deadline:
                raise Failure(
                    f"the controller does not answer: {error}", hint="run it again to continue"
                ) from None
        time.sleep(LOOK_EVERY_S)


def _place(move: Move) -> Place:
    return Place(move.topic, move.partition)


def _report(refused: dict[Place, str], total: int) -> None:
    for place, why in list(refused.items())[:10]:
        note(f"{place}: {why}")
    if refused:
        raise Failure(f"{len(refused)} of {plural(total, 'partition')} refused")
    note("done")


def _set_limit(cluster: Cluster, bytes_per_second: int | None) -> None:
    value = None if bytes_per_second is None else str(bytes_per_second)
    _patiently(cluster, lambda address: set_everywhere(address, LIMIT, value))


# -- progress ---------------------------------------------------------------------------------------------


@contextmanager
def _progress() -> Iterator[Progress]:
    if not sys.stderr.isatty():
        yield _Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress

    columns = (TextColumn("moving"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with RichProgress(*columns, console=Console(stderr=True)) as bar:
        yield _Bar(bar, bar.add_task("moving", total=None))


class _Bar:
    def __init__(self, bar: Any, task: Any) -> None:
        self._bar = bar
        self._task = task

    def done(self, moved: int, total: int) -> None:
        self._bar.update(self._task, completed=moved, total=total)


class _Lines:
    def __init__(self) -> None:
        self._last = -1

    def done(self, moved: int, total: int) -> None:
        if moved != self._last:
            note(f"{moved} of {plural(total, 'partition')} moved")
        self._last = moved
