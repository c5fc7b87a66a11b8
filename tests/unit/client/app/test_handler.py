"""What handlers of single messages get, and the trace context of the current message."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.client.app.raw_message import RawMessage

from penstock.client.app.figures import Figures
from penstock.client.app.handler import UnreadableMessage, make_loop
from penstock.client.app.message import Message
from penstock.client.app.runners import MessageRunner, ThreadRunner
from penstock.client.payloads import inspect_handler
from penstock.client.tracing import TraceContext, current_trace, trace_headers


class Raw(RawMessage):
    """With a trace context of its own."""

    def __init__(self, number: int, value: bytes | None = b"{}") -> None:
        trace = TraceContext(f"{number + 1:032x}", f"{number + 1:016x}", 1, "")
        super().__init__(number, value=value, headers=trace_headers(trace))


def run(handler: Callable[..., Any], *raws: Raw) -> tuple[Figures, list[tuple[Raw, Exception]]]:
    figures, failed = Figures(), []
    runner = MessageRunner(
        make_loop(handler, inspect_handler(handler)), lambda raw, error: failed.append((raw, error)), figures
    )
    runner.run(raws)
    return figures, failed


def test_every_message_is_an_object_of_its_own() -> None:
    kept = []

    def handle(message: Message) -> None:
        kept.append(message)

    figures, _ = run(handle, Raw(1), Raw(2), Raw(3))
    assert [message.offset for message in kept] == [1, 2, 3]
    assert all(isinstance(message, Message) for message in kept)
    assert figures.handled == 3


def test_bytes_are_unchanged_and_tombstones_need_a_handler_that_accepts_none() -> None:
    got = []

    def strict(payload: bytes) -> None:
        got.append(payload)

    def lenient(payload: bytes | None) -> None:
        got.append(payload)

    tombstone = Raw(2, None)
    _, failed = run(strict, Raw(1, b"a"), tombstone, Raw(3, b"c"))
    assert got == [b"a", b"c"]
    assert [(raw, type(error)) for raw, error in failed] == [(tombstone, UnreadableMessage)]
    run(lenient, tombstone)
    assert got[-1] is None


def test_payload_and_message_come_together() -> None:
    got = []

    def handle(order: dict[str, int], message: Message) -> None:
        got.append((order, message.offset))

    run(handle, Raw(1, b'{"a": 1}'), Raw(2, b"{}"))
    assert got == [({"a": 1}, 1), ({}, 2)]


def test_what_fails_is_told_with_its_message_and_the_others_are_handled() -> None:
    seen = []

    def handle(message: Message) -> None:
        seen.append(message.offset)
        if message.offset % 2:
            raise KeyError(message.offset)

    figures, failed = run(handle, *map(Raw, range(5)))
    assert seen == [0, 1, 2, 3, 4]
    assert [(raw.offset(), error.args) for raw, error in failed] == [(1, (1,)), (3, (3,))]
    assert figures.handled == 3


@pytest.mark.parametrize("fails", [False, True])
def test_the_trace_is_that_of_the_message_in_hand_and_of_none_afterwards(fails: bool) -> None:
    traces = []

    def handle(payload: bytes) -> None:
        trace = current_trace()
        traces.append(trace and int(trace.trace_id, 16))
        if fails:
            raise ValueError

    run(handle, Raw(0), Raw(1), Raw(2))
    assert traces == [1, 2, 3]
    assert current_trace() is None


def test_room_is_there_when_half_of_what_lanes_hold_is_done() -> None:
    gate = threading.Semaphore(0)
    workers = ThreadRunner(
        lambda raw: gate.acquire(), lambda raw, error: None, Figures(), workers=2, in_flight_max=4
    )
    workers.run([Raw(number) for number in range(4)])
    assert workers.await_room(0.01) == 0
    gate.release(2)
    assert workers.await_room(30.0) == 2
    gate.release(2)
    workers.drain()
    workers.close()
