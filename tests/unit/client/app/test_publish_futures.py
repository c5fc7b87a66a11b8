"""Futures of published messages: as in the standard library, but they cannot be cancelled."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from concurrent.futures import TimeoutError as TimedOut

import pytest

from penstock.client.app.publisher import LazyFuture


def test_a_result_is_there_for_those_who_come_late_and_those_who_wait() -> None:
    for _ in range(200):
        promise: LazyFuture[int] = LazyFuture()
        with ThreadPoolExecutor(2) as pool:
            waiting = [pool.submit(promise.result, 10) for _ in range(2)]
            promise.set_result(7)
            assert [each.result(60) for each in waiting] == [7, 7]
        assert promise.result() == 7
        assert promise.done()


def test_an_error_is_raised_for_every_call() -> None:
    promise: LazyFuture[int] = LazyFuture()
    promise.set_exception(KeyError("gone"))
    with pytest.raises(KeyError):
        promise.result()
    assert isinstance(promise.exception(), KeyError)


def test_a_result_that_is_not_there_in_time_raises() -> None:
    promise: LazyFuture[int] = LazyFuture()
    with pytest.raises(TimedOut):
        promise.result(0.001)
    assert not promise.done()
    promise.set_result(1)
    assert promise.result(0) == 1


def test_callbacks_are_called_whether_they_came_before_or_after() -> None:
    promise: LazyFuture[int] = LazyFuture()
    heard: list[int] = []
    promise.add_done_callback(lambda done: heard.append(done.result()))
    promise.set_result(1)
    promise.add_done_callback(lambda done: heard.append(done.result() + 1))
    assert heard == [1, 2]


def test_many_are_waited_for_at_once() -> None:
    promises: list[LazyFuture[int]] = [LazyFuture() for _ in range(100)]
    promises[0].set_result(0)

    def keep() -> None:
        for number, promise in enumerate(promises[1:], 1):
            promise.set_result(number)

    thread = threading.Thread(target=keep)
    thread.start()
    assert sorted(each.result() for each in as_completed(promises, timeout=60)) == list(range(100))
    assert wait(promises, timeout=60).not_done == set()
    thread.join()


def test_what_is_on_its_way_cannot_be_cancelled() -> None:
    promise: LazyFuture[int] = LazyFuture()
    assert not promise.cancel()
    promise.set_result(1)
    assert promise.result() == 1
    assert not promise.cancelled()


async def test_a_coroutine_that_gives_up_does_not_disturb_who_reports() -> None:
    promise: LazyFuture[int] = LazyFuture()
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(asyncio.wrap_future(promise), 0.001)
    promise.set_result(1)
    assert await asyncio.wrap_future(promise) == 1
