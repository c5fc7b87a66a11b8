"""Handlers are run while another thread takes back what was not begun: nobody takes a part of a batch for all of it."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from penstock.client.app.figures import Figures
from penstock.client.app.guarding import Stopped
from penstock.client.app.handling import one_by_one
from penstock.client.app.inline import Inline, InlineBatches, Runner
from penstock.client.app.lanes import AsyncLanes, ThreadLanes


class Raw:
    def __init__(self, number: int) -> None:
        self._number = number

    def topic(self) -> str:
        return "orders"

    def partition(self) -> int:
        return 0

    def offset(self) -> int:
        return self._number

    def key(self) -> bytes:
        return b"k"


def inline(call: Callable[[Any], Any]) -> Runner:
    return Inline(one_by_one(call), lambda raw, error: None, Figures())


def batches(call: Callable[[Any], Any]) -> Runner:
    def call_all(pairs: Any) -> None:
        for raw, _ in pairs:
            call(raw)

    return InlineBatches(
        call_all, lambda raw: None, lambda raw, error: None, Figures(), count_max=2, isolates=True
    )


def threads(call: Callable[[Any], Any]) -> Runner:
    return ThreadLanes(call, lambda raw, error: None, Figures(), lanes=2, in_flight_max=100)


def tasks(call: Callable[[Any], Any]) -> Runner:
    async def called(raw: Any) -> Any:
        return call(raw)

    return AsyncLanes(called, lambda raw, error: None, Figures(), lanes=2, in_flight_max=100)


@pytest.mark.parametrize("make", [inline, batches, threads, tasks])
def test_a_batch_whose_rest_is_taken_back_is_not_whole(make: Callable[..., Runner]) -> None:
    begun, taken = threading.Event(), threading.Event()

    def call(raw: Raw) -> None:
        begun.set()
        taken.wait(10)

    runner = make(call)

    def take_back() -> None:
        begun.wait(10)
        assert runner.trim()
        taken.set()

    other = threading.Thread(target=take_back)
    other.start()
    runner.run([Raw(number) for number in range(8)])
    runner.drain()
    assert not runner.is_whole
    other.join()

    runner.run([Raw(number) for number in range(8, 10)])
    runner.drain()
    assert runner.is_whole
    runner.close()


@pytest.mark.parametrize("make", [inline, batches, threads, tasks])
def test_a_batch_with_a_message_that_was_not_tried_is_not_whole(make: Callable[..., Runner]) -> None:
    def call(raw: Raw) -> None:
        if raw.offset() == 3:
            raise Stopped

    runner = make(call)
    runner.run([Raw(number) for number in range(4)])
    runner.drain()
    assert not runner.is_whole
    runner.close()


@pytest.mark.parametrize("make", [inline, batches, threads, tasks])
def test_nothing_is_whole(make: Callable[..., Runner]) -> None:
    runner = make(lambda raw: None)
    runner.run([])
    runner.drain()
    assert runner.is_whole
    runner.close()
