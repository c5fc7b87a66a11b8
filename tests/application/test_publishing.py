"""Publishing many messages: every future is completed, and callbacks are not nested."""

import threading
from collections import deque
from concurrent.futures import Future
from typing import Any

import pytest
from tests.application.apps import QUICK, read_all, running
from tests.waiting import eventually

from penstock.client import ApplicationError, BufferFull, Message, NotPublished, Penstock
from penstock.client.app.publisher import Published
from penstock.testing import EmbeddedBroker

MANY = 5_000


def test_a_callback_may_take_the_lock_of_the_sender(app: Penstock, topic: str) -> None:
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


#: librdkafka sends a batch again after NOT_LEADER_OR_FOLLOWER, even with retries disabled.
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


def test_acks_are_chosen_for_a_call_and_for_a_topic(penstock: EmbeddedBroker) -> None:
    """Too few replicas in sync: only what waits for all of them is refused."""
    for topic in ("quick", "sure"):
        penstock.create_topic(topic, partitions=1)
    penstock.faults.fail("produce", "not_enough_replicas", when=lambda request: request.body.acks == -1)
    with Penstock(penstock.bootstrap_servers, acks={"quick": 1}) as app:
        assert app.publish("quick", b"0").offset == 0
        assert app.publish("quick", b"1", acks=0) == Published("quick", 0, -1)
        assert app.publish_soon("quick", b"2", acks=1).result(60).offset == 2
    # What is refused is sent again until its time is up.
    impatient = {"message.timeout.ms": 1_000}
    with Penstock(penstock.bootstrap_servers, settings=impatient, acks={"quick": 1}) as app:
        for topic, acks in (("quick", "all"), ("sure", None)):
            with pytest.raises(NotPublished):
                app.publish(topic, b"none", acks=acks)
    read = read_all(penstock.bootstrap_servers, "quick")
    assert [each.value() for each in read] == [b"0", b"1", b"2"]


@pytest.mark.parametrize("acks", [2, -1, True, "leader"])
def test_acks_that_there_are_none_of(acks: Any) -> None:
    with pytest.raises(ApplicationError, match="must be 0, 1 or"):
        Penstock("127.0.0.1:1", acks=acks)
    with Penstock("127.0.0.1:1") as app, pytest.raises(ApplicationError, match="must be 0, 1 or"):
        app.publish("orders", b"", acks=acks)


def test_acks_are_no_setting() -> None:
    for name in ("acks", "enable.idempotence", "request.required.acks"):
        with pytest.raises(ApplicationError, match="acks="):
            Penstock("127.0.0.1:1", settings={name: "1"})


def test_what_drop_oldest_drops_and_what_it_sends_are_all(app: Penstock, bootstrap: str, topic: str) -> None:
    """To the message: each is in the topic once and in order, or its future raises BufferFull."""
    with Penstock(bootstrap, settings={"queue.buffering.max.messages": 50}, overflow="drop-oldest") as small:
        futures = [small.publish_soon(topic, b"%d" % number, partition=0) for number in range(MANY)]
        assert small.flush(60) == 0
        errors = [each.exception(60) for each in futures]
        figures = small.publish_figures()
    kept = [b"%d" % number for number, error in enumerate(errors) if error is None]
    assert all(isinstance(each, BufferFull) for each in errors if each is not None)
    assert [each.value() for each in read_all(bootstrap, topic)] == kept
    assert kept[-1] == b"%d" % (MANY - 1)
    assert (figures.sent, figures.waiting, figures.dropped_total) == (len(kept), 0, MANY - len(kept))


def test_a_full_buffer_uses_up_no_attempt_of_a_handler(app: Penstock, topic: str) -> None:
    calls: list[bytes] = []

    @app.subscribe(topic, group=f"{topic}-group")
    def work(value: bytes) -> None:
        calls.append(value)
        if len(calls) == 1:
            raise BufferFull("results", "reject")

    app.publish(topic, b"once more")
    (figures,) = app.figures().values()
    with running(app, until=lambda: figures.handled == 1):
        pass
    assert (calls, figures.dead, figures.retried) == ([b"once more"] * 2, 0, 0)


def test_a_hot_key_is_spread_and_found_again(app: Penstock, bootstrap: str, topic: str) -> None:
    for number in range(60):
        app.publish_soon(topic, b"%d" % number, key="hot", salt=16)
        app.publish_soon(topic, b"%d" % number, key="cart", salt=16, salt_by=f"cart-{number % 2}")
    assert app.flush() == 0
    found = [Message(raw) for raw in read_all(bootstrap, topic)]
    hot = [each for each in found if each.unsalted_key == b"hot"]
    assert len(hot) == 60
    assert {each.partition for each in hot} == {0, 1}
    assert len({each.key for each in hot}) > 4
    carts = [each for each in found if each.unsalted_key == b"cart"]
    assert len({each.key for each in carts}) == 2, "what is to stay in order has one key"


def test_a_salt_needs_a_key(app: Penstock, topic: str) -> None:
    with pytest.raises(ApplicationError, match="salt= needs a key="):
        app.publish(topic, b"", salt=4)
    with pytest.raises(ApplicationError, match="the number of keys"):
        app.publish(topic, b"", key="hot", salt_by="cart")
    with pytest.raises(ApplicationError, match="1 to"):
        app.publish(topic, b"", key="hot", salt=0)
