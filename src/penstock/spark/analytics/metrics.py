"""Metrics of topics in time windows: rates and sizes, retries and dead letters, lag and latency of groups.

The sink writes rows to a topic as JSON and to a Delta table, each batch exactly once in each. There are three kinds:
    traffic   of a topic in a window: records, bytes, records_per_s, size_mean, size_max
    failures  of a group in a window: how many records of the topic it sent to its retry topics and dead letters
    group     of a group at the end of a batch: lag, and latency_s, the age of the oldest record that it has not read

A record belongs to the window of its timestamp. Timestamps in the future count as now, because a record in a retry
topic carries the time at which it is due. Functions import pyspark themselves, because a command that lists pipelines
imports this module.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from penstock.client.errors import OutOfRange
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.fetch import PartitionReader, checked_batches, visible_batches
from penstock.client.wire.metadata import IsolationLevel, TopicPartition
from penstock.client.wire.offsets import (
    EARLIEST,
    LATEST,
    OffsetAndTimestamp,
    committed_offsets,
    list_groups,
    list_offsets,
)
from penstock.protocol.dead_letter_headers import GROUP_HEADER
from penstock.protocol.record_batch import decode_records
from penstock.spark.exactly_once.decisions import MicroBatch
from penstock.spark.pipelines.declaration import Pipeline, PipelineError, RunSettings, Source, pipeline

_RECORD_BYTES_MAX: Final = 64 << 20
#: A broker returns at least one whole batch, whatever the limit. One batch is enough here.
_FETCH_BYTES: Final = 1
_SHARE_GROUP: Final = "share"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLag:
    group: str
    topic: str
    #: Log end offsets minus committed offsets, summed over the partitions.
    lag: int
    #: Age of the oldest unread record. 0 if everything is read; None if its timestamp could not be read.
    latency_s: float | None


def group_lags(cluster: Cluster, topics: re.Pattern[str], *, now_ms: int) -> list[GroupLag]:
    """Return the lag of every group in every matching topic for which it has committed offsets.

    Share groups are left out. Raises Unavailable, Refused.
    """
    names = [each.group for each in list_groups(cluster) if each.kind != _SHARE_GROUP]
    positions = {
        name: {
            tp: at.offset
            for tp, at in committed_offsets(cluster, name, stable=False).items()
            if topics.fullmatch(tp[0])
        }
        for name in names
    }
    partitions = sorted({tp for found in positions.values() for tp in found})
    existing = cluster.topics({topic for topic, _ in partitions})
    partitions = [tp for tp in partitions if tp[0] in existing]
    first, last = (_edge_offsets(cluster, partitions, edge) for edge in (EARLIEST, LATEST))
    found = []
    for name, at in positions.items():
        waiting = {tp: max(at[tp], first[tp]) for tp in partitions if tp in at}
        found += _lags_by_topic(cluster, name, waiting, last, now_ms)
    return found


def _edge_offsets(cluster: Cluster, partitions: list[TopicPartition], edge: int) -> dict[TopicPartition, int]:
    found: Mapping[TopicPartition, OffsetAndTimestamp | None] = (
        list_offsets(cluster, dict.fromkeys(partitions, edge)) if partitions else {}
    )
    return {tp: at.offset if at is not None else 0 for tp, at in found.items()}


def _lags_by_topic(
    cluster: Cluster,
    group: str,
    at: Mapping[TopicPartition, int],
    ends: Mapping[TopicPartition, int],
    now_ms: int,
) -> list[GroupLag]:
    lags: dict[str, int] = {}
    ages: dict[str, float | None] = {}
    for tp, position in at.items():
        lag = max(ends[tp] - position, 0)
        lags[tp[0]] = lags.get(tp[0], 0) + lag
        ages.setdefault(tp[0], 0.0 if not lag else None)
        if lag and (written_ms := timestamp_at(cluster, tp, position)) is not None:
            ages[tp[0]] = max(ages[tp[0]] or 0.0, (now_ms - written_ms) / 1000, 0.0)
    return [GroupLag(group=group, topic=topic, lag=lag, latency_s=ages[topic]) for topic, lag in lags.items()]


def timestamp_at(cluster: Cluster, tp: TopicPartition, offset: int) -> int | None:
    """Return the timestamp of the first record at or after the offset.

    Fetches only once. Returns None if the fetched batches contain no such record, or if the offset is out of range.
    """
    reader = PartitionReader(
        cluster, tp[0], None, tp[1], isolation=IsolationLevel.READ_COMMITTED, bytes_max=_FETCH_BYTES
    )
    try:
        fetched = reader.fetch(offset, wait_ms=0)
    except OutOfRange:
        return None
    for view in visible_batches(checked_batches(fetched.data), fetched.aborted):
        for record in decode_records(view.data, _RECORD_BYTES_MAX):
            if record.offset >= offset:
                return int(record.timestamp)
    return None


GROUP_KIND: Final = "group"
#: Columns that group rows add to those of the window rows.
_LAG_COLUMNS: Final = {"lag": "bigint", "latency_s": "double"}
_LAG_SCHEMA: Final = (
    "kind string, window_start timestamp, window_end timestamp, topic string, group string, "
    "lag bigint, latency_s double"
)


class MetricsSink:
    """Adds group rows to each batch and writes it to a topic, a table or both. Implements `declaration.BatchSink`."""

    def __init__(self, *, topic: str | None, table: str | None, topics: str, window_s: int) -> None:
        self.topic = topic
        self.table = table
        self.topics = topics
        self.window_s = window_s
        self._run: RunSettings | None = None
        self._delta: Any = None

    def describe(self) -> str:
        return " and ".join(each for each in (self.topic, self.table and f"Delta table {self.table}") if each)

    def prepare(self, spark: Any, run: RunSettings) -> None:
        """Open the table. Raises ArchiveError, ClientError."""
        from penstock.spark.archive.sink import DeltaSink

        self._run = run
        if self.table is not None:
            self._delta = DeltaSink(self.table, partition_by="day")
            self._delta.prepare(spark, run)

    def write(self, rows: Any, batch: MicroBatch) -> None:
        """Write to the topic first, then to the table.

        If the batch fails between the two and runs again, topic and table can have different group rows for it.
        """
        assert self._run is not None, "prepare was not called"
        whole = self._with_groups(rows, self._run)
        if self.topic is not None:
            self._to_topic(whole, batch, self._run, self.topic)
        if self._delta is not None:
            from pyspark.sql import functions as F

            self._delta.write(whole.withColumn("day", F.to_date("window_start")), batch)

    def _with_groups(self, rows: Any, run: RunSettings) -> Any:
        from pyspark.sql import functions as F

        with run.cluster() as cluster:
            states = group_lags(cluster, re.compile(self.topics), now_ms=int(time.time() * 1000))
        samples = rows.sparkSession.createDataFrame(self._samples(states, time.time()), _LAG_SCHEMA)
        whole = rows.withColumns({name: F.lit(None).cast(kind) for name, kind in _LAG_COLUMNS.items()})
        return whole.unionByName(samples, allowMissingColumns=True)

    def _samples(self, states: list[GroupLag], now_s: float) -> list[tuple[Any, ...]]:
        """Return the lags as group rows of the window that contains `now_s`."""
        start_s = int(now_s) // self.window_s * self.window_s
        start, end = (datetime.fromtimestamp(each, UTC) for each in (start_s, start_s + self.window_s))
        return [(GROUP_KIND, start, end, each.topic, each.group, each.lag, each.latency_s) for each in states]

    def _to_topic(self, rows: Any, batch: MicroBatch, run: RunSettings, topic: str) -> None:
        from pyspark.sql import functions as F

        from penstock.spark.pipelines.evaluator import JSON_FORMAT

        value = F.to_json(F.struct(*[F.col(f"`{name}`") for name in rows.columns]), JSON_FORMAT)
        records = rows.select(F.col("topic").alias("key"), value.alias("value"))
        given = {
            **run.options(),
            "topic": topic,
            "contract": "exactly-once",
            "txnAppId": batch.query,
            "txnVersion": str(batch.number),
        }
        records.write.format("penstock").mode("append").options(**given).save()


TRAFFIC_KIND, FAILURES_KIND = "traffic", "failures"
_DURATION: Final = re.compile(r"(\d+) (second|minute|hour|day)s?")
_SECONDS: Final = {"second": 1, "minute": 60, "hour": 3600, "day": 86400}
_RETRY_PATTERN: Final = r"^(.+)\\.retry\\.[1-9][0-9]{0,2}$"
_DEAD_LETTER_PATTERN: Final = r"^(.+)\\.dlq$"
_REPLAYED_PATTERN: Final = r"\\.dlq\\.replayed$"
#: Penstock's internal topics.
_INTERNAL_PATTERN: Final = r"penstock-.*"


def metrics(
    topics: str = ".*",
    to: str = "",
    table: str = "",
    window: str = "10 seconds",
    late: str = "1 minute",
    starting: str = "latest",
    every: str = "10s",
    name: str = "metrics",
) -> Pipeline:
    """Write metrics of all topics whose full name matches `topics` to the topic `to`, the Delta table `table`, or both.

    Each window is written once, when `late` has passed after its end. Records that arrive after that are not counted.
    Raises PipelineError.
    """
    if not to and not table:
        raise PipelineError(
            "set to= or table=, or both: the topic and the table to which metrics are written"
        )
    window_s = _seconds("window", window)
    _seconds("late", late)
    pattern = rf"(?!{_INTERNAL_PATTERN}|{re.escape(to)}$)(?:{topics})(?:\.retry\.[1-9][0-9]{{0,2}}|\.dlq)?"
    declare = pipeline(
        name,
        source=Source(pattern=pattern, starting=starting, letters=True),
        sink=MetricsSink(topic=to or None, table=table or None, topics=topics, window_s=window_s),
        delivery="exactly-once",
        every=every,
        stateful=True,
    )
    return declare(lambda rows: windows(rows, window, window_s, late))


def _seconds(name: str, text: str) -> int:
    match = _DURATION.fullmatch(text)
    if match is None or int(match[1]) < 1:
        raise PipelineError(f"{name}={text!r} must be a time such as 10 seconds")
    return int(match[1]) * _SECONDS[match[2]]


def windows(rows: Any, window: str, window_s: int, late: str) -> Any:
    """Return the `traffic` and `failures` rows of the windows that are complete."""
    from pyspark.sql import functions as F

    classified = rows.select(
        F.least(F.col("timestamp"), F.current_timestamp()).alias("event_time"),
        F.expr(_original_topic()).alias("topic"),
        F.expr(_topic_role()).alias("role"),
        F.expr(_failed_group()).alias("group"),
        F.expr("coalesce(length(key), 0) + coalesce(length(value), 0)").cast("bigint").alias("size"),
    ).where("role is not null")
    is_traffic = F.col("role") == TRAFFIC_KIND
    size = F.when(is_traffic, F.col("size"))
    found = (
        classified.withWatermark("event_time", late)
        .groupBy(F.window("event_time", window), "topic", "group")
        .agg(
            F.count_if(is_traffic).alias("records"),
            F.sum(size).alias("bytes"),
            F.avg(size).alias("size_mean"),
            F.max(size).alias("size_max"),
            F.count_if(F.col("role") == "retry").alias("retries"),
            F.count_if(F.col("role") == "dead").alias("dead"),
        )
    )
    return found.select(
        F.when(F.col("records") > 0, F.lit(TRAFFIC_KIND)).otherwise(F.lit(FAILURES_KIND)).alias("kind"),
        F.col("window.start").alias("window_start"),
        F.col("window.end").alias("window_end"),
        "topic",
        "group",
        "records",
        F.coalesce("bytes", F.lit(0)).alias("bytes"),
        (F.col("records") / F.lit(window_s)).alias("records_per_s"),
        "size_mean",
        "size_max",
        "retries",
        "dead",
    )


def _original_topic() -> str:
    """Return SQL for the original topic of a record, retry or dead letter."""
    return f"regexp_replace(regexp_replace(topic, '{_RETRY_PATTERN}', '$1'), '{_DEAD_LETTER_PATTERN}', '$1')"


def _topic_role() -> str:
    """Return SQL for what a topic contains. It is null for topics that track replayed dead letters."""
    return (
        f"case when topic rlike '{_REPLAYED_PATTERN}' then null when topic rlike '{_RETRY_PATTERN}' then 'retry' "
        f"when topic rlike '{_DEAD_LETTER_PATTERN}' then 'dead' else '{TRAFFIC_KIND}' end"
    )


def _failed_group() -> str:
    """Return SQL for the group that failed to process a retry or dead letter.

    It is null for other records, so that all records of a topic are counted together.
    """
    group = f"try_element_at(filter(headers, h -> h.key = '{GROUP_HEADER}'), -1).value"
    is_failure = f"topic rlike '{_RETRY_PATTERN}' or topic rlike '{_DEAD_LETTER_PATTERN}'"
    return f"case when {is_failure} then coalesce(cast({group} as string), '') end"
