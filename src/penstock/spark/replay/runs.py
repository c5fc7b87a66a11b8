"""The kinds of replays: topics and archives can be replayed again under another id, dead letters only once.

A piece is read by its offsets, from the topic or from the archive, whichever files contain the rows. It is written as
one batch of the exactly-once sink, so it is written once even if a run repeats it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from contextlib import closing
from typing import Any, Final
from uuid import UUID

from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import functions as F

from penstock.client.deadletters.headers import retry_topic
from penstock.client.deadletters.reader import wait_for_open_transactions
from penstock.client.deadletters.topics import ensure_replayed_topic
from penstock.client.deadletters.writer import replay_query_name
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.metadata import TopicPartition, by_topic
from penstock.spark.archive.delta_table import ArchiveTable
from penstock.spark.archive.files import OFFSET_COLUMN, PARTITION_COLUMN, TableLocation
from penstock.spark.archive.reader import open_table, table_rows
from penstock.spark.archive.rows import ARCHIVE_COLUMNS, KEY, TIMESTAMP, TOMBSTONE, VALUE
from penstock.spark.archive.sink import TOPIC_ID_PROPERTY, TOPIC_PROPERTY, VALUE_FORMAT_PROPERTY
from penstock.spark.exactly_once.decisions import DecisionLog, MicroBatch
from penstock.spark.exactly_once.two_phase_commit import resolve_transactions
from penstock.spark.internal_topics import DocumentStore
from penstock.spark.offsets import OffsetRange
from penstock.spark.pipelines.batch import RowCounter
from penstock.spark.pipelines.declaration import JobContext
from penstock.spark.pipelines.evaluator import JSON_FORMAT
from penstock.spark.replay import dead_letters, lock
from penstock.spark.replay.job import ReplayJobPlan, agree_on_plan, piece_offsets
from penstock.spark.replay.request import ReplayError, ReplayJobRequest, TimestampMode
from penstock.spark.schema import table_schema
from penstock.spark.source.batch import PushedFilters, plan_batch_read
from penstock.spark.source.options import SourceOptions

_READ_OPTIONS = {"kafka.isolation.level": "read_committed", "includeHeaders": "true"}


def requested_ranges(
    cluster: Cluster, request: ReplayJobRequest, options: Mapping[str, str]
) -> list[OffsetRange]:
    """Return the requested offsets of a topic, up to its current end. Raises OptionError, DataLoss."""
    given = {**options, **_READ_OPTIONS, "subscribe": request.source}
    given |= {"startingOffsets": request.starting, "endingOffsets": request.ending}
    if request.since_ms is not None:
        given |= {
            "startingTimestamp": str(request.since_ms),
            # If no record is that late, there is nothing to replay.
            "startingOffsetsByTimestampStrategy": "latest",
        }
    if request.until_ms is not None:
        given["endingTimestamp"] = str(request.until_ms)
    return plan_batch_read(cluster, SourceOptions.parse(given, streaming=False), PushedFilters())


def topic_rows(
    spark: Any, cluster: Cluster, ranges: Iterable[OffsetRange], options: Mapping[str, str]
) -> Any:
    """Return a DataFrame with one task for each range, which keeps the order in partitions. Raises TopicChanged."""
    wanted = list(ranges)
    if not wanted:
        return spark.createDataFrame([], table_schema(include_headers=True))
    for topic, topic_id in {each.topic: each.topic_id for each in wanted}.items():
        cluster.await_topic(topic, topic_id)
    given = {
        **options,
        **_READ_OPTIONS,
        "assign": _partitions_to_json(wanted),
        "startingOffsets": _offsets_to_json({each.topic_partition: each.start for each in wanted}),
        "endingOffsets": _offsets_to_json({each.topic_partition: each.end for each in wanted}),
    }
    return spark.read.format("penstock").options(**given).load()


def _partitions_to_json(wanted: Iterable[OffsetRange]) -> str:
    found = by_topic((each.topic_partition, None) for each in wanted)
    return json.dumps({topic: [part for part, _ in parts] for topic, parts in found.items()})


def _offsets_to_json(offsets: Mapping[TopicPartition, int]) -> str:
    found = by_topic(offsets.items())
    return json.dumps({topic: {str(part): at for part, at in parts} for topic, parts in found.items()})


def within_time(rows: Any, request: ReplayJobRequest, column: str = "timestamp") -> Any:
    """Filter rows by time. Offsets are not ordered by time, because the clocks of producers differ."""
    time_ms = F.unix_millis(F.col(column))
    if request.since_ms is not None:
        rows = rows.where(time_ms >= request.since_ms)
    if request.until_ms is not None:
        rows = rows.where(time_ms < request.until_ms)
    return rows


def open_archive(folder: str) -> ArchiveTable:
    """Open an archive. Raises ArchiveError, or ReplayError if the table is not an archive of a topic."""
    found = open_table(TableLocation.of(folder))
    if TOPIC_PROPERTY not in found.properties:
        raise ReplayError(f"table {folder} is not an archive of a topic")
    return found


def has_parsed_values(table: ArchiveTable) -> bool:
    """Return whether the archive has parsed columns. Then values are written as JSON of the columns."""
    return VALUE_FORMAT_PROPERTY in table.properties


def archive_ranges(rows: Any, table: ArchiveTable) -> list[OffsetRange]:
    """Return the offsets of these rows."""
    ends = rows.groupBy(PARTITION_COLUMN).agg(
        F.min(OFFSET_COLUMN).alias("first"), F.max(OFFSET_COLUMN).alias("last")
    )
    topic, id_text = table.properties[TOPIC_PROPERTY], table.properties.get(TOPIC_ID_PROPERTY)
    topic_id = None if id_text is None else UUID(id_text)
    return [
        OffsetRange(topic, topic_id, row[PARTITION_COLUMN], row["first"], row["last"] + 1)
        for row in sorted(ends.collect(), key=lambda row: row[PARTITION_COLUMN])
    ]


def archive_rows(spark: Any, table: ArchiveTable, ranges: Iterable[OffsetRange] | None = None) -> Any:
    """Return rows with the archive's columns: all rows, or those of these offsets."""
    rows = table_rows(spark, table)
    if ranges is None:
        return rows
    wanted = F.lit(False)
    for each in ranges:
        offset = F.col(OFFSET_COLUMN)
        is_in = (offset >= each.start) & (offset < each.end)
        wanted = wanted | ((F.col(PARTITION_COLUMN) == each.partition) & is_in)
    return rows.where(wanted)


def archive_records(rows: Any, table: ArchiveTable) -> Any:
    """Return key, value, headers and timestamp. The rows of a partition are in one task and in order."""
    ordered = rows.repartition(F.col(PARTITION_COLUMN)).sortWithinPartitions(PARTITION_COLUMN, OFFSET_COLUMN)
    return ordered.select(
        F.col(KEY).alias("key"),
        F.when(~F.col(TOMBSTONE), _archive_value(ordered, table)).alias("value"),
        F.col("_headers").alias("headers"),
        F.col(TIMESTAMP).alias("timestamp"),
    )


def _archive_value(rows: Any, table: ArchiveTable) -> Any:
    if not has_parsed_values(table):
        return F.col(VALUE)
    columns = [F.col(f"`{name}`") for name in rows.columns if name not in ARCHIVE_COLUMNS]
    return F.to_json(F.struct(*columns), JSON_FORMAT).cast("binary")


_FORMAT: Final = "penstock"


def filter_rows(rows: Any, where: str | None) -> Any:
    """Apply the user's condition. Raises ReplayError if it is invalid."""
    if where is None:
        return rows
    try:
        kept = rows.where(where)
        # Spark Connect checks the condition only when the schema is needed.
        _ = kept.schema
    except (AnalysisException, ParseException) as flaw:
        raise ReplayError(f"where={where}: {str(flaw).strip().splitlines()[0]}") from None
    return kept


def write_once(rows: Any, batch: MicroBatch, options: Mapping[str, str], request: ReplayJobRequest) -> None:
    """Write the batch unless it is already written. Raises the errors of Spark."""
    given = {
        **options,
        "contract": "exactly-once",
        "txnAppId": batch.query,
        "txnVersion": str(batch.number),
    }
    if request.times is TimestampMode.KEEP or request.is_to_group:
        given["timestampColumn"] = "timestamp"
    rows.write.format(_FORMAT).mode("append").options(**given).save()


def topic_records(rows: Any, request: ReplayJobRequest) -> Any:
    """Return the records for the target topic. The key determines the partition."""
    return rows.select(F.lit(request.to).alias("topic"), "key", "value", "headers", "timestamp")


class TopicReplay:
    """Replays a range of a topic. The plan is stored, and each piece is a batch of the sink."""

    def __init__(self, cluster: Cluster, request: ReplayJobRequest, context: JobContext) -> None:
        self._cluster = cluster
        self._request = request
        self._spark = context.spark
        self._options = context.run.options()
        self._query = f"replay-{request.id}"
        filter_rows(self._rows([]), request.where)
        with closing(DocumentStore(cluster)) as store:
            self.plan, is_known = agree_on_plan(store, request, self._make_plan)
        # Commit what an earlier run has decided, and abort its other transactions.
        resolve_transactions(cluster, self._query)
        with DecisionLog(cluster, self._query) as decision_log:
            last = decision_log.last_batch()
        self.first = 0 if last is None else last + 1
        if is_known and self.first:
            context.note(_resume_note(request, self.first, self.plan.pieces))

    def _make_plan(self) -> ReplayJobPlan:
        return ReplayJobPlan(
            ranges=tuple(self._ranges()), offsets_max=piece_offsets(self._request.rate_per_s)
        )

    def _ranges(self) -> list[OffsetRange]:
        return requested_ranges(self._cluster, self._request, self._options)

    def _rows(self, ranges: list[OffsetRange]) -> Any:
        return topic_rows(self._spark, self._cluster, ranges, self._options)

    def _records(self, ranges: list[OffsetRange]) -> Any:
        rows = within_time(self._rows(ranges), self._request)
        return filter_rows(rows, self._request.where)

    def write(self, index: int, ranges: list[OffsetRange]) -> int:
        counted = RowCounter.of_rows(self._records(ranges))
        batch = MicroBatch(self._query, index)
        write_once(topic_records(counted.frame, self._request), batch, self._options, self._request)
        return counted.found().get("rows", 0)

    def close(self) -> None:
        """There is nothing to release."""


class ArchiveReplay(TopicReplay):
    """Replays rows of an archive, which are identified by their original offsets."""

    def __init__(self, cluster: Cluster, request: ReplayJobRequest, context: JobContext) -> None:
        self._archive = open_archive(request.source)
        if has_parsed_values(self._archive):
            context.note(f"{request.source} has parsed columns: values are written as JSON of the columns")
        super().__init__(cluster, request, context)

    def _ranges(self) -> list[OffsetRange]:
        return archive_ranges(self._wanted(archive_rows(self._spark, self._archive)), self._archive)

    def _rows(self, ranges: list[OffsetRange]) -> Any:
        return archive_rows(self._spark, self._archive, ranges)

    def _wanted(self, rows: Any) -> Any:
        return filter_rows(within_time(rows, self._request, TIMESTAMP), self._request.where)

    def _records(self, ranges: list[OffsetRange]) -> Any:
        return archive_records(self._wanted(self._rows(ranges)), self._archive)


def _resume_note(request: ReplayJobRequest, first: int, pieces: int) -> str:
    if first >= pieces:
        return f"replay {request.id} is already done: use another id= to repeat it"
    return f"replay {request.id} continues after {first} of {pieces} pieces"


class DeadLetterReplay:
    """Replays dead letters that no replay has replayed before. Every run plans the remaining ones again."""

    first = 0

    def __init__(self, cluster: Cluster, request: ReplayJobRequest, context: JobContext) -> None:
        self._cluster = cluster
        self._request = request
        self._context = context
        self._options = context.run.options()
        self._query = replay_query_name(request.source)
        topic = cluster.await_topic(request.source)
        self._topic_id: UUID | None = topic.id
        ranges = tuple(requested_ranges(cluster, request, self._options))
        self.plan = ReplayJobPlan(ranges=ranges, offsets_max=piece_offsets(request.rate_per_s))
        self._dead_letters(list(ranges))
        self._list = ensure_replayed_topic(cluster, topic)
        self._before = lock.acquire_lock(cluster, self._query)
        self._replayed = self._read_list()
        self._partitions = self._targets(list(ranges))

    def _read_list(self) -> Any:
        """Return the dead letters that were replayed before this run."""
        ends = wait_for_open_transactions(
            self._cluster, [(self._list.name, p.index) for p in self._list.partitions]
        )
        ranges = [
            OffsetRange(topic, self._list.id, partition, 0, end) for (topic, partition), end in ends.items()
        ]
        rows = topic_rows(self._context.spark, self._cluster, [r for r in ranges if r.size], self._options)
        return dead_letters.replayed_offsets(rows, self._topic_id).persist()

    def _dead_letters(self, ranges: list[OffsetRange]) -> Any:
        """Return the requested dead letters, with the columns of their headers. Raises ReplayError."""
        rows = topic_rows(self._context.spark, self._cluster, ranges, self._options)
        return filter_rows(
            dead_letters.with_header_columns(within_time(rows, self._request)), self._request.where
        )

    def _not_replayed(self, ranges: list[OffsetRange]) -> Any:
        return dead_letters.without_replayed(self._dead_letters(ranges), self._replayed)

    def _targets(self, ranges: list[OffsetRange]) -> dict[str, int]:
        """Return the partition counts of all target topics. Raises ReplayError if one does not exist."""
        found = (
            self._not_replayed(ranges)
            .groupBy("origin_topic")
            .agg(
                F.count_if(F.col("without_record").isNull()).alias("with_record"),
                F.count_if(F.col("without_record").isNotNull()).alias("without_record"),
            )
        )
        rows = found.collect()
        self._note_skipped(rows)
        origins = sorted(row["origin_topic"] for row in rows if row["origin_topic"] and row["with_record"])
        if self._request.is_to_group:
            retry_topics = [retry_topic(name, 1) for name in origins]
            advice = "no group retries there; omit to= to send the records to their original topics"
            return self._partition_counts(retry_topics, advice)
        if self._request.to is not None:
            return {}
        return self._partition_counts(origins, "name another topic with to=, or exclude them with where=")

    def _partition_counts(self, names: list[str], advice: str) -> dict[str, int]:
        found = self._cluster.topics(names)
        missing = [name for name in names if name not in found]
        if missing:
            raise ReplayError(
                f"dead letters of {self._request.source} would go to topics that do not exist: "
                f"{', '.join(missing)}; {advice}"
            )
        return {name: len(topic.partitions) for name, topic in found.items()}

    def _note_skipped(self, rows: list[Any]) -> None:
        without_record = sum(row["without_record"] for row in rows)
        if without_record:
            self._context.note(f"skips {without_record} dead letters that do not contain their record")
        without_origin = sum(row["with_record"] for row in rows if row["origin_topic"] is None)
        if without_origin and (self._request.to is None or self._request.is_to_group):
            self._context.note(
                f"skips {without_origin} records whose original topic is unknown; name a topic with to="
            )

    def write(self, index: int, ranges: list[OffsetRange]) -> int:
        waiting = dead_letters.replayable(self._not_replayed(ranges))
        if self._request.to is None or self._request.is_to_group:
            waiting = waiting.where("origin_topic is not null")
        if self._request.is_to_group:
            waiting = waiting.where("error_group is not null")
        counted = RowCounter.of_rows(waiting)
        now_ms = int(time.time() * 1000)
        out = dead_letters.replay_records(
            counted.frame, self._request, self._partitions, self._topic_id, now_ms
        )
        batch = MicroBatch(self._query, self._before + 1 + index)
        write_once(out, batch, self._options, self._request)
        lock.check_lock(self._cluster, batch)
        return counted.found().get("rows", 0)

    def close(self) -> None:
        self._replayed.unpersist()
