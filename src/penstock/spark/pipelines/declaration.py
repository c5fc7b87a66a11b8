"""Declares pipelines: a function of rows, and everything needed to run it. Pure, and imports without Spark.

    @row_function("id STRING, total DOUBLE")
    def price(order: dict) -> dict | None: ...

    @pipeline("clean-orders", source="orders", sink="orders.clean", delivery="exactly-once",
              parse=json_rows("id STRING, amount DOUBLE"), rows=[price])
    def clean(orders: DataFrame) -> DataFrame:
        return orders.where("total > 0")

A job is work on topics that has an end and reports its progress. `RunSettings` says where and how a pipeline or job
runs, which is not part of its declaration.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, runtime_checkable

from penstock.client.errors import ClientError
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.settings import ConnectionSettings
from penstock.protocol.backoff import ExponentialBackoff
from penstock.spark.exactly_once.decisions import MicroBatch
from penstock.spark.option_reader import CONNECTION_PREFIX, OptionError, OptionReader
from penstock.spark.session import LOCAL_MASTER
from penstock.spark.sink.options import Contract


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    bootstrap: str
    #: Folder or URI of the checkpoint for this generation of the pipeline.
    checkpoint: str
    #: Other client settings, without the prefix `kafka.`.
    connection: Mapping[str, str] = field(default_factory=dict, repr=False)
    #: Overrides `Source.starting`, if there is no checkpoint yet.
    starting: str | None = None
    master: str = LOCAL_MASTER
    #: Read what is available now and end, whatever the declaration says.
    once: bool = False

    def options(self) -> dict[str, str]:
        """Return the connection options for sources and sinks."""
        settings = {"bootstrap.servers": self.bootstrap, **self.connection}
        return {CONNECTION_PREFIX + name: value for name, value in settings.items()}

    def cluster(self) -> Cluster:
        """Return a client for the cluster. Raises ClientError, which names the wrong setting."""
        settings = {"client.id": "penstock-pipeline", **self.connection, "bootstrap.servers": self.bootstrap}
        return Cluster(ConnectionSettings.parse(settings))


_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_TOPIC: Final = re.compile(r"[A-Za-z0-9._-]{1,249}")
_GROUP_PREFIX: Final = "penstock-pipeline-"
_EVERY: Final = "every"
_OUTPUT_MODES: Final = ("append", "update")
#: The public name, `penstock.spark.Backoff`.
Backoff = ExponentialBackoff
_BACKOFF: Final = Backoff(base_ms=1_000, cap_ms=300_000)

#: A function from DataFrame to DataFrame.
Transform = Callable[[Any], Any]


class PipelineError(ClientError):
    """The declaration of a pipeline is wrong. Running it again does not help."""


class BatchError(ClientError):
    """A batch of a pipeline has failed, for a reason that may be temporary."""


class DeadLetter(Exception):
    """Raise this in a row function to send the row to the dead-letter topic without retries."""


# Parsers and row functions


class Parser(Protocol):
    """Parses values to columns. It is pickled and sent to other processes, so it contains only plain values."""

    @property
    def schema(self) -> str:
        """The columns, as DDL or in Spark's JSON format."""

    def prepared(self, schema: Any) -> Callable[[Any], Parsed]:
        """Return a function for this process that parses an Arrow array of values to the columns of a StructType."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """One row for each value. Rows with an error are null."""

    rows: Any  # pa.StructArray
    #: Row number -> a sentence that says what is wrong with the row.
    errors: Mapping[int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFunction:
    """A Python function of one row, and the columns that it returns."""

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
    """Decorate a function that receives a row as a dict, and returns a dict with these columns (as DDL).

    The function returns None to drop the row. If it raises an exception, the row goes to a retry topic and is tried
    again after a backoff. If it raises `DeadLetter`, or after the last attempt, the row goes to the dead-letter topic.
    """
    if not isinstance(schema, str) or not schema.strip():
        raise PipelineError('a row function needs the columns that it returns: @row_function("id STRING")')
    return lambda function: RowFunction(call=function, schema=schema)


# Sources and sinks


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The topics that a pipeline reads: `topics` by name, or a `pattern` that must match the whole name.

    starting: where to start if there is no checkpoint: earliest, latest, milliseconds since 1970, or offsets such as
        {"topic": {"0": 23}}
    options: more options of the Spark source, such as maxOffsetsPerTrigger
    letters: whether `pattern` also matches retry and dead-letter topics
    """

    topics: tuple[str, ...] = ()
    pattern: str | None = None
    starting: str = "earliest"
    options: Mapping[str, str] = field(default_factory=dict)
    letters: bool = False

    def describe(self) -> str:
        return ",".join(self.topics) if self.pattern is None else f"/{self.pattern}/"


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicSink:
    #: The topic that rows are written to. None: each row has a column `topic`.
    topic: str | None
    #: More options of the Spark sink, such as kafka.compression.type.
    options: Mapping[str, str] = field(default_factory=dict)

    def describe(self) -> str:
        return self.topic or "the topic of each row"


@runtime_checkable
class BatchSink(Protocol):
    """The interface of a custom sink. It must write each batch only once, even if `write` is called several times."""

    def write(self, rows: Any, batch: MicroBatch) -> None:
        """Write all rows of the batch. Do nothing if this batch was written before."""

    def describe(self) -> str:
        """Return a short description for status output."""

    def prepare(self, spark: Any, run: RunSettings) -> None:
        """Prepare the sink. Called once before the query starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """The error policy of a pipeline: how it handles rows that fail.

    attempts: how many times a row is tried in total
    backoff: the delay between attempts
    isolated_max: how many poison records may be isolated in one batch. With more, the batch itself fails, because the
        records are probably not the cause
    """

    attempts: int = 5
    backoff: Backoff = _BACKOFF
    isolated_max: int = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    name: str
    source: Source
    #: None: rows are not written, and only side effects of the transform matter.
    sink: TopicSink | BatchSink | None = None
    delivery: Contract = Contract.AT_LEAST_ONCE
    every_ms: int = 1_000
    #: Read what is available at the start, and end.
    available_now: bool = False
    parse: Parser | None = None
    rows: tuple[RowFunction, ...] = ()
    transform: Transform | None = None
    #: Whether the transform keeps state across batches: aggregates, joins, deduplication.
    stateful: bool = False
    #: For a stateful pipeline: append, or update to write aggregates whenever they change.
    output_mode: str = "append"
    errors: Errors = Errors()

    def __post_init__(self) -> None:
        validate_pipeline(self)

    def __call__(self, rows: Any) -> Any:
        """Apply the transform to rows. Useful in tests."""
        return rows if self.transform is None else self.transform(rows)

    @property
    def group(self) -> str:
        """The consumer group that shows the pipeline's progress."""
        return pipeline_group(self.name)

    @property
    def evaluates(self) -> bool:
        """Whether rows go through a parser or row functions before the transform."""
        return self.parse is not None or bool(self.rows)


def pipeline_group(name: str) -> str:
    return _GROUP_PREFIX + name


def pipeline_of_group(group: str) -> str | None:
    """Return the name of the pipeline that uses this group, or None if it is not a pipeline's group."""
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
    """Declare the decorated function, from DataFrame to DataFrame, as a pipeline.

    source: a topic, a list of topics, or a `Source`
    sink: a topic, a `TopicSink`, a `BatchSink`, or None to write no rows
    delivery: at-least-once, at-most-once or exactly-once
    every: the trigger interval, such as 500ms, 30s or 1h. None: read what is available, and end
    parse: a parser for the values, such as `json_rows` or `avro_rows`
    rows: row functions, which run after the parser and before the decorated function
    stateful: whether the decorated function keeps state across batches: aggregates, joins, deduplication
    output_mode: for a stateful pipeline: append, or update to write aggregates whenever they change
    errors: how to handle rows that fail

    The decorator raises PipelineError if the declaration is wrong.
    """

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
        f"pipeline {name}: source must be a topic, a list of topics or a Source, not {source!r}"
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
        return OptionReader({_EVERY: every}).duration_ms(_EVERY, default_ms=0)
    except OptionError:
        raise PipelineError(
            f"pipeline {name}: every={every!r} must be a time such as 500ms, 30s or 1h"
        ) from None


# Validation


def validate_pipeline(declared: Pipeline) -> None:
    """Raise PipelineError, with a message that says what is wrong, if the declaration is invalid."""
    if not isinstance(declared.name, str) or _NAME.fullmatch(declared.name) is None:
        raise PipelineError(
            f"a pipeline cannot be named {declared.name!r}: use letters, digits, '.', '_', '-'"
        )
    for flaw in _mistakes(declared):
        raise PipelineError(f"pipeline {declared.name}: {flaw}")


def _mistakes(declared: Pipeline) -> list[str]:
    return [
        *_source_mistakes(declared.source),
        *_sink_mistakes(declared),
        *_row_mistakes(declared),
        *_error_mistakes(declared.errors),
    ]


def _source_mistakes(source: Source) -> list[str]:
    if bool(source.topics) == (source.pattern is not None):
        return ["source must have either topics or a pattern"]
    flaws = [f"{topic!r} is not a valid topic name" for topic in source.topics if not _TOPIC.fullmatch(topic)]
    if source.pattern is not None:
        try:
            re.compile(source.pattern)
        except re.error as flaw:
            flaws.append(f"{source.pattern!r} is not a regular expression ({flaw})")
    return flaws


def _sink_mistakes(declared: Pipeline) -> list[str]:
    flaws = []
    sink = declared.sink
    if sink is not None and not isinstance(sink, TopicSink | BatchSink):
        flaws.append(
            f"sink must be a topic, or have the methods write, describe and prepare; {sink!r} has not"
        )
    if isinstance(sink, TopicSink) and sink.topic is not None and not _TOPIC.fullmatch(sink.topic):
        flaws.append(f"{sink.topic!r} is not a valid topic name")
    if isinstance(sink, TopicSink) and sink.topic in declared.source.topics:
        flaws.append(f"{sink.topic} is both source and sink: the pipeline would read its own output")
    if declared.delivery is Contract.AT_MOST_ONCE and declared.stateful:
        flaws.append("a stateful pipeline cannot be at-most-once: choose at-least-once or exactly-once")
    if declared.output_mode not in _OUTPUT_MODES:
        flaws.append(f"output_mode={declared.output_mode!r} must be one of {', '.join(_OUTPUT_MODES)}")
    return flaws


def _row_mistakes(declared: Pipeline) -> list[str]:
    flaws = []
    if declared.parse is not None and not hasattr(declared.parse, "prepared"):
        flaws.append(f"parse={declared.parse!r} is not a parser; use json_rows or avro_rows")
    for each in declared.rows:
        if not isinstance(each, RowFunction):
            name = getattr(each, "__name__", repr(each))
            flaws.append(f'{name} needs its output columns: @row_function("id STRING, total DOUBLE")')
    if declared.transform is not None and not callable(declared.transform):
        flaws.append(f"{declared.transform!r} is not a function of a DataFrame")
    return flaws


def _error_mistakes(errors: Errors) -> list[str]:
    flaws = []
    if errors.attempts < 1:
        flaws.append(f"errors.attempts must be at least 1, not {errors.attempts}")
    if errors.isolated_max < 0:
        flaws.append(f"errors.isolated_max must be at least 0, not {errors.isolated_max}")
    return flaws


#: Receives how much work is done, and the total if it is known.
ReportProgress = Callable[[int, int | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobContext:
    """What a job receives when it runs."""

    spark: Any
    run: RunSettings
    progress: ReportProgress
    #: Whether a user has requested a stop. A job checks it wherever it can stop and be resumed.
    should_stop: Callable[[], bool]
    #: Shows a message to the user. A job also uses it for a result in words.
    note: Callable[[str], None]


@runtime_checkable
class Job(Protocol):
    @property
    def name(self) -> str:
        """The name that the commands status and stop use, as for pipelines."""

    def run(self, context: JobContext) -> None:
        """Run until the job is done, or until `context.should_stop()`."""


def job_description(job: Job) -> str:
    """Return the job's description, or an empty text: `describe` is optional."""
    describe = getattr(job, "describe", None)
    return str(describe()) if callable(describe) else ""
