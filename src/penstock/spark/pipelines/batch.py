"""One batch of a pipeline, in `foreachBatch`: evaluate once, transform what is good, and write it with the letters.

A topic and the letters are written as one. Another sink is written before the letters, each once for a batch; then the
evaluation is kept in the checkpoint, so that a batch which is done again does not divide its rows in another way.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any, Final

from penstock.client.cluster import Cluster
from penstock.client.letters import Failure, Origin
from penstock.spark.decisions import MicroBatch
from penstock.spark.handing import handed_by_number
from penstock.spark.pipelines import keeping, letter_topics, shaping
from penstock.spark.pipelines.bisecting import Isolated, Stretch, TooMany, Unsteady, isolate
from penstock.spark.pipelines.counts import Tally, counts_of, fates_in, tell
from penstock.spark.pipelines.declaration import BatchError, Pipeline, TopicSink
from penstock.spark.pipelines.evaluation import (
    ATTEMPTS,
    DEAD,
    FATE,
    LETTER,
    RECORD,
    Evaluation,
    Shapes,
    letter_row,
)
from penstock.spark.pipelines.failures import failure_in_spark, is_of_records, is_of_rows
from penstock.spark.pipelines.routing import Routing
from penstock.spark.pipelines.settings import RunSettings
from penstock.spark.sink_options import Contract

_LETTERS: Final = "-letters"
_DRY_RUN: Final = {"dryRun": "true"}
_PLACE: Final = ("topic", "partition", "offset")


def written_as(query: str) -> tuple[str, ...]:
    """The names that a query's batches are written under; one that begins with another comes before that."""
    return query + _LETTERS, query


class Batches:
    """All batches of one query. Sent to where Spark calls it, so connections are made there."""

    def __init__(
        self,
        pipeline: Pipeline,
        run: RunSettings,
        shapes: Shapes | None,
        routing: Routing,
        *,
        checkpoint: str,
    ) -> None:
        self.pipeline = pipeline
        self.run = run
        self.shapes = shapes
        self.routing = routing
        self.checkpoint = checkpoint
        self._query: str | None = None
        self._cluster: Cluster | None = None
        #: Only the first batch after a start can have been begun before.
        self._may_be_kept = True

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
            self.routing = letter_topics.with_new(self.routing, self.cluster, self.pipeline)
        _Batch(self, frame, batch, may_be_kept=self._may_be_kept).run()
        self._may_be_kept = False

    def _query_id(self, spark: Any) -> str:
        if self._query is None:
            self._query = keeping.query_id(spark, self.checkpoint)
        return self._query


class _Batch:
    def __init__(self, batches: Batches, frame: Any, batch: MicroBatch, *, may_be_kept: bool) -> None:
        self.pipeline, self.sink = batches.pipeline, batches.pipeline.sink
        self.batches, self.frame, self.batch = batches, frame, batch
        self.contract = batches.pipeline.delivery
        self.may_be_kept = may_be_kept
        self.fates: dict[str, int] = {}
        self.tally: Tally | None = None
        self.held: list[Any] = []
        #: With at-most-once: what has been sent may be there, so nothing of the batch is sent again.
        self.is_given_away = False
        self.isolated_count = 0
        #: What the last write failed for, and so the next tries have to go as far as.
        self.is_refused_by_sink = False

    def run(self) -> None:
        try:
            with handed_by_number(self.frame.sparkSession):
                rows_out = self._written(self._evaluated())
        finally:
            for frame in self.held:
                keeping.release(frame)
        if self.tally is not None:
            self.fates = self.tally.found()
        counts = counts_of(self.fates, rows_out)
        tell(self.batches.cluster, self.pipeline.name, self.batch, counts)

    # Evaluating

    def _evaluated(self) -> Any:
        """Rows with what becomes of them, held so that they are evaluated once."""
        if self._is_kept and self.may_be_kept:
            found = keeping.find(self.frame.sparkSession, self._folder, self.batch)
            if found is not None:
                return self._counted(found)
        if not self.pipeline.evaluates and self.contract is not Contract.AT_MOST_ONCE:
            # Nothing to hold: they are what the source gives, whenever it is asked.
            self.tally = Tally.of_fates(shaping.as_evaluated(self.frame))
            return self.tally.frame
        evaluated = self._counted(self._to_evaluate())
        if self._is_kept and self.pipeline.rows:
            keeping.keep(evaluated, self._folder, self.batch)
        return evaluated

    def _to_evaluate(self) -> Any:
        shapes = self.batches.shapes
        if shapes is None:
            return shaping.as_evaluated(self.frame)
        evaluation = Evaluation(
            parse=self.pipeline.parse, rows=self.pipeline.rows, shapes=shapes, routing=self.batches.routing
        )
        return self.frame.mapInArrow(evaluation, shapes.evaluated)

    def _counted(self, frame: Any) -> Any:
        counted = Tally.of_fates(frame)
        held = self._hold(counted.frame)
        self.tally, self.fates = None, counted.found() or fates_in(held)
        return held

    def _hold(self, frame: Any) -> Any:
        """Run it now; should a part be lost, the batch fails rather than that rows are evaluated twice."""
        held = frame.localCheckpoint(eager=True)
        self.held.append(held)
        return held

    @property
    def _is_kept(self) -> bool:
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
                if self.is_given_away or not is_of_rows(error):
                    raise
                self.is_refused_by_sink = is_of_records(error)
                # Each time there are fewer rows, so this ends.
                evaluated = self._without_poison(evaluated, error)

    def _write(self, evaluated: Any) -> int:
        with_letters = bool(self.fates.get("retried", 0) + self.fates.get("dead", 0))
        counted = Tally.of_rows(self._output(evaluated))
        if isinstance(self.sink, TopicSink):
            rows = shaping.records(self.pipeline, counted.frame, self.sink)
            if with_letters:
                rows = rows.unionByName(shaping.letters(evaluated))
            self._to_topics(rows, self.sink.options, self.batch.query)
            return counted.found().get("rows", 0)
        if self.sink is None:
            counted.frame.write.format("noop").mode("append").save()
        else:
            self.sink.write(self._once(counted.frame), self.batch)
        if with_letters:
            # Afterwards, for should the rows fail there will be more letters, and a batch of them is written once.
            self._to_topics(shaping.letters(evaluated), {}, self.batch.query + _LETTERS)
        return counted.found().get("rows", 0)

    def _output(self, evaluated: Any) -> Any:
        return self.pipeline(shaping.good_rows(self.pipeline, evaluated))

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
            self.is_given_away = True
        self._save(rows, {**options, **contract})

    def _save(self, rows: Any, options: Any) -> None:
        given = {**self.batches.run.options(), **options, "timestampColumn": shaping.TIMESTAMP}
        rows.write.format("penstock").mode("append").options(**given).save()

    # When it fails

    def _without_poison(self, evaluated: Any, error: Exception) -> Any:
        """The same rows, with letters for those that make it fail. Raises `error` where no row does."""
        if self.tally is not None:
            evaluated = self._counted(shaping.as_evaluated(self.frame))
        if self._try(evaluated) is None:
            raise error
        found = self._isolated(evaluated, error)
        self.isolated_count += len(found)
        dead = self._dead(evaluated, found)
        self.fates["good"] = self.fates.get("good", 0) - len(found)
        self.fates["dead"] = self.fates.get("dead", 0) + len(found)
        better = evaluated.where(~_at(each.stretch for each in found)).unionByName(dead)
        if self._is_kept:
            keeping.keep(better, self._folder, self.batch)
        return better

    def _isolated(self, evaluated: Any, error: Exception) -> list[Isolated]:
        stretches = _stretches(evaluated)

        def fails(some: Sequence[Stretch]) -> Failure | None:
            return self._try(evaluated.where(_at(some)))

        try:
            return isolate(
                stretches,
                failure_in_spark(error),
                fails,
                found_max=self.pipeline.errors.isolated_max - self.isolated_count,
            )
        except TooMany:
            raise BatchError(
                f"pipeline {self.pipeline.name}: more than {self.pipeline.errors.isolated_max} records make "
                f"{self.batch} fail, of {_told(stretches)}; the last error: {failure_in_spark(error).message}"
            ) from None
        except Unsteady:
            raise error from None

    def _try(self, evaluated: Any) -> Failure | None:
        """What goes wrong with these rows when they are written nowhere. Raises what is not about rows."""
        output = self._output(evaluated)
        if isinstance(self.sink, TopicSink):
            output = shaping.records(self.pipeline, output, self.sink)
        try:
            if isinstance(self.sink, TopicSink) and self.is_refused_by_sink:
                self._save(output, {**self.sink.options, **_DRY_RUN})
            else:
                output.write.format("noop").mode("append").save()
        except Exception as error:
            if not is_of_rows(error):
                raise
            return failure_in_spark(error)
        return None

    def _dead(self, evaluated: Any, found: list[Isolated]) -> Any:
        """Rows of these records that go to the dead letters."""
        failures = {each.stretch[:3]: each.failure for each in found}
        rows = evaluated.where(_at(each.stretch for each in found)).collect()
        now_ms, chance = int(time.time() * 1000), random.Random()
        made = []
        for row in rows:
            record = row[RECORD]
            place = (record["topic"], record["partition"], record["offset"])
            letter = self._letter(record, row[ATTEMPTS], failures[place], now_ms, chance)
            told = row.asDict() | {LETTER: _letter_value(letter), FATE: DEAD}
            made.append(tuple(told[name] for name in evaluated.columns))
        return evaluated.sparkSession.createDataFrame(made, evaluated.schema)

    def _letter(
        self, record: Any, attempts: int, failure: Failure, now_ms: int, chance: random.Random
    ) -> Any:
        headers = None
        if record["headers"] is not None:
            headers = [(each["key"], _bytes(each["value"])) for each in record["headers"]]
        origin = Origin(
            topic=record["topic"],
            partition=record["partition"],
            offset=record["offset"],
            timestamp_ms=int(record["timestamp"].timestamp() * 1000),
            attempts=attempts - 1,
        )
        routing = self.batches.routing
        return routing.letter(
            origin,
            routing.source_of(record["topic"]),
            headers,
            failure,
            is_retriable=False,
            now_ms=now_ms,
            chance=chance,
        )


def _letter_value(letter: Any) -> tuple[Any, ...]:
    row = letter_row(letter)
    headers = [(each["key"], each["value"]) for each in row["headers"]]
    return row["topic"], row["partition"], headers, None


def _bytes(value: Any) -> bytes | None:
    return None if value is None else bytes(value)


def _stretches(evaluated: Any) -> list[Stretch]:
    """The offsets that rows of the batch are from."""
    from pyspark.sql import functions as f

    place = [f.col(f"{RECORD}.topic").alias("topic"), f.col(f"{RECORD}.partition").alias("partition")]
    offset = f.col(f"{RECORD}.offset")
    rows = evaluated.groupBy(*place).agg(f.min(offset).alias("first"), f.max(offset).alias("last")).collect()
    found = (Stretch(row["topic"], row["partition"], row["first"], row["last"] + 1) for row in rows)
    return sorted(found)


def _at(stretches: Any) -> Any:
    """A condition: rows of these offsets."""
    from pyspark.sql import functions as f

    topic, partition, offset = (f.col(f"{RECORD}.{name}") for name in _PLACE)
    found = f.lit(False)
    for each in stretches:
        is_there = (topic == each.topic) & (partition == each.partition)
        found = found | (is_there & (offset >= each.start) & (offset < each.end))
    return found


def _told(stretches: Sequence[Stretch]) -> str:
    return ", ".join(map(str, stretches))
