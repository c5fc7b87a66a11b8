"""OpenTelemetry spans around handling and publishing, by the semantic conventions for messaging.

This module needs opentelemetry-api, so only `penstock.client.tracing` imports it, and only where that package is
installed. The application's own propagators read and write the headers; they are W3C's unless the application sets up
others.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from opentelemetry import context, propagate, trace
from opentelemetry.propagators.textmap import Getter, Setter
from opentelemetry.trace import Link, NoOpTracerProvider, ProxyTracerProvider, SpanKind

from penstock import __version__
from penstock.client.deadletters.headers import Header
from penstock.client.tracing import TRACEPARENT, TraceContext, TracedMessage, inject_trace, trace_headers

__all__ = ["consuming", "consuming_batch", "is_recording", "publishing"]

_TRACER_NAME: Final = "penstock.client"
_KEY_CHARACTERS_MAX: Final = 128
#: Whether the environment names a provider, which the OpenTelemetry API creates on first use.
_HAS_PROVIDER_VARIABLE: Final = "OTEL_PYTHON_TRACER_PROVIDER" in os.environ


def is_recording() -> bool:
    """Whether a provider is set. The API alone records nothing, and an application may set a provider at any time."""
    if getattr(trace, "_TRACER_PROVIDER", trace) is None and not _HAS_PROVIDER_VARIABLE:
        return False  # get_tracer_provider would read the environment each time, which is slow
    return not isinstance(trace.get_tracer_provider(), ProxyTracerProvider | NoOpTracerProvider)


@contextmanager
def consuming(message: TracedMessage, *, client: str, group: str | None) -> Iterator[None]:
    attributes = _attributes("process", message.topic, client)
    attributes |= _message_attributes(message)
    if group is not None:
        attributes["messaging.consumer.group.name"] = group
    with _message_context(message), _span(f"{message.topic} process", SpanKind.CONSUMER, attributes):
        yield


@contextmanager
def consuming_batch(messages: Sequence[TracedMessage], *, client: str, group: str | None) -> Iterator[None]:
    topic = messages[0].topic
    attributes = _attributes("process", topic, client)
    attributes["messaging.batch.message_count"] = len(messages)
    if group is not None:
        attributes["messaging.consumer.group.name"] = group
    links = [link for link in map(_link, messages) if link is not None]
    with _span(f"{topic} process", SpanKind.CONSUMER, attributes, links=links):
        yield


@contextmanager
def publishing(
    topic: str, headers: list[Header], *, key: bytes | None, client: str
) -> Iterator[list[Header]]:
    attributes = _attributes("publish", topic, client)
    if key is not None:
        attributes |= _key_attributes(key)
    with _span(f"{topic} publish", SpanKind.PRODUCER, attributes):
        yield _headers_with_context(headers)


# Spans


@contextmanager
def _span(
    name: str,
    kind: SpanKind,
    attributes: dict[str, str | int],
    *,
    links: list[Link] | None = None,
) -> Iterator[None]:
    tracer = trace.get_tracer(_TRACER_NAME, __version__)
    with tracer.start_as_current_span(name, kind=kind, attributes=attributes, links=links) as span:
        try:
            yield
        except Exception as error:
            span.set_attribute("error.type", type(error).__qualname__)
            raise


@contextmanager
def _message_context(message: TracedMessage) -> Iterator[None]:
    """Returns a context with the trace and baggage of the message, without the current context."""
    token = context.attach(_extract_context(message))
    try:
        yield
    finally:
        context.detach(token)


def _extract_context(message: TracedMessage) -> context.Context:
    return propagate.extract(message.headers, context=context.Context(), getter=_HEADER_GETTER)


def _attributes(operation: str, topic: str, client: str) -> dict[str, str | int]:
    kind = {"process": "process", "publish": "send"}[operation]
    result: dict[str, str | int] = {
        "messaging.system": "kafka",
        "messaging.operation.name": operation,
        "messaging.operation.type": kind,
        "messaging.destination.name": topic,
    }
    return result | ({"messaging.client.id": client} if client else {})


def _message_attributes(message: TracedMessage) -> dict[str, str | int]:
    result: dict[str, str | int] = {
        "messaging.destination.partition.id": str(message.partition),
        "messaging.kafka.offset": message.offset,
        "messaging.message.id": message.id,
    }
    if message.key is not None:
        result |= _key_attributes(message.key)
    if message.value is None:
        result["messaging.kafka.message.tombstone"] = True
    return result


def _key_attributes(key: bytes) -> dict[str, str | int]:
    """Returns the key if it is text."""
    try:
        return {"messaging.kafka.message.key": key.decode()[:_KEY_CHARACTERS_MAX]}
    except UnicodeDecodeError:
        return {}


def _link(message: TracedMessage) -> Link | None:
    producer = trace.get_current_span(_extract_context(message)).get_span_context()
    return Link(producer) if producer.is_valid else None


# Headers


def _headers_with_context(headers: list[Header]) -> list[Header]:
    """Keeps a trace context that the caller has passed."""
    if any(name == TRACEPARENT for name, _ in headers):
        return headers
    result = list(headers)
    propagate.inject(result, setter=_HEADER_SETTER)
    current = _current_trace()
    if current is None or any(name == TRACEPARENT for name, _ in result):
        return inject_trace(result, None)
    # The application's propagators may write another format, so add W3C's too.
    return result + trace_headers(current)


def _current_trace() -> TraceContext | None:
    span = trace.get_current_span().get_span_context()
    if not span.is_valid:
        return None
    return TraceContext(
        trace_id=f"{span.trace_id:032x}",
        span_id=f"{span.span_id:016x}",
        flags=span.trace_flags,
        state=span.trace_state.to_header(),
    )


class _HeaderGetter(Getter[list[Header]]):
    def get(self, carrier: list[Header], key: str) -> list[str] | None:
        """Returns the last header of a name; for tracestate all of them, because they form one list."""
        found = [value.decode("latin-1") for name, value in carrier if name == key and value is not None]
        return (found if key == "tracestate" else found[-1:]) or None

    def keys(self, carrier: list[Header]) -> list[str]:
        return [name for name, _ in carrier]


class _HeaderSetter(Setter[list[Header]]):
    def set(self, carrier: list[Header], key: str, value: str) -> None:
        carrier.append((key, value.encode()))


_HEADER_GETTER: Final = _HeaderGetter()
_HEADER_SETTER: Final = _HeaderSetter()
