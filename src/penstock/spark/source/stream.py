"""`spark.readStream.format("penstock")`.

`StreamPlan` decides on the driver where the query begins, how far the next batch goes, and what its tasks read.
`StreamReader` is Spark's interface to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)

from penstock.client.wire.cluster import Cluster
from penstock.client.wire.topics import check_topic_contracts
from penstock.spark.at_most_once.offset_claims import OffsetClaims
from penstock.spark.at_most_once.task_claims import TaskClaim
from penstock.spark.offsets import (
    GroupProgress,
    OffsetRange,
    Position,
    TopicPosition,
    is_batch_due,
    limit_offsets,
    ranges_between,
    split_ranges,
    start_offset,
    unread_offsets,
)
from penstock.spark.schema import Projection
from penstock.spark.sink.options import Contract
from penstock.spark.source.discovery import Discovery
from penstock.spark.source.options import SourceOptions
from penstock.spark.source.task import RangePartition, read_task, warn_of_unknown_settings
from penstock.spark.workers import without_traceback


class ReadTask(NamedTuple):
    """The range that one task reads. With a claim, only the first attempt that uses the claim gets the records."""

    wanted: OffsetRange
    task_claim: TaskClaim | None = None


class StreamPlan:
    """The plan of one query, in the process that plans it."""

    def __init__(
        self,
        options: SourceOptions,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._options = options
        self._cluster = Cluster(options.connection)
        self._discovery = Discovery(self._cluster, options)
        is_claiming = options.contract is Contract.AT_MOST_ONCE
        # The claims are the committed offsets of the group, so nothing else may commit to it.
        self._progress = GroupProgress(options.connection, None if is_claiming else options.group_id)
        self._claims = (
            OffsetClaims(self._cluster, options.group_id) if is_claiming and options.group_id else None
        )
        #: Topics whose contract this query satisfies.
        self._allowed: set[str] = set()
        self._clock = clock
        self._wall = wall
        self._last_batch_s: float | None = None
        #: The end of a query with the trigger availableNow; None for other triggers.
        self._target: Position | None = None
        #: The end of the data when the query last looked for more.
        self.seen: Position | None = None

    def close(self) -> None:
        if self._claims is not None:
            self._claims.close()
        self._cluster.close()
        self._progress.close()

    def initial_position(self) -> Position:
        """Return the start of the query. Raises OptionError, DataLoss, ClaimError, InsufficientContract, Unavailable,
        Refused.
        """
        found = self._discovery.position(self._options.start, self._discovery.topics())
        self._check_contracts(found.topics)
        return (found if self._claims is None else self._claims.skip_claimed(found)).as_initial()

    def set_target(self) -> None:
        """Read what is available now, and no more."""
        empty = Position({})
        self._target = self._due(empty, self._discovery.latest(empty))

    def next_end(self, start: Position, offsets_max: int | None, offsets_min: int | None) -> Position:
        """Return the end of the batch that begins at `start`. It equals `start` if the query should wait for more data.

        All batches before `start` are finished.

        Raises DataLoss, ClaimError, Unavailable, Refused.
        """
        self._progress.commit(start)
        if self._claims is not None:
            self._claims.refresh()
        self.seen = self._discovery.latest(start)
        return start.next_position(self._next_topics(start, self.seen, offsets_max, offsets_min))

    def _next_topics(
        self, start: Position, available: Position, offsets_max: int | None, offsets_min: int | None
    ) -> Mapping[str, TopicPosition]:
        if self._target is not None:
            available, offsets_min = _up_to_target(start, available, self._target), None
        else:
            available = self._due(start, available)
        ids, ends = available.ids, available.offsets
        begins = {tp: start_offset(start, tp[0], ids[tp[0]], tp[1]) for tp in ends}
        total = sum(unread_offsets(begins, ends).values())
        if total == 0:
            return available.topics
        if not self._is_due(total, offsets_min):
            return start.topics
        self._last_batch_s = self._clock()
        if offsets_max is None or total <= offsets_max:
            return available.topics
        return self._limited(available, begins, offsets_max).topics

    def _due(self, start: Position, available: Position) -> Position:
        return self._discovery.due(start, available, int(self._wall() * 1000))

    def _is_due(self, total: int, offsets_min: int | None) -> bool:
        if self._last_batch_s is None:
            return True
        waited_ms = (self._clock() - self._last_batch_s) * 1000
        return is_batch_due(total, offsets_min, waited_ms, self._options.trigger_delay_ms_max)

    def _limited(self, available: Position, begins: dict[tuple[str, int], int], offsets_max: int) -> Position:
        """Limit the batch. Offsets of deleted records do not count towards the limit."""
        first, ends = self._discovery.beginnings(begins), available.offsets
        there = {tp: max(begin, min(first[tp], ends[tp])) for tp, begin in begins.items()}
        return Position.of(limit_offsets(there, ends, offsets_max), available.ids)

    def tasks(self, start: Position, end: Position) -> list[ReadTask]:
        """Return the tasks of a batch. Raises DataLoss, ClaimError, InsufficientContract, Unavailable, Refused."""
        wanted = ranges_between(start, end)
        self._check_contracts(each.topic for each in wanted)
        if self._claims is None:
            return [ReadTask(each) for each in self._split(wanted)]
        pieces = self._split(self._claims.without_claimed(wanted))
        return [ReadTask(*each) for each in zip(pieces, self._claims.claim(pieces), strict=True)]

    def _check_contracts(self, topics: Iterable[str]) -> None:
        """Check the contracts of new topics if this source delivers at most once. Otherwise the sink decides."""
        new = set(topics) - self._allowed
        if self._claims is None or not new:
            return
        who = f"the stream of group {self._options.group_id}"
        check_topic_contracts(self._cluster, sorted(new), self._options.contract.value, who=who)
        self._allowed |= new

    def _split(self, wanted: Sequence[OffsetRange]) -> list[OffsetRange]:
        return split_ranges(
            self._discovery.readable(wanted),
            partitions_min=self._options.partitions_min,
            records_max=self._options.partition_records_max,
        )


def _up_to_target(start: Position, available: Position, target: Position) -> Position:
    """Limit the available offsets to the target, but do not go back behind `start`."""
    found = {}
    for (topic, partition), end in available.offsets.items():
        known = target.topics.get(topic)
        is_in_target = known is not None and known.is_same_topic(available.topics[topic].id)
        goal = known.offsets.get(partition) if known is not None and is_in_target else None
        behind = start.topics[topic].offsets.get(partition) if topic in start.topics else None
        if goal is not None:
            found[topic, partition] = min(end, max(goal, behind or 0))
        elif behind is not None:
            found[topic, partition] = min(end, behind)
    return Position.of(found, available.ids)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):  # type: ignore[misc, unused-ignore]
    """Spark creates readers in several processes. Only the one that plans the query connects to brokers."""

    def __init__(self, options: SourceOptions, projection: Projection) -> None:
        self.options = options
        self.projection = projection
        self._plan: StreamPlan | None = None

    @property
    def plan(self) -> StreamPlan:
        if self._plan is None:
            warn_of_unknown_settings(self.options)
            self._plan = StreamPlan(self.options)
        return self._plan

    @without_traceback()
    def initialOffset(self) -> dict[str, Any]:
        return self.plan.initial_position().to_json()

    @without_traceback()
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        is_limited = not isinstance(limit, ReadAllAvailable)
        offsets_max = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        offsets_min = self.options.trigger_offsets_min if is_limited else None
        return self.plan.next_end(Position.from_json(start), offsets_max, offsets_min).to_json()

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the limit of a batch. Spark accepts one limit; `latestOffset` applies the minimum."""
        if self.options.trigger_offsets_max is not None:
            return ReadMaxRows(self.options.trigger_offsets_max)
        if self.options.trigger_offsets_min is not None:
            return ReadMinRows(self.options.trigger_offsets_min)
        return ReadAllAvailable()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        seen = self.plan.seen
        return None if seen is None else seen.to_json()

    @without_traceback()
    def prepareForTriggerAvailableNow(self) -> None:
        self.plan.set_target()

    @without_traceback()
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        tasks = self.plan.tasks(Position.from_json(start), Position.from_json(end))
        return [RangePartition(each.wanted, each.task_claim) for each in tasks]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return read_task(self.options, self.projection, partition)

    def stop(self) -> None:
        if self._plan is not None:
            self._plan.close()
