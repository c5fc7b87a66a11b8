"""One pass over the records of a batch: parse, run row functions, and say of each row what becomes of it.

Good and bad rows come from the same evaluation, whose result is kept before anything is written: row functions need not
give the same answer twice. `_record` is the record as it was published, also where it comes from a retry topic.
"""

from __future__ import annotations

import random
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.client.letters import Failure, is_for
from penstock.spark.pipelines.declaration import DeadLetter, Parser, Pipeline, PipelineError, RowFunction
from penstock.spark.pipelines.parsing import struct_type
from penstock.spark.pipelines.parsing_columns import arrow_struct, to_struct
from penstock.spark.pipelines.routing import Letter, Routing
from penstock.spark.schemas import TYPES

if TYPE_CHECKING:
    import pyarrow as pa

RECORD: Final = "_record"
ATTEMPTS: Final = "_attempts"
LETTER: Final = "_letter"
FATE: Final = "_fate"
INTERNAL: Final = (ATTEMPTS, LETTER, FATE)

#: What becomes of a row.
GOOD: Final = 0
RETRIED: Final = 1
DEAD: Final = 2
#: A row function wants no more of it.
DROPPED: Final = 3
#: A retry that is another group's.
FOREIGN: Final = 4

RECORD_FIELDS: Final = ", ".join(f"{name}: {kind}" for name, kind in TYPES.items())
_LETTER_TYPE: Final = (
    f"struct<topic: string, partition: int, headers: {TYPES['headers']}, timestamp: timestamp>"
)
ADDED: Final = f"{RECORD} struct<{RECORD_FIELDS}>, {ATTEMPTS} int, {LETTER} {_LETTER_TYPE}, {FATE} tinyint"


class Shapes(NamedTuple):
    """StructTypes, looked up where there is a session."""

    #: What the parser makes; None without one.
    parsed: Any | None
    #: What each row function makes.
    rows: tuple[Any, ...]
    #: What is there at the end, without what is added.
    columns: Any
    evaluated: Any


def shapes_of(pipeline: Pipeline) -> Shapes:
    """Raises PipelineError."""
    from pyspark.sql.types import StructType

    what = f"pipeline {pipeline.name}"
    parsed = None
    if pipeline.parse is not None:
        parsed = _checked(struct_type(pipeline.parse.schema, f"{what}, parse"), f"{what}, parse")
        pipeline.parse.prepared(parsed)
    rows = tuple(
        _checked(struct_type(each.schema, f"{what}, {each.name}"), f"{what}, {each.name}")
        for each in pipeline.rows
    )
    last = rows[-1] if rows else parsed
    assert last is not None, f"{what} evaluates nothing"
    columns = _nullable(last)
    added = struct_type(ADDED, what)
    return Shapes(parsed, rows, columns, StructType([*columns.fields, *added.fields]))


def _checked(schema: Any, what: str) -> Any:
    names = [field.name.lower() for field in schema.fields]
    for name in names:
        if name in (RECORD, *INTERNAL):
            raise PipelineError(
                f"{what}: a column cannot be called {name}, which is used for the record itself"
            )
        if names.count(name) > 1:
            raise PipelineError(f"{what}: there are two columns {name}")
    return schema


def _nullable(schema: Any) -> Any:
    """Rows that failed have no values."""
    from pyspark.sql.types import StructField, StructType

    return StructType([StructField(field.name, field.dataType, True) for field in schema.fields])


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Sent to tasks."""

    parse: Parser | None
    rows: tuple[RowFunction, ...]
    shapes: Shapes
    routing: Routing

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """For `mapInArrow`, with rows of the source."""
        steps = _Steps(self)
        for batch in batches:
            yield steps.evaluated(batch)


class _Steps:
    """An evaluation in the process where it happens."""

    def __init__(self, evaluation: Evaluation) -> None:
        from pyspark.sql.pandas.types import to_arrow_schema

        self.functions = evaluation.rows
        self.kinds = [arrow_struct(each) for each in evaluation.shapes.rows]
        self.columns = arrow_struct(evaluation.shapes.columns)
        self.schema = to_arrow_schema(evaluation.shapes.evaluated, timezone="UTC")
        self.letters = _Letters(evaluation.routing, self.schema)
        self.parse: Callable[[Any], Any] | None = None
        if evaluation.parse is not None:
            self.parse = evaluation.parse.prepared(evaluation.shapes.parsed)

    def evaluated(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        arrivals = self.letters.arrive(batch)
        rows, failures, dropped = self._rows(batch, arrivals.foreign)
        letters, fates = self.letters.route(arrivals, failures, dropped)
        import pyarrow as pa

        columns = [*rows.flatten(), arrivals.records, arrivals.attempts, letters, fates]
        fitted = [
            column.cast(field.type) if column.type != field.type else column
            for column, field in zip(columns, self.schema, strict=True)
        ]
        return pa.RecordBatch.from_arrays(fitted, schema=self.schema)

    def _rows(
        self, batch: pa.RecordBatch, foreign: frozenset[int]
    ) -> tuple[pa.StructArray, dict[int, _Failed], set[int]]:
        """What all steps make of them, with those that failed and those that were dropped on the way."""
        failures: dict[int, _Failed] = {}
        rows: Any = batch.to_struct_array()
        if self.parse is not None:
            parsed = self.parse(batch.column("value"))
            rows = parsed.rows
            failures = {
                number: _Failed(Failure(error_class="ParseError", message=error), is_retriable=False)
                for number, error in parsed.errors.items()
                if number not in foreign
            }
        if not self.functions:
            return rows, failures, set()
        return self._called(rows, failures, foreign)

    def _called(
        self, rows: Any, failures: dict[int, _Failed], foreign: frozenset[int]
    ) -> tuple[pa.StructArray, dict[int, _Failed], set[int]]:
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
            made = to_struct(current, kind, errors).rows
            for number, error in errors.items():
                failures[number] = _misfit(function, error)
        return made, failures, dropped


class _Failed(NamedTuple):
    failure: Failure
    is_retriable: bool


def _call(
    function: RowFunction,
    row: dict[str, Any],
    number: int,
    failures: dict[int, _Failed],
    dropped: set[int],
) -> dict[str, Any] | None:
    try:
        found = function.call(row)
        if found is not None:
            return dict(found)
        dropped.add(number)
    except ImportError:
        raise  # every row would fail in the same way, until the module is installed
    except Exception as error:
        failures[number] = _Failed(failure_of(error), not isinstance(error, DeadLetter))
    return None


def failure_of(error: BaseException) -> Failure:
    """With the part of the stack that is not ours."""
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


def _misfit(function: RowFunction, error: str) -> _Failed:
    message = f"{function.name} returned what does not fit its columns: {error}"
    return _Failed(Failure(error_class="TypeError", message=message), is_retriable=False)


# Records and their letters


class _Arrivals(NamedTuple):
    batch: Any
    #: As they were published.
    records: Any
    #: How often each was tried, with this time.
    attempts: Any
    #: By number: retries of other groups.
    foreign: frozenset[int]
    #: By number: those that come from retry topics.
    origins: dict[int, Any]


class _Letters:
    def __init__(self, routing: Routing, schema: pa.Schema) -> None:
        self.routing = routing
        self.record_type = schema.field(RECORD).type
        self.letter_type = schema.field(LETTER).type
        self.chance = random.Random()

    def arrive(self, batch: pa.RecordBatch) -> _Arrivals:
        import numpy as np
        import pyarrow as pa

        origins, foreign = self._retries(batch)
        attempts = np.ones(batch.num_rows, np.int32)
        columns = {name: batch.column(name) for name in TYPES}
        if origins:
            for number, origin in origins.items():
                attempts[number] = origin.attempts + 1
            columns |= self._original(batch, origins)
        arrays = [columns[field.name].cast(field.type) for field in self.record_type]
        records = pa.StructArray.from_arrays(arrays, fields=list(self.record_type))
        return _Arrivals(batch, records, pa.array(attempts), foreign, origins)

    def _retries(self, batch: pa.RecordBatch) -> tuple[dict[int, Any], frozenset[int]]:
        import pyarrow as pa
        import pyarrow.compute as pc

        if not self.routing.retries:
            return {}, frozenset()
        known = pa.array(list(self.routing.retries), pa.string())
        origins, foreign = {}, []
        for number in pc.indices_nonzero(pc.is_in(batch.column("topic"), known)).to_pylist():
            record = _record(batch, number)
            origins[number] = self.routing.arrival(record)
            if not is_for(record["headers"], self.routing.group):
                foreign.append(number)
        return origins, frozenset(foreign)

    def _original(self, batch: pa.RecordBatch, origins: dict[int, Any]) -> dict[str, Any]:
        """Columns that say where and how records were published; others stay as they are."""
        import pyarrow as pa

        told = {name: batch.column(name).to_pylist() for name in ("topic", "partition", "offset", "headers")}
        times = _milliseconds(batch.column("timestamp")).to_pylist()
        for number, origin in origins.items():
            headers = _headers(told["headers"][number])
            own = self.routing.own_headers(told["topic"][number], headers)
            told["headers"][number] = _header_rows(own)
            told["topic"][number], told["partition"][number] = origin.topic, origin.partition
            told["offset"][number], times[number] = origin.offset, origin.timestamp_ms
        columns = {name: pa.array(values, self.record_type.field(name).type) for name, values in told.items()}
        columns["timestamp"] = pa.array([_microseconds(at) for at in times], pa.timestamp("us", "UTC"))
        return columns

    def route(self, arrivals: _Arrivals, failures: dict[int, _Failed], dropped: set[int]) -> tuple[Any, Any]:
        """The letters, null for most rows, and what becomes of each."""
        import numpy as np
        import pyarrow as pa

        fates = np.zeros(arrivals.batch.num_rows, np.int8)
        fates[sorted(dropped)] = DROPPED
        fates[sorted(arrivals.foreign)] = FOREIGN
        letters: list[dict[str, Any] | None] = [None] * arrivals.batch.num_rows
        now_ms = int(time.time() * 1000)
        for number, failed in failures.items():
            letter = self._letter(arrivals, number, failed, now_ms)
            fates[number] = RETRIED if letter.is_retry else DEAD
            letters[number] = letter_row(letter)
        return pa.array(letters, self.letter_type), pa.array(fates)

    def _letter(self, arrivals: _Arrivals, number: int, failed: _Failed, now_ms: int) -> Letter:
        record = _record(arrivals.batch, number)
        return self.routing.letter(
            arrivals.origins.get(number) or self.routing.arrival(record),
            self.routing.source_of(record["topic"]),
            self.routing.own_headers(record["topic"], record["headers"]),
            failed.failure,
            is_retriable=failed.is_retriable,
            now_ms=now_ms,
            chance=self.chance,
        )


def letter_row(letter: Letter) -> dict[str, Any]:
    """As a row of the column of letters, for Arrow."""
    due_ms = letter.timestamp_ms
    return {
        "topic": letter.topic,
        "partition": letter.partition,
        "headers": _header_rows(letter.headers),
        "timestamp": None if due_ms is None else _microseconds(due_ms),
    }


def _record(batch: pa.RecordBatch, number: int) -> dict[str, Any]:
    """What routing asks for."""
    found = {name: batch.column(name)[number].as_py() for name in ("topic", "partition", "offset")}
    time_ms = _milliseconds(batch.column("timestamp").slice(number, 1))[0].as_py()
    return found | {
        "timestamp_ms": -1 if time_ms is None else time_ms,
        "headers": _headers(batch.column("headers")[number].as_py()),
    }


def _milliseconds(column: pa.Array) -> pa.Array:
    import pyarrow as pa
    import pyarrow.compute as pc

    return pc.divide(column.cast(pa.int64()), 1000)


def _microseconds(time_ms: int | None) -> int | None:
    return None if time_ms is None else time_ms * 1000


def _headers(rows: Any) -> list[tuple[str, bytes | None]] | None:
    return None if rows is None else [(row["key"], row["value"]) for row in rows]


def _header_rows(headers: Any) -> list[dict[str, Any]] | None:
    return None if headers is None else [{"key": name, "value": value} for name, value in headers]
