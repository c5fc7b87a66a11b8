"""A topic as a table: what is archived, and what the topic has on top of that, as one DataFrame."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final
from uuid import UUID

from penstock.client.cluster import Cluster
from penstock.client.errors import TopicChanged
from penstock.client.metadata import Isolation, TopicInfo
from penstock.client.positions import EARLIEST, LATEST, list_offsets
from penstock.spark.archive.columns import KEY, OURS, TIMESTAMP, TOMBSTONE, archived_rows
from penstock.spark.archive.ends import Ends
from penstock.spark.archive.errors import ArchiveError, GapError
from penstock.spark.archive.files import OFFSET_COLUMN, PARTITION_COLUMN
from penstock.spark.archive.location import Location
from penstock.spark.archive.readings import Reading, parsed_rows
from penstock.spark.archive.sink import READING, TOPIC, TOPIC_ID
from penstock.spark.archive.tables import Table
from penstock.spark.archive.versions import opened, rows_of
from penstock.spark.pipelines.settings import RunSettings

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
    """All records of the topic: those in the archive, and those that came since, without a gap and without overlap.

    Both are pinned now: the version of the table, and where the topic ends. Values that do not fit the table's schema
    are left out, as the archive leaves them to the dead letters. Raises GapError, ArchiveError, ClientError.
    """
    run = RunSettings(bootstrap=bootstrap, checkpoint="", connection=connection or {})
    # The table comes first: the topic's end is never before the end of what was read from it.
    archive = opened(Location.of(table, storage))
    _check_topic(archive, topic)
    with run.cluster() as cluster:
        info = cluster.await_topic(topic, _topic_id(archive))
        starts, ends = _tail(cluster, info, archive.ends(topic), archive)
    rows = rows_of(spark, archive)
    if starts == ends:
        return rows
    return rows.unionByName(_live(spark, run, topic, archive, starts, ends))


def latest(
    spark: Any,
    topic: str,
    table: str | None = None,
    *,
    bootstrap: str,
    connection: Mapping[str, str] | None = None,
    storage: Mapping[str, str] | None = None,
) -> Any:
    """The newest row of each key; keys whose newest record has no value are gone, and records without key left out.

    Within a partition the order is that of the offsets. A key that is in several partitions, as the number of them was
    changed, has the newest by timestamp. Without a table, what the topic itself has is read.
    """
    if table is None:
        run = RunSettings(bootstrap=bootstrap, checkpoint="", connection=connection or {})
        rows = archived_rows(_read(spark, run, topic, {}))
    else:
        given: dict[str, Any] = {"bootstrap": bootstrap, "connection": connection, "storage": storage}
        rows = _table(spark, topic, table, **given)
    return newest(rows)


#: Under a name that no parameter hides.
_table: Final = table


def newest(rows: Any) -> Any:
    from pyspark.sql import functions as F

    columns = [F.col(f"`{name}`") for name in rows.columns]
    keyed = rows.where(F.col(KEY).isNotNull()).select(KEY, PARTITION_COLUMN, F.struct(*columns).alias("row"))
    by_partition = keyed.groupBy(KEY, PARTITION_COLUMN).agg(
        F.max_by("row", F.col(f"row.{OFFSET_COLUMN}")).alias("row")
    )
    by_time = F.struct(f"row.{TIMESTAMP}", f"row.{PARTITION_COLUMN}")
    by_key = by_partition.groupBy(KEY).agg(F.max_by("row", by_time).alias("row"))
    return by_key.select("row.*").where(~F.col(TOMBSTONE))


# What belongs together


def _check_topic(archive: Table, topic: str) -> None:
    known = archive.properties.get(TOPIC)
    if known != topic:
        is_of = "no archive of a topic" if known is None else f"an archive of topic {known}"
        raise ArchiveError(f"table {archive.location} is {is_of}, not of {topic}")


def _topic_id(archive: Table) -> UUID | None:
    told = archive.properties.get(TOPIC_ID)
    return None if told is None else UUID(told)


def _tail(
    cluster: Cluster, info: TopicInfo, ends: Ends, archive: Table
) -> tuple[dict[int, int], dict[int, int]]:
    """From where to where the topic is to be read. Raises GapError, TopicChanged."""
    places = [(info.name, each.index) for each in info.partitions]
    first, last = (
        list_offsets(cluster, dict.fromkeys(places, edge), isolation=Isolation.READ_COMMITTED)
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


def _refuse_gap(topic: str, archive: Table, starts: Mapping[int, int], begins: Mapping[int, int]) -> None:
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


# What the topic has on top


def _live(
    spark: Any,
    run: RunSettings,
    topic: str,
    archive: Table,
    starts: Mapping[int, int],
    ends: Mapping[int, int],
) -> Any:
    bounds = {
        name: json.dumps({topic: {str(index): offset for index, offset in sorted(offsets.items())}})
        for name, offsets in (("startingOffsets", starts), ("endingOffsets", ends))
    }
    rows = _read(spark, run, topic, bounds)
    told = archive.properties.get(READING)
    if told is not None:
        rows = parsed_rows(rows, Reading.from_json(told))
    return _as_archived(archived_rows(rows), archive)


def _read(spark: Any, run: RunSettings, topic: str, bounds: Mapping[str, str]) -> Any:
    options = {"subscribe": topic, "includeHeaders": "true", "kafka.isolation.level": "read_committed"}
    return spark.read.format("penstock").options(**run.options(), **options, **bounds).load()


def _as_archived(rows: Any, archive: Table) -> Any:
    """With the columns of the table, in its order: it may have some that its schema has no longer."""
    from pyspark.sql import functions as F
    from pyspark.sql.types import StructType

    wanted = StructType.fromJson(json.loads(archive.schema))
    have = set(rows.columns)
    assert have.issuperset(OURS), "a row of an archive tells which record it was"
    return rows.select(
        *[
            F.col(f"`{each.name}`") if each.name in have else F.lit(None).cast(each.dataType).alias(each.name)
            for each in wanted.fields
        ]
    )
