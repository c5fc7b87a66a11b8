"""`spark.read.format("penstock")`: reads the offsets between two positions, planned once.

Filters that Spark pushes down exclude topics, partitions, offsets and times before anything is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

from pyspark.sql.datasource import DataSourceReader, InputPartition

from penstock.client.wire.cluster import Cluster
from penstock.spark.offsets import OffsetRange, ranges_between, split_ranges
from penstock.spark.schema import Projection
from penstock.spark.source.discovery import Discovery
from penstock.spark.source.options import SourceOptions
from penstock.spark.source.task import RangePartition, read_task, warn_of_unknown_settings
from penstock.spark.workers import without_traceback

#: Columns that are never null, so that the filter IsNotNull always holds.
_NEVER_NULL: Final = frozenset({"topic", "partition", "offset", "timestamp", "timestampType"})
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class PushedFilters:
    """What remains after all pushed filters. None means no restriction."""

    topics: frozenset[str] | None = None
    partitions: frozenset[int] | None = None
    start: int | None = None
    end: int | None = None
    #: Records before this time are not needed.
    since_ms: int | None = None

    def narrowed(self, ranges: Iterable[OffsetRange]) -> list[OffsetRange]:
        """Apply all filters but the time, for which only brokers know the offsets."""
        kept = [
            each._replace(
                start=max(each.start, self.start if self.start is not None else each.start),
                end=min(each.end, self.end if self.end is not None else each.end),
            )
            for each in ranges
            if (self.topics is None or each.topic in self.topics)
            and (self.partitions is None or each.partition in self.partitions)
        ]
        return [each for each in kept if each.size]

    def narrow(self, column: str, relation: str, value: Any) -> tuple[PushedFilters, bool]:
        """Return the filters with one more, and whether Spark need not apply that one again."""
        if relation == "IsNotNull":
            return self, column in _NEVER_NULL
        rule = _RULES.get((column, relation))
        if rule is None or value is None:
            return self, False
        # Records are not ordered by time, so later offsets may have earlier timestamps.
        return rule(self, value), column != "timestamp"


def _in_topics(pushed_filters: PushedFilters, values: Iterable[str]) -> PushedFilters:
    wanted = frozenset(values)
    return replace(
        pushed_filters, topics=wanted if pushed_filters.topics is None else pushed_filters.topics & wanted
    )


def _in_partitions(pushed_filters: PushedFilters, values: Iterable[int]) -> PushedFilters:
    wanted = frozenset(values)
    return replace(
        pushed_filters,
        partitions=wanted if pushed_filters.partitions is None else pushed_filters.partitions & wanted,
    )


def _from_offset(pushed_filters: PushedFilters, start: int) -> PushedFilters:
    return replace(
        pushed_filters, start=start if pushed_filters.start is None else max(pushed_filters.start, start)
    )


def _before_offset(pushed_filters: PushedFilters, end: int) -> PushedFilters:
    return replace(pushed_filters, end=end if pushed_filters.end is None else min(pushed_filters.end, end))


def _from_time(pushed_filters: PushedFilters, start: datetime) -> PushedFilters:
    """Round down: timestamps of records have milliseconds, those of Spark have microseconds."""
    start = start if start.tzinfo is not None else start.astimezone()
    since_ms = (start - _EPOCH) // _MILLISECOND
    return replace(
        pushed_filters,
        since_ms=since_ms if pushed_filters.since_ms is None else max(pushed_filters.since_ms, since_ms),
    )


_MILLISECOND: Final = datetime(1970, 1, 1, 0, 0, 0, 1000) - datetime(1970, 1, 1)
_EQUAL: Final = ("EqualTo", "EqualNullSafe")
_RULES: Final[dict[tuple[str, str], Callable[[PushedFilters, Any], PushedFilters]]] = {
    **{("topic", name): lambda pushed_filters, value: _in_topics(pushed_filters, [value]) for name in _EQUAL},
    ("topic", "In"): lambda pushed_filters, values: _in_topics(pushed_filters, values),
    **{
        ("partition", name): lambda pushed_filters, value: _in_partitions(pushed_filters, [value])
        for name in _EQUAL
    },
    ("partition", "In"): lambda pushed_filters, values: _in_partitions(pushed_filters, values),
    **{
        ("offset", name): lambda pushed_filters, value: _before_offset(
            _from_offset(pushed_filters, value), value + 1
        )
        for name in _EQUAL
    },
    ("offset", "GreaterThan"): lambda pushed_filters, value: _from_offset(pushed_filters, value + 1),
    ("offset", "GreaterThanOrEqual"): lambda pushed_filters, value: _from_offset(pushed_filters, value),
    ("offset", "LessThan"): lambda pushed_filters, value: _before_offset(pushed_filters, value),
    ("offset", "LessThanOrEqual"): lambda pushed_filters, value: _before_offset(pushed_filters, value + 1),
    **{
        ("timestamp", name): lambda pushed_filters, value: _from_time(pushed_filters, value)
        for name in (*_EQUAL, "GreaterThan", "GreaterThanOrEqual")
    },
}


class BatchReader(DataSourceReader):  # type: ignore[misc, unused-ignore]
    def __init__(self, options: SourceOptions, projection: Projection) -> None:
        self.options = options
        self.projection = projection
        self.pushed_filters = PushedFilters()
        self.pushFilters = FilterPushDown(self)

    def partitions(self) -> list[InputPartition]:
        with without_traceback(), Cluster(self.options.connection) as cluster:
            warn_of_unknown_settings(self.options)
            return [
                RangePartition(each) for each in plan_batch_read(cluster, self.options, self.pushed_filters)
            ]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return read_task(self.options, self.projection, partition)


class FilterPushDown:
    """The method `pushFilters` of a reader, which Spark calls if `spark.sql.python.filterPushdown.enabled` is set.

    If it is not set, Spark refuses a reader whose class overrides `pushFilters`. Spark compares `__func__` to find out,
    so this object has the `__func__` of the base class.
    """

    __func__ = staticmethod(DataSourceReader.pushFilters)

    def __init__(self, reader: BatchReader) -> None:
        self._reader = reader

    def __call__(self, filters: list[Any]) -> Iterable[Any]:
        """Keep the filters that planning can apply, and return those that Spark still has to apply."""
        left = []
        for each in filters:
            column, relation = ".".join(getattr(each, "attribute", ())), type(each).__name__
            found, is_done = self._reader.pushed_filters.narrow(
                column, relation, getattr(each, "value", None)
            )
            self._reader.pushed_filters = found
            if not is_done:
                left.append(each)
        return left


def plan_batch_read(
    cluster: Cluster, options: SourceOptions, pushed_filters: PushedFilters
) -> list[OffsetRange]:
    """Return the ranges of a batch read, one for each task. Raises OptionError, DataLoss, Unavailable, Refused."""
    discovery = Discovery(cluster, options)
    topics = discovery.topics()
    start, end = (discovery.position(bound, topics) for bound in (options.start, options.end))
    wanted = pushed_filters.narrowed(ranges_between(start, end))
    if pushed_filters.since_ms is not None:
        wanted = _ranges_since(discovery, wanted, pushed_filters.since_ms)
    there = discovery.readable(wanted)
    return split_ranges(
        there, partitions_min=options.partitions_min, records_max=options.partition_records_max
    )


def _ranges_since(discovery: Discovery, wanted: list[OffsetRange], since_ms: int) -> list[OffsetRange]:
    first = discovery.first_at({each.topic_partition: max(since_ms, 0) for each in wanted})
    found = ((each, first[each.topic_partition]) for each in wanted)
    later = [each._replace(start=max(each.start, at)) for each, at in found if at is not None]
    return [each for each in later if each.size]
