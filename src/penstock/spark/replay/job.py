"""A replay as a job: piece after piece, at its rate, from where the last run stopped.

The plan says which offsets a replay covers, in numbered pieces; the same ranges are always cut in the same way. Offsets
of a partition are replayed in order, piece after piece, and all partitions come to their end together. This is pure.

A plan is made once, and is the same for every run that continues the replay. It is in the topic `penstock-pipelines`
under `replay/<id>/<unique id>`. If two runs plan at the same time, the plan that was written first counts, and both see
which one that is.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final, Protocol
from uuid import UUID

from penstock.client.deadletters.replay import RateLimiter
from penstock.client.wire.cluster import Cluster
from penstock.spark.internal_topics import DocumentStore
from penstock.spark.offsets import OffsetRange
from penstock.spark.pipelines.declaration import JobContext
from penstock.spark.replay.request import ReplayError, ReplayJobRequest, SourceKind

#: Without a rate: large enough that what each piece costs by itself does not matter.
PIECE_OFFSETS_DEFAULT: Final = 200_000
#: With one: a piece goes out as fast as it can, so it holds what is allowed in this time.
_BURST_S: Final = 2.0


def piece_offsets(rate_per_s: float | None) -> int:
    """How many offsets a piece has."""
    if rate_per_s is None:
        return PIECE_OFFSETS_DEFAULT
    return max(1, min(PIECE_OFFSETS_DEFAULT, int(rate_per_s * _BURST_S)))


def count_offsets(ranges: Iterable[OffsetRange]) -> int:
    """In offsets."""
    return sum(each.size for each in ranges)


def count_pieces(ranges: Sequence[OffsetRange], offsets_max: int) -> int:
    assert offsets_max > 0
    return -(-count_offsets(ranges) // offsets_max)


def cut_piece(ranges: Sequence[OffsetRange], offsets_max: int, index: int) -> list[OffsetRange]:
    """The piece with this number, from 0: of each range a share in proportion to its size."""
    pieces = count_pieces(ranges, offsets_max)
    assert 0 <= index < pieces, f"there are {pieces} pieces, and none has the number {index}"
    # Each rounds at another place, lest all partitions round up in the same pieces.
    shifts = [number * pieces // len(ranges) for number in range(len(ranges))]
    cut = (
        each._replace(
            start=each.start + (each.size * index + shift) // pieces,
            end=each.start + (each.size * (index + 1) + shift) // pieces,
        )
        for each, shift in zip(ranges, shifts, strict=True)
    )
    return [each for each in cut if each.size]


def cut_pieces(
    ranges: Sequence[OffsetRange], offsets_max: int, first: int = 0
) -> Iterator[list[OffsetRange]]:
    """From the one with this number on."""
    for index in range(first, count_pieces(ranges, offsets_max)):
        yield cut_piece(ranges, offsets_max, index)


_PLAN_VERSION: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayJobPlan:
    ranges: tuple[OffsetRange, ...]
    #: Of each piece.
    offsets_max: int

    @property
    def pieces(self) -> int:
        return count_pieces(self.ranges, self.offsets_max)

    @property
    def total(self) -> int:
        """In offsets."""
        return count_offsets(self.ranges)

    def piece(self, index: int) -> list[OffsetRange]:
        return cut_piece(self.ranges, self.offsets_max, index)

    def to_json(self, request: ReplayJobRequest) -> dict[str, Any]:
        ranges = [
            [each.topic, str(each.topic_id) if each.topic_id else None, each.partition, each.start, each.end]
            for each in self.ranges
        ]
        return {
            "version": _PLAN_VERSION,
            "id": request.id,
            "asked": request.identity,
            "ranges": ranges,
            "offsets_max": self.offsets_max,
        }

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> ReplayJobPlan:
        ranges = tuple(
            OffsetRange(topic, UUID(topic_id) if topic_id else None, partition, start, end)
            for topic, topic_id, partition, start, end in told["ranges"]
        )
        return cls(ranges=ranges, offsets_max=told["offsets_max"])


def agree_on_plan(
    store: DocumentStore, request: ReplayJobRequest, make: Callable[[], ReplayJobPlan]
) -> tuple[ReplayJobPlan, bool]:
    """The plan of this replay, and whether it was there before.

    Raises ReplayError where the id belongs to another replay; Unavailable, Refused, and what `make` raises.
    """
    found = _first_plan(store, request)
    if found is not None:
        return found, True
    store.write(f"{_plan_prefix(request)}{uuid.uuid4().hex}", make().to_json(request))
    found = _first_plan(store, request)
    if found is None:
        raise ReplayError(f"replay {request.id}: its plan is not on the board, where it was written")
    return found, False


def _plan_prefix(request: ReplayJobRequest) -> str:
    return f"replay/{request.id}/"


def _first_plan(store: DocumentStore, request: ReplayJobRequest) -> ReplayJobPlan | None:
    """In the order of the board: every plan has a key of its own, written once, so none takes another's place."""
    for key, document in store.read().items():
        if key.startswith(_plan_prefix(request)):
            return _check_plan(document, request)
    return None


def _check_plan(document: Mapping[str, Any], request: ReplayJobRequest) -> ReplayJobPlan:
    if document.get("version") != _PLAN_VERSION:
        raise ReplayError(f"replay {request.id} was planned by another version, and cannot be gone on with")
    if document["asked"] != request.identity:
        differing = sorted(
            name for name, value in request.identity.items() if document["asked"].get(name) != value
        )
        raise ReplayError(
            f"replay {request.id} was begun with another {', '.join(differing)}: give this one another id="
        )
    return ReplayJobPlan.from_json(document)


#: So often somebody who waits for the pace asks whether to stop.
_STOP_POLL_S: Final = 0.5


class ReplayRun(Protocol):
    """What differs between kinds of replays."""

    plan: ReplayJobPlan
    #: The first piece that is not written yet.
    first: int

    def write(self, index: int, ranges: list[OffsetRange]) -> int:
        """One piece, once. Returns how many records it had. Raises SinkError, Unavailable, what Spark raises."""

    def close(self) -> None:
        """Let go of what was held for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """`pipelines.jobs.Job`."""

    request: ReplayJobRequest
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    @property
    def name(self) -> str:
        return f"replay-{self.request.id}"

    def describe(self) -> str:
        home = "whoever gave each letter up" if self.request.is_to_group else "where each letter is from"
        to = home if self.request.is_to_group or self.request.to is None else self.request.to
        return f"{self.request.source} -> {to}"

    def run(self, context: JobContext) -> None:
        """Raises ReplayError, SinkError, DataLoss, TopicChanged, Unavailable, Refused, what Spark raises."""
        with context.run.cluster() as cluster:
            self._refuse_missing(cluster)
            with closing(_create_run(cluster, self.request, context)) as replay_run:
                written = self._replay(replay_run, context)
        if written is not None:
            context.note(f"replay {self.request.id}: {written} records written by this run")

    def _refuse_missing(self, cluster: Cluster) -> None:
        wanted = [self.request.to] if self.request.to and not self.request.is_to_group else []
        wanted += [self.request.source] if self.request.kind is not SourceKind.ARCHIVE else []
        found = cluster.topics(wanted)
        for name in wanted:
            if name not in found:
                raise ReplayError(f"there is no topic {name}")

    def _replay(self, replay_run: ReplayRun, context: JobContext) -> int | None:
        """How many records were written; None where it was stopped before its end."""
        plan, written = replay_run.plan, 0
        done = sum(count_offsets(plan.piece(index)) for index in range(replay_run.first))
        context.progress(done, plan.total)
        pace = self._pace(plan)
        for index in range(replay_run.first, plan.pieces):
            ranges = plan.piece(index)
            if not self._await_pace(pace, count_offsets(ranges), context):
                context.note(f"replay {self.request.id}: stopped; run it again to go on")
                return None
            count = replay_run.write(index, ranges)
            if pace is not None:
                pace.spend(count, self.clock())
            written, done = written + count, done + count_offsets(ranges)
            context.progress(done, plan.total)
        return written

    def _pace(self, plan: ReplayJobPlan) -> RateLimiter | None:
        if self.request.rate_per_s is None:
            return None
        return RateLimiter(self.request.rate_per_s, burst=plan.offsets_max, now_s=self.clock())

    def _await_pace(self, pace: RateLimiter | None, records: int, context: JobContext) -> bool:
        """False where somebody wants it to end."""
        while not context.should_stop():
            wait_s = pace.wait_s(records, self.clock()) if pace is not None else 0.0
            if wait_s <= 0:
                return True
            self.sleep(min(wait_s, _STOP_POLL_S))
        return False


def _create_run(cluster: Cluster, request: ReplayJobRequest, context: JobContext) -> ReplayRun:
    from penstock.spark.replay.runs import ArchiveReplay, DeadLetterReplay, TopicReplay

    match request.kind:
        case SourceKind.TOPIC:
            return TopicReplay(cluster, request, context)
        case SourceKind.ARCHIVE:
            return ArchiveReplay(cluster, request, context)
        case SourceKind.LETTERS:
            return DeadLetterReplay(cluster, request, context)
