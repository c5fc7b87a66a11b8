"""Queries of Spark as a runner sees them: what they have finished, whether they may be stopped, why they failed."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Final

from penstock.client.errors import ClientError
from penstock.spark.offsets import Position
from penstock.spark.pipelines.status import Trouble

#: Asking for offsets and waiting are the steps of a trigger in which nothing of a batch is done yet.
_BEFORE_BATCH: Final = ("Getting offsets", "Waiting", "Initializing")
_AT_WORK: Final = ("Writing offsets", "Processing")

#: Whatever is tried again fails again.
_LASTING: Final = frozenset(
    {
        "AnalysisException",
        "AuthenticationFailed",
        "ClaimError",
        "DataLoss",
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
_OURS: Final = re.compile(r"\bpenstock\.[\w.]+\.(\w+): ([^\n]*)")
#: The last line of a traceback of Python, and the first words of an error of Spark.
_PYTHONS: Final = re.compile(r"^(?!pyspark\.)(?:\w+\.)*([A-Z]\w*): ([^\n]*)", re.M)
_SPARKS: Final = re.compile(r"\[([A-Z][A-Z0-9_.]+)\] ([^\n]*)")
#: Where Spark begins to tell of itself.
_ENDS: Final = re.compile(r"\n=== Streaming Query ===|\n+JVM stacktrace:|\n SQLSTATE:| SQLSTATE: \w+")
_MESSAGE_CHARS_MAX: Final = 600


class QueryFailed(Exception):
    """Of a query that ran, with what Spark knows about it."""

    def __init__(self, trouble: Trouble) -> None:
        super().__init__(trouble.message)
        self.trouble = trouble


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The last batch that a query has finished."""

    batch: int
    rows: int
    batch_ms: int
    rows_per_s: float
    end: Position


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """At a query, at one moment."""

    is_active: bool
    is_at_work: bool
    #: Whether it can be stopped without leaving a batch half done.
    is_between: bool


def look(query: Any) -> Look:
    status = query.status
    step, is_triggered = str(status["message"]), bool(status["isTriggerActive"])
    return Look(
        is_active=bool(query.isActive),
        is_at_work=is_triggered and step.startswith(_AT_WORK),
        is_between=not is_triggered or step.startswith(_BEFORE_BATCH),
    )


def finished(query: Any) -> Finished | None:
    """None while it has finished nothing, or has had nothing to read of late."""
    told = query.lastProgress
    return _finished(told) if told is not None and told.numInputRows and told.sources else None


def _finished(told: Any) -> Finished:
    end = told.sources[0].endOffset
    seconds = max(told.batchDuration, 1) / 1000
    return Finished(
        batch=int(told.batchId),
        rows=int(told.numInputRows),
        batch_ms=int(told.batchDuration),
        rows_per_s=round(told.numInputRows / seconds, 1),
        end=Position.from_json(json.loads(end)) if end else Position({}),
    )


def refuse_failed(query: Any) -> None:
    """Raises QueryFailed where it ended by itself."""
    error = query.exception()
    if error is not None:
        raise QueryFailed(trouble_of(error))


# Why


def trouble_of(error: BaseException) -> Trouble:
    """An error in a sentence: what was raised at its bottom, not how it came up through Spark."""
    if isinstance(error, QueryFailed):
        return error.trouble
    if isinstance(error, ClientError):
        return Trouble(kind=type(error).__name__, message=str(error))
    text = _ENDS.split(str(error))[0].strip()
    for pattern in (_OURS, _PYTHONS):
        if found := pattern.findall(text):
            kind, message = found[-1]
            return Trouble(kind=kind, message=_short(message) or kind)
    if sparks := _SPARKS.search(text):
        return Trouble(kind=type(error).__name__, message=_short(sparks[2]))
    return Trouble(kind=type(error).__name__, message=_short(text.split("\n")[0]) or type(error).__name__)


def is_lasting(trouble: Trouble) -> bool:
    return trouble.kind in _LASTING


def _short(text: str) -> str:
    text = text.strip()
    return text if len(text) <= _MESSAGE_CHARS_MAX else text[:_MESSAGE_CHARS_MAX] + "..."
