"""All kinds of runners with messages that cannot be handled."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.client.app.raw_message import RawMessage

from penstock.client.app.breaker import ApplicationStopping
from penstock.client.app.figures import Figures
from penstock.client.app.handler import loop_over_call
from penstock.client.app.runners import (
    AsyncRunner,
    BatchRunner,
    FailureCallback,
    MessageRunner,
    Runner,
    ThreadRunner,
)


def passed_over(raw: RawMessage, error: Exception) -> None:
    pass


def inline(call: Callable[[Any], Any], failed: FailureCallback = passed_over) -> Runner:
    return MessageRunner(loop_over_call(call), failed, Figures())


def batches(call: Callable[[Any], Any], failed: FailureCallback = passed_over) -> Runner:
    def call_all(pairs: Any) -> None:
        for raw, _ in pairs:
            call(raw)

    return BatchRunner(call_all, lambda raw: None, failed, Figures(), count_max=2, isolates=True)


def threads(call: Callable[[Any], Any], failed: FailureCallback = passed_over) -> Runner:
    return ThreadRunner(call, failed, Figures(), workers=2, in_flight_max=100)


def tasks(call: Callable[[Any], Any], failed: FailureCallback = passed_over) -> Runner:
    async def called(raw: Any) -> Any:
        return call(raw)

    return AsyncRunner(called, failed, Figures(), workers=2, in_flight_max=100)


@pytest.mark.parametrize("make", [inline, batches, threads, tasks])
def test_what_was_left_is_forgotten_when_it_is_read_again(make: Callable[..., Runner]) -> None:
    def call(raw: RawMessage) -> None:
        if raw.offset() == 3:
            raise ApplicationStopping

    runner = make(call)
    runner.run([RawMessage(number, key=b"k") for number in range(4)])
    runner.drain()
    assert [raw.offset() for raw in runner.pending()][-1] == 3
    runner.forget()
    assert runner.pending() == []
    runner.close()


@pytest.mark.parametrize("make", [inline, batches, threads, tasks])
def test_what_hinders_is_raised_until_it_is_forgotten(make: Callable[..., Runner]) -> None:
    def failed(raw: RawMessage, error: Exception) -> None:
        raise error

    def call(raw: RawMessage) -> None:
        if raw.offset() == 1:
            raise LookupError("no such table")

    runner = make(call, failed)
    with pytest.raises(LookupError):
        _run(runner, [RawMessage(0, key=b"k"), RawMessage(1, key=b"k")])
    runner.forget()
    _run(runner, [RawMessage(2, key=b"k")])
    assert runner.pending() == []
    runner.close()


@pytest.mark.parametrize("make", [inline, batches, threads, tasks])
def test_there_may_be_nothing_to_do(make: Callable[..., Runner]) -> None:
    runner = make(lambda raw: None)
    runner.run([])
    runner.drain()
    assert runner.pending() == []
    runner.close()


def _run(runner: Runner, batch: list[RawMessage]) -> None:
    runner.run(batch)
    runner.drain()
