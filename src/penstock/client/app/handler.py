"""A handler as the runners call it: a function of one raw message, with payload, message and database handle filled in.

Every message passes through here, so all work that is the same for every message is done once, outside these functions.

A handler requests a database handle by the name of a parameter: `connection` is the driver's connection, `session` a
SQLAlchemy session on it. Either way the transaction belongs to the contract: a commit through a session only releases a
savepoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from penstock.client.app.librdkafka import ApplicationError
from penstock.client.app.message import Message
from penstock.client.deadletters.headers import Header
from penstock.client.payloads import BytesCodec, HandlerSignature, PayloadError, codec_for
from penstock.client.tracing import Spans, set_current_message

__all__ = (
    "NOT_HANDLED",
    "DecodedMessages",
    "HandlerCall",
    "HandlerLoop",
    "LoopPosition",
    "UnreadableMessage",
    "check_database_parameter",
    "database_handle",
    "loop_over_call",
    "make_batch_call",
    "make_call",
    "make_loop",
)


SESSION: Final = "session"


def check_database_parameter(name: str) -> None:
    """Raises ApplicationError if SQLAlchemy is missing for a `session`."""
    if name == SESSION:
        try:
            import sqlalchemy  # noqa: F401
        except ImportError:
            raise ApplicationError(
                "a handler's `session` is SQLAlchemy's: pip install 'penstock[outbox]', or take a `connection`"
            ) from None


@contextmanager
def database_handle(name: str, connection: Any) -> Iterator[Any]:
    if name != SESSION:
        yield connection
        return
    from sqlalchemy import create_engine
    from sqlalchemy.orm import Session
    from sqlalchemy.pool import StaticPool

    is_postgres = type(connection).__module__.startswith("psycopg")
    engine = create_engine(
        "postgresql+psycopg://" if is_postgres else "sqlite://",
        creator=lambda: connection,
        poolclass=StaticPool,
        pool_reset_on_return=None,
    )
    for end in ("do_commit", "do_rollback"):
        setattr(engine.dialect, end, lambda _connection: None)
    with (
        engine.connect() as bound,
        bound.begin(),
        Session(bound, join_transaction_mode="create_savepoint") as session,
    ):
        yield session
        session.commit()


#: Called with a raw message and, if the handler requests one, a database handle as a keyword argument.
HandlerCall = Callable[..., Any]
#: Raw messages with their decoded payloads.
DecodedMessages = Sequence[tuple[Any, Any]]


#: A call returns this if it skipped its message: it was handled before, or follows a failed message of its key.
NOT_HANDLED: Final = object()


class UnreadableMessage(PayloadError):
    """The payload does not match the handler's annotation, so a retry would fail too."""


class LoopPosition:
    """The message that a loop handles now: it failed if the loop raises, and published messages join its trace."""

    __slots__ = ("left_out", "raw")

    def __init__(self) -> None:
        self.raw: Any = None
        #: How many messages of the batch were skipped without an error.
        self.left_out = 0

    def headers(self) -> list[Header] | None:
        found: list[Header] | None = self.raw.headers() if self.raw is not None else None
        return found


#: Handles the rest of a batch. An exception of the handler ends it; the position then has the failed message.
HandlerLoop = Callable[[Iterator[Any], LoopPosition], None]


class _FastMessage(Message):
    """A message that is made without calling a Python `__init__`, which would take longer than the rest of the loop."""

    __slots__ = ()
    __init__ = object.__init__


def make_loop(handler: Callable[..., Any], shape: HandlerSignature) -> HandlerLoop:
    """Returns the fastest loop for a handler that nothing wraps, in the polling thread."""
    if shape.payload is None:
        return _message_loop(handler)
    if not shape.takes_message and isinstance(codec := codec_for(shape.payload), BytesCodec):
        return _value_loop(handler, payload_reader(shape.payload), takes_none=codec.takes_none)
    return loop_over_call(_call_without_handles(handler, shape))


def loop_over_call(call: HandlerCall) -> HandlerLoop:
    def loop(remaining: Iterator[Any], position: LoopPosition) -> None:
        for raw in remaining:
            position.raw = raw
            if call(raw) is NOT_HANDLED:
                position.left_out += 1

    return loop


def _message_loop(handler: Callable[..., Any]) -> HandlerLoop:
    def loop(remaining: Iterator[Any], position: LoopPosition) -> None:
        for raw in remaining:
            position.raw = raw
            message = _FastMessage()
            message._raw = raw
            handler(message)

    return loop


def _value_loop(handler: Callable[..., Any], read: Callable[[Any], Any], *, takes_none: bool) -> HandlerLoop:
    def loop(remaining: Iterator[Any], position: LoopPosition) -> None:
        for raw in remaining:
            position.raw = raw
            value = raw.value()
            handler(value if value is not None or takes_none else read(raw))

    return loop


def make_call(
    handler: Callable[..., Any], shape: HandlerSignature, spans: Spans, *, sets_current_message: bool = True
) -> HandlerCall:
    """Returns a function that calls the handler with one message and raises UnreadableMessage.

    For an async handler it returns an awaitable. With a `LoopPosition`, which knows the current message already,
    `sets_current_message` can be false.
    """
    call = _call_with_handles(handler, shape) if shape.extras else _call_without_handles(handler, shape)
    if spans.is_on:
        return _with_span_async(call, spans) if shape.is_async else _with_span(call, spans)
    return _with_current_message(call) if sets_current_message else call


def _call_without_handles(handler: Callable[..., Any], shape: HandlerSignature) -> HandlerCall:
    if shape.payload is None:
        return lambda raw: handler(Message(raw))
    read = payload_reader(shape.payload)
    if shape.takes_message:
        return lambda raw: handler(read(raw), Message(raw))
    return lambda raw: handler(read(raw))


def _call_with_handles(handler: Callable[..., Any], shape: HandlerSignature) -> HandlerCall:
    if shape.payload is None:
        return lambda raw, **handles: handler(Message(raw), **handles)
    read = payload_reader(shape.payload)
    if shape.takes_message:
        return lambda raw, **handles: handler(read(raw), Message(raw), **handles)
    return lambda raw, **handles: handler(read(raw), **handles)


def payload_reader(annotation: Any) -> Callable[[Any], Any]:
    """Returns a function that decodes the payload of a raw message and raises UnreadableMessage."""
    decode = codec_for(annotation).decode

    def read(raw: Any) -> Any:
        try:
            return decode(raw.value())
        except PayloadError as flaw:
            raise UnreadableMessage(str(flaw)) from flaw

    return read


def _with_current_message(call: HandlerCall) -> HandlerCall:
    """Wraps `call` so that messages published by the handler join the trace of its message."""

    def handle(raw: Any, **handles: Any) -> Any:
        set_current_message(raw)
        return call(raw, **handles)

    return handle


def _with_span(call: HandlerCall, spans: Spans) -> HandlerCall:
    def handle(raw: Any, **handles: Any) -> Any:
        with spans.consume(Message(raw)):
            return call(raw, **handles)

    return handle


def _with_span_async(call: HandlerCall, spans: Spans) -> HandlerCall:
    async def handle(raw: Any, **handles: Any) -> Any:
        with spans.consume(Message(raw)):
            return await call(raw, **handles)

    return handle


def make_batch_call(
    handler: Callable[..., Any], shape: HandlerSignature, spans: Spans
) -> tuple[Callable[[DecodedMessages], Any], Callable[[Any], Any]]:
    """Returns a function that calls the handler with a list, and one that decodes a payload (UnreadableMessage)."""
    read = payload_reader(shape.payload) if shape.payload is not None else lambda raw: None
    needs_messages = shape.payload is None or shape.takes_message

    def call(pairs: DecodedMessages) -> Any:
        messages = [Message(raw) for raw, _ in pairs] if needs_messages or spans.is_on else []
        with spans.consume_batch(messages):
            if shape.payload is None:
                return handler(messages)
            payloads = [payload for _, payload in pairs]
            return handler(payloads, messages) if shape.takes_message else handler(payloads)

    return call, read
