"""`spark.readStream.format("penstock")`: Spark's names for what `stream_plan` decides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)

from penstock.spark.offsets import Position
from penstock.spark.options import SourceOptions
from penstock.spark.plainly import told_plainly
from penstock.spark.schemas import Projection
from penstock.spark.stream_plan import StreamPlan
from penstock.spark.tasks import RangePartition, read_task, warn_of_unknown


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):  # type: ignore[misc, unused-ignore]
    """Made in several processes; only the one that is asked for offsets connects to brokers."""

    def __init__(self, options: SourceOptions, projection: Projection) -> None:
        self.options = options
        self.projection = projection
        self._plan: StreamPlan | None = None

    @property
    def plan(self) -> StreamPlan:
        if self._plan is None:
            warn_of_unknown(self.options)
            self._plan = StreamPlan(self.options)
        return self._plan

    @told_plainly()
    def initialOffset(self) -> dict[str, Any]:
        return self.plan.starting().to_json()

    @told_plainly()
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        is_limited = not isinstance(limit, ReadAllAvailable)
        offsets_max = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        offsets_min = self.options.trigger_offsets_min if is_limited else None
        return self.plan.next_end(Position.from_json(start), offsets_max, offsets_min).to_json()

    def getDefaultReadLimit(self) -> ReadLimit:
        """Spark takes one limit from Python; the least that a batch waits for is known here anyway."""
        if self.options.trigger_offsets_max is not None:
            return ReadMaxRows(self.options.trigger_offsets_max)
        if self.options.trigger_offsets_min is not None:
            return ReadMinRows(self.options.trigger_offsets_min)
        return ReadAllAvailable()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        seen = self.plan.seen
        return None if seen is None else seen.to_json()

    @told_plainly()
    def prepareForTriggerAvailableNow(self) -> None:
        self.plan.aim()

    @told_plainly()
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        tasks = self.plan.tasks(Position.from_json(start), Position.from_json(end))
        return [RangePartition(each.wanted, each.ticket) for each in tasks]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return read_task(self.options, self.projection, partition)

    def stop(self) -> None:
        if self._plan is not None:
            self._plan.close()
