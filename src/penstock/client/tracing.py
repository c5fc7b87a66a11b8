"""Tracing: the W3C trace context in message headers, and spans where OpenTelemetry records.

A message that a handler publishes belongs to the trace of the message that it handles, also without OpenTelemetry or
where OpenTelemetry records nothing. This module looks for OpenTelemetry on first use and never requires it.

Anyone may have written the headers `traceparent` and `tracestate`. An invalid trace context counts as absent; it is
never used in part.
"""

from __future__ import annotations

import importlib.util
import os
import random
import re
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from functools import cache
from types import ModuleType
from typing import Final, NamedTuple, Protocol

from penstock.client.deadletters.headers import Header

__all__ = (
    "TRACEPARENT",
    "TRACESTATE",
    "Spans",
    "TraceContext",
    "TracedMessage",
    "current_trace",
    "extract_trace",
    "inject_trace",
    "set_current_message",
    "trace_headers",
)


TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"
STATE_CHARACTERS_MAX: Final = 512
SAMPLED: Final = 0x01
#: The flags "sampled" and "random trace id". W3C forbids passing on unknown flags.
_FLAGS_KNOWN: Final = 0x03
#: Later versions may append more fields after a hyphen.
_TRACEPARENT: Final = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(?P<more>-.*)?",
    re.ASCII,
)
_NO_TRACE: Final = "0" * 32
_NO_SPAN: Final = "0" * 16
_TRACESTATE: Final = re.compile(r"[\x20-\x7e\t]*", re.ASCII)

_RANDOM: Final = random.Random()
# After a fork, parent and child must not generate the same ids.
os.register_at_fork(after_in_child=_RANDOM.seed)


class TraceContext(NamedTuple):
    """A span of a trace, which new spans continue."""

    trace_id: str
    span_id: str
    flags: int
    #: The tracestate header, unchanged.
    state: str


def extract_trace(headers: Iterable[Header] | None) -> TraceContext | None:
    """Returns the trace context in the headers; None if there is no valid one."""
    parent: bytes | None = None
    states: list[bytes] = []
    for name, value in headers or ():
        if name == TRACEPARENT:
            parent = value
        elif name == TRACESTATE and value:
            states.append(value)
    return _parse_trace(parent, states) if parent is not None else None


def inject_trace(
    headers: list[Header], current: TraceContext | None, *, chance: random.Random | None = None
) -> list[Header]:
    """Adds a trace context to the headers unless they have one: a child of `current`, or a new trace.

    A new trace is marked as sampled, so that consumers which record spans record this one.
    """
    for name, _ in headers:
        if name == TRACEPARENT:
            return headers
    chance = chance or _RANDOM
    if current is None:
        return [*headers, (TRACEPARENT, _new_traceparent(chance))]
    return [*headers, *trace_headers(current, chance.getrandbits(64) or 1)]


def trace_headers(trace: TraceContext, child: int | None = None) -> list[Header]:
    """Returns the headers of the trace context, or of a child span with this id."""
    span_id = trace.span_id if child is None else f"{child:016x}"
    parent = f"00-{trace.trace_id}-{span_id}-{trace.flags & _FLAGS_KNOWN:02x}"
    result: list[Header] = [(TRACEPARENT, parent.encode())]
    return [*result, (TRACESTATE, trace.state.encode())] if trace.state else result


def _new_traceparent(chance: random.Random) -> bytes:
    return b"00-%032x-%016x-%02x" % (chance.getrandbits(128) or 1, chance.getrandbits(64) or 1, SAMPLED)


def _parse_trace(parent: bytes, states: list[bytes]) -> TraceContext | None:
    match = _TRACEPARENT.fullmatch(parent.decode("latin-1"))
    if match is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    if version == "ff" or (version == "00" and more is not None):
        return None
    if trace_id == _NO_TRACE or span_id == _NO_SPAN:
        return None
    return TraceContext(trace_id, span_id, int(flags, 16), _join_tracestate(states) if states else "")


def _join_tracestate(states: list[bytes]) -> str:
    """Returns the tracestate; drops the oldest entries, at the end, if it is too long."""
    text = ",".join(state.decode("latin-1") for state in states)
    if _TRACESTATE.fullmatch(text) is None:
        return ""
    if len(text) <= STATE_CHARACTERS_MAX:
        return text
    return text[: STATE_CHARACTERS_MAX + 1].rpartition(",")[0]


class TracedMessage(Protocol):
    """The fields of a message that spans record, as in `app.message.Message`."""

    @property
    def topic(self) -> str: ...
    @property
    def partition(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def key(self) -> bytes | None: ...
    @property
    def value(self) -> bytes | None: ...
    @property
    def headers(self) -> list[Header]: ...
    @property
    def id(self) -> str: ...


class WithHeaders(Protocol):
    """A message of the client library; without recording, only its headers are needed."""

    def headers(self) -> list[Header] | None: ...


#: The message that the handler works on; published messages join its trace.
_CURRENT_MESSAGE: Final[ContextVar[TracedMessage | WithHeaders | None]] = ContextVar(
    "penstock_current_message", default=None
)


def set_current_message(message: WithHeaders) -> None:
    """Sets the current message until the next call, for sequential loops without recording."""
    _CURRENT_MESSAGE.set(message)


def current_trace() -> TraceContext | None:
    """Returns the trace context of the current message, if there is one."""
    message = _CURRENT_MESSAGE.get()
    if message is None:
        return None
    headers = message.headers
    return extract_trace((headers() or []) if callable(headers) else headers)


class Spans:
    """Spans of one application: `client` is its name, `group` its consumer group."""

    __slots__ = ("_client", "_group")

    def __init__(self, *, client: str = "", group: str | None = None) -> None:
        self._client = client
        self._group = group

    @property
    def is_on(self) -> bool:
        """Whether spans are recorded now."""
        return _recorder() is not None

    def consume(self, message: TracedMessage) -> AbstractContextManager[object]:
        """Returns the span `orders process` around the handling of one message, in the message's trace."""
        recorder = _recorder()
        if recorder is None:
            return _MessageScope(message)
        span: AbstractContextManager[object] = recorder.consuming(
            message, client=self._client, group=self._group
        )
        return span

    def consume_batch(self, messages: Sequence[TracedMessage]) -> AbstractContextManager[object]:
        """Returns a span around the handling of several messages, linked to their traces."""
        recorder = _recorder()
        if recorder is None or not messages:
            return _MessageScope(None)
        span: AbstractContextManager[object] = recorder.consuming_batch(
            messages, client=self._client, group=self._group
        )
        return span

    def publish(
        self, topic: str, headers: list[Header], *, key: bytes | None = None
    ) -> AbstractContextManager[list[Header]]:
        """Returns the span `orders publish` around publishing a message; it yields the headers to send.

        They have the trace context of the span or, without recording, of the current message.
        """
        recorder = _recorder()
        if recorder is None:
            return _PublishScope(headers)
        span: AbstractContextManager[list[Header]] = recorder.publishing(
            topic, headers, key=key, client=self._client
        )
        return span


class _MessageScope:
    """A class and not a generator, because every message enters it and a class is faster."""

    __slots__ = ("_message", "_token")

    def __init__(self, message: TracedMessage | None) -> None:
        self._message = message
        self._token: Token[TracedMessage | WithHeaders | None] | None = None

    def __enter__(self) -> None:
        self._token = _CURRENT_MESSAGE.set(self._message)

    def __exit__(self, *exception: object) -> None:
        assert self._token is not None
        _CURRENT_MESSAGE.reset(self._token)


class _PublishScope:
    """A class and not a generator, because every published message enters it."""

    __slots__ = ("_headers",)

    def __init__(self, headers: list[Header]) -> None:
        self._headers = headers

    def __enter__(self) -> list[Header]:
        return inject_trace(self._headers, current_trace())

    def __exit__(self, *exception: object) -> None:
        pass


def _recorder() -> ModuleType | None:
    """Returns None if no tracer records."""
    found = _opentelemetry()
    return found if found is not None and found.is_recording() else None


@cache
def _opentelemetry() -> ModuleType | None:
    if (
        importlib.util.find_spec("opentelemetry") is None
        or importlib.util.find_spec("opentelemetry.trace") is None
    ):
        return None
    from penstock.client import opentelemetry_spans

    return opentelemetry_spans
