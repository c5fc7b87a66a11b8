"""A replay as a job: piece after piece, at its rate, from where the last run stopped.

The plan divides the requested offsets into numbered pieces, always in the same way. Each piece contains a share of
every partition, in order, so that all partitions are finished together.

A plan is made once, and is the same for every run that continues the replay. It is stored in the topic
`penstock-pipelines` under `replay/<id>/<unique id>`. If two runs plan at the same time, both use the plan that was
written first.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final, Protocol

from penstock.client.deadletters.replay import RateLimiter
from penstock.client.wire.cluster import Cluster
from penstock.spark.internal_topics import PIPELINES_TOPIC, DocumentStore
from penstock.spark.offsets import OffsetRange, ranges_from_json, ranges_to_json
from penstock.spark.pipelines.declaration import JobContext
from penstock.spark.replay.request import ReplayError, ReplayJobRequest, SourceKind

#: The size of a piece without a rate: large enough that its fixed cost does not matter.
PIECE_OFFSETS_DEFAULT: Final = 200_000
#: With a rate, a piece contains what the rate allows in this time, because it is written at full speed.
_BURST_S: Final = 2.0


def piece_offsets(rate_per_s: float | None) -> int:
    """Return how many offsets a piece contains."""
    if rate_per_s is None:
        return PIECE_OFFSETS_DEFAULT
    return max(1, min(PIECE_OFFSETS_DEFAULT, int(rate_per_s * _BURST_S)))


def count_offsets(ranges: Iterable[OffsetRange]) -> int:
    return sum(each.size for each in ranges)


def count_pieces(ranges: Sequence[OffsetRange], offsets_max: int) -> int:
    assert offsets_max > 0
    return -(-count_offsets(ranges) // offsets_max)


def nth_piece(ranges: Sequence[OffsetRange], offsets_max: int, index: int) -> list[OffsetRange]:
    """Return the piece with this number, from 0. It contains a share of each range in proportion to its size."""
    pieces = count_pieces(ranges, offsets_max)
    assert 0 <= index < pieces, f"there are {pieces} pieces, and none has the number {index}"
    # Each range is shifted by another amount, so that not all ranges round up in the same pieces.
    shifts = [number * pieces // len(ranges) for number in range(len(ranges))]
    shares = (
        each._replace(
            start=each.start + (each.size * index + shift) // pieces,
            end=each.start + (each.size * (index + 1) + shift) // pieces,
        )
        for each, shift in zip(ranges, shifts, strict=True)
    )
    return [each for each in shares if each.size]


_PLAN_VERSION: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayJobPlan:
    ranges: tuple[OffsetRange, ...]
    #: How many offsets each piece contains at most.
    offsets_max: int

    @property
    def pieces(self) -> int:
        return count_pieces(self.ranges, self.offsets_max)

    @property
    def total(self) -> int:
        """The number of offsets."""
        return count_offsets(self.ranges)

    def piece(self, index: int) -> list[OffsetRange]:
        return nth_piece(self.ranges, self.offsets_max, index)

    def to_json(self, request: ReplayJobRequest) -> dict[str, Any]:
        return {
            "version": _PLAN_VERSION,
            "id": request.id,
            "asked": request.identity,
            "ranges": ranges_to_json(self.ranges),
            "offsets_max": self.offsets_max,
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> ReplayJobPlan:
        return cls(ranges=tuple(ranges_from_json(content["ranges"])), offsets_max=content["offsets_max"])


def agree_on_plan(
    store: DocumentStore, request: ReplayJobRequest, make: Callable[[], ReplayJobPlan]
) -> tuple[ReplayJobPlan, bool]:
    """Return the plan of this replay, and whether it existed before.

    Raises ReplayError if the id belongs to another replay; Unavailable, Refused, and the errors of `make`.
    """
    found = _first_plan(store, request)
    if found is not None:
        return found, True
    store.write(f"{_plan_prefix(request)}{uuid.uuid4().hex}", make().to_json(request))
    found = _first_plan(store, request)
    if found is None:
        raise ReplayError(f"replay {request.id}: its plan was written to {PIPELINES_TOPIC}, but is not there")
    return found, False


def _plan_prefix(request: ReplayJobRequest) -> str:
    return f"replay/{request.id}/"


def _first_plan(store: DocumentStore, request: ReplayJobRequest) -> ReplayJobPlan | None:
    """Return the plan that was written first. Each plan has its own key and is written once."""
    for key, document in store.read().items():
        if key.startswith(_plan_prefix(request)):
            return _check_plan(document, request)
    return None


def _check_plan(document: Mapping[str, Any], request: ReplayJobRequest) -> ReplayJobPlan:
    if document.get("version") != _PLAN_VERSION:
        raise ReplayError(f"replay {request.id} was planned by another version, and cannot be continued")
    if document["asked"] != request.identity:
        differing = sorted(
            name for name, value in request.identity.items() if document["asked"].get(name) != value
        )
        raise ReplayError(
            f"replay {request.id} was started with another {', '.join(differing)}: use another id= for this one"
        )
    return ReplayJobPlan.from_json(document)


#: How often a replay that waits for its rate checks for a stop request.
_STOP_POLL_S: Final = 0.5


class ReplayRun(Protocol):
    """The part of a replay that depends on the kind of source."""

    plan: ReplayJobPlan
    #: The first piece that is not written yet.
    first: int

    def write(self, index: int, ranges: list[OffsetRange]) -> int:
        """Write one piece once. Return its number of records. Raises SinkError, Unavailable, errors of Spark."""

    def close(self) -> None:
        """Release what the run holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The replay job. Implements `pipelines.declaration.Job`."""

    request: ReplayJobRequest
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    @property
    def name(self) -> str:
        return f"replay-{self.request.id}"

    def describe(self) -> str:
        if self.request.is_to_group:
            return f"{self.request.source} -> the group that failed"
        return f"{self.request.source} -> {self.request.to or 'the original topics'}"

    def run(self, context: JobContext) -> None:
        """Raises ReplayError, SinkError, DataLoss, TopicChanged, Unavailable, Refused, and errors of Spark."""
        with context.run.cluster() as cluster:
            self._refuse_missing_topics(cluster)
            with closing(_create_run(cluster, self.request, context)) as replay_run:
                written = self._replay(replay_run, context)
        if written is not None:
            context.note(f"replay {self.request.id}: this run wrote {written} records")

    def _refuse_missing_topics(self, cluster: Cluster) -> None:
        wanted = [self.request.to] if self.request.to and not self.request.is_to_group else []
        wanted += [self.request.source] if self.request.kind is not SourceKind.ARCHIVE else []
        found = cluster.topics(wanted)
        for name in wanted:
            if name not in found:
                raise ReplayError(f"there is no topic {name}")

    def _replay(self, replay_run: ReplayRun, context: JobContext) -> int | None:
        """Return how many records were written, or None if the replay was stopped."""
        plan, written = replay_run.plan, 0
        done = sum(count_offsets(plan.piece(index)) for index in range(replay_run.first))
        context.progress(done, plan.total)
        limiter = None
        if self.request.rate_per_s is not None:
            limiter = RateLimiter(self.request.rate_per_s, burst=plan.offsets_max, now_s=self.clock())
        for index in range(replay_run.first, plan.pieces):
            ranges = plan.piece(index)
            if not self._await_rate(limiter, count_offsets(ranges), context):
                context.note(f"replay {self.request.id}: stopped; run it again to continue")
                return None
            count = replay_run.write(index, ranges)
            if limiter is not None:
                limiter.spend(count, self.clock())
            written, done = written + count, done + count_offsets(ranges)
            context.progress(done, plan.total)
        return written

    def _await_rate(self, limiter: RateLimiter | None, records: int, context: JobContext) -> bool:
        """Wait until the rate allows these records. Return False if a user has requested a stop."""
        while not context.should_stop():
            wait_s = limiter.wait_s(records, self.clock()) if limiter is not None else 0.0
            if wait_s <= 0:
                return True
            self.sleep(min(wait_s, _STOP_POLL_S))
        return False


def _create_run(cluster: Cluster, request: ReplayJobRequest, context: JobContext) -> ReplayRun:
    # A command that lists pipelines imports this module, and needs no pyspark.
    from penstock.spark.replay.runs import ArchiveReplay, DeadLetterReplay, TopicReplay

    match request.kind:
        case SourceKind.TOPIC:
            return TopicReplay(cluster, request, context)
        case SourceKind.ARCHIVE:
            return ArchiveReplay(cluster, request, context)
        case SourceKind.DEAD_LETTERS:
            return DeadLetterReplay(cluster, request, context)
