"""Trace context: W3C's rules, and spans if OpenTelemetry is recording."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import baggage, trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from penstock.client.deadletters.headers import Header
from penstock.client.tracing import Spans, TraceContext, current_trace, extract_trace, inject_trace

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"


@dataclass
class Message:
    topic: str = "orders"
    partition: int = 2
    offset: int = 41
    key: bytes | None = b"ann"
    value: bytes | None = b"{}"
    headers: list[Header] = field(default_factory=list)
    id: str = "m-1"


def parent_of(headers: list[Header]) -> str:
    found = [value for name, value in headers if name == "traceparent"]
    assert len(found) == 1
    assert found[0] is not None
    return found[0].decode()


# What comes in


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        (PARENT, 1),
        (f"00-{TRACE_ID}-{SPAN_ID}-00", 0),
        (f"00-{TRACE_ID}-{SPAN_ID}-ff", 255),
        (f"01-{TRACE_ID}-{SPAN_ID}-01", 1),
        (f"cc-{TRACE_ID}-{SPAN_ID}-01-what-the-future-will-be-like", 1),
    ],
)
def test_valid_parents(text: str, flags: int) -> None:
    assert extract_trace([("traceparent", text.encode())]) == TraceContext(TRACE_ID, SPAN_ID, flags, "")


@pytest.mark.parametrize(
    "text",
    [
        "",
        f"ff-{TRACE_ID}-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{SPAN_ID}-01-more",
        f"00-{TRACE_ID}-{SPAN_ID}-01-",
        f"00-{'0' * 32}-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        PARENT.upper(),
        f"00-{TRACE_ID.replace('a', 'A')}-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{SPAN_ID}",
        f"00-{TRACE_ID}-{SPAN_ID}-1",
        f"00-{TRACE_ID[:-1]}-{SPAN_ID}-01",
        f"cc-{TRACE_ID}-{SPAN_ID}-01x",
        f" {PARENT}",
        f"{PARENT}\n",
        f"0x-{TRACE_ID}-{SPAN_ID}-01",
    ],
)
def test_what_is_no_parent_is_absent(text: str) -> None:
    assert extract_trace([("traceparent", text.encode())]) is None


def test_headers_without_a_parent() -> None:
    assert extract_trace(None) is None
    assert extract_trace([]) is None
    assert extract_trace([("traceparent", None)]) is None
    assert extract_trace([("tracestate", b"a=b")]) is None
    assert extract_trace([("Traceparent", PARENT.encode())]) is None


@given(st.binary(max_size=80), st.binary(max_size=600))
def test_no_header_makes_it_fail(parent: bytes, state: bytes) -> None:
    assert extract_trace([("traceparent", parent)]) is None
    found = extract_trace([("traceparent", PARENT.encode()), ("tracestate", state)])
    assert found is not None
    assert len(found.state) <= 512


def test_the_state_is_carried_through_untouched() -> None:
    state = "rojo=00f067aa0ba902b7 ,\tcongo=t61rcWkgMzE"
    headers: list[Header] = [("traceparent", PARENT.encode()), ("tracestate", state.encode())]
    sent = inject_trace([], extract_trace(headers))
    assert sent[1] == ("tracestate", state.encode())
    parts: list[Header] = [("tracestate", b"a=1"), *headers[:1], ("tracestate", b"b=2")]
    assert extract_trace(parts) == TraceContext(TRACE_ID, SPAN_ID, 1, "a=1,b=2")


def test_a_state_that_is_too_long_loses_whole_entries_at_its_end() -> None:
    entries = [f"vendor{number}={'x' * 40}" for number in range(20)]
    found = extract_trace([("traceparent", PARENT.encode()), ("tracestate", ",".join(entries).encode())])
    assert found is not None
    assert found.state == ",".join(entries[:10])
    assert extract_trace([("traceparent", PARENT.encode()), ("tracestate", b"x" * 600)]) == TraceContext(
        TRACE_ID, SPAN_ID, 1, ""
    )


# What goes out


def test_a_child_has_the_trace_and_a_span_of_its_own() -> None:
    sent = inject_trace([("a", b"b")], TraceContext(TRACE_ID, SPAN_ID, 0xFF, "k=v"), chance=Random(1))
    assert sent[0] == ("a", b"b")
    child = extract_trace(sent)
    assert child is not None
    assert child.trace_id == TRACE_ID
    assert child.span_id != SPAN_ID
    assert (child.flags, child.state) == (0x03, "k=v")


def test_a_trace_begins_where_there_is_none() -> None:
    found = {extract_trace(inject_trace([], None)) for _ in range(100)}
    assert None not in found
    assert len({each.trace_id for each in found if each}) == 100
    assert {each.flags for each in found if each} == {1}


def test_what_the_caller_gave_stays() -> None:
    given_: list[Header] = [("traceparent", b"mine")]
    assert inject_trace(given_, TraceContext(TRACE_ID, SPAN_ID, 1, "k=v")) == given_


def test_ids_are_never_all_zero() -> None:
    class Zero(Random):
        def getrandbits(self, k: int) -> int:
            return 0

    assert extract_trace(inject_trace([], None, chance=Zero())) is not None


def test_two_processes_that_were_one_give_different_ids() -> None:
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(there, parent_of(inject_trace([], None)).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(there)
    with open(here, "rb") as told:
        assert told.read().decode() != parent_of(inject_trace([], None))


# Without OpenTelemetry


def test_what_a_handler_publishes_belongs_to_the_trace_of_its_message() -> None:
    spans = Spans()
    assert not spans.is_on
    with spans.consume(Message(headers=[("traceparent", PARENT.encode())])):
        assert current_trace() == TraceContext(TRACE_ID, SPAN_ID, 1, "")
        with spans.publish("billed", [("a", b"b")]) as headers:
            assert headers[0] == ("a", b"b")
            assert parent_of(headers).startswith(f"00-{TRACE_ID}-")
            assert SPAN_ID not in parent_of(headers)
    assert current_trace() is None
    with spans.publish("billed", []) as headers:
        assert TRACE_ID not in parent_of(headers)


def test_the_message_in_hand_is_forgotten_after_an_error() -> None:
    message = Message(headers=[("traceparent", PARENT.encode())])
    with pytest.raises(KeyError), Spans().consume(message):
        raise KeyError
    assert current_trace() is None
    with Spans().consume(message), Spans().consume_batch([message, message]):
        assert current_trace() is None  # of several messages none is the parent


def test_nothing_needs_opentelemetry() -> None:
    program = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "from penstock.client.tracing import Spans\n"
        "with Spans().publish('orders', []) as headers: print(headers[0][0])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "traceparent\n"


def test_opentelemetry_is_not_imported_before_it_is_used() -> None:
    program = "import sys, penstock.client.tracing; assert 'opentelemetry' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


# With OpenTelemetry


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    yield exporter
    provider.shutdown()


def test_handling_is_a_span_of_the_producers_trace(recorded: InMemorySpanExporter) -> None:
    spans = Spans(client="billing-service", group="billing")
    assert spans.is_on
    with spans.consume(Message(headers=[("traceparent", PARENT.encode()), ("tracestate", b"k=v")])):
        pass
    (span,) = recorded.get_finished_spans()
    assert (span.name, span.kind) == ("orders process", SpanKind.CONSUMER)
    assert span.parent is not None
    assert (f"{span.parent.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE_ID, SPAN_ID)
    assert span.parent.is_remote
    assert dict(span.attributes or {}) == {
        "messaging.system": "kafka",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": "orders",
        "messaging.destination.partition.id": "2",
        "messaging.kafka.offset": 41,
        "messaging.kafka.message.key": "ann",
        "messaging.message.id": "m-1",
        "messaging.consumer.group.name": "billing",
        "messaging.client.id": "billing-service",
    }
    assert span.status.status_code is StatusCode.UNSET


def test_publishing_is_a_span_and_its_context_goes_with_the_message(recorded: InMemorySpanExporter) -> None:
    spans = Spans()
    message = Message(headers=[("traceparent", PARENT.encode()), ("tracestate", b"k=v")])
    with spans.consume(message), spans.publish("billed", [("a", b"b")], key=b"\xff") as headers:
        pass
    published, handled = recorded.get_finished_spans()
    assert (published.name, published.kind) == ("billed publish", SpanKind.PRODUCER)
    assert published.parent is not None
    assert published.parent.span_id == handled.context.span_id
    assert parent_of(headers) == f"00-{TRACE_ID}-{published.context.span_id:016x}-01"
    assert ("tracestate", b"k=v") in headers
    assert headers[0] == ("a", b"b")
    assert "messaging.kafka.message.key" not in (published.attributes or {})


def test_baggage_goes_through_a_handler(recorded: InMemorySpanExporter) -> None:
    spans = Spans()
    with spans.consume(Message(headers=[("traceparent", PARENT.encode()), ("baggage", b"tenant=a")])):
        assert baggage.get_baggage("tenant") == "a"
        with spans.publish("billed", []) as headers:
            assert ("baggage", b"tenant=a") in headers
    assert baggage.get_baggage("tenant") is None


def test_an_error_is_told_by_the_span(recorded: InMemorySpanExporter) -> None:
    with pytest.raises(KeyError), Spans().consume(Message(value=None)):
        raise KeyError("gone")
    (span,) = recorded.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR
    assert (span.attributes or {})["error.type"] == "KeyError"
    assert (span.attributes or {})["messaging.kafka.message.tombstone"] is True
    assert span.events[0].name == "exception"
    assert span.parent is None


def test_a_batch_is_linked_with_the_traces_of_its_messages(recorded: InMemorySpanExporter) -> None:
    other = Message(headers=[("traceparent", f"00-{'1' * 32}-{'2' * 16}-01".encode())])
    with Spans(group="billing").consume_batch(
        [Message(headers=[("traceparent", PARENT.encode())]), other, Message()]
    ):
        pass
    (span,) = recorded.get_finished_spans()
    assert [f"{link.context.trace_id:032x}" for link in span.links] == [TRACE_ID, "1" * 32]
    assert (span.attributes or {})["messaging.batch.message_count"] == 3


def test_a_callers_own_trace_context_is_left_alone(recorded: InMemorySpanExporter) -> None:
    with Spans().publish("billed", [("traceparent", b"mine")]) as headers:
        assert headers == [("traceparent", b"mine")]


def test_other_propagators_do_not_keep_w3c_from_being_told(
    recorded: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    from opentelemetry import propagate
    from opentelemetry.propagators.composite import CompositePropagator

    monkeypatch.setattr(propagate, "propagator", CompositePropagator([]))
    with Spans().publish("billed", []) as headers:
        pass
    (span,) = recorded.get_finished_spans()
    assert f"{span.context.span_id:016x}" in parent_of(headers)
