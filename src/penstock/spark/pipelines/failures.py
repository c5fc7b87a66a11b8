"""What Spark raises, as what went wrong: the error of a user's function where there is one, in its own words."""

from __future__ import annotations

import re
from typing import Any, Final

from penstock.client.errors import ClientError
from penstock.client.letters import Failure
from penstock.spark.pipelines.declaration import PipelineError

#: The last line of a traceback: a class, and what it says.
_RAISED: Final = re.compile(
    r"^(?P<kind>[A-Za-z_][\w.]*(?:Error|Exception|Warning|Exit|Interrupt|[A-Z]\w*)): ?(?P<message>.*)$"
)
_TRACEBACK: Final = "Traceback (most recent call last):"
_CAUSE: Final = re.compile(r"^Caused by: (?P<kind>[\w.$]+)(?:: (?P<message>.*))?$", re.MULTILINE)


def is_of_rows(error: Exception) -> bool:
    """Whether rows may be the reason: it is nothing that we have said ourselves."""
    return not isinstance(error, ClientError)


def failure_in_spark(error: BaseException) -> Failure:
    text = _text(error)
    return _python(text) or _java(error, text)


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
