"""Reads an archive as a DataFrame: at one version, or together with the records that are only in the topic so far.

Spark reads the files of a version by their names. So later commits are not visible, and a filter on the day reads only
the files of that day.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import unquote
from uuid import UUID

from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from penstock.client.errors import TopicChanged
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.metadata import IsolationLevel, TopicInfo
from penstock.client.wire.offsets import EARLIEST, LATEST, list_offsets
from penstock.spark.archive.delta_table import ArchiveError, ArchiveTable, EndOffsets, GapError
from penstock.spark.archive.files import OFFSET_COLUMN, PARTITION_COLUMN, TableLocation
from penstock.spark.archive.rows import (
    ARCHIVE_COLUMNS,
    KEY,
    TIMESTAMP,
    TOMBSTONE,
    ValueFormat,
    archived_rows,
    parsed_rows,
)
from penstock.spark.archive.sink import TOPIC_ID_PROPERTY, TOPIC_PROPERTY, VALUE_FORMAT_PROPERTY
from penstock.spark.pipelines.declaration import RunSettings

#: Delta reader features that do not change how the Parquet files are read.
_IGNORED_FEATURES: Final = frozenset({"timestampNtz", "v2Checkpoint", "vacuumProtocolCheck"})
_COLUMN_MAPPING: Final = "delta.columnMapping.mode"


def history(
    spark: Any, table: str, *, version: int | None = None, storage: Mapping[str, str] | None = None
) -> Any:
    """Return all rows of the table, at `version` or at its newest version. Raises ArchiveError."""
    return table_rows(spark, open_table(TableLocation.of(table, storage), version))


def open_table(location: TableLocation, version: int | None = None) -> ArchiveTable:
    """Open the table. Raises ArchiveError if it does not exist, or if its Parquet files cannot be read on their own."""
    table = ArchiveTable.open(location, version)
    if table is None:
        raise ArchiveError(f"there is no table {location}")
    _refuse_features(table)
    return table


def _refuse_features(table: ArchiveTable) -> None:
    protocol = table.handle.protocol()
    features = sorted(set(protocol.reader_features or ()) - _IGNORED_FEATURES)
    if table.properties.get(_COLUMN_MAPPING, "none") != "none" and "columnMapping" not in features:
        features.append("columnMapping")
    if not features and protocol.min_reader_version == 2:
        features.append("columnMapping")
    if features:
        raise ArchiveError(
            f"table {table.location} uses {', '.join(features)}, so its Parquet files cannot be read on their own; "
            "use a Delta reader, or rewrite the table without these features"
        )


def table_rows(spark: Any, table: ArchiveTable) -> Any:
    schema = StructType.fromJson(json.loads(table.schema))
    paths = _file_paths(table)
    if not paths:
        return spark.createDataFrame([], schema)
    reader = spark.read.schema(schema).option("basePath", table.location.for_spark())
    return reader.parquet(*paths).select(*[f"`{name}`" for name in schema.names])


def _file_paths(table: ArchiveTable) -> list[str]:
    """Return the paths of all files. Raises ArchiveError if a file is not in a folder `COLUMN=VALUE`.

    Spark takes the values of partition columns from the folder names. Penstock always writes such folders.
    """
    partition_by = table.partition_by
    found = [unquote(path) for path in table.paths()]
    for name in partition_by:
        misplaced = [path for path in found if f"{name}=" not in path]
        if misplaced:
            raise ArchiveError(
                f"table {table.location} has files that are not in a folder {name}=VALUE, such as {misplaced[0]}"
            )
    return [table.location.for_spark(path) for path in found]


_GAPS_NAMED_MAX: Final = 5


def table(
    spark: Any,
    topic: str,
    table: str,
    *,
    bootstrap: str,
    connection: Mapping[str, str] | None = None,
    storage: Mapping[str, str] | None = None,
) -> Any:
    """Return all records of the topic: the archived ones and the newer ones, without gap or overlap.

    The call pins both the version of the table and the end of the topic. Values that do not fit the table's schema are
    left out, because the archive sends them to the dead-letter topic. Raises GapError, ArchiveError, ClientError.
    """
    run = RunSettings(bootstrap=bootstrap, checkpoint="", connection=connection or {})
    # Open the table first: then the end of the topic, read later, cannot be below the table's end offsets.
    archive = open_table(TableLocation.of(table, storage))
    _check_topic(archive, topic)
    id_text = archive.properties.get(TOPIC_ID_PROPERTY)
    topic_id = None if id_text is None else UUID(id_text)
    with run.cluster() as cluster:
        info = cluster.await_topic(topic, topic_id)
        starts, ends = _unarchived_range(cluster, info, archive.ends(topic), archive)
    rows = table_rows(spark, archive)
    if starts == ends:
        return rows
    return rows.unionByName(_unarchived_rows(spark, run, topic, archive, starts, ends))


def latest(
    spark: Any,
    topic: str,
    table: str | None = None,
    *,
    bootstrap: str,
    connection: Mapping[str, str] | None = None,
    storage: Mapping[str, str] | None = None,
) -> Any:
    """Return the newest row of each key. Leaves out keys whose newest record is a tombstone, and records without a key.

    Within a partition, the row with the highest offset is the newest. If a key is in several partitions, because the
    number of partitions was changed, the row with the latest timestamp is the newest. Without a table, only the records
    that are still in the topic are read.
    """
    if table is None:
        run = RunSettings(bootstrap=bootstrap, checkpoint="", connection=connection or {})
        rows = archived_rows(_read_topic(spark, run, topic, {}))
    else:
        given: dict[str, Any] = {"bootstrap": bootstrap, "connection": connection, "storage": storage}
        rows = _table(spark, topic, table, **given)
    return newest_by_key(rows)


#: An alias for use in `latest`, whose parameter `table` hides the function.
_table: Final = table


def newest_by_key(rows: Any) -> Any:
    columns = [F.col(f"`{name}`") for name in rows.columns]
    keyed = rows.where(F.col(KEY).isNotNull()).select(KEY, PARTITION_COLUMN, F.struct(*columns).alias("row"))
    by_partition = keyed.groupBy(KEY, PARTITION_COLUMN).agg(
        F.max_by("row", F.col(f"row.{OFFSET_COLUMN}")).alias("row")
    )
    by_time = F.struct(f"row.{TIMESTAMP}", f"row.{PARTITION_COLUMN}")
    by_key = by_partition.groupBy(KEY).agg(F.max_by("row", by_time).alias("row"))
    return by_key.select("row.*").where(~F.col(TOMBSTONE))


# Matching table and topic


def _check_topic(archive: ArchiveTable, topic: str) -> None:
    known = archive.properties.get(TOPIC_PROPERTY)
    if known != topic:
        is_of = "not an archive of a topic" if known is None else f"an archive of topic {known}"
        raise ArchiveError(f"table {archive.location} is {is_of}, not of {topic}")


def _unarchived_range(
    cluster: Cluster, info: TopicInfo, ends: EndOffsets, archive: ArchiveTable
) -> tuple[dict[int, int], dict[int, int]]:
    """Return the start and end offsets between which the topic must be read. Raises GapError, TopicChanged."""
    partitions = [(info.name, each.index) for each in info.partitions]
    first, last = (
        list_offsets(cluster, dict.fromkeys(partitions, edge), isolation=IsolationLevel.READ_COMMITTED)
        for edge in (EARLIEST, LATEST)
    )
    begins = {index: at.offset for (_, index), at in first.items() if at is not None}
    stops = {index: at.offset for (_, index), at in last.items() if at is not None}
    starts = {index: ends.of(index) for index in begins}
    _refuse_gap(info.name, archive, starts, begins)
    for index, start in starts.items():
        if start > stops[index]:
            raise TopicChanged(
                f"table {archive.location} has records of {info.name}[{index}] up to offset {start - 1}, and the log "
                f"ends at {stops[index]}: the topic has lost records that are archived"
            )
    return starts, stops


def _refuse_gap(
    topic: str, archive: ArchiveTable, starts: Mapping[int, int], begins: Mapping[int, int]
) -> None:
    gaps = [
        f"{topic}[{index}] offsets {start} to {begins[index] - 1}"
        for index, start in sorted(starts.items())
        if start < begins[index]
    ]
    if gaps:
        more = f" and {len(gaps) - _GAPS_NAMED_MAX} more" if len(gaps) > _GAPS_NAMED_MAX else ""
        raise GapError(
            f"records are neither in table {archive.location} nor in the topic any more: "
            f"{'; '.join(gaps[:_GAPS_NAMED_MAX])}{more}. They were deleted before they were archived"
        )


# Reading the records that are not archived yet


def _unarchived_rows(
    spark: Any,
    run: RunSettings,
    topic: str,
    archive: ArchiveTable,
    starts: Mapping[int, int],
    ends: Mapping[int, int],
) -> Any:
    bounds = {
        name: json.dumps({topic: {str(index): offset for index, offset in sorted(offsets.items())}})
        for name, offsets in (("startingOffsets", starts), ("endingOffsets", ends))
    }
    rows = _read_topic(spark, run, topic, bounds)
    value_format = archive.properties.get(VALUE_FORMAT_PROPERTY)
    if value_format is not None:
        rows = parsed_rows(rows, ValueFormat.from_json(value_format))
    return _with_table_columns(archived_rows(rows), archive)


def _read_topic(spark: Any, run: RunSettings, topic: str, bounds: Mapping[str, str]) -> Any:
    options = {"subscribe": topic, "includeHeaders": "true", "kafka.isolation.level": "read_committed"}
    return spark.read.format("penstock").options(**run.options(), **options, **bounds).load()


def _with_table_columns(rows: Any, archive: ArchiveTable) -> Any:
    """Return the rows with the table's columns in its order. Columns that the value schema no longer has are null."""
    wanted = StructType.fromJson(json.loads(archive.schema))
    have = set(rows.columns)
    assert have.issuperset(ARCHIVE_COLUMNS), "rows lack columns of an archive"
    return rows.select(
        *[
            F.col(f"`{each.name}`") if each.name in have else F.lit(None).cast(each.dataType).alias(each.name)
            for each in wanted.fields
        ]
    )
