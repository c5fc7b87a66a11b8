"""Streaming queries as a runner sees them: finished batches, whether they may be stopped, why they failed.

The report of an error of Spark names its cause: the error of the user's function, if there is one.
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

#: The last line of a traceback: a class, and its message.
_LAST_TRACEBACK_LINE: Final = re.compile(
    r"^(?P<kind>[A-Za-z_][\w.]*(?:Error|Exception|Warning|Exit|Interrupt|[A-Z]\w*)): ?(?P<message>.*)$"
)
_TRACEBACK: Final = "Traceback (most recent call last):"
#: Errors that appear when a query is stopped in the middle of a batch.
_STOPPED: Final = (
    "java.lang.InterruptedException",
    "java.nio.channels.ClosedByInterruptException",
    "SPARK_JOB_CANCELLED",
)
_OWN_MODULES: Final = "penstock."
#: Errors for a module that is not installed. No row is the cause, and a retry fails in the same way.
MISSING_MODULE: Final = ("ImportError", "ModuleNotFoundError")
#: Our errors that single rows cause, by their full class names.
_RECORD_ERRORS: Final = frozenset(
    f"{kind.__module__}.{kind.__qualname__}" for kind in (RecordsRefused, RecordTooLarge, WrongRow)
)
#: Titles in an error of Spark before the positions of the query before and after its last batch.
_COMMITTED_TITLE: Final = "Current Committed Offsets: "
_AVAILABLE_TITLE: Final = "Current Available Offsets: "
_POSITION_START: Final = '{"version"'


def is_caused_by_rows(error: Exception) -> bool:
    """Return whether rows may be the cause: the query was not stopped, and the error is not another one of ours."""
    if isinstance(error, ClientError) or any(words in str(error) for words in _STOPPED):
        return False
    kind = failure_from_spark(error).error_class
    if kind in MISSING_MODULE:
        return False
    return not kind.startswith(_OWN_MODULES) or kind in _RECORD_ERRORS


def is_caused_by_records(error: Exception) -> bool:
    """Return whether the cause is a row that was converted to a record which its topic does not accept."""
    return failure_from_spark(error).error_class in _RECORD_ERRORS


def failure_from_spark(error: BaseException) -> Failure:
    text = _error_text(error)
    return _python_failure(text) or _own_failure(text) or _java_failure(error, text)


def _error_text(error: BaseException) -> str:
    described = getattr(error, "desc", None) or getattr(error, "_desc", None)
    return str(described or error)


def _python_failure(text: str) -> Failure | None:
    """Return the innermost Python traceback in the text."""
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
    """Return an error of ours that was reported without a traceback."""
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
        # Some errors of Spark have no condition, and those of Java have no such method.
        return None


def first_line(error: BaseException) -> str:
    """Return the first line of the message, without query plans and stacks."""
    if isinstance(error, PipelineError):
        return str(error)
    text = _error_text(error)
    return next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)


def failed_range(error: BaseException) -> str | None:
    """Return the offsets of the failed batch, from the error with which a streaming query has ended."""
    text = str(error)
    after = list(_positions(text, _AVAILABLE_TITLE))
    before = list(_positions(text, _COMMITTED_TITLE))
    before += [Position({})] * (len(after) - len(before))
    found = [each for start, end in zip(before, after, strict=False) for each in ranges_between(start, end)]
    texts = [f"{each.topic}[{each.partition}] {each.start} to {each.end - 1}" for each in found]
    return ", ".join(texts) or None


def _positions(text: str, title: str) -> Iterator[Position]:
    """Yield the positions of all sources in the line with this title."""
    _, _, rest = text.partition(title)
    line = rest.partition("\n")[0]
    while (at := line.find(_POSITION_START)) >= 0:
        content, end = json.JSONDecoder().raw_decode(line, at)
        yield Position.from_json(content)
        line = line[end:]


#: Steps of a trigger before the batch starts.
_BEFORE_BATCH: Final = ("Getting offsets", "Waiting", "Initializing")
#: Steps in which the query does not know yet whether there is data to read.
_UNDECIDED: Final = ("Getting offsets", "Initializing")
_PROCESSING: Final = ("Writing offsets", "Processing")

#: Errors that would occur again in every restart.
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
#: The last line of a Python traceback, and the first line of an error of Spark.
_PYTHON_ERROR: Final = re.compile(r"^(?!pyspark\.)(?:\w+\.)*([A-Z]\w*): ([^\n]*)", re.M)
_SPARK_ERROR: Final = re.compile(r"\[([A-Z][A-Z0-9_.]+)\] ([^\n]*)")
#: What follows the message in an error of Spark.
_MESSAGE_END: Final = re.compile(r"\n=== Streaming Query ===|\n+JVM stacktrace:|\n SQLSTATE:| SQLSTATE: \w+")
_MESSAGE_CHARS_MAX: Final = 600
_INSTALL_HINT: Final = (
    " (install it wherever tasks of this pipeline run; 'penstock[spark]' contains what Penstock needs)"
)


class QueryFailed(Exception):
    """A running query has failed."""

    def __init__(self, trouble: ErrorInfo) -> None:
        super().__init__(trouble.message)
        self.trouble = trouble


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedBatch:
    """A batch of a query that read at least one row."""

    query: str
    batch: int
    rows: int
    #: 0 if the sink does not report it.
    rows_out: int
    batch_ms: int
    rows_per_s: float
    end: Position


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryActivity:
    """What a query does at present."""

    is_active: bool
    #: Whether the query knows if there is data to read.
    is_decided: bool
    is_at_work: bool
    #: Whether the query can be stopped without interrupting a batch.
    is_between: bool


class WatchedQuery:
    """A query, and which of its batches were reported."""

    def __init__(self, query: Any) -> None:
        self.query = query
        self._reported_at = ""

    def activity(self) -> QueryActivity:
        status = self.query.status
        step, is_triggered = str(status["message"]), bool(status["isTriggerActive"])
        return QueryActivity(
            is_active=bool(self.query.isActive),
            is_decided=not step.startswith(_UNDECIDED),
            is_at_work=is_triggered and step.startswith(_PROCESSING),
            is_between=not is_triggered or step.startswith(_BEFORE_BATCH),
        )

    def new_batches(self) -> list[FinishedBatch]:
        """Return the batches with rows that the query has finished since the last call."""
        last = self.query.lastProgress
        if last is None or last.timestamp == self._reported_at:
            return []
        before, self._reported_at = self._reported_at, last.timestamp
        new = [each for each in self.query.recentProgress if each.timestamp > before]
        return [_finished_batch(each) for each in new if each.numInputRows]

    def raise_failure(self) -> None:
        """Raise QueryFailed if the query has ended with an error."""
        error = self.query.exception()
        if error is not None:
            raise QueryFailed(error_info(error))


def _finished_batch(progress: Any) -> FinishedBatch:
    end = progress.sources[0].endOffset if progress.sources else None
    seconds = max(progress.batchDuration, 1) / 1000
    return FinishedBatch(
        query=str(progress.id),
        batch=int(progress.batchId),
        rows=int(progress.numInputRows),
        rows_out=max(int(progress.sink.numOutputRows), 0),
        batch_ms=int(progress.batchDuration),
        rows_per_s=round(progress.numInputRows / seconds, 1),
        end=_parse_position(end),
    )


def _parse_position(text: str | None) -> Position:
    """Parse a position. Returns an empty one if the transform has added another source that Spark lists first."""
    try:
        return Position.from_json(json.loads(text)) if text else Position({})
    except (ClientError, ValueError):
        return Position({})


# Errors


def error_info(error: BaseException) -> ErrorInfo:
    """Return the class and message of the innermost error, without what Spark adds."""
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
