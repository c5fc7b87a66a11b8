"""A replay as a job: piece after piece, at its pace, from wherever it was left."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Final, Protocol

from penstock.client.cluster import Cluster
from penstock.client.deadletters.pacing import Pace
from penstock.spark.offsets import OffsetRange
from penstock.spark.pipelines.jobs import JobContext
from penstock.spark.replay.chunks import total
from penstock.spark.replay.plans import Plan
from penstock.spark.replay.request import Kind, ReplayError, Request

#: So often somebody who waits for the pace asks whether to stop.
_NAP_S: Final = 0.5


class Course(Protocol):
    """What differs between kinds of replays."""

    plan: Plan
    #: The first piece that is not written yet.
    first: int

    def write(self, index: int, ranges: list[OffsetRange]) -> int:
        """One piece, once. Returns how many records it had. Raises SinkError, Unavailable, what Spark raises."""

    def close(self) -> None:
        """Let go of what was held for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """`pipelines.jobs.Job`."""

    request: Request
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
            with closing(_course(cluster, self.request, context)) as course:
                written = self._replay(course, context)
        if written is not None:
            context.note(f"replay {self.request.id}: {written} records written by this run")

    def _refuse_missing(self, cluster: Cluster) -> None:
        wanted = [self.request.to] if self.request.to and not self.request.is_to_group else []
        wanted += [self.request.source] if self.request.kind is not Kind.ARCHIVE else []
        found = cluster.topics(wanted)
        for name in wanted:
            if name not in found:
                raise ReplayError(f"there is no topic {name}")

    def _replay(self, course: Course, context: JobContext) -> int | None:
        """How many records were written; None where it was stopped before its end."""
        plan, written = course.plan, 0
        done = sum(total(plan.piece(index)) for index in range(course.first))
        context.progress(done, plan.total)
        pace = self._pace(plan)
        for index in range(course.first, plan.pieces):
            ranges = plan.piece(index)
            if not self._await_pace(pace, total(ranges), context):
                context.note(f"replay {self.request.id}: stopped; run it again to go on")
                return None
            count = course.write(index, ranges)
            if pace is not None:
                pace.spend(count, self.clock())
            written, done = written + count, done + total(ranges)
            context.progress(done, plan.total)
        return written

    def _pace(self, plan: Plan) -> Pace | None:
        if self.request.rate_per_s is None:
            return None
        return Pace(self.request.rate_per_s, burst=plan.offsets_max, now_s=self.clock())

    def _await_pace(self, pace: Pace | None, records: int, context: JobContext) -> bool:
        """False where somebody wants it to end."""
        while not context.should_stop():
            wait_s = pace.wait_s(records, self.clock()) if pace is not None else 0.0
            if wait_s <= 0:
                return True
            self.sleep(min(wait_s, _NAP_S))
        return False


def _course(cluster: Cluster, request: Request, context: JobContext) -> Course:
    from penstock.spark.replay.courses import ArchiveCourse, LettersCourse, RangeCourse

    match request.kind:
        case Kind.TOPIC:
            return RangeCourse(cluster, request, context)
        case Kind.ARCHIVE:
            return ArchiveCourse(cluster, request, context)
        case Kind.LETTERS:
            return LettersCourse(cluster, request, context)
