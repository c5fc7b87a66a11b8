"""A handler as the runners call it: one function of a raw message, with payload, message and handles filled in.

Every message goes through here, so what need not be done for each is done once, outside of the functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from penstock.client.app.message import Message
from penstock.client.letters import Header
from penstock.client.payload_kinds import BytesCodec
from penstock.client.payloads import HandlerShape, PayloadError, codec_for
from penstock.client.tracing import Spans, take_in_hand

__all__ = [
    "NOT_HANDLED",
    "Call",
    "Chunk",
    "Hand",
    "Loop",
    "Unreadable",
    "calling",
    "calling_batch",
    "looping",
    "one_by_one",
]

#: A raw message, and what is given by name: a database connection, for those that ask for one.
Call = Callable[..., Any]
#: Messages with what was read from each.
Chunk = Sequence[tuple[Any, Any]]


#: What a call returns that has left its message out: it was handled before, or waits for another one of its key.
NOT_HANDLED: Final = object()


class Unreadable(PayloadError):
    """The message is not what the handler takes, which no later attempt can change."""


class Hand:
    """The message that a loop is at: whose trace it is that things are published in, and who failed."""

    __slots__ = ("left_out", "raw")

    def __init__(self) -> None:
        self.raw: Any = None
        #: How many of the batch were not handled, without having failed.
        self.left_out = 0

    def headers(self) -> list[Header] | None:
        found: list[Header] | None = self.raw.headers() if self.raw is not None else None
        return found


#: Handles what is left of a batch. What a handler raises ends it, and the hand has the message that failed.
Loop = Callable[[Iterator[Any], Hand], None]


class _Handed(Message):
    """Made without a call of Python code, which would take longer than all the rest."""

    __slots__ = ()
    __init__ = object.__init__


def looping(handler: Callable[..., Any], shape: HandlerShape) -> Loop:
    """For a handler with nothing around it, in the thread that reads."""
    if shape.payload is None:
        return _messages(handler)
    if not shape.takes_message and isinstance(codec := codec_for(shape.payload), BytesCodec):
        return _values(handler, reading(shape.payload), takes_none=codec.takes_none)
    return one_by_one(_plain(handler, shape))


def one_by_one(call: Call) -> Loop:
    def loop(rest: Iterator[Any], hand: Hand) -> None:
        for raw in rest:
            hand.raw = raw
            if call(raw) is NOT_HANDLED:
                hand.left_out += 1

    return loop


def _messages(handler: Callable[..., Any]) -> Loop:
    def loop(rest: Iterator[Any], hand: Hand) -> None:
        for raw in rest:
            hand.raw = raw
            message = _Handed()
            message._raw = raw
            handler(message)

    return loop


def _values(handler: Callable[..., Any], read: Callable[[Any], Any], *, takes_none: bool) -> Loop:
    def loop(rest: Iterator[Any], hand: Hand) -> None:
        for raw in rest:
            hand.raw = raw
            value = raw.value()
            handler(value if value is not None or takes_none else read(raw))

    return loop


def calling(
    handler: Callable[..., Any], shape: HandlerShape, spans: Spans, *, takes_in_hand: bool = True
) -> Call:
    """For one message. Raises Unreadable; an async handler gives an awaitable.

    Whoever has a `Hand` need not have messages taken in hand one by one.
    """
    call = _with_handles(handler, shape) if shape.extras else _plain(handler, shape)
    if spans.is_on:
        return _recorded_async(call, spans) if shape.is_async else _recorded(call, spans)
    return _in_hand(call) if takes_in_hand else call


def _plain(handler: Callable[..., Any], shape: HandlerShape) -> Call:
    if shape.payload is None:
        return lambda raw: handler(Message(raw))
    read = reading(shape.payload)
    if shape.takes_message:
        return lambda raw: handler(read(raw), Message(raw))
    return lambda raw: handler(read(raw))


def _with_handles(handler: Callable[..., Any], shape: HandlerShape) -> Call:
    if shape.payload is None:
        return lambda raw, **handles: handler(Message(raw), **handles)
    read = reading(shape.payload)
    if shape.takes_message:
        return lambda raw, **handles: handler(read(raw), Message(raw), **handles)
    return lambda raw, **handles: handler(read(raw), **handles)


def reading(annotation: Any) -> Callable[[Any], Any]:
    """The payload of a raw message. Raises Unreadable."""
    decode = codec_for(annotation).decode

    def read(raw: Any) -> Any:
        try:
            return decode(raw.value())
        except PayloadError as flaw:
            raise Unreadable(str(flaw)) from flaw

    return read


def _in_hand(call: Call) -> Call:
    """What is published meanwhile belongs to the trace of the message."""

    def handle(raw: Any, **handles: Any) -> Any:
        take_in_hand(raw)
        return call(raw, **handles)

    return handle


def _recorded(call: Call, spans: Spans) -> Call:
    def handle(raw: Any, **handles: Any) -> Any:
        with spans.consume(Message(raw)):
            return call(raw, **handles)

    return handle


def _recorded_async(call: Call, spans: Spans) -> Call:
    async def handle(raw: Any, **handles: Any) -> Any:
        with spans.consume(Message(raw)):
            return await call(raw, **handles)

    return handle


def calling_batch(
    handler: Callable[..., Any], shape: HandlerShape, spans: Spans
) -> tuple[Callable[[Chunk], Any], Callable[[Any], Any]]:
    """For lists: a function of messages with their payloads, and the one that reads a payload (Unreadable)."""
    read = reading(shape.payload) if shape.payload is not None else lambda raw: None
    needs_messages = shape.payload is None or shape.takes_message

    def call(pairs: Chunk) -> Any:
        messages = [Message(raw) for raw, _ in pairs] if needs_messages or spans.is_on else []
        with spans.consume_batch(messages):
            if shape.payload is None:
                return handler(messages)
            payloads = [payload for _, payload in pairs]
            return handler(payloads, messages) if shape.takes_message else handler(payloads)

    return call, read
