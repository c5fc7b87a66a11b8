"""Publishing many at a time: every future is told, and nobody is called back in the middle of another call."""

import threading
from collections import deque
from concurrent.futures import Future

import pytest
from tests.application.apps import QUICK, read_all, running
from tests.waiting import eventually

from penstock.client import NotPublished, Penstock
from penstock.client.app.publishing import Published
from penstock.testing import EmbeddedBroker

MANY = 5_000


@pytest.mark.timeout(60)
def test_whoever_is_called_back_may_want_what_the_sender_holds(app: Penstock, topic: str) -> None:
    lock, told, sent = threading.Lock(), [], 0
    others: deque[Future[Published]] = deque()

    def note(future: Future[Published]) -> None:
        with lock:
            told.append(future.result())

    with lock:
        # For so long that it is the sender who hears of most of them.
        while sent < MANY or not others[-MANY // 2].done():
            app.publish_soon(topic, b"watched").add_done_callback(note)
            others.append(app.publish_soon(topic, b"another"))
            sent += 1
    eventually(lambda: len(told) == sent, what="all calls back")
    assert len({(place.partition, place.offset) for place in told}) == sent


def test_one_who_waits_is_told_while_another_sends_many(app: Penstock, topic: str) -> None:
    stop = threading.Event()

    def send() -> None:
        while not stop.is_set():
            app.publish_soon(topic, b"one of many")

    sender = threading.Thread(target=send)
    sender.start()
    try:
        for number in range(20):
            assert app.publish(topic, b"%d" % number).offset >= 0
    finally:
        stop.set()
        sender.join()
    assert app.flush() == 0


def test_all_are_told_when_they_are_flushed(app: Penstock, topic: str) -> None:
    called: list[Future[Published]] = []
    futures = [app.publish_soon(topic, b"%d" % number) for number in range(MANY)]
    for future in futures:
        future.add_done_callback(called.append)
    assert app.flush() == 0
    eventually(lambda: len(called) == MANY, what="all calls back")
    assert all(future.done() for future in futures)


def test_one_that_no_broker_takes_is_told_so_among_the_others(app: Penstock, topic: str) -> None:
    large = b"x" * 900_000
    app.create_topic(f"{topic}-small", partitions=1, settings={"max.message.bytes": "1000"})
    futures = [app.publish_soon(topic, b"x") for _ in range(500)]
    refused = app.publish_soon(f"{topic}-small", large)
    futures += [app.publish_soon(topic, b"x") for _ in range(500)]
    assert isinstance(refused.exception(60), NotPublished)
    assert len({(future.result(60).partition, future.result().offset) for future in futures}) == 1000


#: The library sends again what a leader has disowned, whatever it is told of retries.
DISOWNED = pytest.mark.parametrize("error", ["not_leader_or_follower", "request_timed_out"])


@DISOWNED
def test_a_leader_that_loses_its_place_doubles_nothing(penstock: EmbeddedBroker, error: str) -> None:
    penstock.create_topic("orders", partitions=1)
    fault = penstock.faults.disown("produce", error, times=1)
    with Penstock(penstock.bootstrap_servers, settings=QUICK) as app:
        app.publish("orders", b"once")
    assert fault.hits == 1
    assert [record.value() for record in read_all(penstock.bootstrap_servers, "orders")] == [b"once"]


@DISOWNED
def test_nor_does_it_double_dead_letters_at_most_once(penstock: EmbeddedBroker, error: str) -> None:
    penstock.create_topic("orders", partitions=1)
    with Penstock(penstock.bootstrap_servers, settings=QUICK) as app:

        @app.subscribe("orders", group="billing", delivery="at-most-once")
        def bill(order: bytes) -> None:
            raise ValueError(order)

        app.publish("orders", b"once")
        fault = penstock.faults.disown("produce", error, times=1)
        (figures,) = app.figures().values()
        with running(app, until=lambda: figures.dead == 1):
            pass
    assert fault.hits == 1
    assert [record.value() for record in read_all(penstock.bootstrap_servers, "orders.dlq")] == [b"once"]


def test_another_producer_is_made_when_one_cannot_go_on(penstock: EmbeddedBroker) -> None:
    penstock.create_topic("orders", partitions=1)
    with Penstock(penstock.bootstrap_servers, settings=QUICK) as app:
        penstock.faults.fail("init_producer_id", "cluster_authorization_failed", times=1)
        with pytest.raises(NotPublished):
            app.publish("orders", b"refused")
        assert app.publish("orders", b"taken").offset == 0
        assert app.flush() == 0
