"""The node's own log: one line per event with named fields, rate-limited so that no client can flood it.

Code logs through the standard library: `logger.warning("bad request", extra={"peer": ..., "reason": ...})`. The
message names the kind of event and never changes; what differs between events goes into the fields.
"""

import logging
import sys
import time
from collections.abc import Callable
from typing import Any, Final, TextIO

#: Rate limit for each kind of event: a burst of BURST_LINES, then LINES_PER_SECOND.
BURST_LINES: Final = 50
LINES_PER_SECOND: Final = 1.0
#: Longer field values are truncated, because clients choose the content of some fields.
FIELD_CHARS_MAX: Final = 1000
#: Kinds of events that have a rate limit of their own; all further kinds share one.
_EVENT_KINDS_MAX: Final = 1000
#: The audit trail has a budget for each principal, and each of its lines would count as a kind of its own.
_WITHOUT_LIMIT: Final = "penstock.audit"

_STANDARD_FIELDS: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


def configure_logging(
    format: str = "text",
    level: str = "info",
    stream: TextIO | None = None,
    *,
    burst_lines: int = BURST_LINES,
    lines_per_second: float = LINES_PER_SECOND,
) -> "RateLimitedHandler":
    """Write the events of `penstock` loggers to `stream` (default: standard error).

    A second call replaces the handler of the first.
    """
    logger = logging.getLogger("penstock")
    for handler in [each for each in logger.handlers if isinstance(each, RateLimitedHandler)]:
        logger.removeHandler(handler)
        handler.close()
    handler = RateLimitedHandler(
        stream or sys.stderr, burst_lines=burst_lines, lines_per_second=lines_per_second
    )
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False
    return handler


def suppressed_lines() -> int:
    """Return how many lines the current handler has suppressed."""
    handlers = logging.getLogger("penstock").handlers
    return sum(each.suppressed_lines for each in handlers if isinstance(each, RateLimitedHandler))


class TextFormatter(logging.Formatter):
    """`2026-01-02T03:04:05.678Z INFO penstock.server connection refused peer=1.2.3.4:5 reason="two words"`"""

    def format(self, record: logging.LogRecord) -> str:
        parts = [_timestamp(record.created), record.levelname, record.name, _one_line(record.getMessage())]
        parts += [f"{name}={_quoted(value)}" for name, value in extra_fields(record).items()]
        line = " ".join(parts)
        trace = _traceback(self, record)
        return f"{line}\n{trace}" if trace else line


class JsonFormatter(logging.Formatter):
    """One object per line: ts, level, logger, message, fields, and exception where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        import json  # imported here so that a node that logs text starts faster

        line: dict[str, Any] = {
            "ts": _timestamp(record.created),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "fields": {name: _field_value(value) for name, value in extra_fields(record).items()},
        }
        if trace := _traceback(self, record):
            line["exception"] = trace
        return json.dumps(line)


def extra_fields(record: logging.LogRecord) -> dict[str, Any]:
    """Return the fields that were passed as `extra`, in the same order."""
    return {name: value for name, value in vars(record).items() if name not in _STANDARD_FIELDS}


class RateLimitedHandler(logging.StreamHandler[TextIO]):
    """Limits how often each kind of event is written; the next written line says how many lines were suppressed.

    A kind is a logger, a level and a message before its arguments are formatted. Critical events are always written.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        burst_lines: int = BURST_LINES,
        lines_per_second: float = LINES_PER_SECOND,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(stream)
        self.suppressed_lines = 0
        self._burst_lines = burst_lines
        self._lines_per_second = lines_per_second
        self._clock = clock
        self._allowances: dict[tuple[str, int, str], _TokenBucket] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Called by the logging module under this handler's lock."""
        if record.name == _WITHOUT_LIMIT:
            super().emit(record)
            return
        allowance = self._allowance(record)
        if record.levelno < logging.CRITICAL and not allowance.take(self._clock()):
            self.suppressed_lines += 1
            allowance.suppressed += 1
            return
        if allowance.suppressed:
            record = logging.makeLogRecord(vars(record) | {"suppressed": allowance.suppressed})
            allowance.suppressed = 0
        super().emit(record)

    def close(self) -> None:
        """Report the suppressed lines that are not reported yet, then close."""
        self.acquire()
        try:
            for (name, level, kind), allowance in self._allowances.items():
                if allowance.suppressed:
                    super().emit(_suppression_record(name, level, kind, allowance.suppressed))
            self._allowances.clear()
        finally:
            self.release()
        super().close()

    def _allowance(self, record: logging.LogRecord) -> "_TokenBucket":
        kind = (record.name, record.levelno, str(record.msg))
        allowance = self._allowances.get(kind)
        if allowance is None:
            if len(self._allowances) >= _EVENT_KINDS_MAX:
                kind = ("penstock", logging.WARNING, "other events")
            allowance = self._allowances.setdefault(
                kind, _TokenBucket(self._burst_lines, self._lines_per_second, self._clock())
            )
        return allowance


class _TokenBucket:
    """A token bucket: full at first and refilled over time. Each line takes one token."""

    __slots__ = ("_burst", "_per_second", "_then", "_tokens", "suppressed")

    def __init__(self, burst: int, per_second: float, now: float) -> None:
        self._burst = self._tokens = float(burst)
        self._per_second = per_second
        self._then = now
        self.suppressed = 0

    def take(self, now: float) -> bool:
        self._tokens = min(self._burst, self._tokens + (now - self._then) * self._per_second)
        self._then = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


def _suppression_record(name: str, level: int, kind: str, count: int) -> logging.LogRecord:
    record = logging.LogRecord(name, level, "", 0, "lines suppressed", (), None)
    record.of, record.suppressed = kind, count
    return record


def _timestamp(seconds: float) -> str:
    whole, milliseconds = divmod(round(seconds * 1000), 1000)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole)) + f".{milliseconds:03d}Z"


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    if record.exc_info and not record.exc_text:
        record.exc_text = formatter.formatException(record.exc_info)
    stack = formatter.formatStack(record.stack_info) if record.stack_info else ""
    return "\n".join(part for part in (record.exc_text, stack) if part)


def _field_value(value: Any) -> Any:
    """Return the value as a JSON scalar; long text is truncated."""
    if value is None or isinstance(value, bool | int | float):
        return value
    text = str(value)
    return text if len(text) <= FIELD_CHARS_MAX else f"{text[:FIELD_CHARS_MAX]}..."


def _quoted(value: Any) -> str:
    text = str(_field_value(value))
    if text and text.isprintable() and not any(mark in text for mark in ' "=\\'):
        return text
    return _json_string(text)


def _one_line(message: str) -> str:
    """Escape a message that contains line breaks or terminal control characters."""
    return message if message.isprintable() else _json_string(message)[1:-1]


def _json_string(text: str) -> str:
    import json

    return json.dumps(text, ensure_ascii=not text.isprintable())
