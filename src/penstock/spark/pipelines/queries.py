"""Streaming queries as a runner sees them: what they have finished, whether they may be stopped, why they failed.

An error of Spark is reduced to its cause: the error of the user's function if there is one, in its own words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from penstock.client.deadletters.headers import Failure
from penstock.client.errors import ClientError, RecordsRefused
from penstock.spark.offsets import Position, ranges_between
from penstock.spark.pipelines.declaration import PipelineError
from penstock.spark.pipelines.status import ErrorInfo
from penstock.spark.sink.records import RecordTooLarge, WrongRow
from penstock.spark.workers import OWN_ERROR

#: The last line of a traceback: a class, and what it says.
_LAST_TRACEBACK_LINE: Final = re.compile(
    r"^(?P<kind>[A-Za-z_][\w.]*(?:Error|Exception|Warning|Exit|Interrupt|[A-Z]\w*)): ?(?P<message>.*)$"
)
_TRACEBACK: Final = "Traceback (most recent call last):"
#: What comes of stopping a query in the middle of a batch.
_STOPPED: Final = (
    "java.lang.InterruptedException",
    "java.nio.channels.ClosedByInterruptException",
    "SPARK_JOB_CANCELLED",
)
_OWN_MODULES: Final = "penstock."
#: What Python raises where something is not installed. No row is the reason, and the next attempt lacks it too.
MISSING_MODULE: Final = ("ImportError", "ModuleNotFoundError")
#: Of our errors those that single rows are the reason of, by the names under which Spark tells of them.
_RECORD_ERRORS: Final = frozenset(
    f"{kind.__module__}.{kind.__qualname__}" for kind in (RecordsRefused, RecordTooLarge, WrongRow)
)
#: How Spark tells where a query stood that has failed: before its last batch, and after it.
_COMMITTED_TITLE: Final = "Current Committed Offsets: "
_AVAILABLE_TITLE: Final = "Current Available Offsets: "
_POSITION_START: Final = '{"version"'


def is_caused_by_rows(error: Exception) -> bool:
    """Whether rows may be the reason: nobody has stopped the query, and we have said nothing else ourselves."""
    if isinstance(error, ClientError) or any(words in str(error) for words in _STOPPED):
        return False
    kind = failure_from_spark(error).error_class
    if kind in MISSING_MODULE:
        return False
    return not kind.startswith(_OWN_MODULES) or kind in _RECORD_ERRORS


def is_caused_by_records(error: Exception) -> bool:
    """Whether rows are the reason which have become records already, that a topic does not take."""
    return failure_from_spark(error).error_class in _RECORD_ERRORS


def failure_from_spark(error: BaseException) -> Failure:
    text = _error_text(error)
    return _python_failure(text) or _own_failure(text) or _java_failure(error, text)


def _error_text(error: BaseException) -> str:
    described = getattr(error, "desc", None) or getattr(error, "_desc", None)
    return str(described or error)


def _python_failure(text: str) -> Failure | None:
    """The innermost traceback of Python in it."""
    at = text.rfind(_TRACEBACK)
    if at < 0:
        return None
    stack = [_TRACEBACK]
    for line in text[at + len(_TRACEBACK) :].splitlines():
        match = _LAST_TRACEBACK_LINE.match(line)
        stack.append(line)
        if match is not None:
            return Failure(error_class=match["kind"], message=match["message"], stack="\n".join(stack))
    return None


def _own_failure(text: str) -> Failure | None:
    """What we tell without a traceback."""
    found = OWN_ERROR.findall(text)
    return Failure(error_class=found[-1][0], message=found[-1][1]) if found else None


def _java_failure(error: BaseException, text: str) -> Failure:
    condition = _condition(error)
    first = next((line for line in text.splitlines() if line.strip()), type(error).__name__)
    return Failure(error_class=condition or type(error).__name__, message=first, stack=text)


def _condition(error: Any) -> str | None:
    try:
        return str(error.getCondition() or "") or None
    except Exception:
        # Not all of Spark's errors have one, and those of Java have none here.
        return None


def first_line(error: BaseException) -> str:
    """What is wrong, without plans and stacks."""
    if isinstance(error, PipelineError):
        return str(error)
    text = _error_text(error)
    return next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)


def failed_range(error: BaseException) -> str | None:
    """The offsets of the batch that failed, of an error with which a streaming query has ended."""
    text = str(error)
    after = list(_positions(text, _AVAILABLE_TITLE))
    before = list(_positions(text, _COMMITTED_TITLE))
    before += [Position({})] * (len(after) - len(before))
    found = [each for start, end in zip(before, after, strict=False) for each in ranges_between(start, end)]
    told = [f"{each.topic}[{each.partition}] {each.start} to {each.end - 1}" for each in found]
    return ", ".join(told) or None


def _positions(text: str, title: str) -> Iterator[Position]:
    """One for each source, which is what comes before it in the line."""
    _, _, rest = text.partition(title)
    line = rest.partition("\n")[0]
    while (at := line.find(_POSITION_START)) >= 0:
        content, end = json.JSONDecoder().raw_decode(line, at)
        yield Position.from_json(content)
        line = line[end:]


#: Asking for offsets and waiting are the steps of a trigger in which nothing of a batch is done yet.
_BEFORE_BATCH: Final = ("Getting offsets", "Waiting", "Initializing")
#: Steps that say nothing about whether there is something to read.
_UNDECIDED: Final = ("Getting offsets", "Initializing")
_PROCESSING: Final = ("Writing offsets", "Processing")

#: Whatever is tried again fails again.
_PERMANENT_ERRORS: Final = frozenset(
    {
        "AnalysisException",
        "AuthenticationFailed",
        "ClaimError",
        "DataLoss",
        *MISSING_MODULE,
        "LoadingError",
        "NoJava",
        "OptionError",
        "ParseException",
        "PipelineError",
        "SinkError",
        "TopicChanged",
        "UnsupportedVersion",
    }
)
#: The last line of a traceback of Python, and the first words of an error of Spark.
_PYTHON_ERROR: Final = re.compile(r"^(?!pyspark\.)(?:\w+\.)*([A-Z]\w*): ([^\n]*)", re.M)
_SPARK_ERROR: Final = re.compile(r"\[([A-Z][A-Z0-9_.]+)\] ([^\n]*)")
#: Where Spark begins to tell of itself.
_MESSAGE_END: Final = re.compile(r"\n=== Streaming Query ===|\n+JVM stacktrace:|\n SQLSTATE:| SQLSTATE: \w+")
_MESSAGE_CHARS_MAX: Final = 600
_INSTALL_HINT: Final = (
    " (install it wherever tasks of this pipeline run; what Penstock needs is in 'penstock[spark]')"
)


class QueryFailed(Exception):
    """Of a query that ran, with what Spark knows about it."""

    def __init__(self, trouble: ErrorInfo) -> None:
        super().__init__(trouble.message)
        self.trouble = trouble


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedBatch:
    """A batch of a query, with something in it."""

    query: str
    batch: int
    rows: int
    #: 0 where the sink does not tell.
    rows_out: int
    batch_ms: int
    rows_per_s: float
    end: Position


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryActivity:
    """At a query, at one moment."""

    is_active: bool
    #: Whether it knows if there is something to read.
    is_decided: bool
    is_at_work: bool
    #: Whether it can be stopped without leaving a batch half done.
    is_between: bool


class WatchedQuery:
    """One query, and what it last told."""

    def __init__(self, query: Any) -> None:
        self.query = query
        self._told_at = ""

    def look(self) -> QueryActivity:
        status = self.query.status
        step, is_triggered = str(status["message"]), bool(status["isTriggerActive"])
        return QueryActivity(
            is_active=bool(self.query.isActive),
            is_decided=not step.startswith(_UNDECIDED),
            is_at_work=is_triggered and step.startswith(_PROCESSING),
            is_between=not is_triggered or step.startswith(_BEFORE_BATCH),
        )

    def new_batches(self) -> list[FinishedBatch]:
        """The batches that it has finished since this was last asked, less those that had nothing to read."""
        last = self.query.lastProgress
        if last is None or last.timestamp == self._told_at:
            return []
        before, self._told_at = self._told_at, last.timestamp
        told = [each for each in self.query.recentProgress if each.timestamp > before]
        return [_finished_batch(each) for each in told if each.numInputRows]

    def refuse_failed(self) -> None:
        """Raises QueryFailed where it ended by itself."""
        error = self.query.exception()
        if error is not None:
            raise QueryFailed(error_info(error))


def _finished_batch(told: Any) -> FinishedBatch:
    end = told.sources[0].endOffset if told.sources else None
    seconds = max(told.batchDuration, 1) / 1000
    return FinishedBatch(
        query=str(told.id),
        batch=int(told.batchId),
        rows=int(told.numInputRows),
        rows_out=max(int(told.sink.numOutputRows), 0),
        batch_ms=int(told.batchDuration),
        rows_per_s=round(told.numInputRows / seconds, 1),
        end=_parse_position(end),
    )


def _parse_position(told: str | None) -> Position:
    """Nowhere, where a transform has brought another source with it and Spark tells of that one first."""
    try:
        return Position.from_json(json.loads(told)) if told else Position({})
    except (ClientError, ValueError):
        return Position({})


# Why


def error_info(error: BaseException) -> ErrorInfo:
    """An error in a sentence: what was raised at its bottom, not how it came up through Spark."""
    if isinstance(error, QueryFailed):
        return error.trouble
    if isinstance(error, ClientError):
        return ErrorInfo(kind=type(error).__name__, message=str(error))
    text = _MESSAGE_END.split(str(error))[0].strip()
    for pattern in (OWN_ERROR, _PYTHON_ERROR):
        if found := pattern.findall(text):
            kind, message = found[-1]
            kind = kind.rpartition(".")[2]
            advice = _INSTALL_HINT if kind in MISSING_MODULE else ""
            return ErrorInfo(kind=kind, message=(_shortened(message) or kind) + advice)
    if sparks := _SPARK_ERROR.search(text):
        return ErrorInfo(kind=type(error).__name__, message=_shortened(sparks[2]))
    return ErrorInfo(
        kind=type(error).__name__, message=_shortened(text.split("\n")[0]) or type(error).__name__
    )


def is_permanent(trouble: ErrorInfo) -> bool:
    return trouble.kind in _PERMANENT_ERRORS


def _shortened(text: str) -> str:
    text = text.strip()
    return text if len(text) <= _MESSAGE_CHARS_MAX else text[:_MESSAGE_CHARS_MAX] + "..."
