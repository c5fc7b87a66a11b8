"""A handler as the runners call it: one function of a raw message, with payload, message and handles filled in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from penstock.client.app.message import Message
from penstock.client.payloads import HandlerShape, codec_for

__all__ = ["Call", "Chunk", "calling", "calling_batch"]

#: A raw message, and what is given by name: a database connection, for those that ask for one.
Call = Callable[..., Any]


def calling(handler: Callable[..., Any], shape: HandlerShape) -> Call:
    """For one message. Calling it raises PayloadError for what cannot be read; an async handler gives an awaitable."""
    if shape.payload is None:
        return lambda raw, **handles: handler(Message(raw), **handles)
    decode = codec_for(shape.payload).decode
    if shape.takes_message:
        return lambda raw, **handles: handler(decode(raw.value()), Message(raw), **handles)
    return lambda raw, **handles: handler(decode(raw.value()), **handles)


#: Messages with what was read from each.
Chunk = Sequence[tuple[Any, Any]]


def calling_batch(
    handler: Callable[..., Any], shape: HandlerShape
) -> tuple[Callable[[Chunk], Any], Callable[[Any], Any]]:
    """For lists: a function of messages with their payloads, and the one that reads a payload (PayloadError)."""
    if shape.payload is None:
        return (lambda pairs: handler([Message(raw) for raw, _ in pairs])), lambda raw: None
    decode = codec_for(shape.payload).decode
    if shape.takes_message:
        return (
            lambda pairs: handler([payload for _, payload in pairs], [Message(raw) for raw, _ in pairs]),
            lambda raw: decode(raw.value()),
        )
    return (lambda pairs: handler([payload for _, payload in pairs])), lambda raw: decode(raw.value())
