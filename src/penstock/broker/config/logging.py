"""The node's own log: one line per event, its facts as named fields, and no client can flood it.

Code logs through the standard library: `logger.warning("bad request", extra={"peer": ..., "reason": ...})`.
The message names the kind of event and never changes; what differs from one to the next goes into the fields.
"""

import logging
import sys
import time
from collections.abc import Callable
from typing import Any, Final, TextIO

#: How often one kind of event may be written: this many at once, then so many each second.
BURST_LINES: Final = 50
LINES_PER_SECOND: Final = 1.0
#: A client chooses what some fields say, so they are cut.
FIELD_CHARS_MAX: Final = 1000
#: Kinds of events told apart; beyond that they share one allowance.
_KINDS_MAX: Final = 1000

_STANDARD_FIELDS: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


def configure_logging(
    format: str = "text",
    level: str = "info",
    stream: TextIO | None = None,
    *,
    burst_lines: int = BURST_LINES,
    lines_per_second: float = LINES_PER_SECOND,
) -> "BoundedHandler":
    """Write what `penstock` loggers say to `stream` (standard error); a second call replaces the first."""
    logger = logging.getLogger("penstock")
    for handler in [each for each in logger.handlers if isinstance(each, BoundedHandler)]:
        logger.removeHandler(handler)
        handler.close()
    handler = BoundedHandler(stream or sys.stderr, burst_lines=burst_lines, lines_per_second=lines_per_second)
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False
    return handler


def suppressed_lines() -> int:
    """How many lines the handler in use has left out."""
    handlers = logging.getLogger("penstock").handlers
    return sum(each.suppressed_lines for each in handlers if isinstance(each, BoundedHandler))


class TextFormatter(logging.Formatter):
    """`2026-01-02T03:04:05.678Z INFO penstock.server connection refused peer=1.2.3.4:5 reason="two words"`"""

    def format(self, record: logging.LogRecord) -> str:
        parts = [_timestamp(record.created), record.levelname, record.name, _one_line(record.getMessage())]
        parts += [f"{name}={_quoted(value)}" for name, value in fields_of(record).items()]
        line = " ".join(parts)
        trace = _traceback(self, record)
        return f"{line}\n{trace}" if trace else line


class JsonFormatter(logging.Formatter):
    """One object per line: ts, level, logger, message, fields, and exception where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        import json  # lets a node that writes text start without it

        line: dict[str, Any] = {
            "ts": _timestamp(record.created),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "fields": {name: _plain(value) for name, value in fields_of(record).items()},
        }
        if trace := _traceback(self, record):
            line["exception"] = trace
        return json.dumps(line)


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """What was given as `extra`, in that order."""
    return {name: value for name, value in vars(record).items() if name not in _STANDARD_FIELDS}


class BoundedHandler(logging.StreamHandler[TextIO]):
    """Writes each kind of event a bounded number of times; the next line written says how many were not.

    A kind is a logger, a level and a message before its arguments are put in. What is critical is always
    written.
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
        self._allowances: dict[tuple[str, int, str], _Allowance] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Called by the logging module under this handler's lock."""
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
        """Nothing may stay untold: what was left out and not yet reported is reported now."""
        self.acquire()
        try:
            for (name, level, kind), allowance in self._allowances.items():
                if allowance.suppressed:
                    super().emit(_summary(name, level, kind, allowance.suppressed))
            self._allowances.clear()
        finally:
            self.release()
        super().close()

    def _allowance(self, record: logging.LogRecord) -> "_Allowance":
        kind = (record.name, record.levelno, str(record.msg))
        allowance = self._allowances.get(kind)
        if allowance is None:
            if len(self._allowances) >= _KINDS_MAX:
                kind = ("penstock", logging.WARNING, "other events")
            allowance = self._allowances.setdefault(
                kind, _Allowance(self._burst_lines, self._lines_per_second, self._clock())
            )
        return allowance


class _Allowance:
    """A token bucket: full at first, refilled with time, one taken for each line."""

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


def _summary(name: str, level: int, kind: str, count: int) -> logging.LogRecord:
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


def _plain(value: Any) -> Any:
    """As JSON can say it; text from a client is cut."""
    if value is None or isinstance(value, bool | int | float):
        return value
    text = str(value)
    return text if len(text) <= FIELD_CHARS_MAX else f"{text[:FIELD_CHARS_MAX]}..."


def _quoted(value: Any) -> str:
    text = str(_plain(value))
    if text and text.isprintable() and not any(mark in text for mark in ' "=\\'):
        return text
    return _as_json(text)


def _one_line(message: str) -> str:
    """A message that would break the line, or play tricks on a terminal, is escaped."""
    return message if message.isprintable() else _as_json(message)[1:-1]


def _as_json(text: str) -> str:
    import json

    return json.dumps(text, ensure_ascii=not text.isprintable())
