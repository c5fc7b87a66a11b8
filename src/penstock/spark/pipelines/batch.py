"""One batch of a pipeline, in `foreachBatch`: evaluate once, transform the good rows, write them and failure records.

A topic sink and the failure records are written in one transaction. Another sink is written before them, each once for
a batch; then the evaluation is saved in the checkpoint, so that a batch which is repeated divides its rows in the same
way. Rows are counted while they are written, without running anything twice. If single records make a batch fail, a
bisection of its offsets finds them; it is pure, and the batch runs the tries.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.client.deadletters.headers import Failure, Origin
from penstock.client.errors import ClientError
from penstock.client.wire.cluster import Cluster
from penstock.spark.exactly_once.decisions import MicroBatch
from penstock.spark.pipelines import checkpoints, evaluator, failure_topics
from penstock.spark.pipelines.declaration import BatchError, Pipeline, RunSettings, TopicSink
from penstock.spark.pipelines.evaluator import (
    ATTEMPTS,
    DEAD,
    DROPPED,
    FAILURE_RECORD,
    FOREIGN,
    GOOD,
    RECORD,
    RETRIED,
    ROW_RESULT,
    Evaluation,
    RowSchemas,
    failure_record_row,
)
from penstock.spark.pipelines.failure_topics import FailureRouting
from penstock.spark.pipelines.queries import failure_from_spark, is_caused_by_records, is_caused_by_rows
from penstock.spark.session import arrow_batches_by_rows
from penstock.spark.sink.options import Contract

if TYPE_CHECKING:
    from penstock.spark.pipelines.status import RowCounts


#: Runs these offsets alone; what goes wrong, or None.
TryRanges = Callable[[Sequence["RecordRange"]], Failure | None]


class RecordRange(NamedTuple):
    """Offsets of one partition: `start` and up to, but not including, `end`."""

    topic: str
    partition: int
    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}] {self.start} to {self.end - 1}"


class PoisonRecord(NamedTuple):
    """One record, and what went wrong with it alone."""

    record_range: RecordRange
    failure: Failure


class TooManyPoisonRecords(Exception):
    """More records fail than a batch may have poison in it."""


class NotReproducible(Exception):
    """What failed together does not fail alone: it is not about single records."""


def find_poison_records(
    record_ranges: Sequence[RecordRange], failure: Failure, fails: TryRanges, *, found_max: int
) -> list[PoisonRecord]:
    """The records that fail on their own, of stretches that have failed together.

    For one among n this takes between log2(n) and 2 log2(n) tries. Raises TooMany, Unsteady.
    """
    found: list[PoisonRecord] = []
    _bisect(tuple(record_ranges), failure, fails, found, found_max, is_tried=True)
    return found


def _bisect(
    record_ranges: tuple[RecordRange, ...],
    failure: Failure,
    fails: TryRanges,
    found: list[PoisonRecord],
    found_max: int,
    *,
    is_tried: bool,
) -> None:
    """`is_tried`: whether these were seen to fail, rather than concluded to since their other half does not."""
    if sum(each.size for each in record_ranges) == 1:
        seen = failure if is_tried else fails(record_ranges)
        if seen is None:
            raise NotReproducible
        if len(found) >= found_max:
            raise TooManyPoisonRecords
        found.append(PoisonRecord(record_ranges[0], seen))
        return
    left, right = halves(record_ranges)
    left_failure = fails(left)
    if left_failure is None:
        _bisect(right, failure, fails, found, found_max, is_tried=False)
        return
    _bisect(left, left_failure, fails, found, found_max, is_tried=True)
    right_failure = fails(right)
    if right_failure is not None:
        _bisect(right, right_failure, fails, found, found_max, is_tried=True)


def halves(record_ranges: Sequence[RecordRange]) -> tuple[tuple[RecordRange, ...], tuple[RecordRange, ...]]:
    """Both have at least one offset."""
    left: list[RecordRange] = []
    right: list[RecordRange] = []
    room = sum(each.size for each in record_ranges) // 2
    assert room, f"{record_ranges} cannot be halved"
    for each in record_ranges:
        cut = each.start + min(room, each.size)
        room -= cut - each.start
        left += [each._replace(end=cut)] if cut > each.start else []
        right += [each._replace(start=cut)] if cut < each.end else []
    return tuple(left), tuple(right)


_LOG: Final = logging.getLogger("penstock.spark")
#: Spark tells what it has observed a moment after the job; where there was no job, it never does.
_OBSERVATION_WAIT_S: Final = 5.0
_RESULTS_BY_NAME: Final = {
    "good": GOOD,
    "retried": RETRIED,
    "dead": DEAD,
    "dropped": DROPPED,
    "foreign": FOREIGN,
}


class RowCounter:
    """Counts what goes through a frame when it is run."""

    def __init__(self, frame: Any, **conditions: Any) -> None:
        from pyspark.sql import Observation
        from pyspark.sql import functions as f

        self._observation = Observation()
        counted = [f.count_if(condition).alias(name) for name, condition in conditions.items()]
        self.frame = frame.observe(self._observation, *counted)

    @classmethod
    def of_row_results(cls, evaluated: Any) -> RowCounter:
        from pyspark.sql import functions as f

        return cls(evaluated, **{name: f.col(ROW_RESULT) == fate for name, fate in _RESULTS_BY_NAME.items()})

    @classmethod
    def of_rows(cls, rows: Any) -> RowCounter:
        from pyspark.sql import functions as f

        return cls(rows, rows=f.lit(True))

    def found(self) -> dict[str, int]:
        """After it was run; empty where it was not."""
        told: dict[str, int] = {}

        def wait() -> None:
            told.update({name: int(number or 0) for name, number in self._observation.get.items()})

        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        waiting.join(_OBSERVATION_WAIT_S)
        return dict(told)


def count_row_results(held: Any) -> dict[str, int]:
    """Counted by asking: where letters depend on it, what Spark happens to tell is not enough."""
    rows = held.groupBy(ROW_RESULT).count().collect()
    numbers = {int(row[ROW_RESULT]): int(row["count"]) for row in rows}
    return {name: numbers.get(fate, 0) for name, fate in _RESULTS_BY_NAME.items()}


def row_counts(row_results: dict[str, int], rows_out: int) -> RowCounts:
    from penstock.spark.pipelines.status import RowCounts

    return RowCounts(
        rows_in=sum(number for name, number in row_results.items() if name != "foreign"),
        rows_out=rows_out,
        retried=row_results.get("retried", 0),
        dead=row_results.get("dead", 0),
    )


def report_counts(cluster: Cluster, name: str, batch: MicroBatch, counts: RowCounts) -> None:
    """On the board. A batch does not fail because nobody can be told of it."""
    from penstock.spark.pipelines.status import add_counts

    try:
        add_counts(cluster, name, batch, counts)
    except ClientError as trouble:
        _LOG.warning("%s: what it counted is not on the board: %s", batch, trouble)


_FAILURE_RECORDS_SUFFIX: Final = "-letters"
_DRY_RUN: Final = {"dryRun": "true"}
_RECORD_ID_COLUMNS: Final = ("topic", "partition", "offset")


def sink_query_names(query: str) -> tuple[str, ...]:
    """The names that a query's batches are written under; one that begins with another comes before that."""
    return query + _FAILURE_RECORDS_SUFFIX, query


class BatchRunner:
    """All batches of one query. Sent to where Spark calls it, so connections are made there."""

    def __init__(
        self,
        pipeline: Pipeline,
        run: RunSettings,
        row_schemas: RowSchemas | None,
        routing: FailureRouting,
        *,
        checkpoint: str,
    ) -> None:
        self.pipeline = pipeline
        self.run = run
        self.row_schemas = row_schemas
        self.routing = routing
        self.checkpoint = checkpoint
        self._query: str | None = None
        self._cluster: Cluster | None = None
        #: Only the first batch after a start can have been begun before.
        self._may_be_saved = True

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_query": None, "_cluster": None}

    @property
    def cluster(self) -> Cluster:
        if self._cluster is None:
            self._cluster = self.run.cluster()
        return self._cluster

    def __call__(self, frame: Any, number: int) -> None:
        """For `foreachBatch`. Raises BatchError, and what Spark raises where that is not about the rows."""
        batch = MicroBatch(self._query_id(frame.sparkSession), number)
        if self.pipeline.source.pattern is not None:
            self.routing = failure_topics.with_new_topics(self.routing, self.cluster, self.pipeline)
        _BatchRun(self, frame, batch, may_be_saved=self._may_be_saved).run()
        self._may_be_saved = False

    def _query_id(self, spark: Any) -> str:
        if self._query is None:
            self._query = checkpoints.query_id(spark, self.checkpoint)
        return self._query


class _BatchRun:
    def __init__(self, batches: BatchRunner, frame: Any, batch: MicroBatch, *, may_be_saved: bool) -> None:
        self.pipeline, self.sink = batches.pipeline, batches.pipeline.sink
        self.batches, self.frame, self.batch = batches, frame, batch
        self.contract = batches.pipeline.delivery
        self.may_be_saved = may_be_saved
        self.row_results: dict[str, int] = {}
        self.row_counter: RowCounter | None = None
        self.held: list[Any] = []
        #: With at-most-once: what has been sent may be there, so nothing of the batch is sent again.
        self.is_sent = False
        self.isolated_count = 0
        #: What the last write failed for, and so the next tries have to go as far as.
        self.is_refused_by_sink = False

    def run(self) -> None:
        try:
            with arrow_batches_by_rows(self.frame.sparkSession):
                rows_out = self._written(self._evaluated())
        finally:
            for frame in self.held:
                checkpoints.release_local_checkpoint(frame)
        if self.row_counter is not None:
            self.row_results = self.row_counter.found()
        counts = row_counts(self.row_results, rows_out)
        report_counts(self.batches.cluster, self.pipeline.name, self.batch, counts)

    # Evaluating

    def _evaluated(self) -> Any:
        """Rows with what becomes of them, held so that they are evaluated once."""
        if self._saves_evaluation and self.may_be_saved:
            found = checkpoints.find_evaluation(self.frame.sparkSession, self._folder, self.batch)
            if found is not None:
                return self._counted(found)
        if not self.pipeline.evaluates and self.contract is not Contract.AT_MOST_ONCE:
            # Nothing to hold: they are what the source gives, whenever it is asked.
            self.row_counter = RowCounter.of_row_results(evaluator.as_evaluated_rows(self.frame))
            return self.row_counter.frame
        evaluated = self._counted(self._to_evaluate())
        if self._saves_evaluation and self.pipeline.rows:
            checkpoints.save_evaluation(evaluated, self._folder, self.batch)
        return evaluated

    def _to_evaluate(self) -> Any:
        row_schemas = self.batches.row_schemas
        if row_schemas is None:
            return evaluator.as_evaluated_rows(self.frame)
        evaluation = Evaluation(
            parse=self.pipeline.parse,
            rows=self.pipeline.rows,
            row_schemas=row_schemas,
            routing=self.batches.routing,
        )
        return self.frame.mapInArrow(evaluation, row_schemas.evaluated)

    def _counted(self, frame: Any) -> Any:
        counted = RowCounter.of_row_results(frame)
        held = self._hold(counted.frame)
        self.row_counter, self.row_results = None, counted.found() or count_row_results(held)
        return held

    def _hold(self, frame: Any) -> Any:
        """Run it now; should a part be lost, the batch fails rather than that rows are evaluated twice."""
        held = frame.localCheckpoint(eager=True)
        self.held.append(held)
        return held

    @property
    def _saves_evaluation(self) -> bool:
        """Whether letters and rows are written one after the other, and each once."""
        is_apart = self.sink is not None and not isinstance(self.sink, TopicSink)
        return is_apart and self.contract is Contract.EXACTLY_ONCE

    @property
    def _folder(self) -> str:
        return f"{self.batches.run.checkpoint}/evaluated"

    # Writing

    def _written(self, evaluated: Any) -> int:
        """How many rows came out."""
        while True:
            try:
                return self._write(evaluated)
            except Exception as error:
                if self.is_sent or not is_caused_by_rows(error):
                    raise
                self.is_refused_by_sink = is_caused_by_records(error)
                # Each time there are fewer rows, so this ends.
                evaluated = self._without_poison(evaluated, error)

    def _write(self, evaluated: Any) -> int:
        with_letters = bool(self.row_results.get("retried", 0) + self.row_results.get("dead", 0))
        counted = RowCounter.of_rows(self._output(evaluated))
        if isinstance(self.sink, TopicSink):
            rows = evaluator.output_records(self.pipeline, counted.frame, self.sink)
            if with_letters:
                rows = rows.unionByName(evaluator.failure_records(evaluated))
            self._to_topics(rows, self.sink.options, self.batch.query)
            return counted.found().get("rows", 0)
        if self.sink is None:
            counted.frame.write.format("noop").mode("append").save()
        else:
            self.sink.write(self._once(counted.frame), self.batch)
        if with_letters:
            # Afterwards, for should the rows fail there will be more letters, and a batch of them is written once.
            self._to_topics(
                evaluator.failure_records(evaluated), {}, self.batch.query + _FAILURE_RECORDS_SUFFIX
            )
        return counted.found().get("rows", 0)

    def _output(self, evaluated: Any) -> Any:
        return self.pipeline(evaluator.good_rows(self.pipeline, evaluated))

    def _once(self, rows: Any) -> Any:
        """At most once means: nothing of it is computed a second time."""
        return self._hold(rows) if self.contract is Contract.AT_MOST_ONCE else rows

    def _to_topics(self, rows: Any, options: Any, name: str) -> None:
        contract = {"contract": self.contract.value}
        if self.contract is Contract.EXACTLY_ONCE:
            checkpoint = self.batches.checkpoint + name.removeprefix(self.batch.query)
            contract |= {
                "txnAppId": name,
                "txnVersion": str(self.batch.number),
                "checkpointLocation": checkpoint,
            }
        rows = self._once(rows)
        if self.contract is Contract.AT_MOST_ONCE:
            # What the topics do not take must be known while all can still be written.
            self._save(rows, {**options, **_DRY_RUN})
            self.is_sent = True
        self._save(rows, {**options, **contract})

    def _save(self, rows: Any, options: Any) -> None:
        given = {**self.batches.run.options(), **options, "timestampColumn": evaluator.TIMESTAMP_COLUMN}
        rows.write.format("penstock").mode("append").options(**given).save()

    # When it fails

    def _without_poison(self, evaluated: Any, error: Exception) -> Any:
        """The same rows, with letters for those that make it fail. Raises `error` where no row does."""
        if self.row_counter is not None:
            evaluated = self._counted(evaluator.as_evaluated_rows(self.frame))
        if self._try(evaluated) is None:
            raise error
        found = self._isolated(evaluated, error)
        self.isolated_count += len(found)
        dead = self._dead(evaluated, found)
        self.row_results["good"] = self.row_results.get("good", 0) - len(found)
        self.row_results["dead"] = self.row_results.get("dead", 0) + len(found)
        better = evaluated.where(~_in_ranges(each.record_range for each in found)).unionByName(dead)
        if self._saves_evaluation:
            checkpoints.save_evaluation(better, self._folder, self.batch)
        return better

    def _isolated(self, evaluated: Any, error: Exception) -> list[PoisonRecord]:
        record_ranges = _batch_ranges(evaluated)

        def fails(some: Sequence[RecordRange]) -> Failure | None:
            return self._try(evaluated.where(_in_ranges(some)))

        try:
            return find_poison_records(
                record_ranges,
                failure_from_spark(error),
                fails,
                found_max=self.pipeline.errors.isolated_max - self.isolated_count,
            )
        except TooManyPoisonRecords:
            raise BatchError(
                f"pipeline {self.pipeline.name}: more than {self.pipeline.errors.isolated_max} records make "
                f"{self.batch} fail, of {_ranges_text(record_ranges)}; "
                f"the last error: {failure_from_spark(error).message}"
            ) from None
        except NotReproducible:
            raise error from None

    def _try(self, evaluated: Any) -> Failure | None:
        """What goes wrong with these rows when they are written nowhere. Raises what is not about rows."""
        output = self._output(evaluated)
        if isinstance(self.sink, TopicSink):
            output = evaluator.output_records(self.pipeline, output, self.sink)
        try:
            if isinstance(self.sink, TopicSink) and self.is_refused_by_sink:
                self._save(output, {**self.sink.options, **_DRY_RUN})
            else:
                output.write.format("noop").mode("append").save()
        except Exception as error:
            if not is_caused_by_rows(error):
                raise
            return failure_from_spark(error)
        return None

    def _dead(self, evaluated: Any, found: list[PoisonRecord]) -> Any:
        """Rows of these records that go to the dead letters."""
        failures = {each.record_range[:3]: each.failure for each in found}
        rows = evaluated.where(_in_ranges(each.record_range for each in found)).collect()
        now_ms, chance = int(time.time() * 1000), random.Random()
        made = []
        for row in rows:
            record = row[RECORD]
            place = (record["topic"], record["partition"], record["offset"])
            failure_record = self._failure_record(record, row[ATTEMPTS], failures[place], now_ms, chance)
            told = row.asDict() | {FAILURE_RECORD: _failure_record_value(failure_record), ROW_RESULT: DEAD}
            made.append(tuple(told[name] for name in evaluated.columns))
        return evaluated.sparkSession.createDataFrame(made, evaluated.schema)

    def _failure_record(
        self, record: Any, attempts: int, failure: Failure, now_ms: int, chance: random.Random
    ) -> Any:
        headers = None
        if record["headers"] is not None:
            headers = [(each["key"], _bytes_or_none(each["value"])) for each in record["headers"]]
        origin = Origin(
            topic=record["topic"],
            partition=record["partition"],
            offset=record["offset"],
            timestamp_ms=int(record["timestamp"].timestamp() * 1000),
            attempts=attempts - 1,
        )
        routing = self.batches.routing
        return routing.failure_record(
            origin,
            routing.source_of(record["topic"]),
            headers,
            failure,
            is_retriable=False,
            now_ms=now_ms,
            chance=chance,
        )


def _failure_record_value(failure_record: Any) -> tuple[Any, ...]:
    row = failure_record_row(failure_record)
    headers = [(each["key"], each["value"]) for each in row["headers"]]
    return row["topic"], row["partition"], headers, None


def _bytes_or_none(value: Any) -> bytes | None:
    return None if value is None else bytes(value)


def _batch_ranges(evaluated: Any) -> list[RecordRange]:
    """The offsets that rows of the batch are from."""
    from pyspark.sql import functions as f

    place = [f.col(f"{RECORD}.topic").alias("topic"), f.col(f"{RECORD}.partition").alias("partition")]
    offset = f.col(f"{RECORD}.offset")
    rows = evaluated.groupBy(*place).agg(f.min(offset).alias("first"), f.max(offset).alias("last")).collect()
    found = (RecordRange(row["topic"], row["partition"], row["first"], row["last"] + 1) for row in rows)
    return sorted(found)


def _in_ranges(record_ranges: Any) -> Any:
    """A condition: rows of these offsets."""
    from pyspark.sql import functions as f

    topic, partition, offset = (f.col(f"{RECORD}.{name}") for name in _RECORD_ID_COLUMNS)
    found = f.lit(False)
    for each in record_ranges:
        is_there = (topic == each.topic) & (partition == each.partition)
        found = found | (is_there & (offset >= each.start) & (offset < each.end))
    return found


def _ranges_text(record_ranges: Sequence[RecordRange]) -> str:
    return ", ".join(map(str, record_ranges))
