"""Evaluates the records of a batch in one pass: parses them, runs row functions, and decides what happens to each row.

Good and bad rows come from the same evaluation, and its result is saved before anything is written, because a row
function may give another answer the second time. `_record` is the record as it was first published, even if it was read
from a retry topic. The module also selects the columns that the transform receives, and converts the transform's output
to records.
"""

from __future__ import annotations

import random
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import functions as f
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructField, StructType

from penstock.client.deadletters.headers import Failure, is_for_group
from penstock.spark.pipelines.arrow_values import arrow_struct, struct_from_rows
from penstock.spark.pipelines.declaration import (
    DeadLetter,
    Parser,
    Pipeline,
    PipelineError,
    RowFunction,
    TopicSink,
)
from penstock.spark.pipelines.failure_topics import FailureRecord, FailureRouting
from penstock.spark.pipelines.parsers import struct_type
from penstock.spark.schema import COLUMN_TYPES

RECORD: Final = "_record"
ATTEMPTS: Final = "_attempts"
FAILURE_RECORD: Final = "_letter"
ROW_RESULT: Final = "_fate"
INTERNAL_COLUMNS: Final = (ATTEMPTS, FAILURE_RECORD, ROW_RESULT)

#: The results of a row.
GOOD: Final = 0
RETRIED: Final = 1
DEAD: Final = 2
#: A row function returned None.
DROPPED: Final = 3
#: A record in a retry topic that belongs to another group.
FOREIGN: Final = 4

_HEADERS_TYPE: Final = COLUMN_TYPES["headers"]
RECORD_FIELDS: Final = ", ".join(f"{name}: {kind}" for name, kind in COLUMN_TYPES.items())
_FAILURE_RECORD_TYPE: Final = (
    f"struct<topic: string, partition: int, headers: {_HEADERS_TYPE}, timestamp: timestamp>"
)
ADDED_COLUMNS: Final = (
    f"{RECORD} struct<{RECORD_FIELDS}>, {ATTEMPTS} int, "
    f"{FAILURE_RECORD} {_FAILURE_RECORD_TYPE}, {ROW_RESULT} tinyint"
)


class RowSchemas(NamedTuple):
    """The StructTypes of the evaluation's steps. Building them needs a Spark session."""

    #: The parser's columns; None without a parser.
    parsed: Any | None
    #: The columns of each row function.
    rows: tuple[Any, ...]
    #: The columns after the last step, without those that the evaluation adds.
    columns: Any
    evaluated: Any


def build_row_schemas(pipeline: Pipeline) -> RowSchemas:
    """Build the schemas and check their column names. Raises PipelineError."""
    what = f"pipeline {pipeline.name}"
    parsed = None
    if pipeline.parse is not None:
        parsed = _check_column_names(struct_type(pipeline.parse.schema, f"{what}, parse"), f"{what}, parse")
        pipeline.parse.prepared(parsed)
    rows = tuple(
        _check_column_names(struct_type(each.schema, f"{what}, {each.name}"), f"{what}, {each.name}")
        for each in pipeline.rows
    )
    last = rows[-1] if rows else parsed
    assert last is not None, f"{what} evaluates nothing"
    # Failed rows have no values, so all columns are nullable.
    columns = StructType([StructField(field.name, field.dataType, True) for field in last.fields])
    added = struct_type(ADDED_COLUMNS, what)
    return RowSchemas(parsed, rows, columns, StructType([*columns.fields, *added.fields]))


def _check_column_names(schema: Any, what: str) -> Any:
    names = [field.name.lower() for field in schema.fields]
    for name in names:
        if name in (RECORD, *INTERNAL_COLUMNS):
            raise PipelineError(f"{what}: a column cannot be named {name}, which is reserved")
        if names.count(name) > 1:
            raise PipelineError(f"{what}: there are two columns {name}")
    return schema


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The evaluation of a pipeline's rows. Sent to tasks."""

    parse: Parser | None
    rows: tuple[RowFunction, ...]
    row_schemas: RowSchemas
    routing: FailureRouting

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Evaluate rows of the source, for `mapInArrow`."""
        steps = _TaskEvaluation(self)
        for batch in batches:
            yield steps.evaluated(batch)


class _TaskEvaluation:
    """The evaluation inside a task, with its parser prepared."""

    def __init__(self, evaluation: Evaluation) -> None:
        self.functions = evaluation.rows
        self.kinds = [arrow_struct(each) for each in evaluation.row_schemas.rows]
        self.columns = arrow_struct(evaluation.row_schemas.columns)
        self.schema = to_arrow_schema(evaluation.row_schemas.evaluated, timezone="UTC")
        self.failure_records = _FailureRecords(evaluation.routing, self.schema)
        self.parse: Callable[[Any], Any] | None = None
        if evaluation.parse is not None:
            self.parse = evaluation.parse.prepared(evaluation.row_schemas.parsed)

    def evaluated(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        published = self.failure_records.published(batch)
        rows, failures, dropped = self._rows(batch, published.foreign)
        failure_records, row_results = self.failure_records.route(published, failures, dropped)
        columns = [*rows.flatten(), published.records, published.attempts, failure_records, row_results]
        fitted = [
            column.cast(field.type) if column.type != field.type else column
            for column, field in zip(columns, self.schema, strict=True)
        ]
        return pa.RecordBatch.from_arrays(fitted, schema=self.schema)

    def _rows(
        self, batch: pa.RecordBatch, foreign: frozenset[int]
    ) -> tuple[pa.StructArray, dict[int, _RowFailure], set[int]]:
        """Return the rows after all steps, the failures by row number, and the numbers of dropped rows."""
        failures: dict[int, _RowFailure] = {}
        rows: Any = batch.to_struct_array()
        if self.parse is not None:
            parsed = self.parse(batch.column("value"))
            rows = parsed.rows
            failures = {
                number: _RowFailure(Failure(error_class="ParseError", message=error), is_retriable=False)
                for number, error in parsed.errors.items()
                if number not in foreign
            }
        if not self.functions:
            return rows, failures, set()
        return self._called(rows, failures, foreign)

    def _called(
        self, rows: Any, failures: dict[int, _RowFailure], foreign: frozenset[int]
    ) -> tuple[pa.StructArray, dict[int, _RowFailure], set[int]]:
        dropped: set[int] = set()
        current: list[dict[str, Any] | None] = rows.to_pylist()
        for number in (*failures, *foreign):
            current[number] = None
        made = rows
        for function, kind in zip(self.functions, self.kinds, strict=True):
            for number, row in enumerate(current):
                if row is not None:
                    current[number] = _call(function, row, number, failures, dropped)
            errors: dict[int, str] = {}
            made = struct_from_rows(current, kind, errors).rows
            for number, error in errors.items():
                message = f"{function.name} returned a row that does not fit its columns: {error}"
                failure = Failure(error_class="TypeError", message=message)
                failures[number] = _RowFailure(failure, is_retriable=False)
        return made, failures, dropped


class _RowFailure(NamedTuple):
    failure: Failure
    is_retriable: bool


def _call(
    function: RowFunction,
    row: dict[str, Any],
    number: int,
    failures: dict[int, _RowFailure],
    dropped: set[int],
) -> dict[str, Any] | None:
    try:
        found = function.call(row)
        if found is not None:
            return dict(found)
        dropped.add(number)
    except ImportError:
        raise  # every row would fail in the same way until the module is installed, so fail the batch
    except Exception as error:
        failures[number] = _RowFailure(failure_from_exception(error), not isinstance(error, DeadLetter))
    return None


def failure_from_exception(error: BaseException) -> Failure:
    """Return the failure, with a stack trace that leaves out the frames of this module."""
    stack = error.__traceback__
    while stack is not None and stack.tb_frame.f_globals.get("__name__") == __name__:
        stack = stack.tb_next
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return Failure(
        error_class=name,
        message=str(error) or kind.__qualname__,
        stack="".join(traceback.format_exception(kind, error, stack)),
    )


# Records and their failure records


class _PublishedRecords(NamedTuple):
    batch: Any
    #: The records as they were first published.
    records: Any
    #: How often each record was tried, including this time.
    attempts: Any
    #: Row numbers of retries that belong to other groups.
    foreign: frozenset[int]
    #: Row number -> origin, for records from retry topics.
    origins: dict[int, Any]


class _FailureRecords:
    def __init__(self, routing: FailureRouting, schema: pa.Schema) -> None:
        self.routing = routing
        self.record_type = schema.field(RECORD).type
        self.failure_record_type = schema.field(FAILURE_RECORD).type
        self.chance = random.Random()

    def published(self, batch: pa.RecordBatch) -> _PublishedRecords:
        origins, foreign = self._retries(batch)
        attempts = np.ones(batch.num_rows, np.int32)
        columns = {name: batch.column(name) for name in COLUMN_TYPES}
        if origins:
            for number, origin in origins.items():
                attempts[number] = origin.attempts + 1
            columns |= self._original(batch, origins)
        arrays = [columns[field.name].cast(field.type) for field in self.record_type]
        records = pa.StructArray.from_arrays(arrays, fields=list(self.record_type))
        return _PublishedRecords(batch, records, pa.array(attempts), foreign, origins)

    def _retries(self, batch: pa.RecordBatch) -> tuple[dict[int, Any], frozenset[int]]:
        if not self.routing.retries:
            return {}, frozenset()
        known = pa.array(list(self.routing.retries), pa.string())
        origins, foreign = {}, []
        for number in pc.indices_nonzero(pc.is_in(batch.column("topic"), known)).to_pylist():
            record = _record_for_routing(batch, number)
            origins[number] = self.routing.read_origin(record)
            if not is_for_group(record["headers"], self.routing.group):
                foreign.append(number)
        return origins, frozenset(foreign)

    def _original(self, batch: pa.RecordBatch, origins: dict[int, Any]) -> dict[str, Any]:
        """Return the columns topic, partition, offset, timestamp and headers as records were first published."""
        values = {
            name: batch.column(name).to_pylist() for name in ("topic", "partition", "offset", "headers")
        }
        times = _milliseconds(batch.column("timestamp")).to_pylist()
        for number, origin in origins.items():
            headers = _header_pairs(values["headers"][number])
            own = self.routing.own_headers(values["topic"][number], headers)
            values["headers"][number] = _header_rows(own)
            values["topic"][number], values["partition"][number] = origin.topic, origin.partition
            values["offset"][number], times[number] = origin.offset, origin.timestamp_ms
        columns = {name: pa.array(each, self.record_type.field(name).type) for name, each in values.items()}
        columns["timestamp"] = pa.array([_microseconds(at) for at in times], pa.timestamp("us", "UTC"))
        return columns

    def route(
        self, published: _PublishedRecords, failures: dict[int, _RowFailure], dropped: set[int]
    ) -> tuple[Any, Any]:
        """Return the failure records, null for most rows, and the result of each row."""
        row_results = np.zeros(published.batch.num_rows, np.int8)
        row_results[sorted(dropped)] = DROPPED
        row_results[sorted(published.foreign)] = FOREIGN
        found: list[dict[str, Any] | None] = [None] * published.batch.num_rows
        now_ms = int(time.time() * 1000)
        for number, failed in failures.items():
            failure_record = self._failure_record(published, number, failed, now_ms)
            row_results[number] = RETRIED if failure_record.is_retry else DEAD
            found[number] = failure_record_row(failure_record)
        return pa.array(found, self.failure_record_type), pa.array(row_results)

    def _failure_record(
        self, published: _PublishedRecords, number: int, failed: _RowFailure, now_ms: int
    ) -> FailureRecord:
        record = _record_for_routing(published.batch, number)
        return self.routing.failure_record(
            published.origins.get(number) or self.routing.read_origin(record),
            self.routing.source_of(record["topic"]),
            self.routing.own_headers(record["topic"], record["headers"]),
            failed.failure,
            is_retriable=failed.is_retriable,
            now_ms=now_ms,
            chance=self.chance,
        )


def failure_record_row(failure_record: FailureRecord) -> dict[str, Any]:
    """Return a failure record as a value of its Arrow column."""
    due_ms = failure_record.timestamp_ms
    return {
        "topic": failure_record.topic,
        "partition": failure_record.partition,
        "headers": _header_rows(failure_record.headers),
        "timestamp": None if due_ms is None else _microseconds(due_ms),
    }


def _record_for_routing(batch: pa.RecordBatch, number: int) -> dict[str, Any]:
    """Return the fields of a record that `FailureRouting` needs."""
    found = {name: batch.column(name)[number].as_py() for name in ("topic", "partition", "offset")}
    time_ms = _milliseconds(batch.column("timestamp").slice(number, 1))[0].as_py()
    return found | {
        "timestamp_ms": -1 if time_ms is None else time_ms,
        "headers": _header_pairs(batch.column("headers")[number].as_py()),
    }


def _milliseconds(column: pa.Array) -> pa.Array:
    return pc.divide(column.cast(pa.int64()), 1000)


def _microseconds(time_ms: int | None) -> int | None:
    return None if time_ms is None else time_ms * 1000


def _header_pairs(rows: Any) -> list[tuple[str, bytes | None]] | None:
    return None if rows is None else [(row["key"], row["value"]) for row in rows]


def _header_rows(headers: Any) -> list[dict[str, Any]] | None:
    return None if headers is None else [{"key": name, "value": value} for name, value in headers]


#: Becomes the timestamp of records. Null means the time at which they are written.
TIMESTAMP_COLUMN: Final = "timestamp"
_RECORD_COLUMNS: Final = ("key", "headers", "topic", "partition")
_TEXT_TYPES: Final = ("string", "binary")
#: Formats timestamps with microseconds, so that they are the same when they are read again.
JSON_FORMAT: Final = {
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}


def as_evaluated_rows(frame: Any) -> Any:
    """Return rows of the source as good rows, for a pipeline that does not evaluate rows."""
    record = f.struct(*[f.col(name) for name in COLUMN_TYPES]).alias(RECORD)
    return frame.select(
        record,
        f.lit(1).alias(ATTEMPTS),
        f.lit(None).cast(_FAILURE_RECORD_TYPE).alias(FAILURE_RECORD),
        f.lit(GOOD).cast("tinyint").alias(ROW_RESULT),
    )


def good_rows(pipeline: Pipeline, evaluated: Any) -> Any:
    """Return the good rows with the columns that the transform receives."""
    good = evaluated.where(f.col(ROW_RESULT) == GOOD)
    return good.drop(*INTERNAL_COLUMNS) if pipeline.evaluates else good.select(f"{RECORD}.*")


def failure_records(evaluated: Any) -> Any:
    """Return the failed rows as records for retry and dead-letter topics."""
    return evaluated.where(f.col(FAILURE_RECORD).isNotNull()).select(
        f.col(f"{FAILURE_RECORD}.topic").alias("topic"),
        f.col(f"{FAILURE_RECORD}.partition").alias("partition"),
        f.col(f"{RECORD}.key").alias("key"),
        f.col(f"{RECORD}.value").alias("value"),
        f.col(f"{FAILURE_RECORD}.headers").alias("headers"),
        f.col(f"{FAILURE_RECORD}.timestamp").alias(TIMESTAMP_COLUMN),
    )


def output_records(pipeline: Pipeline, output: Any, sink: TopicSink) -> Any:
    """Return the output as records, with the same columns as `failure_records`.

    Raises PipelineError if the type of a column cannot be written.
    """
    kinds = {field.name.lower(): field for field in output.schema.fields}
    whole = None if "value" in kinds or RECORD not in kinds else RECORD
    _refuse_type(pipeline, kinds, "value", _TEXT_TYPES)
    _refuse_type(pipeline, kinds, "key", _TEXT_TYPES)
    _refuse_type(pipeline, kinds, "headers", (_HEADERS_TYPE,))
    _refuse_type(pipeline, kinds, "partition", ("int",))
    _refuse_type(pipeline, kinds, "topic", ("string",))
    if sink.topic is None and "topic" not in kinds:
        raise PipelineError(
            f"pipeline {pipeline.name}: no topic to write to: name one, or add a column topic"
        )
    topic = f.lit(sink.topic) if sink.topic is not None else f.col("topic")
    return output.select(
        topic.cast("string").alias("topic"),
        _output_column(kinds, "partition", None).cast("int").alias("partition"),
        _output_column(kinds, "key", whole).cast("binary").alias("key"),
        _output_value(output, kinds).cast("binary").alias("value"),
        _output_column(kinds, "headers", whole).cast(_HEADERS_TYPE).alias("headers"),
        f.lit(None).cast("timestamp").alias(TIMESTAMP_COLUMN),
    )


def _refuse_type(pipeline: Pipeline, kinds: dict[str, Any], name: str, wanted: tuple[str, ...]) -> None:
    if name not in kinds:
        return
    kind = kinds[name].dataType.simpleString().split(" collate ")[0]
    if kind not in wanted:
        raise PipelineError(
            f"pipeline {pipeline.name}: column {name} is {kind}; it must be {' or '.join(wanted)} to be written"
        )


def _output_column(kinds: dict[str, Any], name: str, whole: str | None) -> Any:
    if name in kinds:
        return f.col(f"`{kinds[name].name}`")
    return f.lit(None) if whole is None else f.col(f"{whole}.{name}")


def _output_value(output: Any, kinds: dict[str, Any]) -> Any:
    """Return the column `value` if there is one, or all columns as JSON."""
    if "value" in kinds:
        return f.col(f"`{kinds['value'].name}`")
    names = [name for name in output.columns if name.lower() not in (*_RECORD_COLUMNS, RECORD)]
    if not names:
        return f.lit("{}")
    return f.to_json(f.struct(*[f.col(f"`{name}`") for name in names]), JSON_FORMAT)
