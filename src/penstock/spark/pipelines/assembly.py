"""Starts a declared pipeline as streaming queries.

It creates the topics, checks the transform with an empty frame, and passes options to sources and sinks.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from pyspark.errors import PySparkException
from pyspark.sql import functions as f
from pyspark.sql.types import StructType

from penstock.client.deadletters.headers import is_failure_topic
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.metadata import TopicInfo
from penstock.client.wire.offsets import EARLIEST, LATEST, committed_offsets, list_offsets
from penstock.client.wire.topics import NewTopic, ensure_topic
from penstock.protocol.backoff import ExponentialBackoff
from penstock.spark import register
from penstock.spark.at_most_once.task_claims import refuse_speculation
from penstock.spark.exactly_once.decisions import MicroBatch
from penstock.spark.option_reader import numbers_by_partition
from penstock.spark.pipelines import checkpoints, evaluator, failure_topics
from penstock.spark.pipelines.batch import BatchRunner
from penstock.spark.pipelines.declaration import (
    BatchSink,
    Pipeline,
    PipelineError,
    RunSettings,
    Source,
    TopicSink,
)
from penstock.spark.pipelines.evaluator import RECORD, RowSchemas, build_row_schemas
from penstock.spark.pipelines.failure_topics import FailureRouting
from penstock.spark.pipelines.queries import first_line
from penstock.spark.schema import table_schema
from penstock.spark.session import local_checkpoints
from penstock.spark.sink.options import Contract

_EDGES: Final = {"earliest": EARLIEST, "latest": LATEST}
_QUERY: Final = "query"
_ROWS: Final = "rows"
_NO_ROUTING: Final = FailureRouting(group="", attempts_max=1, backoff=ExponentialBackoff())


def start(spark: Any, pipeline: Pipeline, run: RunSettings) -> tuple[Any, ...]:
    """Start the streaming queries. Raises PipelineError, Unavailable, Refused; then no query runs."""
    register(spark)
    if pipeline.delivery is Contract.AT_MOST_ONCE:
        refuse_speculation(spark.conf.get("spark.speculation", "false"))
    row_schemas = build_row_schemas(pipeline) if pipeline.evaluates else None
    with run.cluster() as cluster:
        if pipeline.stateful:
            return _start_stateful(spark, pipeline, run, row_schemas, cluster)
        topics = failure_topics.source_topics(cluster, pipeline)
        _try_transform(spark, pipeline, row_schemas)
        _prepare(spark, pipeline, run)
        routing = failure_topics.ensure_failure_topics(cluster, pipeline, topics)
        frame = _source(
            spark, pipeline, run, routing, _starting_options(cluster, pipeline, run, routing, topics)
        )
        batches = BatchRunner(pipeline, run, row_schemas, routing, checkpoint=_folder(run, _QUERY))
        return (_start_batches(frame, pipeline, run, batches, pipeline.name, _QUERY),)


def _prepare(spark: Any, pipeline: Pipeline, run: RunSettings) -> None:
    if pipeline.sink is not None and not isinstance(pipeline.sink, TopicSink):
        pipeline.sink.prepare(spark, run)


# Checking the transform


def _try_transform(spark: Any, pipeline: Pipeline, row_schemas: RowSchemas | None) -> None:
    """Apply the transform to an empty frame. Raises PipelineError."""
    schema = row_schemas.evaluated if row_schemas is not None else table_schema(include_headers=True)
    empty = spark.createDataFrame([], schema)
    evaluated = empty if row_schemas is not None else evaluator.as_evaluated_rows(empty)
    _checked_output(pipeline, evaluator.good_rows(pipeline, evaluated))


def _checked_output(pipeline: Pipeline, rows: Any) -> Any:
    try:
        output = pipeline(rows)
        if not hasattr(output, "schema"):
            raise PipelineError(
                f"pipeline {pipeline.name}: its function returned {output!r}, not a DataFrame"
            )
        output.schema  # noqa: B018
    except PipelineError:
        raise
    except PySparkException as error:
        raise PipelineError(f"pipeline {pipeline.name}: {first_line(error)}") from None
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        raise PipelineError(
            f"pipeline {pipeline.name}: its function fails on an empty DataFrame: {message}"
        ) from error
    if isinstance(pipeline.sink, TopicSink):
        evaluator.output_records(pipeline, output, pipeline.sink)
    return output


# Sources


def _source(
    spark: Any, pipeline: Pipeline, run: RunSettings, routing: FailureRouting, starting: Mapping[str, str]
) -> Any:
    if pipeline.source.pattern is not None:
        names = "|".join(map(re.escape, routing.retries))
        pattern = failure_topics.source_pattern(pipeline)
        subscription = {"subscribePattern": f"{pattern}|{names}" if names else pattern}
    else:
        subscription = {"subscribe": ",".join([*pipeline.source.topics, *routing.retries])}
    given = {
        **run.options(),
        "includeHeaders": "true",
        "kafka.isolation.level": "read_committed",
        **pipeline.source.options,
        **subscription,
        **starting,
        "kafka.group.id": pipeline.group,
        "contract": pipeline.delivery.value,
        **({"readWhenDue": ",".join(routing.retries)} if routing.retries else {}),
    }
    return spark.readStream.format("penstock").options(**given).load()


def _starting_options(
    cluster: Cluster,
    pipeline: Pipeline,
    run: RunSettings,
    routing: FailureRouting,
    topics: Mapping[str, TopicInfo],
) -> dict[str, str]:
    """Return the options that say where to start without a checkpoint. Retry topics continue at the group's offsets.

    Raises PipelineError.
    """
    asked = (run.starting or pipeline.source.starting).strip()
    if asked.isdecimal():
        at_time = {"startingTimestamp": asked, "startingOffsetsByTimestampStrategy": "latest"}
        if not routing.retries or pipeline.source.pattern is not None:
            return at_time
    elif asked.lower() in _EDGES:
        if not routing.retries or pipeline.source.pattern is not None:
            return {"startingOffsets": asked.lower()}
    elif not asked.startswith("{"):
        raise PipelineError(
            f"pipeline {pipeline.name}: it cannot start at {asked!r}; use earliest, latest, milliseconds since 1970, "
            'or {"topic": {"0": 23}}'
        )
    offsets = _offsets(cluster, pipeline, asked, topics)
    for name in routing.retries:
        partitions = [(name, index) for index in range(routing.partitions[name])]
        known = committed_offsets(cluster, pipeline.group, partitions, stable=False)
        offsets |= {tp: known[tp].offset if tp in known else EARLIEST for tp in partitions}
    by_topic: dict[str, dict[str, int]] = {}
    for (topic, partition), offset in offsets.items():
        by_topic.setdefault(topic, {})[str(partition)] = offset
    return {"startingOffsets": json.dumps(by_topic)}


def _offsets(
    cluster: Cluster, pipeline: Pipeline, asked: str, topics: Mapping[str, TopicInfo]
) -> dict[tuple[str, int], int]:
    partitions = [(name, part.index) for name, info in topics.items() for part in info.partitions]
    if asked.lower() in _EDGES:
        return dict.fromkeys(partitions, _EDGES[asked.lower()])
    if asked.isdecimal():
        found = list_offsets(cluster, dict.fromkeys(partitions, int(asked)))
        return {tp: LATEST if at is None else at.offset for tp, at in found.items()}
    given = numbers_by_partition("starting", asked, least=EARLIEST)
    # The group's offsets say where to continue in retry topics.
    named = [tp for tp in given if not is_failure_topic(tp[0])]
    return {tp: given.get(tp, EARLIEST) for tp in (*partitions, *named)}


# Queries


def _start_batches(
    frame: Any, pipeline: Pipeline, run: RunSettings, batches: Any, name: str, folder: str
) -> Any:
    writer = frame.writeStream.queryName(name).foreachBatch(batches)
    return _start_query(frame.sparkSession, writer, pipeline, run, folder)


def _folder(run: RunSettings, name: str) -> str:
    return f"{run.checkpoint}/{name}"


def _start_query(spark: Any, writer: Any, pipeline: Pipeline, run: RunSettings, folder: str) -> Any:
    checkpoint = _folder(run, folder)
    writer = writer.option("checkpointLocation", checkpoint)
    if pipeline.available_now or run.once:
        writer = writer.trigger(availableNow=True)
    else:
        writer = writer.trigger(processingTime=f"{pipeline.every_ms} milliseconds")
    with local_checkpoints(spark, checkpoint):
        return writer.start()


# Stateful pipelines


def _start_stateful(
    spark: Any, pipeline: Pipeline, run: RunSettings, row_schemas: RowSchemas | None, cluster: Cluster
) -> tuple[Any, ...]:
    """Start two queries if rows are evaluated. The first one removes failed rows: a state cannot forget a row again."""
    topics = failure_topics.source_topics(cluster, pipeline)
    if row_schemas is None:
        options = _starting_options(cluster, pipeline, run, _NO_ROUTING, topics)
        frame = _source(spark, pipeline, run, _NO_ROUTING, options)
        output = _checked_output(pipeline, frame)
        _prepare(spark, pipeline, run)
        return (_start_stateful_query(output, pipeline, run),)
    between = _rows_topic(pipeline, run)
    rows = _rows_frame(spark, pipeline, run, row_schemas, between)
    output = _checked_output(pipeline, rows)
    _prepare(spark, pipeline, run)
    routing = failure_topics.ensure_failure_topics(cluster, pipeline, topics)
    count = max((len(info.partitions) for info in topics.values()), default=1)
    ensure_topic(cluster, NewTopic(name=between, partitions=count))
    frame = _source(spark, pipeline, run, routing, _starting_options(cluster, pipeline, run, routing, topics))
    first = _row_pipeline(pipeline, between)
    batches = BatchRunner(first, run, row_schemas, routing, checkpoint=_folder(run, _ROWS))
    before = _start_batches(frame, pipeline, run, batches, f"{pipeline.name}-{_ROWS}", _ROWS)
    try:
        return before, _start_stateful_query(output, pipeline, run)
    except BaseException:
        before.stop()
        raise


def _rows_topic(pipeline: Pipeline, run: RunSettings) -> str:
    """Return the topic between the two queries. Each checkpoint has another one, so that no old rows are read."""
    return f"{pipeline.name}.{_ROWS}.{hashlib.sha256(run.checkpoint.encode()).hexdigest()[:8]}"


def _row_pipeline(pipeline: Pipeline, between: str) -> Pipeline:
    """Return the first pipeline: up to the row functions, with rows as JSON in place of the transform's output."""

    def as_json(rows: Any) -> Any:
        whole = f.to_json(f.struct(*[f.col(f"`{name}`") for name in rows.columns]), evaluator.JSON_FORMAT)
        return rows.select(whole.alias("value"), f.col(f"{RECORD}.key").alias("key"))

    return replace(pipeline, stateful=False, transform=as_json, sink=TopicSink(topic=between))


def _rows_frame(
    spark: Any, pipeline: Pipeline, run: RunSettings, row_schemas: RowSchemas, between: str
) -> Any:
    """Return the rows that the first query has written, as the transform expects them."""

    record = row_schemas.evaluated[RECORD]
    whole = StructType([*row_schemas.columns.fields, record])
    source = replace(pipeline, source=Source(topics=(between,)), delivery=Contract.AT_LEAST_ONCE)
    frame = _source(spark, source, run, _NO_ROUTING, {"startingOffsets": "earliest"})
    parsed = f.from_json(f.col("value").cast("string"), whole, {**evaluator.JSON_FORMAT, "mode": "FAILFAST"})
    return frame.select(parsed.alias(_ROWS)).select(f"{_ROWS}.*")


def _start_stateful_query(output: Any, pipeline: Pipeline, run: RunSettings) -> Any:
    name = pipeline.name
    sink = pipeline.sink
    if isinstance(sink, TopicSink):
        rows = evaluator.output_records(pipeline, output, sink).drop(evaluator.TIMESTAMP_COLUMN)
        given = {**run.options(), **sink.options, "contract": pipeline.delivery.value}
        writer = rows.writeStream.format("penstock").options(**given).outputMode(pipeline.output_mode)
        return _start_query(output.sparkSession, writer.queryName(name), pipeline, run, _QUERY)
    if sink is None:
        writer = output.writeStream.format("noop").outputMode(pipeline.output_mode)
        return _start_query(output.sparkSession, writer.queryName(name), pipeline, run, _QUERY)
    writer = output.writeStream.foreachBatch(StatefulBatchRunner(sink, _folder(run, _QUERY))).outputMode(
        pipeline.output_mode
    )
    return _start_query(output.sparkSession, writer.queryName(name), pipeline, run, _QUERY)


class StatefulBatchRunner:
    """Writes batches in `foreachBatch`. Rows are held, because a state can be computed only once for a batch."""

    def __init__(self, sink: BatchSink, checkpoint: str) -> None:
        self.sink = sink
        self.checkpoint = checkpoint
        self._query: str | None = None

    def __call__(self, rows: Any, number: int) -> None:
        if self._query is None:
            self._query = checkpoints.query_id(rows.sparkSession, self.checkpoint)
        held = rows.localCheckpoint(eager=True)
        try:
            self.sink.write(held, MicroBatch(self._query, number))
        finally:
            checkpoints.release_local_checkpoint(held)
