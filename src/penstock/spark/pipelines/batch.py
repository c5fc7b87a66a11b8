"""One batch of a pipeline, in `foreachBatch`: evaluate once, transform the good rows, write them and failure records.

A topic sink and the failure records are written in one transaction. A custom sink is written before the failure
records, each once for a batch; the evaluation is saved in the checkpoint first, so that a repeated batch divides its
rows in the same way. Rows are counted while they are written, so nothing runs twice. If single records make a batch
fail, a bisection of its offsets finds them.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from pyspark.sql import Observation
from pyspark.sql import functions as f

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
from penstock.spark.pipelines.open_transactions import FAILURE_RECORDS_SUFFIX
from penstock.spark.pipelines.queries import failure_from_spark, is_caused_by_records, is_caused_by_rows
from penstock.spark.pipelines.status import RowCounts, add_counts
from penstock.spark.session import arrow_batches_by_rows
from penstock.spark.sink.options import Contract

#: Processes these offsets alone, and returns the failure if there is one.
TryRanges = Callable[[Sequence["RecordRange"]], Failure | None]


class RecordRange(NamedTuple):
    """The offsets start <= offset < end of one partition."""

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
    """A record that fails alone, and its failure."""

    record_range: RecordRange
    failure: Failure


class TooManyPoisonRecords(Exception):
    """More records fail than `Errors.isolated_max` allows."""


class NotReproducible(Exception):
    """Records that failed together do not fail alone, so no single record is the cause."""


def find_poison_records(
    record_ranges: Sequence[RecordRange], failure: Failure, fails: TryRanges, *, found_max: int
) -> list[PoisonRecord]:
    """Return the records that fail alone, among ranges that failed together.

    To find one of n records takes between log2(n) and 2 log2(n) tries. Raises TooManyPoisonRecords, NotReproducible.
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
    """With `is_tried`, these ranges have failed. Without it, they must fail, because the other half has not."""
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
    """Split the ranges in two. Both halves have at least one offset."""
    left: list[RecordRange] = []
    right: list[RecordRange] = []
    left_size = sum(each.size for each in record_ranges) // 2
    assert left_size, f"{record_ranges} cannot be halved"
    for each in record_ranges:
        middle = each.start + min(left_size, each.size)
        left_size -= middle - each.start
        left += [each._replace(end=middle)] if middle > each.start else []
        right += [each._replace(start=middle)] if middle < each.end else []
    return tuple(left), tuple(right)


_LOG: Final = logging.getLogger("penstock.spark")
#: Spark reports an observation shortly after the job. If there was no job, it never does.
_OBSERVATION_WAIT_S: Final = 5.0
_RESULTS_BY_NAME: Final = {
    "good": GOOD,
    "retried": RETRIED,
    "dead": DEAD,
    "dropped": DROPPED,
    "foreign": FOREIGN,
}


class RowCounter:
    """Counts the rows of a frame while it runs."""

    def __init__(self, frame: Any, **conditions: Any) -> None:
        self._observation = Observation()
        counted = [f.count_if(condition).alias(name) for name, condition in conditions.items()]
        self.frame = frame.observe(self._observation, *counted)

    @classmethod
    def of_row_results(cls, evaluated: Any) -> RowCounter:
        return cls(
            evaluated, **{name: f.col(ROW_RESULT) == result for name, result in _RESULTS_BY_NAME.items()}
        )

    @classmethod
    def of_rows(cls, rows: Any) -> RowCounter:
        return cls(rows, rows=f.lit(True))

    def found(self) -> dict[str, int]:
        """Return the counts after the frame has run, or nothing if it has not."""
        counts: dict[str, int] = {}

        def wait() -> None:
            counts.update({name: int(number or 0) for name, number in self._observation.get.items()})

        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        waiting.join(_OBSERVATION_WAIT_S)
        return dict(counts)


def count_row_results(held: Any) -> dict[str, int]:
    """Count with a query. Failure records depend on these counts, and Spark may not report an observation."""
    rows = held.groupBy(ROW_RESULT).count().collect()
    numbers = {int(row[ROW_RESULT]): int(row["count"]) for row in rows}
    return {name: numbers.get(result, 0) for name, result in _RESULTS_BY_NAME.items()}


def row_counts(row_results: dict[str, int], rows_out: int) -> RowCounts:
    return RowCounts(
        rows_in=sum(number for name, number in row_results.items() if name != "foreign"),
        rows_out=rows_out,
        retried=row_results.get("retried", 0),
        dead=row_results.get("dead", 0),
    )


def report_counts(cluster: Cluster, name: str, batch: MicroBatch, counts: RowCounts) -> None:
    """Add the counts to the pipeline's status. A batch does not fail if this is impossible."""
    try:
        add_counts(cluster, name, batch, counts)
    except ClientError as trouble:
        _LOG.warning("%s: its row counts could not be added to the status: %s", batch, trouble)


_DRY_RUN: Final = {"dryRun": "true"}
_RECORD_ID_COLUMNS: Final = ("topic", "partition", "offset")


class BatchRunner:
    """Runs all batches of one query. It is pickled and sent to where Spark calls it, and connects there."""

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
        #: Only the first batch after a start may have been evaluated before.
        self._may_be_saved = True

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_query": None, "_cluster": None}

    @property
    def cluster(self) -> Cluster:
        if self._cluster is None:
            self._cluster = self.run.cluster()
        return self._cluster

    def __call__(self, frame: Any, number: int) -> None:
        """Run a batch, for `foreachBatch`. Raises BatchError, and errors of Spark that no row causes."""
        if self._query is None:
            self._query = checkpoints.query_id(frame.sparkSession, self.checkpoint)
        batch = MicroBatch(self._query, number)
        if self.pipeline.source.pattern is not None:
            self.routing = failure_topics.with_new_topics(self.routing, self.cluster, self.pipeline)
        _BatchRun(self, frame, batch, may_be_saved=self._may_be_saved).run()
        self._may_be_saved = False


class _BatchRun:
    def __init__(self, batches: BatchRunner, frame: Any, batch: MicroBatch, *, may_be_saved: bool) -> None:
        self.pipeline, self.sink = batches.pipeline, batches.pipeline.sink
        self.batches, self.frame, self.batch = batches, frame, batch
        self.contract = batches.pipeline.delivery
        self.may_be_saved = may_be_saved
        self.row_results: dict[str, int] = {}
        self.row_counter: RowCounter | None = None
        self.held: list[Any] = []
        #: With at-most-once: records may have been sent, so no record of the batch is sent again.
        self.is_sent = False
        self.isolated_count = 0
        #: Whether a topic refused a record of the last write. Then tries must include the encoding of records.
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
        """Return the rows with their results. They are held, so that each row is evaluated once."""
        if self._saves_evaluation and self.may_be_saved:
            found = checkpoints.find_evaluation(self.frame.sparkSession, self._folder, self.batch)
            if found is not None:
                return self._counted(found)
        if not self.pipeline.evaluates and self.contract is not Contract.AT_MOST_ONCE:
            # There is nothing to hold: the source returns the same rows every time.
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
        """Run the frame now and keep its rows. If a part is lost, the batch fails instead of evaluating rows twice."""
        held = frame.localCheckpoint(eager=True)
        self.held.append(held)
        return held

    @property
    def _saves_evaluation(self) -> bool:
        """Whether rows and failure records are written separately, and each exactly once."""
        is_apart = self.sink is not None and not isinstance(self.sink, TopicSink)
        return is_apart and self.contract is Contract.EXACTLY_ONCE

    @property
    def _folder(self) -> str:
        return f"{self.batches.run.checkpoint}/evaluated"

    # Writing

    def _written(self, evaluated: Any) -> int:
        """Write the batch, without the records that make it fail. Return how many rows came out."""
        while True:
            try:
                return self._write(evaluated)
            except Exception as error:
                if self.is_sent or not is_caused_by_rows(error):
                    raise
                self.is_refused_by_sink = is_caused_by_records(error)
                # There are fewer rows each time, so this loop ends.
                evaluated = self._without_poison(evaluated, error)

    def _write(self, evaluated: Any) -> int:
        has_failures = bool(self.row_results.get("retried", 0) + self.row_results.get("dead", 0))
        counted = RowCounter.of_rows(self._output(evaluated))
        if isinstance(self.sink, TopicSink):
            rows = evaluator.output_records(self.pipeline, counted.frame, self.sink)
            if has_failures:
                rows = rows.unionByName(evaluator.failure_records(evaluated))
            self._to_topics(rows, self.sink.options, self.batch.query)
            return counted.found().get("rows", 0)
        if self.sink is None:
            counted.frame.write.format("noop").mode("append").save()
        else:
            self.sink.write(self._once(counted.frame), self.batch)
        if has_failures:
            # Written last: if the rows fail, there will be more failure records, and they are written once per batch.
            self._to_topics(
                evaluator.failure_records(evaluated), {}, self.batch.query + FAILURE_RECORDS_SUFFIX
            )
        return counted.found().get("rows", 0)

    def _output(self, evaluated: Any) -> Any:
        return self.pipeline(evaluator.good_rows(self.pipeline, evaluated))

    def _once(self, rows: Any) -> Any:
        """Hold the rows if they are delivered at most once, so that they are computed once."""
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
            # Find out which records the topics refuse before anything is sent.
            self._save(rows, {**options, **_DRY_RUN})
            self.is_sent = True
        self._save(rows, {**options, **contract})

    def _save(self, rows: Any, options: Any) -> None:
        given = {**self.batches.run.options(), **options, "timestampColumn": evaluator.TIMESTAMP_COLUMN}
        rows.write.format("penstock").mode("append").options(**given).save()

    # Failures

    def _without_poison(self, evaluated: Any, error: Exception) -> Any:
        """Return the rows, with failure records for those that make the batch fail. Raises `error` if no row does."""
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
                f"pipeline {self.pipeline.name}: more than {self.pipeline.errors.isolated_max} records of "
                f"{', '.join(map(str, record_ranges))} make {self.batch} fail; "
                f"the last error: {failure_from_spark(error).message}"
            ) from None
        except NotReproducible:
            raise error from None

    def _try(self, evaluated: Any) -> Failure | None:
        """Process the rows without writing them, and return the failure. Raises errors that no row causes."""
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
        """Return the rows of these records with failure records for the dead-letter topic."""
        failures = {each.record_range[:3]: each.failure for each in found}
        rows = evaluated.where(_in_ranges(each.record_range for each in found)).collect()
        now_ms, chance = int(time.time() * 1000), random.Random()
        made = []
        for row in rows:
            record = row[RECORD]
            record_id = (record["topic"], record["partition"], record["offset"])
            failure_record = self._failure_record(record, row[ATTEMPTS], failures[record_id], now_ms, chance)
            values = row.asDict() | {FAILURE_RECORD: _failure_record_value(failure_record), ROW_RESULT: DEAD}
            made.append(tuple(values[name] for name in evaluated.columns))
        return evaluated.sparkSession.createDataFrame(made, evaluated.schema)

    def _failure_record(
        self, record: Any, attempts: int, failure: Failure, now_ms: int, chance: random.Random
    ) -> Any:
        headers = None
        if record["headers"] is not None:
            headers = [
                (each["key"], None if each["value"] is None else bytes(each["value"]))
                for each in record["headers"]
            ]
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


def _batch_ranges(evaluated: Any) -> list[RecordRange]:
    """Return the range of offsets in each partition of the batch."""
    partition = [f.col(f"{RECORD}.topic").alias("topic"), f.col(f"{RECORD}.partition").alias("partition")]
    offset = f.col(f"{RECORD}.offset")
    rows = (
        evaluated.groupBy(*partition).agg(f.min(offset).alias("first"), f.max(offset).alias("last")).collect()
    )
    found = (RecordRange(row["topic"], row["partition"], row["first"], row["last"] + 1) for row in rows)
    return sorted(found)


def _in_ranges(record_ranges: Any) -> Any:
    """Return the condition that selects the rows of these offsets."""
    topic, partition, offset = (f.col(f"{RECORD}.{name}") for name in _RECORD_ID_COLUMNS)
    found = f.lit(False)
    for each in record_ranges:
        is_partition = (topic == each.topic) & (partition == each.partition)
        found = found | (is_partition & (offset >= each.start) & (offset < each.end))
    return found
