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
#: Sampled, and that the id of the trace is random; what else may be set one day is not ours to hand on.
_FLAGS_KNOWN: Final = 0x03
#: Versions to come may have more behind a further hyphen.
_TRACEPARENT: Final = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(?P<more>-.*)?",
    re.ASCII,
)
_NO_TRACE: Final = "0" * 32
_NO_SPAN: Final = "0" * 16
_TRACESTATE: Final = re.compile(r"[\x20-\x7e\t]*", re.ASCII)

_RANDOM: Final = random.Random()
# Two processes that were one must not go on with the same ids.
os.register_at_fork(after_in_child=_RANDOM.seed)


class TraceContext(NamedTuple):
    """A place in a trace: where it is to be continued from."""

    trace_id: str
    span_id: str
    flags: int
    #: What vendors of tracing have to tell each other, as it came.
    state: str


def extract_trace(headers: Iterable[Header] | None) -> TraceContext | None:
    """As the headers of a message tell; None where they tell none that is valid."""
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
    """With a child of `current`, or the beginning of a trace, unless the headers have a trace context of their own.

    A trace that begins here is told as sampled: nobody further on who records is told not to.
    """
    for name, _ in headers:
        if name == TRACEPARENT:
            return headers
    chance = chance or _RANDOM
    if current is None:
        return [*headers, (TRACEPARENT, _new_traceparent(chance))]
    return [*headers, *trace_headers(current, chance.getrandbits(64) or 1)]


def trace_headers(trace: TraceContext, child: int | None = None) -> list[Header]:
    """Of the place itself, or of a child of it by its id."""
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
    """As it came; what is too long loses entries at its end, which are the oldest."""
    text = ",".join(state.decode("latin-1") for state in states)
    if _TRACESTATE.fullmatch(text) is None:
        return ""
    if len(text) <= STATE_CHARACTERS_MAX:
        return text
    return text[: STATE_CHARACTERS_MAX + 1].rpartition(",")[0]


class TracedMessage(Protocol):
    """What tracing wants to know of a message; `app.message.Message` has it."""

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
    """A message of the client library: all that is asked of it where nothing is recorded."""

    def headers(self) -> list[Header] | None: ...


#: The message in hand, read only by who publishes while it is.
_CURRENT_MESSAGE: Final[ContextVar[TracedMessage | WithHeaders | None]] = ContextVar(
    "penstock_message_in_hand", default=None
)


def set_current_message(message: WithHeaders) -> None:
    """Until the next one is: for loops that handle one message after the other, where nothing is recorded."""
    _CURRENT_MESSAGE.set(message)


def current_trace() -> TraceContext | None:
    """Of the message in hand, where there is one."""
    message = _CURRENT_MESSAGE.get()
    if message is None:
        return None
    headers = message.headers
    return extract_trace((headers() or []) if callable(headers) else headers)


class Spans:
    """Spans of one application: `client` is its name, `group` the one it consumes for."""

    __slots__ = ("_client", "_group")

    def __init__(self, *, client: str = "", group: str | None = None) -> None:
        self._client = client
        self._group = group

    @property
    def is_on(self) -> bool:
        """Whether anything is recorded now."""
        return _recorder() is not None

    def consume(self, message: TracedMessage) -> AbstractContextManager[object]:
        """Around the handling of one message, which its span is a part of the trace of: `orders process`."""
        recorder = _recorder()
        if recorder is None:
            return _MessageScope(message)
        span: AbstractContextManager[object] = recorder.consuming(
            message, client=self._client, group=self._group
        )
        return span

    def consume_batch(self, messages: Sequence[TracedMessage]) -> AbstractContextManager[object]:
        """Around the handling of several, whose traces its span is linked with."""
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
        """Around the publishing of a message with the headers that are handed in: `orders publish`.

        These have the trace context of the span, or that of the message in hand where nothing is recorded.
        """
        recorder = _recorder()
        if recorder is None:
            return _PublishScope(headers)
        span: AbstractContextManager[list[Header]] = recorder.publishing(
            topic, headers, key=key, client=self._client
        )
        return span


class _MessageScope:
    """A context manager without a generator: it is entered for every message."""

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
    """Without a generator too: it is entered for every message that is published."""

    __slots__ = ("_headers",)

    def __init__(self, headers: list[Header]) -> None:
        self._headers = headers

    def __enter__(self) -> list[Header]:
        return inject_trace(self._headers, current_trace())

    def __exit__(self, *exception: object) -> None:
        pass


def _recorder() -> ModuleType | None:
    """None unless a tracer is installed that records."""
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
