"""Queries of Spark as a runner sees them: what they have finished, whether they may be stopped, why they failed."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Final

from penstock.client.errors import ClientError
from penstock.spark.offsets import Position
from penstock.spark.pipelines.failures import MISSING_MODULE
from penstock.spark.pipelines.status import Trouble
from penstock.spark.plainly import OURS

#: Asking for offsets and waiting are the steps of a trigger in which nothing of a batch is done yet.
_BEFORE_BATCH: Final = ("Getting offsets", "Waiting", "Initializing")
#: Steps that say nothing about whether there is something to read.
_UNDECIDED: Final = ("Getting offsets", "Initializing")
_AT_WORK: Final = ("Writing offsets", "Processing")

#: Whatever is tried again fails again.
_LASTING: Final = frozenset(
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
_PYTHONS: Final = re.compile(r"^(?!pyspark\.)(?:\w+\.)*([A-Z]\w*): ([^\n]*)", re.M)
_SPARKS: Final = re.compile(r"\[([A-Z][A-Z0-9_.]+)\] ([^\n]*)")
#: Where Spark begins to tell of itself.
_ENDS: Final = re.compile(r"\n=== Streaming Query ===|\n+JVM stacktrace:|\n SQLSTATE:| SQLSTATE: \w+")
_MESSAGE_CHARS_MAX: Final = 600
_INSTALL_IT: Final = (
    " (install it wherever tasks of this pipeline run; what Penstock needs is in 'penstock[spark]')"
)


class QueryFailed(Exception):
    """Of a query that ran, with what Spark knows about it."""

    def __init__(self, trouble: Trouble) -> None:
        super().__init__(trouble.message)
        self.trouble = trouble


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
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
class Look:
    """At a query, at one moment."""

    is_active: bool
    #: Whether it knows if there is something to read.
    is_decided: bool
    is_at_work: bool
    #: Whether it can be stopped without leaving a batch half done.
    is_between: bool


class Watched:
    """One query, and what it last told."""

    def __init__(self, query: Any) -> None:
        self.query = query
        self._told_at = ""

    def look(self) -> Look:
        status = self.query.status
        step, is_triggered = str(status["message"]), bool(status["isTriggerActive"])
        return Look(
            is_active=bool(self.query.isActive),
            is_decided=not step.startswith(_UNDECIDED),
            is_at_work=is_triggered and step.startswith(_AT_WORK),
            is_between=not is_triggered or step.startswith(_BEFORE_BATCH),
        )

    def news(self) -> list[Finished]:
        """The batches that it has finished since this was last asked, less those that had nothing to read."""
        last = self.query.lastProgress
        if last is None or last.timestamp == self._told_at:
            return []
        before, self._told_at = self._told_at, last.timestamp
        told = [each for each in self.query.recentProgress if each.timestamp > before]
        return [_finished(each) for each in told if each.numInputRows]

    def refuse_failed(self) -> None:
        """Raises QueryFailed where it ended by itself."""
        error = self.query.exception()
        if error is not None:
            raise QueryFailed(trouble_of(error))


def _finished(told: Any) -> Finished:
    end = told.sources[0].endOffset if told.sources else None
    seconds = max(told.batchDuration, 1) / 1000
    return Finished(
        query=str(told.id),
        batch=int(told.batchId),
        rows=int(told.numInputRows),
        rows_out=max(int(told.sink.numOutputRows), 0),
        batch_ms=int(told.batchDuration),
        rows_per_s=round(told.numInputRows / seconds, 1),
        end=_position(end),
    )


def _position(told: str | None) -> Position:
    """Nowhere, where a transform has brought another source with it and Spark tells of that one first."""
    try:
        return Position.from_json(json.loads(told)) if told else Position({})
    except (ClientError, ValueError):
        return Position({})


# Why


def trouble_of(error: BaseException) -> Trouble:
    """An error in a sentence: what was raised at its bottom, not how it came up through Spark."""
    if isinstance(error, QueryFailed):
        return error.trouble
    if isinstance(error, ClientError):
        return Trouble(kind=type(error).__name__, message=str(error))
    text = _ENDS.split(str(error))[0].strip()
    for pattern in (OURS, _PYTHONS):
        if found := pattern.findall(text):
            kind, message = found[-1]
            kind = kind.rpartition(".")[2]
            advice = _INSTALL_IT if kind in MISSING_MODULE else ""
            return Trouble(kind=kind, message=(_short(message) or kind) + advice)
    if sparks := _SPARKS.search(text):
        return Trouble(kind=type(error).__name__, message=_short(sparks[2]))
    return Trouble(kind=type(error).__name__, message=_short(text.split("\n")[0]) or type(error).__name__)


def is_lasting(trouble: Trouble) -> bool:
    return trouble.kind in _LASTING


def _short(text: str) -> str:
    text = text.strip()
    return text if len(text) <= _MESSAGE_CHARS_MAX else text[:_MESSAGE_CHARS_MAX] + "..."
