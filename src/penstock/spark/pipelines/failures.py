"""What Spark raises, as what went wrong: the error of a user's function where there is one, in its own words."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final

from penstock.client.errors import ClientError, RecordsRefused
from penstock.client.letters import Failure
from penstock.spark.offsets import Position, ranges
from penstock.spark.pipelines.declaration import PipelineError
from penstock.spark.plainly import OURS
from penstock.spark.sink_limits import RecordTooLarge
from penstock.spark.sink_rows import WrongRow

#: The last line of a traceback: a class, and what it says.
_RAISED: Final = re.compile(
    r"^(?P<kind>[A-Za-z_][\w.]*(?:Error|Exception|Warning|Exit|Interrupt|[A-Z]\w*)): ?(?P<message>.*)$"
)
_TRACEBACK: Final = "Traceback (most recent call last):"
#: What comes of stopping a query in the middle of a batch.
_STOPPED: Final = (
    "java.lang.InterruptedException",
    "java.nio.channels.ClosedByInterruptException",
    "SPARK_JOB_CANCELLED",
)
_IS_OURS: Final = "penstock."
#: What Python raises where something is not installed. No row is the reason, and the next attempt lacks it too.
MISSING_MODULE: Final = ("ImportError", "ModuleNotFoundError")
#: Of our errors those that single rows are the reason of, by the names under which Spark tells of them.
_OF_RECORDS: Final = frozenset(
    f"{kind.__module__}.{kind.__qualname__}" for kind in (RecordsRefused, RecordTooLarge, WrongRow)
)
#: How Spark tells where a query stood that has failed: before its last batch, and after it.
_BEFORE: Final = "Current Committed Offsets: "
_AFTER: Final = "Current Available Offsets: "
_POSITION: Final = '{"version"'


def is_of_rows(error: Exception) -> bool:
    """Whether rows may be the reason: nobody has stopped the query, and we have said nothing else ourselves."""
    if isinstance(error, ClientError) or any(words in str(error) for words in _STOPPED):
        return False
    kind = failure_in_spark(error).error_class
    if kind in MISSING_MODULE:
        return False
    return not kind.startswith(_IS_OURS) or kind in _OF_RECORDS


def is_of_records(error: Exception) -> bool:
    """Whether rows are the reason which have become records already, that a topic does not take."""
    return failure_in_spark(error).error_class in _OF_RECORDS


def failure_in_spark(error: BaseException) -> Failure:
    text = _text(error)
    return _python(text) or _plain(text) or _java(error, text)


def _text(error: BaseException) -> str:
    described = getattr(error, "desc", None) or getattr(error, "_desc", None)
    return str(described or error)


def _python(text: str) -> Failure | None:
    """The innermost traceback of Python in it."""
    at = text.rfind(_TRACEBACK)
    if at < 0:
        return None
    stack = [_TRACEBACK]
    for line in text[at + len(_TRACEBACK) :].splitlines():
        match = _RAISED.match(line)
        stack.append(line)
        if match is not None:
            return Failure(error_class=match["kind"], message=match["message"], stack="\n".join(stack))
    return None


def _plain(text: str) -> Failure | None:
    """What we tell without a traceback."""
    found = OURS.findall(text)
    return Failure(error_class=found[-1][0], message=found[-1][1]) if found else None


def _java(error: BaseException, text: str) -> Failure:
    condition = _condition(error)
    first = next((line for line in text.splitlines() if line.strip()), type(error).__name__)
    return Failure(error_class=condition or type(error).__name__, message=first, stack=text)


def _condition(error: Any) -> str | None:
    try:
        return str(error.getCondition() or "") or None
    except Exception:
        # Not all of Spark's errors have one, and those of Java have none here.
        return None


def sentence_of(error: BaseException) -> str:
    """What is wrong, without plans and stacks."""
    if isinstance(error, PipelineError):
        return str(error)
    text = _text(error)
    return next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)


def range_in(error: BaseException) -> str | None:
    """The offsets of the batch that failed, of an error with which a streaming query has ended."""
    text = str(error)
    after = list(_positions(text, _AFTER))
    before = list(_positions(text, _BEFORE))
    before += [Position({})] * (len(after) - len(before))
    found = [each for start, end in zip(before, after, strict=False) for each in ranges(start, end)]
    told = [f"{each.topic}[{each.partition}] {each.start} to {each.end - 1}" for each in found]
    return ", ".join(told) or None


def _positions(text: str, title: str) -> Iterator[Position]:
    """One for each source, which is what comes before it in the line."""
    _, _, rest = text.partition(title)
    line = rest.partition("\n")[0]
    while (at := line.find(_POSITION)) >= 0:
        content, end = json.JSONDecoder().raw_decode(line, at)
        yield Position.from_json(content)
        line = line[end:]
