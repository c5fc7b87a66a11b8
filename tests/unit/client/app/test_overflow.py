"""Publishing while the buffer is full: each policy, its errors, its counters. No broker is needed to fill a buffer."""

import asyncio
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.client import ApplicationError, Block, BufferFull, NotPublished, Penstock
from penstock.client.app.application import drafts
from penstock.client.app.overflow import PublishCounters, WaitingMessages, drop_oldest_bounds
from penstock.client.app.publisher import Draft, Publisher

NO_BROKER = "127.0.0.1:1"
BUFFER = 20


@pytest.fixture
def app() -> Iterator[Penstock]:
    with Penstock(NO_BROKER, settings=_settings()) as app:
        yield app
        app.close(0)


def _settings(messages: int = BUFFER) -> dict[str, Any]:
    return {"queue.buffering.max.messages": messages}


def _fill(app: Penstock, messages: int = BUFFER) -> None:
    for number in range(messages):
        app.publish_soon("orders", b"%d" % number)


def test_reject_raises_at_once(app: Penstock) -> None:
    _fill(app)
    for publish in (app.publish, app.publish_soon):
        with pytest.raises(BufferFull, match="orders: the buffer is full, and overflow='reject'") as error:
            publish("orders", b"one more", overflow="reject")
        assert error.value.policy == "reject"
        assert not error.value.may_be_there
    figures = app.publish_figures()
    assert (figures.sent, figures.dropped) == (BUFFER, {("orders", "reject"): 2})


def test_drop_newest_fails_the_future_and_not_the_call(app: Penstock) -> None:
    _fill(app)
    dropped = [app.publish_soon("orders", b"", overflow="drop-newest") for _ in range(5)]
    for each in dropped:
        with pytest.raises(BufferFull, match="orders: dropped unsent, because the buffer is full"):
            each.result(0)
    with pytest.raises(BufferFull):
        app.publish("orders", b"", overflow="drop-newest")
    figures = app.publish_figures()
    assert figures.dropped == {("orders", "drop-newest"): 6}
    assert figures.sent + figures.dropped_total == BUFFER + 6


def test_drop_oldest_keeps_the_newest() -> None:
    with Penstock(NO_BROKER, settings=_settings(), overflow="drop-oldest") as app:
        futures = [app.publish_soon("orders", b"%d" % number) for number in range(50)]
        figures = app.publish_figures()
        assert (figures.sent, figures.waiting, figures.dropped_total) == (2, 18, 30)
        dropped = futures[2:32]
        for each in dropped:
            with pytest.raises(BufferFull, match="as the oldest message in a full buffer"):
                each.result(60)
        assert not any(each.done() for each in (*futures[:2], *futures[32:]))
        app.close(0)
        for each in futures[32:]:
            with pytest.raises(BufferFull, match="the application was closed"):
                each.result(60)
        assert all(isinstance(each.exception(60), NotPublished) for each in futures)
        figures = app.publish_figures()
        assert figures.dropped == {("orders", "drop-oldest"): 30, ("orders", "closed"): 18}
        assert figures.sent + figures.waiting + figures.dropped_total == 50


def test_block_waits_no_longer_than_its_bound(app: Penstock) -> None:
    _fill(app)
    with pytest.raises(BufferFull, match="for as long as overflow= allows") as error:
        app.publish("orders", b"", overflow=Block(wait="50ms"))
    assert error.value.policy == "block"
    assert app.publish_figures().dropped == {("orders", "block"): 1}


def test_block_continues_when_there_is_room() -> None:
    impatient = {**_settings(1), "message.timeout.ms": 300}
    with Penstock(NO_BROKER, settings=impatient) as app:
        futures = [app.publish_soon("orders", b"") for _ in range(2)]
        assert app.flush() == 0
        assert all(isinstance(each.exception(60), NotPublished) for each in futures)
        assert (app.publish_figures().sent, app.publish_figures().dropped) == (2, {})


async def test_the_event_loop_runs_while_a_coroutine_waits_for_room() -> None:
    """A call that blocks would end when the first message expires: the loop would see it done in its next turns."""
    slow = {**_settings(1), "message.timeout.ms": 10_000}
    with Penstock(NO_BROKER, settings=slow) as app:
        first = asyncio.create_task(app.apublish("orders", b"fills the buffer"))
        second = asyncio.create_task(app.apublish("orders", b"waits for room"))
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert app.publish_figures().sent == 1
        assert not first.done()
        assert not second.done()
        for task in (first, second):
            task.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        app.close(0)


async def test_coroutines_follow_the_policies(app: Penstock) -> None:
    _fill(app)
    for overflow in ("reject", "drop-newest", Block(wait="50ms")):
        with pytest.raises(BufferFull):
            await app.apublish("orders", b"", overflow=overflow)  # type: ignore[arg-type]
    assert app.publish_figures().dropped_total == 3


def test_the_policy_is_that_of_the_call_or_topic_or_application() -> None:
    by_topic = {"clicks": "drop-newest", "payments": "reject"}
    with Penstock(NO_BROKER, settings=_settings(), overflow=by_topic) as app:  # type: ignore[arg-type]
        _fill(app)
        assert isinstance(app.publish_soon("clicks", b"").exception(0), BufferFull)
        with pytest.raises(BufferFull, match="reject"):
            app.publish_soon("payments", b"")
        assert isinstance(app.publish_soon("payments", b"", overflow="drop-newest").exception(0), BufferFull)
        app.close(0)


@pytest.mark.parametrize("overflow", ["drop", "", 5, True, None, {"orders": "wait"}])
def test_other_values_are_refused(overflow: Any) -> None:
    with pytest.raises(ApplicationError, match=r"overflow=.* must be 'block', 'reject'"):
        Penstock(NO_BROKER, overflow=overflow)


def test_blocking_for_no_time_is_refused() -> None:
    with pytest.raises(ValueError, match='use overflow="reject"'):
        Block(wait=0)


def test_a_transaction_drops_nothing(app: Penstock) -> None:
    held: list[Any] = []
    token = drafts.set(held)
    try:
        for overflow in ("reject", "drop-oldest", "drop-newest"):
            with pytest.raises(ApplicationError, match="a transaction drops nothing"):
                app.publish("orders", b"", overflow=overflow)  # type: ignore[arg-type]
        app.publish("orders", b"", overflow="block")
    finally:
        drafts.reset(token)
    assert len(held) == 1


def test_a_message_that_the_producer_refuses_is_counted() -> None:
    with Penstock(NO_BROKER, settings={**_settings(), "message.max.bytes": 1_000}) as app:
        with pytest.raises(NotPublished, match="too large"):
            app.publish("orders", bytes(2_000))
        refused = app.publish_soon("orders", bytes(2_000), overflow="drop-oldest")
        with pytest.raises(NotPublished, match="too large"):
            refused.result(60)
        assert app.publish_figures().refused == 2


def test_waiting_messages_have_bounds_in_messages_and_bytes() -> None:
    producer, bounds = drop_oldest_bounds(
        {"queue.buffering.max.messages": "100", "queue.buffering.max.kbytes": 1}
    )
    assert producer["queue.buffering.max.messages"] == 10
    assert bounds == (90, 1024)
    assert drop_oldest_bounds({"queue.buffering.max.messages": 0})[1].messages == 90_000
    waiting: WaitingMessages[int] = WaitingMessages(bounds)
    assert [waiting.add(number, 1) for number in range(90)] == [[]] * 90
    assert waiting.add(90, 1) == [0]
    assert waiting.add(91, 1_000) == list(range(1, 67))
    assert waiting.add(92, 1_025) == [92]
    assert len(waiting) == 25
    assert waiting.first() == 67


def test_drops_are_logged_once_in_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    counters = PublishCounters(lambda: now_s)
    with caplog.at_level(logging.WARNING, "penstock.client"):
        for _ in range(1_000):
            counters.dropped("orders", "reject")
        counters.dropped("clicks", "drop-newest")
        now_s = 10.0
        counters.log_drops()
        counters.log_drops()
        counters.dropped("orders", "reject")
        counters.log_drops(now=True)
    assert [each.getMessage() for each in caplog.records] == [
        "orders: 1 messages were not published (reject)",
        "clicks: 1 messages were not published (drop-newest)",
        "orders: 999 messages were not published (reject)",
        "orders: 1 messages were not published (reject)",
    ]


def test_callbacks_of_dropped_messages_run_in_the_thread_of_the_publisher() -> None:
    """A sender may hold a lock that the callback of another message takes."""
    with Penstock(NO_BROKER, settings=_settings(2), overflow="drop-oldest") as app:
        lock, told = threading.Lock(), threading.Event()

        def note(future: Any) -> None:
            with lock:
                told.set()

        with lock:
            app.publish_soon("orders", b"is with the producer")
            app.publish_soon("orders", b"is dropped").add_done_callback(note)
            app.publish_soon("orders", b"takes its place")
            assert not told.is_set()
        assert told.wait(60)
        app.close(0)


def test_a_closed_publisher_refuses() -> None:
    publisher = Publisher({"bootstrap.servers": NO_BROKER}, drops_oldest=True)
    publisher.close(0)
    with pytest.raises(NotPublished, match="closed"):
        publisher.send(Draft("orders", b"", None, []))
