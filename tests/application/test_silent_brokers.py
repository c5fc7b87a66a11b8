"""Applications report a broker that is frozen: it accepts connections and answers nothing."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
from tests.application.apps import QUICK
from tests.brokers import BrokerProcess
from tests.waiting import eventually

from penstock.client import Penstock


@contextmanager
def _subscription(app: Penstock, **parameters: Any) -> Iterator[None]:
    seen: list[int] = []

    @app.subscribe("orders", group="billing", **parameters)
    def bill(value: int) -> None:
        seen.append(value)

    app.publish("orders", 1)
    app.start()
    eventually(lambda: seen == [1], what="a message before the broker is frozen")
    yield


@contextmanager
def _consumer(app: Penstock) -> Iterator[None]:
    done = threading.Event()
    with app.consumer("orders", group="billing") as consumer:
        app.publish("orders", 1)
        eventually(lambda: consumer.poll(timeout="200ms"), what="a message before the broker is frozen")
        consumer.commit()

        def poll() -> None:
            while not done.is_set():
                consumer.poll(timeout="200ms")

        polling = threading.Thread(target=poll)
        polling.start()
        try:
            yield
        finally:
            done.set()
            polling.join()


@contextmanager
def _publisher(app: Penstock) -> Iterator[None]:
    done = threading.Event()
    app.publish("orders", 1)

    def publish() -> None:
        while not done.wait(0.05):
            app.publish_soon("orders", 2)

    publishing = threading.Thread(target=publish)
    publishing.start()
    try:
        yield
    finally:
        done.set()
        publishing.join()


KINDS: dict[str, Callable[[Penstock], AbstractContextManager[None]]] = {
    "at-most-once": lambda app: _subscription(app, delivery="at-most-once"),
    "at-least-once": _subscription,
    "exactly-once": lambda app: _subscription(app, delivery="exactly-once"),
    "share group": lambda app: _subscription(app, share=True),
    "plain consumer": _consumer,
    "publisher": _publisher,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_broker_is_reported_and_so_is_its_return(
    fresh_broker: BrokerProcess, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    with Penstock(fresh_broker.bootstrap_servers, settings=QUICK) as app:
        app.create_topic("orders", partitions=1)
        with KINDS[kind](app):
            caplog.clear()
            os.kill(fresh_broker.pid, signal.SIGSTOP)
            try:
                eventually(lambda: "no reply; trying again" in caplog.text, what="a report of silence")
                assert "answers again" not in caplog.text
            finally:
                os.kill(fresh_broker.pid, signal.SIGCONT)
            eventually(lambda: "answers again" in caplog.text, what="a report of the return")
