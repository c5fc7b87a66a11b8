"""Replays dead letters: plans first, then publishes them in transactions at a limited rate, each one once.

A replay skips dead letters that are resolved already. To continue a replay that was killed, run it again. A replay does
not include dead letters that arrive while it runs, because records that fail again would be replayed forever. The rate
limiter is pure and takes the time as an argument.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from penstock.client.deadletters.dead_letter import DeadLetter, DeadLetterFilter, Resolution, ResolutionState
from penstock.client.deadletters.headers import original_topic, replayed_topic
from penstock.client.deadletters.reader import (
    OffsetRange,
    Resolutions,
    offset_ranges,
    read_dead_letters,
    read_resolutions,
)
from penstock.client.deadletters.topics import DeadLetterError, ensure_replayed_topic
from penstock.client.deadletters.writer import (
    ENTRIES_MAX,
    DeadLetterWriter,
    NotReplayable,
    RefusedEntry,
    ReplayDestination,
    ReplayLock,
    ReplayRoute,
    ReplayTarget,
    ResolutionEntry,
    locked_producer,
    outgoing_record,
    replay_route,
    transaction_chunks,
)
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.metadata import TopicInfo
from penstock.client.wire.offsets import committed_offsets, group_info

#: Shorter waits are below the resolution of clocks.
_WAIT_S_MIN: Final = 1e-6


class RateLimiter:
    """A token bucket: at most `rate_per_s` records a second, with bursts of up to `burst` records.

    A step waits until the bucket has enough tokens or is full. Its level may become negative.
    """

    def __init__(self, rate_per_s: float, *, burst: int, now_s: float) -> None:
        assert rate_per_s > 0
        assert burst > 0
        self._rate_per_s = rate_per_s
        self._burst = float(burst)
        self._level = float(burst)
        self._now_s = now_s

    def wait_s(self, records: int, now_s: float) -> float:
        """Returns how long to wait before a step of about this many records."""
        self._fill(now_s)
        missing = min(float(records), self._burst) - self._level
        wait_s = missing / self._rate_per_s
        return wait_s if wait_s >= _WAIT_S_MIN else 0.0

    def spend(self, records: int, now_s: float) -> None:
        """Takes tokens for sent records."""
        self._fill(now_s)
        self._level -= records

    def _fill(self, now_s: float) -> None:
        # Ignore a clock that was set back.
        passed_s = max(0.0, now_s - self._now_s)
        self._level = min(self._burst, self._level + passed_s * self._rate_per_s)
        self._now_s = now_s


#: How often a waiting replay checks whether to stop.
_STOP_CHECK_S: Final = 0.2
_SHARE_GROUP: Final = "share"
#: How many refused entries the outcome keeps for the report.
REFUSALS_MAX: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRequest:
    topic: TopicInfo
    #: The id of the replay in the resolutions.
    id: str
    wanted: DeadLetterFilter = field(default_factory=DeadLetterFilter)
    destination: ReplayDestination = field(default_factory=ReplayDestination)
    rate_per_s: float | None = None
    #: The maximum number of dead letters.
    limit: int | None = None

    @property
    def chunk(self) -> int:
        """How many dead letters go into one transaction: at most as many as the rate allows in a second."""
        return ENTRIES_MAX if self.rate_per_s is None else max(1, min(ENTRIES_MAX, int(self.rate_per_s)))


@dataclass(slots=True, kw_only=True)
class ReplayPlan:
    """What a replay would do now."""

    spans: list[OffsetRange]
    #: How many dead letters take each route.
    routes: Counter[ReplayRoute] = field(default_factory=Counter)
    left: Counter[NotReplayable] = field(default_factory=Counter)
    #: Selected, and resolved already.
    done: Counter[ResolutionState] = field(default_factory=Counter)
    #: The numbers of partitions of the target topics that exist.
    partitions: dict[str, int] = field(default_factory=dict)
    #: Remarks for the user.
    notes: list[str] = field(default_factory=list)
    limit: int | None = None

    @property
    def total(self) -> int:
        count = self.routes.total()
        return count if self.limit is None else min(count, self.limit)


@dataclass(slots=True, kw_only=True)
class ReplayOutcome:
    replayed: int = 0
    #: Resolved before, for example by another process.
    done_before: int = 0
    refused: int = 0
    refusals: list[RefusedEntry] = field(default_factory=list)
    is_stopped: bool = False


# Planning


def plan_replay(cluster: Cluster, request: ReplayRequest) -> ReplayPlan:
    """Raises DeadLetterError if the destination is not possible; Unavailable, Refused, CorruptRecords."""
    _reject_loops(request)
    found = ReplayPlan(spans=offset_ranges(cluster, request.topic), limit=request.limit)
    done = read_resolutions(cluster, request.topic, found.spans, is_settled=False)
    for letter in _matching_dead_letters(cluster, request, found.spans):
        resolution = done.get(letter.dead_letter_id)
        if resolution is not None:
            found.done[resolution.state] += 1
            continue
        route = replay_route(letter, request.destination)
        if isinstance(route, ReplayRoute):
            found.routes[route] += 1
        else:
            found.left[route] += 1
    names = sorted({route.topic for route in found.routes} | _named_topics(request))
    found.partitions = {name: len(each.partitions) for name, each in cluster.topics(names).items()}
    _reject_missing_topics(request, found)
    found.notes = _check_groups(cluster, found)
    return found


def _matching_dead_letters(
    cluster: Cluster, request: ReplayRequest, wanted: list[OffsetRange]
) -> Iterator[DeadLetter]:
    narrowed = request.wanted.partitions
    chosen = [span for span in wanted if not narrowed or span.partition in narrowed]
    return (
        each for each in read_dead_letters(cluster, request.topic, chosen) if request.wanted.matches(each)
    )


def _named_topics(request: ReplayRequest) -> set[str]:
    return {request.destination.topic} if request.destination.topic is not None else set()


def _reject_loops(request: ReplayRequest) -> None:
    if request.destination.topic in (request.topic.name, replayed_topic(request.topic.name)):
        raise DeadLetterError(
            f"dead letters of {request.topic.name} cannot be replayed to {request.destination}"
        )


def _reject_missing_topics(request: ReplayRequest, found: ReplayPlan) -> None:
    missing = {route.topic: route for route in found.routes if route.topic not in found.partitions} | {
        name: ReplayRoute(name) for name in _named_topics(request) if name not in found.partitions
    }
    if not missing:
        return
    if request.destination.topic is not None:
        raise DeadLetterError(f"there is no topic {request.destination.topic}")
    if request.destination.target is ReplayTarget.ORIGINAL:
        raise DeadLetterError(
            f"dead letters of {request.topic.name} come from topics that do not exist: {', '.join(sorted(missing))}; "
            "choose another topic, or exclude them with a filter"
        )
    raise DeadLetterError("; ".join(_no_retry_topic_text(route) for _, route in sorted(missing.items())))


def _no_retry_topic_text(route: ReplayRoute) -> str:
    return (
        f"group {route.group} has no retries of {original_topic(route.topic)} (there is no topic {route.topic}), "
        "so its dead letters can only go to the original topic, to all groups that read it"
    )


def _check_groups(cluster: Cluster, found: ReplayPlan) -> list[str]:
    """Raises DeadLetterError for a share group, which has no retry topics. Returns remarks about other groups."""
    notes = []
    for route in sorted(found.routes):
        if route.group is None:
            continue
        info = group_info(cluster, route.group)
        if info is not None and info.kind == _SHARE_GROUP:
            raise DeadLetterError(
                f"{route.group} is a share group, and does not read {route.topic}: "
                "its dead letters can only go to the original topic, to all groups that read it"
            )
        topic_partitions = [(route.topic, index) for index in range(found.partitions[route.topic])]
        if not committed_offsets(cluster, route.group, topic_partitions, stable=False):
            notes.append(
                f"group {route.group} has no committed offset in {route.topic} yet: it reads the topic when it runs"
            )
    return notes


# Replaying


class Replay:
    """One replay. Clock, sleep and the stop check are arguments."""

    def __init__(
        self,
        cluster: Cluster,
        request: ReplayRequest,
        found: ReplayPlan,
        *,
        progress: Callable[[int], None] = lambda done: None,
        should_stop: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        now_ms: Callable[[], int] = lambda: int(time.time() * 1000),
    ) -> None:
        self._cluster = cluster
        self._request = request
        self._plan = found
        self._progress = progress
        self._should_stop = should_stop
        self._clock = clock
        self._sleep = sleep
        self._now_ms = now_ms
        self.outcome = ReplayOutcome()

    def run(self, lock: ReplayLock) -> ReplayOutcome:
        """Raises ReplayFenced, Unavailable, Refused; `outcome` has the results so far."""
        topic = self._request.topic
        list_topic = ensure_replayed_topic(self._cluster, topic)
        with locked_producer(self._cluster, lock, topic.name) as producer:
            done = read_resolutions(self._cluster, topic, self._plan.spans, is_settled=True)
            self._write(DeadLetterWriter(producer, topic, list_topic), self._entries(done))
        return self.outcome

    def _entries(self, done: Resolutions) -> Iterator[ResolutionEntry]:
        for letter in _matching_dead_letters(self._cluster, self._request, self._plan.spans):
            if letter.dead_letter_id in done:
                self.outcome.done_before += 1
                continue
            route = replay_route(letter, self._request.destination)
            if isinstance(route, ReplayRoute):
                yield self._entry(letter, route)

    def _entry(self, letter: DeadLetter, route: ReplayRoute) -> ResolutionEntry:
        now_ms, destination = self._now_ms(), self._request.destination
        partitions = self._plan.partitions[route.topic]
        out = outgoing_record(letter, route, destination, partitions=partitions, now_ms=now_ms)
        resolution = Resolution(
            ResolutionState.REPLAYED, at_ms=now_ms, replay=self._request.id, to=route.topic
        )
        return ResolutionEntry(letter, resolution, out)

    def _write(self, writer: DeadLetterWriter, entries: Iterator[ResolutionEntry]) -> None:
        limit, outcome = self._request.limit, self.outcome
        limiter = self._rate_limiter()
        for chunk in transaction_chunks(entries, self._request.chunk):
            allowed = chunk if limit is None else chunk[: max(limit - outcome.replayed - outcome.refused, 0)]
            if not allowed:
                return
            if not self._await_rate(limiter, len(allowed)):
                outcome.is_stopped = True
                return
            refusals = writer.write(allowed)
            if limiter is not None:
                limiter.spend(len(allowed), self._clock())
            outcome.replayed += len(allowed) - len(refusals)
            outcome.refused += len(refusals)
            outcome.refusals += refusals[: REFUSALS_MAX - len(outcome.refusals)]
            self._progress(outcome.replayed + outcome.refused)

    def _rate_limiter(self) -> RateLimiter | None:
        rate_per_s = self._request.rate_per_s
        return (
            None
            if rate_per_s is None
            else RateLimiter(rate_per_s, burst=self._request.chunk, now_s=self._clock())
        )

    def _await_rate(self, limiter: RateLimiter | None, count: int) -> bool:
        """Waits for the rate limit. Returns False on stop."""
        while not self._should_stop():
            wait_s = limiter.wait_s(count, self._clock()) if limiter is not None else 0.0
            if wait_s <= 0:
                return True
            self._sleep(min(wait_s, _STOP_CHECK_S))
        return False
