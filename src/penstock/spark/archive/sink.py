"""Rows of a batch into a Delta table, once, however often the batch is tried and by whomever.

    sink = DeltaSink("lake/orders", topic="orders")
    sink.prepare(spark, run)
    query = rows.writeStream.foreachBatch(lambda rows, number: sink.write(rows, MicroBatch(query_id, number)))

Tasks write files; the driver commits them together with the number of the batch and the ends of the topic's
partitions. A batch that the table has is not written again, and neither is any record below the ends: not by a query
that begins anew because its checkpoint was deleted, and not by two queries at once.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from itertools import islice
from typing import Any, Final

from penstock.client.errors import ClientError
from penstock.client.retrying import Backoff, Deadline, attempts
from penstock.spark.archive import upkeep
from penstock.spark.archive.columns import DAY
from penstock.spark.archive.ends import Ends
from penstock.spark.archive.errors import ArchiveError, GapError, Overtaken
from penstock.spark.archive.files import OFFSET_COLUMN, PARTITION_COLUMN, FileWriter, Told
from penstock.spark.archive.location import Location
from penstock.spark.archive.spans import Span, span_of
from penstock.spark.archive.tables import Table
from penstock.spark.decisions import MicroBatch
from penstock.spark.handing import handed_by_number
from penstock.spark.pipelines.settings import RunSettings

_LOG: Final = logging.getLogger("penstock.spark")
#: Properties of a table that is an archive.
TOPIC: Final = "penstock.topic"
TOPIC_ID: Final = "penstock.topic.id"
READING: Final = "penstock.reading"
#: How often somebody else may be faster.
_LOOKS_MAX: Final = 30
_UPKEEP_REST_MS: Final = 30_000
_SWEEP_REST_MS: Final = 6 * 3_600_000


class DeltaSink:
    """For pipelines, and for any `foreachBatch`. Without a topic, batches are all that is kept account of."""

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
        self.location = Location.of(table, storage)
        self.topic = topic
        self.partition_by = partition_by
        self.reading = reading
        self.compact_bytes = compact_mb << 20
        self.keep_hours = keep_hours
        self._run: RunSettings | None = None
        self._topic_id: str | None = None
        self._table: Table | None = None
        self._upkeep, self._sweep = Deadline(_UPKEEP_REST_MS), Deadline(0)

    def __getstate__(self) -> dict[str, Any]:
        """What is open stays here; a Spark server looks at the table itself."""
        return {**self.__dict__, "_table": None}

    def describe(self) -> str:
        return f"Delta table {self.location}"

    def prepare(self, spark: Any, run: RunSettings) -> None:
        """Raises ArchiveError where the table is another topic's, ClientError where no broker tells which it is."""
        self._run = run
        if self.topic is not None:
            with run.cluster() as cluster:
                topic_id = cluster.await_topic(self.topic).id
            self._topic_id = None if topic_id is None else str(topic_id)
        table = Table.open(self.location)
        if table is not None:
            self._check_kind(table)

    def write(self, rows: Any, batch: MicroBatch) -> None:
        """Raises ArchiveError, SchemaChanged, GapError."""
        self._check_columns(rows)
        schema = rows.schema.json()
        span = self._span(rows.sparkSession, batch)
        told, written_above, trouble = Told(), None, None
        # Counted, not timed: however long the files took, they are worth committing.
        for _ in islice(attempts(Deadline(math.inf), Backoff(), random.Random()), _LOOKS_MAX):
            try:
                table = self._look(schema)
                if table.has(batch):
                    _LOG.info("%s is in table %s already", batch, self.location)
                    return
                ends = self._ends(table, span)
                if written_above != ends:
                    told, written_above = self._write_files(rows, ends), ends
                self._commit(table, batch, told, ends, span)
            except Overtaken as overtaken:
                trouble = overtaken
            else:
                self._keep_up(table, told)
                return
        raise ArchiveError(str(trouble))

    # Looking

    def _look(self, schema: str) -> Table:
        """The table as it is now, made or widened if need be. Raises Overtaken, ArchiveError."""
        if self._table is None:
            found = Table.open(self.location)
            if found is None:
                found = Table.create(self.location, schema, self.partition_by, self._properties())
            self._check_kind(found)
            self._table = found
        self._table.look()
        self._table.widen(schema)
        self._table.tell(self._properties())
        return self._table

    def _properties(self) -> dict[str, str]:
        told = {TOPIC: self.topic, TOPIC_ID: self._topic_id, READING: self.reading}
        return {name: value for name, value in told.items() if value is not None}

    def _check_kind(self, table: Table) -> None:
        known = table.properties
        if known.get(TOPIC) != self.topic:
            is_of = f"an archive of topic {known[TOPIC]}" if TOPIC in known else "no archive of a topic"
            raise ArchiveError(f"table {self.location} is {is_of}: give another one")
        if self._topic_id is not None and known.get(TOPIC_ID, self._topic_id) != self._topic_id:
            raise ArchiveError(
                f"topic {self.topic} was deleted and created anew since table {self.location} was made: its id is "
                f"{self._topic_id}, not {known[TOPIC_ID]}; archive it to another table"
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
                    f"and have {kinds.get(name, 'none')}"
                )

    def _span(self, spark: Any, batch: MicroBatch) -> Span | None:
        if self.topic is None or self._run is None or not self._run.checkpoint:
            return None
        return span_of(spark, self._run.checkpoint, batch.number, self.topic)

    def _ends(self, table: Table, span: Span | None) -> Ends:
        """Raises GapError, ArchiveError."""
        if self.topic is None:
            return Ends()
        ends = table.ends(self.topic)
        if span is not None:
            _refuse_gap(self.topic, self.location, ends, span)
        return ends

    # Writing

    def _write_files(self, rows: Any, ends: Ends) -> Told:
        writer = FileWriter(
            location=self.location,
            partition_by=self.partition_by,
            ends=None if self.topic is None else dict(ends.offsets),
        )
        with handed_by_number(rows.sparkSession):
            found = rows.mapInArrow(writer, "told string").collect()
        told = Told.together(row["told"] for row in found)
        if told.skipped:
            _LOG.warning("left out %d rows that table %s has already", told.skipped, self.location)
        return told

    def _commit(self, table: Table, batch: MicroBatch, told: Told, ends: Ends, span: Span | None) -> None:
        """Nothing where nothing is new: a query that begins anew would make a commit for every batch of old."""
        if self.topic is None:
            if told.files:
                table.append(told.files, batch, {}, {})
            return
        moved = ends.raised(told.ends).raised(span.ends if span is not None else {})
        if told.files or moved != ends:
            about = {"topic": self.topic, "topicId": self._topic_id, "ends": dict(moved.offsets)}
            table.append(told.files, batch, moved.transactions(self.topic, ends), about)

    # Afterwards

    def _keep_up(self, table: Table, told: Told) -> None:
        """What fails here is tried again later; the rows are there."""
        from deltalake.exceptions import DeltaError

        try:
            if self._upkeep.is_over:
                self._upkeep = Deadline(_UPKEEP_REST_MS)
                self._join(table, growing=[each.value for each in told.files])
            if self._sweep.is_over:
                self._sweep = Deadline(_SWEEP_REST_MS)
                upkeep.sweep(table, self.keep_hours)
        except (DeltaError, OSError, ClientError) as trouble:
            _LOG.warning("table %s could not be tidied up: %s", self.location, trouble)

    def _join(self, table: Table, growing: list[str | None]) -> None:
        """The files that are most worth joining."""
        today = datetime.fromtimestamp(time.time(), UTC).date().isoformat()
        joining = upkeep.next_joining(upkeep.files_of(table), self.compact_bytes, [*growing, today])
        if joining is not None:
            fewer = upkeep.join(table, joining)
            _LOG.info("table %s has %d files fewer in %s", self.location, fewer, joining.value)


def _refuse_gap(topic: str, location: Location, ends: Ends, span: Span) -> None:
    """A batch that begins behind the table's end would leave a hole in it. A new table begins anywhere."""
    for partition, start in sorted(span.starts.items()):
        if ends and start > ends.of(partition):
            raise GapError(
                f"table {location} ends at offset {ends.of(partition)} of {topic}[{partition}], and the query goes on "
                f"at {start}: what lies between would be missing. Start it at earliest, or archive to another table"
            )
