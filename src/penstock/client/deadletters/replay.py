"""Letters published again: surveyed first, then transaction by transaction at their pace, each once.

What was on the list before, or has been put there by whoever was killed, is left out; so it is enough to run a replay
again. Letters that come while it runs are not part of it, lest those that fail again go round in circles.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from penstock.client.cluster import Cluster
from penstock.client.deadletters.filters import Filter
from penstock.client.deadletters.letter import Letter
from penstock.client.deadletters.marks import Mark, State
from penstock.client.deadletters.pacing import Pace
from penstock.client.deadletters.reading import Marks, Span, letters, read_marks, spans
from penstock.client.deadletters.routing import Aim, Destination, Left, Route, outgoing, route_of
from penstock.client.deadletters.topics import DeadLetterError, ensure_list
from penstock.client.deadletters.turns import Turn, taken
from penstock.client.deadletters.writing import ENTRIES_MAX, Desk, Entry, Refusal, chunks
from penstock.client.letters import original_topic, replayed_topic
from penstock.client.metadata import TopicInfo
from penstock.client.positions import committed, group_info

#: So often somebody who waits for the pace asks whether to stop.
_NAP_S: Final = 0.2
_SHARE: Final = "share"
#: How much of the first refusals is kept, to be told.
REFUSALS_MAX: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    topic: TopicInfo
    #: By which it is known on the list.
    id: str
    wanted: Filter = field(default_factory=Filter)
    destination: Destination = field(default_factory=Destination)
    rate_per_s: float | None = None
    #: No more letters than this.
    limit: int | None = None

    @property
    def chunk(self) -> int:
        """Letters in one transaction: no more than may go out in a second."""
        return ENTRIES_MAX if self.rate_per_s is None else max(1, min(ENTRIES_MAX, int(self.rate_per_s)))


@dataclass(slots=True, kw_only=True)
class Survey:
    """What there is to do, before anything is done."""

    spans: list[Span]
    #: How many letters go where.
    routes: Counter[Route] = field(default_factory=Counter)
    left: Counter[Left] = field(default_factory=Counter)
    #: Asked for, and done with already.
    done: Counter[State] = field(default_factory=Counter)
    #: Of the topics that letters go to; those that do not exist are not in it.
    partitions: dict[str, int] = field(default_factory=dict)
    #: What should be known before it begins.
    notes: list[str] = field(default_factory=list)
    limit: int | None = None

    @property
    def total(self) -> int:
        count = self.routes.total()
        return count if self.limit is None else min(count, self.limit)


@dataclass(slots=True, kw_only=True)
class Outcome:
    replayed: int = 0
    #: Somebody was quicker, or it was done before.
    done_before: int = 0
    refused: int = 0
    refusals: list[Refusal] = field(default_factory=list)
    is_stopped: bool = False


# Before


def survey(cluster: Cluster, request: Request) -> Survey:
    """Raises DeadLetterError where they cannot go where they are to go; Unavailable, Refused, CorruptRecords."""
    _refuse_circles(request)
    found = Survey(spans=spans(cluster, request.topic), limit=request.limit)
    done = read_marks(cluster, request.topic, found.spans, is_settled=False)
    for letter in _asked_for(cluster, request, found.spans):
        mark = done.get(letter.spot)
        if mark is not None:
            found.done[mark.state] += 1
            continue
        route = route_of(letter, request.destination)
        if isinstance(route, Route):
            found.routes[route] += 1
        else:
            found.left[route] += 1
    names = sorted({route.topic for route in found.routes} | _named(request))
    found.partitions = {name: len(each.partitions) for name, each in cluster.topics(names).items()}
    _refuse_missing(request, found)
    found.notes = _looked_at_groups(cluster, found)
    return found


def _asked_for(cluster: Cluster, request: Request, wanted: list[Span]) -> Iterator[Letter]:
    narrowed = request.wanted.partitions
    chosen = [span for span in wanted if not narrowed or span.partition in narrowed]
    return (each for each in letters(cluster, request.topic, chosen) if request.wanted.matches(each))


def _named(request: Request) -> set[str]:
    return {request.destination.topic} if request.destination.topic is not None else set()


def _refuse_circles(request: Request) -> None:
    if request.destination.topic in (request.topic.name, replayed_topic(request.topic.name)):
        raise DeadLetterError(f"letters of {request.topic.name} cannot be replayed to {request.destination}")


def _refuse_missing(request: Request, found: Survey) -> None:
    missing = {route.topic: route for route in found.routes if route.topic not in found.partitions} | {
        name: Route(name) for name in _named(request) if name not in found.partitions
    }
    if not missing:
        return
    if request.destination.topic is not None:
        raise DeadLetterError(f"there is no topic {request.destination.topic}")
    if request.destination.aim is Aim.ORIGINAL:
        raise DeadLetterError(
            f"letters of {request.topic.name} are from topics that do not exist: {', '.join(sorted(missing))}; "
            "name another topic, or leave them out by a filter"
        )
    raise DeadLetterError("; ".join(_without_retries(route) for _, route in sorted(missing.items())))


def _without_retries(route: Route) -> str:
    return (
        f"group {route.group} has no retries of {original_topic(route.topic)} (there is no topic {route.topic}), "
        "so that its letters can only go back to the original topic, to all groups that read it"
    )


def _looked_at_groups(cluster: Cluster, found: Survey) -> list[str]:
    """Raises DeadLetterError for a group that never reads topics of retries; told is who has not read there yet."""
    notes = []
    for route in sorted(found.routes):
        if route.group is None:
            continue
        info = group_info(cluster, route.group)
        if info is not None and info.kind == _SHARE:
            raise DeadLetterError(
                f"{route.group} is a share group, whose retries are with the brokers and not in {route.topic}: "
                "its letters can only go back to the original topic, to all groups that read it"
            )
        places = [(route.topic, index) for index in range(found.partitions[route.topic])]
        if not committed(cluster, route.group, places, stable=False):
            notes.append(
                f"group {route.group} has no position in {route.topic} yet: it reads there once it runs"
            )
    return notes


# Doing it


class Replay:
    """One run. Time, sleep and the wish to stop are arguments."""

    def __init__(
        self,
        cluster: Cluster,
        request: Request,
        found: Survey,
        *,
        progress: Callable[[int], None] = lambda done: None,
        should_stop: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        now_ms: Callable[[], int] = lambda: int(time.time() * 1000),
    ) -> None:
        self._cluster = cluster
        self._request = request
        self._survey = found
        self._progress = progress
        self._should_stop = should_stop
        self._clock = clock
        self._sleep = sleep
        self._now_ms = now_ms
        self.outcome = Outcome()

    def run(self, turn: Turn) -> Outcome:
        """Raises Overtaken, Unavailable, Refused; `outcome` tells how far it came."""
        topic = self._request.topic
        list_topic = ensure_list(self._cluster, topic)
        with taken(self._cluster, turn, topic.name) as producer:
            done = read_marks(self._cluster, topic, self._survey.spans, is_settled=True)
            self._write(Desk(producer, topic, list_topic), self._entries(done))
        return self.outcome

    def _entries(self, done: Marks) -> Iterator[Entry]:
        for letter in _asked_for(self._cluster, self._request, self._survey.spans):
            if letter.spot in done:
                self.outcome.done_before += 1
                continue
            route = route_of(letter, self._request.destination)
            if isinstance(route, Route):
                yield self._entry(letter, route)

    def _entry(self, letter: Letter, route: Route) -> Entry:
        now_ms, destination = self._now_ms(), self._request.destination
        partitions = self._survey.partitions[route.topic]
        out = outgoing(letter, route, destination, partitions=partitions, now_ms=now_ms)
        mark = Mark(State.REPLAYED, at_ms=now_ms, replay=self._request.id, to=route.topic)
        return Entry(letter, mark, out)

    def _write(self, desk: Desk, entries: Iterator[Entry]) -> None:
        limit, outcome = self._request.limit, self.outcome
        pace = self._pace()
        for chunk in chunks(entries, self._request.chunk):
            allowed = chunk if limit is None else chunk[: max(limit - outcome.replayed - outcome.refused, 0)]
            if not allowed:
                return
            if not self._await_pace(pace, len(allowed)):
                outcome.is_stopped = True
                return
            refusals = desk.write(allowed)
            if pace is not None:
                pace.spend(len(allowed), self._clock())
            outcome.replayed += len(allowed) - len(refusals)
            outcome.refused += len(refusals)
            outcome.refusals += refusals[: REFUSALS_MAX - len(outcome.refusals)]
            self._progress(outcome.replayed + outcome.refused)

    def _pace(self) -> Pace | None:
        rate_per_s = self._request.rate_per_s
        return (
            None if rate_per_s is None else Pace(rate_per_s, burst=self._request.chunk, now_s=self._clock())
        )

    def _await_pace(self, pace: Pace | None, count: int) -> bool:
        """False where somebody wants it to end."""
        while not self._should_stop():
            wait_s = pace.wait_s(count, self._clock()) if pace is not None else 0.0
            if wait_s <= 0:
                return True
            self._sleep(min(wait_s, _NAP_S))
        return False
