"""What batch and streaming reads share: the ranges that go to tasks, and reading them there."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, Final

from pyspark.sql.datasource import InputPartition

from penstock.spark.offsets import OffsetRange
from penstock.spark.options import SourceOptions
from penstock.spark.plainly import handed, told_plainly
from penstock.spark.schemas import Projection
from penstock.spark.sink_options import SinkOptions
from penstock.spark.tickets import Ticket

_LOG: Final = logging.getLogger("penstock.spark")


class RangePartition(InputPartition):  # type: ignore[misc, unused-ignore]
    """One task's part of a read."""

    def __init__(self, wanted: OffsetRange, ticket: Ticket | None = None) -> None:
        super().__init__(wanted)
        self.wanted = wanted
        self.ticket = ticket


def read_task(options: SourceOptions, projection: Projection, partition: Any) -> Iterator[Any]:
    """Arrow batches; none for the partition that Spark makes up where a read has none."""
    from penstock.spark.reading import read_range

    if not isinstance(partition, RangePartition):
        return
    with told_plainly():
        if partition.ticket is not None and not _may_read(options, partition.ticket, partition.wanted):
            return
        fit = projection.fit()
        yield from handed(map(fit, read_range(options, partition.wanted, projection.columns)))


def _may_read(options: SourceOptions, ticket: Ticket, wanted: OffsetRange) -> bool:
    from penstock.spark.reading import task_cluster
    from penstock.spark.tickets import redeem, tell_skipped, this_attempt

    cluster, attempt = task_cluster(options.connection), this_attempt()
    if redeem(cluster, ticket, attempt):
        return True
    tell_skipped(cluster, ticket, wanted, attempt)
    return False


def warn_of_unknown(options: SourceOptions | SinkOptions) -> None:
    if options.connection.unknown:
        names = ", ".join(f"kafka.{name}" for name in options.connection.unknown)
        _LOG.warning("settings without effect: %s", names)
