"""The pipeline that archives a topic, and its sink, which writes each batch into a Delta table once.

    sink = DeltaSink("lake/orders", topic="orders")
    sink.prepare(spark, run)
    query = rows.writeStream.foreachBatch(lambda rows, number: sink.write(rows, MicroBatch(query_id, number)))

Tasks write files; the driver commits them together with the number of the batch and the end offsets of the topic's
partitions. The sink does not write a batch that the table already has, nor any record below the end offsets. This also
holds if a query starts over because its checkpoint was deleted, and if two queries run at once.

The sink reads the offsets at which a batch begins and ends from the checkpoint, where Spark wrote them before the batch
started. The rows are not enough: if the last records of a batch are dead letters or transaction markers, the batch
ends after its last row.
"""

from __future__ import annotations

import json
import logging
import math
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit
from uuid import UUID

from penstock.client.errors import ClientError
from penstock.client.retry import Deadline, attempts
from penstock.protocol.backoff import ExponentialBackoff
from penstock.spark.archive import maintenance
from penstock.spark.archive.delta_table import (
    ArchiveError,
    ArchiveTable,
    CommitConflict,
    EndOffsets,
    GapError,
)
from penstock.spark.archive.files import (
    OFFSET_COLUMN,
    PARTITION_COLUMN,
    RESULT_COLUMN,
    FileWriter,
    TableLocation,
    WrittenFiles,
)
from penstock.spark.archive.rows import DAY, JSON, archived_rows, value_format
from penstock.spark.exactly_once.decisions import MicroBatch
from penstock.spark.offsets import Position, start_offset
from penstock.spark.pipelines.declaration import (
    Errors,
    Pipeline,
    PipelineError,
    RunSettings,
    Source,
    pipeline,
)
from penstock.spark.session import arrow_batches_by_rows

#: The checkpoint of a pipeline contains that of its query in the folder `query`; a plain query has no such folder.
_OFFSETS_FOLDERS: Final = ("query/offsets", "offsets")
#: Spark's offsets file begins with a version and the batch metadata. One line for each source follows.
_HEADER_LINES: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOffsets:
    """The offsets of one topic in a batch: start <= offset < end for each partition."""

    topic_id: UUID | None
    starts: Mapping[int, int]
    ends: Mapping[int, int]


def read_batch_offsets(spark: Any, checkpoint: str, number: int, topic: str) -> BatchOffsets | None:
    """Return the batch's offsets, or None if it does not contain the topic. Raises ArchiveError if they are missing."""
    end = parse_offsets_file(_read_offsets_file(spark, checkpoint, number))
    if topic not in end.topics:
        return None
    if end.since is not None:
        start = Position(end.since)
    elif number == 0:
        start = Position({})
    else:
        start = parse_offsets_file(_read_offsets_file(spark, checkpoint, number - 1))
    topic_id = end.topics[topic].id
    offsets = end.topics[topic].offsets
    return BatchOffsets(
        topic_id=topic_id,
        starts={each: start_offset(start, topic, topic_id, each) for each in offsets},
        ends=dict(offsets),
    )


def parse_offsets_file(text: str) -> Position:
    """Return the position of the query's only source. Raises ArchiveError."""
    lines = text.splitlines()[_HEADER_LINES:]
    try:
        (position,) = [json.loads(line) for line in lines if line.strip()]
    except ValueError:
        raise ArchiveError(f"the checkpoint is not that of a query with one source: {text!r}") from None
    return Position.from_json(position)


def _read_offsets_file(spark: Any, checkpoint: str, number: int) -> str:
    for folder in _OFFSETS_FOLDERS:
        text = _read_text(spark, f"{checkpoint}/{folder}/{number}")
        if text is not None:
            return text
    raise ArchiveError(f"the checkpoint {checkpoint} does not contain the offsets of batch {number}")


def _read_text(spark: Any, path: str) -> str | None:
    # A command that lists pipelines imports this module, and needs no pyspark.
    from pyspark.errors import AnalysisException

    local = local_path(path)
    try:
        if local is not None:
            return local.read_text()
        return "\n".join(row["value"] for row in spark.read.text(path).collect())
    except (FileNotFoundError, AnalysisException):
        return None


def local_path(path: str) -> Path | None:
    if "://" not in path and not path.startswith("file:"):
        return Path(path)
    return Path(unquote(urlsplit(path).path)) if path.startswith("file:") else None


_LOG: Final = logging.getLogger("penstock.spark")
#: Table properties of an archive.
TOPIC_PROPERTY: Final = "penstock.topic"
TOPIC_ID_PROPERTY: Final = "penstock.topic.id"
VALUE_FORMAT_PROPERTY: Final = "penstock.reading"
#: How many commit attempts may lose against other writers before the batch fails.
_COMMIT_ATTEMPTS_MAX: Final = 30
_COMPACTION_EVERY_MS: Final = 30_000
_VACUUM_EVERY_MS: Final = 6 * 3_600_000


class DeltaSink:
    """Writes each batch to a Delta table exactly once. For pipelines, and for any `foreachBatch`.

    Without a topic, the table tracks only batch numbers, not end offsets.
    """

    def __init__(
        self,
        table: str,
        *,
        topic: str | None = None,
        partition_by: str | None = DAY,
        reading: str | None = None,
        compact_mb: int = 128,
        keep_hours: int = 24,
        storage: Mapping[str, str] | None = None,
    ) -> None:
        self.location = TableLocation.of(table, storage)
        self.topic = topic
        self.partition_by = partition_by
        self.reading = reading
        self.compact_bytes = compact_mb << 20
        self.keep_hours = keep_hours
        self._run: RunSettings | None = None
        self._topic_id: str | None = None
        self._table: ArchiveTable | None = None
        self._next_compaction, self._next_vacuum = Deadline(_COMPACTION_EVERY_MS), Deadline(0)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the open table: a Spark Connect server opens the table itself."""
        return {**self.__dict__, "_table": None}

    def describe(self) -> str:
        return f"Delta table {self.location}"

    def prepare(self, spark: Any, run: RunSettings) -> None:
        """Check that the table, if it exists, belongs to this topic.

        Raises ArchiveError if it does not, and ClientError if no broker returns the topic's id.
        """
        self._run = run
        if self.topic is not None:
            with run.cluster() as cluster:
                topic_id = cluster.await_topic(self.topic).id
            self._topic_id = None if topic_id is None else str(topic_id)
        table = ArchiveTable.open(self.location)
        if table is not None:
            self._check_kind(table)

    def write(self, rows: Any, batch: MicroBatch) -> None:
        """Write a batch unless the table already has it. Raises ArchiveError, SchemaChanged, GapError."""
        self._check_columns(rows)
        schema = rows.schema.json()
        offsets = self._batch_offsets(rows.sparkSession, batch)
        written, written_above, trouble = WrittenFiles(), None, None
        # Limit the attempts, not the time: however long it took to write the files, they are worth committing.
        for _ in islice(
            attempts(Deadline(math.inf), ExponentialBackoff(), random.Random()), _COMMIT_ATTEMPTS_MAX
        ):
            try:
                table = self._refreshed_table(schema)
                if table.has(batch):
                    _LOG.info("%s is in table %s already", batch, self.location)
                    return
                ends = self._ends(table, offsets)
                if written_above != ends:
                    written, written_above = self._write_files(rows, ends), ends
                self._commit(table, batch, written, ends, offsets)
            except CommitConflict as conflict:
                trouble = conflict
            else:
                self._maintain(table, written)
                return
        raise ArchiveError(str(trouble))

    # Reading

    def _refreshed_table(self, schema: str) -> ArchiveTable:
        """Return the table at its newest version. Create it, add columns and set properties as needed.

        Raises CommitConflict, ArchiveError.
        """
        if self._table is None:
            found = ArchiveTable.open(self.location)
            if found is None:
                found = ArchiveTable.create(self.location, schema, self.partition_by, self._properties())
            self._check_kind(found)
            self._table = found
        self._table.refresh()
        self._table.add_columns(schema)
        self._table.set_properties(self._properties())
        return self._table

    def _properties(self) -> dict[str, str]:
        properties = {
            TOPIC_PROPERTY: self.topic,
            TOPIC_ID_PROPERTY: self._topic_id,
            VALUE_FORMAT_PROPERTY: self.reading,
        }
        return {name: value for name, value in properties.items() if value is not None}

    def _check_kind(self, table: ArchiveTable) -> None:
        known = table.properties
        if known.get(TOPIC_PROPERTY) != self.topic:
            is_of = (
                f"an archive of topic {known[TOPIC_PROPERTY]}"
                if TOPIC_PROPERTY in known
                else "not an archive of a topic"
            )
            raise ArchiveError(f"table {self.location} is {is_of}: use another table")
        if self._topic_id is not None and known.get(TOPIC_ID_PROPERTY, self._topic_id) != self._topic_id:
            raise ArchiveError(
                f"topic {self.topic} was deleted and created again after table {self.location} was created: its id is "
                f"{self._topic_id}, not {known[TOPIC_ID_PROPERTY]}; archive it to another table"
            )
        wanted = [] if self.partition_by is None else [self.partition_by]
        if table.partition_by != wanted:
            raise ArchiveError(
                f"table {self.location} is partitioned by {', '.join(table.partition_by) or 'nothing'}, "
                f"not by {', '.join(wanted) or 'nothing'}"
            )

    def _check_columns(self, rows: Any) -> None:
        kinds = {field.name: field.dataType.simpleString() for field in rows.schema.fields}
        wanted = {PARTITION_COLUMN: "int", OFFSET_COLUMN: "bigint"} if self.topic is not None else {}
        if self.partition_by is not None:
            wanted[self.partition_by] = "date"
        for name, kind in wanted.items():
            if kinds.get(name) != kind:
                raise ArchiveError(
                    f"rows for table {self.location} need a column {name} of type {kind}, "
                    f"but have {kinds.get(name, 'none')}"
                )

    def _batch_offsets(self, spark: Any, batch: MicroBatch) -> BatchOffsets | None:
        if self.topic is None or self._run is None or not self._run.checkpoint:
            return None
        return read_batch_offsets(spark, self._run.checkpoint, batch.number, self.topic)

    def _ends(self, table: ArchiveTable, offsets: BatchOffsets | None) -> EndOffsets:
        """Return the table's end offsets. Raises GapError, ArchiveError."""
        if self.topic is None:
            return EndOffsets()
        ends = table.ends(self.topic)
        if offsets is not None:
            _refuse_gap(self.topic, self.location, ends, offsets)
        return ends

    # Writing

    def _write_files(self, rows: Any, ends: EndOffsets) -> WrittenFiles:
        writer = FileWriter(
            location=self.location,
            partition_by=self.partition_by,
            ends=None if self.topic is None else dict(ends.offsets),
        )
        with arrow_batches_by_rows(rows.sparkSession):
            results = rows.mapInArrow(writer, f"{RESULT_COLUMN} string").collect()
        written = WrittenFiles.combined(row[RESULT_COLUMN] for row in results)
        if written.skipped:
            _LOG.warning("skipped %d rows that table %s already has", written.skipped, self.location)
        return written

    def _commit(
        self,
        table: ArchiveTable,
        batch: MicroBatch,
        written: WrittenFiles,
        ends: EndOffsets,
        offsets: BatchOffsets | None,
    ) -> None:
        """Commit the files and end offsets, unless nothing has changed.

        Otherwise a query that starts over would make an empty commit for every batch that is already archived.
        """
        if self.topic is None:
            if written.files:
                table.append(written.files, batch, {}, {})
            return
        moved = ends.raised(written.ends).raised(offsets.ends if offsets is not None else {})
        if written.files or moved != ends:
            about = {"topic": self.topic, "topicId": self._topic_id, "ends": dict(moved.offsets)}
            table.append(written.files, batch, moved.transactions(self.topic, ends), about)

    # Maintenance

    def _maintain(self, table: ArchiveTable, written: WrittenFiles) -> None:
        """Compact and vacuum when due. A failure is only logged and retried later: the rows are already committed."""
        # A command that lists pipelines imports this module, and needs no deltalake.
        from deltalake.exceptions import DeltaError

        try:
            if self._next_compaction.is_over:
                self._next_compaction = Deadline(_COMPACTION_EVERY_MS)
                self._compact(table, growing=[each.value for each in written.files])
            if self._next_vacuum.is_over:
                self._next_vacuum = Deadline(_VACUUM_EVERY_MS)
                maintenance.vacuum_files(table, self.keep_hours)
        except (DeltaError, OSError, ClientError) as trouble:
            _LOG.warning("table %s could not be compacted or vacuumed: %s", self.location, trouble)

    def _compact(self, table: ArchiveTable, growing: list[str | None]) -> None:
        """Run the most useful compaction, if any is needed."""
        today = datetime.fromtimestamp(time.time(), UTC).date().isoformat()
        compaction = maintenance.next_compaction(
            maintenance.table_files(table), self.compact_bytes, [*growing, today]
        )
        if compaction is not None:
            fewer = maintenance.compact_files(table, compaction)
            _LOG.info("table %s: compaction removed %d files of %s", self.location, fewer, compaction.value)


def _refuse_gap(topic: str, location: TableLocation, ends: EndOffsets, offsets: BatchOffsets) -> None:
    """Raise GapError if the batch starts after the table's end offsets. A new table may start at any offset."""
    for partition, start in sorted(offsets.starts.items()):
        if ends and start > ends.of(partition):
            raise GapError(
                f"table {location} ends at offset {ends.of(partition)} of {topic}[{partition}], and the query starts "
                f"at {start}: the records in between would be missing. Start at earliest, or use another table"
            )


def archive(
    topic: str,
    table: str,
    *,
    schema: str | Path | None = None,
    format: str = JSON,
    name: str | None = None,
    every: str | None = "10s",
    starting: str = "earliest",
    compact_mb: int | str = 128,
    keep_hours: int | str = 24,
    offsets_max: int | str = 10_000_000,
    **storage: str,
) -> Pipeline:
    """Archive every record of a topic exactly once in a Delta table, partitioned by day, and compact small files.

    topic: the topic to archive; only committed records are read
    table: a folder or URI that driver and tasks can all reach under the same name
    schema: a file with the columns of the values (DDL, JSON Schema, Avro). Values that do not fit become dead letters.
        Without a schema, values are stored unparsed in a column `value`
    format: the format of the values, if there is a schema: json, avro, or avro-framed with a registry's five bytes
    every: the trigger interval; every batch makes a commit and at least one file
    compact_mb: the size to which files are compacted
    keep_hours: how long replaced files are kept for readers that still use them
    offsets_max: how many offsets a batch reads at most
    Other settings are passed to the table's store: access keys and the like, named as in `deltalake`.
    """
    values = None if schema is None else value_format(schema, format)
    sink = DeltaSink(
        table,
        topic=topic,
        reading=None if values is None else values.to_json(),
        compact_mb=_whole_number("compact_mb", compact_mb, least=1),
        keep_hours=_whole_number("keep_hours", keep_hours, least=1),
        storage=storage,
    )
    options = {"maxOffsetsPerTrigger": str(_whole_number("offsets_max", offsets_max, least=1))}
    declared = pipeline(
        name or f"archive-{topic}",
        source=Source(topics=(topic,), starting=starting, options=options),
        sink=sink,
        delivery="exactly-once",
        every=every,
        parse=values,
        # There is no row function, and a value that does not parse now will not parse later either: do not retry.
        errors=Errors(attempts=1),
    )
    return declared(archived_rows)


def _whole_number(name: str, value: int | str, *, least: int) -> int:
    text = str(value).strip()
    if not text.isdecimal() or int(text) < least:
        raise PipelineError(f"{name}={value} must be a whole number of at least {least}")
    return int(text)
