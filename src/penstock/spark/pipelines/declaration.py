"""What a pipeline is: a function of rows, and all that is to be known to run it. Pure, and needs no Spark to import.

@row_function("id STRING, total DOUBLE")
def price(order: dict) -> dict | None: ...

@pipeline("clean-orders", source="orders", sink="orders.clean", delivery="exactly-once",
          parse=json_rows("id STRING, amount DOUBLE"), rows=[price])
def clean(orders: DataFrame) -> DataFrame:
    return orders.where("total > 0")
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, runtime_checkable

from penstock.client.errors import ClientError
from penstock.client.retrying import Backoff
from penstock.spark.decisions import MicroBatch
from penstock.spark.option_values import GivenOptions, OptionError
from penstock.spark.pipelines.settings import RunSettings
from penstock.spark.sink_options import Contract

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_TOPIC: Final = re.compile(r"[A-Za-z0-9._-]{1,249}")
_GROUP_PREFIX: Final = "penstock-pipeline-"
_EVERY: Final = "every"
_OUTPUT_MODES: Final = ("append", "update")
_BACKOFF: Final = Backoff(base_ms=1_000, cap_ms=300_000)

#: A DataFrame to a DataFrame.
Transform = Callable[[Any], Any]


class PipelineError(ClientError):
    """A pipeline is declared in a way that cannot work: running it again does not help."""


class BatchError(ClientError):
    """A batch of a pipeline has failed, for a reason that may pass."""


class DeadLetter(Exception):
    """Raise it in a row function for a row that need not be tried again."""


# What rows go through


class Parser(Protocol):
    """Makes columns of values. Sent to other processes, so it holds nothing but values."""

    @property
    def schema(self) -> str:
        """The columns, as DDL or JSON of Spark."""

    def prepared(self, schema: Any) -> Callable[[Any], Parsed]:
        """What parses an Arrow array of values in this process, for columns of that StructType."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """As many rows as there were values; where there is an error, the row is null."""

    rows: Any  # pa.StructArray
    #: By number of the row: what is wrong with it, in a sentence.
    errors: Mapping[int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFunction:
    """A Python function of one row, with the columns that it returns."""

    call: Callable[[dict[str, Any]], Mapping[str, Any] | None]
    schema: str

    def __call__(self, row: dict[str, Any]) -> Mapping[str, Any] | None:
        return self.call(row)

    @property
    def name(self) -> str:
        return getattr(self.call, "__name__", type(self.call).__name__)


def row_function(
    schema: str,
) -> Callable[[Callable[[dict[str, Any]], Mapping[str, Any] | None]], RowFunction]:
    """Of a dict, returning a dict with these columns (as DDL), or None to drop the row.

    What it raises makes a retry of the row, or a dead letter if that is a `DeadLetter`.
    """
    if not isinstance(schema, str) or not schema.strip():
        raise PipelineError('a row function names the columns that it returns: @row_function("id STRING")')
    return lambda function: RowFunction(call=function, schema=schema)


# Where they come from and go to


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Topics by name, or by a pattern of the whole name."""

    topics: tuple[str, ...] = ()
    pattern: str | None = None
    #: Where there is no checkpoint: earliest, latest, milliseconds since 1970, or {"topic": {"0": 23}}.
    starting: str = "earliest"
    #: More of the source's options, such as maxOffsetsPerTrigger.
    options: Mapping[str, str] = field(default_factory=dict)
    #: Whether a pattern finds retry and dead-letter topics too.
    letters: bool = False

    def describe(self) -> str:
        return ",".join(self.topics) if self.pattern is None else f"/{self.pattern}/"


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicSink:
    #: Where rows go that have no column `topic`; None where all have one.
    topic: str | None
    #: More of the sink's options, such as kafka.compression.type.
    options: Mapping[str, str] = field(default_factory=dict)

    def describe(self) -> str:
        return self.topic or "the topic of each row"


@runtime_checkable
class BatchSink(Protocol):
    """Anything that rows of a batch can be written to, once however often it is asked."""

    def write(self, rows: Any, batch: MicroBatch) -> None:
        """All of these rows; nothing where it has written this batch before."""

    def describe(self) -> str:
        """For people."""

    def prepare(self, spark: Any, run: RunSettings) -> None:
        """Called once before the query starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """What becomes of rows that fail."""

    #: How often a row is tried at all.
    attempts: int = 5
    backoff: Backoff = _BACKOFF
    #: How many records of a batch may be the reason why it fails; with more, it is not the records.
    isolated_max: int = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    name: str
    source: Source
    #: None: rows go nowhere, and only what the transform does with them counts.
    sink: TopicSink | BatchSink | None = None
    delivery: Contract = Contract.AT_LEAST_ONCE
    every_ms: int = 1_000
    #: Read what is there at the start, and end.
    available_now: bool = False
    parse: Parser | None = None
    rows: tuple[RowFunction, ...] = ()
    transform: Transform | None = None
    #: Whether the transform remembers rows of earlier batches: aggregates, joins, deduplication.
    stateful: bool = False
    #: Of a stateful one: append, or update for aggregates that are told of whenever they change.
    output_mode: str = "append"
    errors: Errors = Errors()

    def __post_init__(self) -> None:
        refuse_wrong(self)

    def __call__(self, rows: Any) -> Any:
        """What the transform makes of rows, for tests of it."""
        return rows if self.transform is None else self.transform(rows)

    @property
    def group(self) -> str:
        """The consumer group that shows how far it has come."""
        return group_of(self.name)

    @property
    def evaluates(self) -> bool:
        """Whether rows go through Python before the transform."""
        return self.parse is not None or bool(self.rows)


def group_of(name: str) -> str:
    return _GROUP_PREFIX + name


def name_of_group(group: str) -> str | None:
    """The pipeline whose group this is; None where it is no pipeline's."""
    return group.removeprefix(_GROUP_PREFIX) if group.startswith(_GROUP_PREFIX) else None


def pipeline(
    name: str,
    *,
    source: str | Sequence[str] | Source,
    sink: str | TopicSink | BatchSink | None = None,
    delivery: str | Contract = Contract.AT_LEAST_ONCE,
    every: str | None = "1s",
    parse: Parser | None = None,
    rows: Sequence[RowFunction] = (),
    stateful: bool = False,
    output_mode: str = "append",
    errors: Errors | None = None,
) -> Callable[[Transform], Pipeline]:
    """Declare the function below as a pipeline. With `every=None` it reads what is there, and ends."""

    def declared(transform: Transform) -> Pipeline:
        return Pipeline(
            name=name,
            source=_source(name, source),
            sink=TopicSink(topic=sink) if isinstance(sink, str) else sink,
            delivery=_contract(name, delivery),
            every_ms=0 if every is None else _duration_ms(name, every),
            available_now=every is None,
            parse=parse,
            rows=tuple(rows),
            transform=transform,
            stateful=stateful,
            output_mode=output_mode,
            errors=errors or Errors(),
        )

    return declared


def _source(name: str, source: str | Sequence[str] | Source) -> Source:
    if isinstance(source, Source):
        return source
    if isinstance(source, str):
        return Source(topics=(source,))
    if isinstance(source, Sequence) and all(isinstance(each, str) for each in source):
        return Source(topics=tuple(source))
    raise PipelineError(
        f"pipeline {name}: its source is a topic, a list of topics or a Source, not {source!r}"
    )


def _contract(name: str, delivery: str | Contract) -> Contract:
    names = [each.value for each in Contract]
    if isinstance(delivery, Contract):
        return delivery
    if delivery not in names:
        raise PipelineError(f"pipeline {name}: delivery={delivery!r} must be one of {', '.join(names)}")
    return Contract(delivery)


def _duration_ms(name: str, every: str) -> int:
    try:
        return GivenOptions({_EVERY: every}).duration_ms(_EVERY, default_ms=0)
    except OptionError:
        raise PipelineError(
            f"pipeline {name}: every={every!r} must be a time such as 500ms, 30s or 1h"
        ) from None


# What cannot work


def refuse_wrong(declared: Pipeline) -> None:
    """Raises PipelineError, which says what is wrong with it."""
    if not isinstance(declared.name, str) or _NAME.fullmatch(declared.name) is None:
        raise PipelineError(
            f"a pipeline cannot be called {declared.name!r}: use letters, digits, '.', '_', '-'"
        )
    for flaw in _flaws(declared):
        raise PipelineError(f"pipeline {declared.name}: {flaw}")


def _flaws(declared: Pipeline) -> list[str]:
    return [
        *_source_flaws(declared.source),
        *_sink_flaws(declared),
        *_row_flaws(declared),
        *_error_flaws(declared.errors),
    ]


def _source_flaws(source: Source) -> list[str]:
    if bool(source.topics) == (source.pattern is not None):
        return ["its source is either topics or a pattern"]
    flaws = [f"{topic!r} is no name of a topic" for topic in source.topics if not _TOPIC.fullmatch(topic)]
    if source.pattern is not None:
        try:
            re.compile(source.pattern)
        except re.error as flaw:
            flaws.append(f"{source.pattern!r} is no pattern ({flaw})")
    return flaws


def _sink_flaws(declared: Pipeline) -> list[str]:
    flaws = []
    sink = declared.sink
    if sink is not None and not isinstance(sink, TopicSink | BatchSink):
        flaws.append(f"its sink is a topic, or has write, describe and prepare; {sink!r} has not")
    if isinstance(sink, TopicSink) and sink.topic is not None and not _TOPIC.fullmatch(sink.topic):
        flaws.append(f"{sink.topic!r} is no name of a topic")
    if isinstance(sink, TopicSink) and sink.topic in declared.source.topics:
        flaws.append(f"it would read what it writes: {sink.topic} is both source and sink")
    if declared.delivery is Contract.AT_MOST_ONCE and declared.stateful:
        flaws.append("what remembers rows cannot be at-most-once: choose at-least-once or exactly-once")
    if declared.output_mode not in _OUTPUT_MODES:
        flaws.append(f"output_mode={declared.output_mode!r} must be one of {', '.join(_OUTPUT_MODES)}")
    return flaws


def _row_flaws(declared: Pipeline) -> list[str]:
    flaws = []
    if declared.parse is not None and not hasattr(declared.parse, "prepared"):
        flaws.append(f"parse={declared.parse!r} is no parser; use json_rows or avro_rows")
    for each in declared.rows:
        if not isinstance(each, RowFunction):
            name = getattr(each, "__name__", repr(each))
            flaws.append(f'{name} needs its output columns: @row_function("id STRING, total DOUBLE")')
    if declared.transform is not None and not callable(declared.transform):
        flaws.append(f"{declared.transform!r} is no function of a DataFrame")
    return flaws


def _error_flaws(errors: Errors) -> list[str]:
    flaws = []
    if errors.attempts < 1:
        flaws.append(f"a row is tried at least once, not {errors.attempts} times")
    if errors.isolated_max < 0:
        flaws.append("errors.isolated_max counts records, and is at least 0")
    return flaws
