"""Rows of an archive as the records that they were. Offsets say which rows, whatever files hold them by now."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from uuid import UUID

from penstock.spark.archive.columns import KEY, OURS, TIMESTAMP, TOMBSTONE, VALUE
from penstock.spark.archive.files import OFFSET_COLUMN, PARTITION_COLUMN
from penstock.spark.archive.location import Location
from penstock.spark.archive.sink import READING, TOPIC, TOPIC_ID
from penstock.spark.archive.tables import Table
from penstock.spark.archive.versions import opened, rows_of
from penstock.spark.offsets import OffsetRange
from penstock.spark.pipelines.shaping import JSON_FORMAT
from penstock.spark.replay.request import ReplayError


def archive(folder: str) -> Table:
    """Raises ArchiveError, ReplayError where it is no archive of a topic."""
    found = opened(Location.of(folder))
    if TOPIC not in found.properties:
        raise ReplayError(f"table {folder} is no archive of a topic")
    return found


def holds_columns(table: Table) -> bool:
    """Whether values were parsed, so that they can be written as JSON of the columns only."""
    return READING in table.properties


def spanned(rows: Any, table: Table) -> list[OffsetRange]:
    """The offsets of these rows."""
    from pyspark.sql import functions as F

    ends = rows.groupBy(PARTITION_COLUMN).agg(
        F.min(OFFSET_COLUMN).alias("first"), F.max(OFFSET_COLUMN).alias("last")
    )
    topic, told = table.properties[TOPIC], table.properties.get(TOPIC_ID)
    topic_id = None if told is None else UUID(told)
    return [
        OffsetRange(topic, topic_id, row[PARTITION_COLUMN], row["first"], row["last"] + 1)
        for row in sorted(ends.collect(), key=lambda row: row[PARTITION_COLUMN])
    ]


def archived(spark: Any, table: Table, ranges: Iterable[OffsetRange] | None = None) -> Any:
    """Rows with the archive's own columns: all, or those of some offsets."""
    from pyspark.sql import functions as F

    rows = rows_of(spark, table)
    if ranges is None:
        return rows
    wanted = F.lit(False)
    for each in ranges:
        offset = F.col(OFFSET_COLUMN)
        is_in = (offset >= each.start) & (offset < each.end)
        wanted = wanted | ((F.col(PARTITION_COLUMN) == each.partition) & is_in)
    return rows.where(wanted)


def as_records(rows: Any, table: Table) -> Any:
    """Key, value, headers and timestamp, those of a partition in one task and in their order."""
    from pyspark.sql import functions as F

    ordered = rows.repartition(F.col(PARTITION_COLUMN)).sortWithinPartitions(PARTITION_COLUMN, OFFSET_COLUMN)
    return ordered.select(
        F.col(KEY).alias("key"),
        F.when(~F.col(TOMBSTONE), _value(ordered, table)).alias("value"),
        F.col("_headers").alias("headers"),
        F.col(TIMESTAMP).alias("timestamp"),
    )


def _value(rows: Any, table: Table) -> Any:
    from pyspark.sql import functions as F

    if not holds_columns(table):
        return F.col(VALUE)
    columns = [F.col(f"`{name}`") for name in rows.columns if name not in OURS]
    return F.to_json(F.struct(*columns), JSON_FORMAT).cast("binary")
