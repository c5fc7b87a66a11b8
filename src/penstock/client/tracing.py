"""Tracing: the trace context of messages, handed on by whoever handles them, and spans where OpenTelemetry records.

Without OpenTelemetry, or with none that records, what is published inside a handler still belongs to the trace of the
message in hand. OpenTelemetry is looked for at the first use, and never needed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from functools import cache
from types import ModuleType
from typing import Final, Protocol

from penstock.client.letters import Header
from penstock.client.trace_context import Trace, incoming, outgoing

__all__ = ["Spans", "Trace", "Traced", "current_trace", "incoming", "outgoing", "take_in_hand"]


class Traced(Protocol):
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
_IN_HAND: Final[ContextVar[Traced | WithHeaders | None]] = ContextVar(
    "penstock_message_in_hand", default=None
)


def take_in_hand(message: WithHeaders) -> None:
    """Until the next one is: for loops that handle one message after the other, where nothing is recorded."""
    _IN_HAND.set(message)


def current_trace() -> Trace | None:
    """Of the message in hand, where there is one."""
    message = _IN_HAND.get()
    if message is None:
        return None
    headers = message.headers
    return incoming((headers() or []) if callable(headers) else headers)


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

    def consume(self, message: Traced) -> AbstractContextManager[object]:
        """Around the handling of one message, which its span is a part of the trace of: `orders process`."""
        recorder = _recorder()
        if recorder is None:
            return _InHand(message)
        span: AbstractContextManager[object] = recorder.consuming(
            message, client=self._client, group=self._group
        )
        return span

    def consume_batch(self, messages: Sequence[Traced]) -> AbstractContextManager[object]:
        """Around the handling of several, whose traces its span is linked with."""
        recorder = _recorder()
        if recorder is None or not messages:
            return _InHand(None)
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
            return _Unrecorded(headers)
        span: AbstractContextManager[list[Header]] = recorder.publishing(
            topic, headers, key=key, client=self._client
        )
        return span


class _InHand:
    """A context manager without a generator: it is entered for every message."""

    __slots__ = ("_message", "_token")

    def __init__(self, message: Traced | None) -> None:
        self._message = message
        self._token: Token[Traced | WithHeaders | None] | None = None

    def __enter__(self) -> None:
        self._token = _IN_HAND.set(self._message)

    def __exit__(self, *exception: object) -> None:
        assert self._token is not None
        _IN_HAND.reset(self._token)


class _Unrecorded:
    """Without a generator too: it is entered for every message that is published."""

    __slots__ = ("_headers",)

    def __init__(self, headers: list[Header]) -> None:
        self._headers = headers

    def __enter__(self) -> list[Header]:
        return outgoing(self._headers, current_trace())

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
    from penstock.client import tracing_spans

    return tracing_spans
