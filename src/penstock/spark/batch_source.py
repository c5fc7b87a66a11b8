"""`spark.read.format("penstock")`: what lies between two positions, planned once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from pyspark.sql.datasource import DataSourceReader, InputPartition

from penstock.client.cluster import Cluster
from penstock.spark.discovery import Discovery
from penstock.spark.narrowing import Narrowing
from penstock.spark.offsets import OffsetRange, ranges
from penstock.spark.options import SourceOptions
from penstock.spark.plainly import told_plainly
from penstock.spark.planning import split
from penstock.spark.schemas import Projection
from penstock.spark.tasks import RangePartition, read_task, warn_of_unknown


class BatchReader(DataSourceReader):  # type: ignore[misc, unused-ignore]
    def __init__(self, options: SourceOptions, projection: Projection) -> None:
        self.options = options
        self.projection = projection
        self.narrowing = Narrowing()
        self.pushFilters = PushDown(self)

    def partitions(self) -> list[InputPartition]:
        with told_plainly(), Cluster(self.options.connection) as cluster:
            warn_of_unknown(self.options)
            return [RangePartition(each) for each in planned(cluster, self.options, self.narrowing)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return read_task(self.options, self.projection, partition)


class PushDown:
    """`pushFilters` of a reader, called only where `spark.sql.python.filterPushdown.enabled` is set.

    Spark refuses a reader whose class defines `pushFilters` where that is not set, instead of not calling it. It knows
    one by `__func__`, so this carries that of the class it stands for.
    """

    __func__ = staticmethod(DataSourceReader.pushFilters)

    def __init__(self, reader: BatchReader) -> None:
        self._reader = reader

    def __call__(self, filters: list[Any]) -> Iterable[Any]:
        """Takes what can be left out when planning; returns the filters that Spark still has to apply."""
        left = []
        for each in filters:
            column, relation = ".".join(getattr(each, "attribute", ())), type(each).__name__
            found, is_done = self._reader.narrowing.narrow(column, relation, getattr(each, "value", None))
            self._reader.narrowing = found
            if not is_done:
                left.append(each)
        return left


def planned(cluster: Cluster, options: SourceOptions, narrowing: Narrowing) -> list[OffsetRange]:
    """The ranges of a batch read, one for each task. Raises OptionError, DataLoss, Unavailable, Refused."""
    discovery = Discovery(cluster, options)
    topics = discovery.topics()
    starting, ending = (discovery.position(bound, topics) for bound in (options.starting, options.ending))
    wanted = narrowing.narrowed(ranges(starting, ending))
    if narrowing.since_ms is not None:
        wanted = _since(discovery, wanted, narrowing.since_ms)
    there = discovery.readable(wanted)
    return split(there, partitions_min=options.partitions_min, records_max=options.partition_records_max)


def _since(discovery: Discovery, wanted: list[OffsetRange], since_ms: int) -> list[OffsetRange]:
    first = discovery.first_at({each.place: max(since_ms, 0) for each in wanted})
    found = ((each, first[each.place]) for each in wanted)
    later = [each._replace(start=max(each.start, at)) for each, at in found if at is not None]
    return [each for each in later if each.size]
