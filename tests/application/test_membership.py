"""How a member of a group behaves when its handlers are slow, when it is taken for dead, and when much waits."""

import threading
import time
from collections import Counter
from collections.abc import Callable

import pytest
from tests.application.apps import QUICK, committed, running
from tests.waiting import eventually

from penstock.client import Backoff, Message, Penstock, Retry

#: The shortest that the library allows beside a session of that length.
SHORT = {**QUICK, "max.poll.interval.ms": 6_000}


@pytest.fixture
def topic(bootstrap: str, unique: Callable[[str], str]) -> str:
    name = unique("orders")
    with Penstock(bootstrap) as app:
        app.create_topic(name, partitions=2)
    return name


def fill(bootstrap: str, topic: str, count: int) -> None:
    """Half of them in each partition."""
    with Penstock(bootstrap) as app:
        futures = [app.publish_soon(topic, number, partition=number % 2) for number in range(count)]
        for future in futures:
            future.result(30)


def test_a_message_is_handled_as_soon_as_it_is_there(
    bootstrap: str, topic: str, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for a batch to become full, which the library's own call does."""
    monkeypatch.setattr("penstock.client.app.consumption._TAKE_S", 60.0)
    app, other = Penstock(bootstrap, settings=QUICK), Penstock(bootstrap)
    handled: list[int] = []

    @app.subscribe(topic, group=group)
    def handle(number: int) -> None:
        handled.append(number)

    app.start()
    closing = threading.Thread(target=app.close)
    try:
        for number in range(3):
            other.publish(topic, number)
            eventually(lambda: len(handled) == number + 1)
    finally:
        closing.start()
        while closing.is_alive():
            other.publish(topic, 0)
            closing.join(0.1)
        other.close()


def test_what_comes_before_a_retry_that_is_not_due_is_done(bootstrap: str, topic: str, group: str) -> None:
    """One retry is due at once, and the one behind it in an hour: the first is not handled again by the next member."""
    fill(bootstrap, topic, 4)
    app = Penstock(bootstrap, settings=QUICK)
    handled: list[int] = []

    @app.subscribe(topic, group=group, retry=Backoff(base="1ms", cap="1h", attempts=2))
    def handle(number: int, message: Message) -> None:
        if message.attempt == 1:
            raise Retry("later", delay="100ms" if number == 0 else "1h")
        handled.append(number)

    figures = app.figures()[handle.__qualname__]
    with running(app, until=lambda: figures.retried == 4 and handled == [0]):
        pass
    assert committed(bootstrap, group, f"{topic}.retry.1", 2) == {0: 1, 1: 0}


class Crew:
    """Two members of one group, the first of which is at work on message 0 for longer than it may go without a poll."""

    def __init__(self, bootstrap: str, topic: str, group: str, concurrency: int) -> None:
        self.handled: list[tuple[str, int]] = []
        self.begun = threading.Event()
        self.apps = {name: Penstock(bootstrap, name=name, settings=SHORT) for name in ("first", "second")}
        self.group = group
        for name in self.apps:
            self._subscribe(name, topic, concurrency)

    def _subscribe(self, name: str, topic: str, concurrency: int) -> None:
        @self.apps[name].subscribe(topic, group=self.group, concurrency=concurrency)
        def handle(number: int) -> None:
            if number == 0 and not self.begun.is_set():
                self.begun.set()
                time.sleep(8)
            self.handled.append((name, number))

    def close(self) -> None:
        for app in self.apps.values():
            app.close()


def test_a_handler_slower_than_the_poll_interval_keeps_its_partitions(
    bootstrap: str, topic: str, unique: Callable[[str], str]
) -> None:
    """While it is at work a second member joins, and gets its part; nothing is lost and nothing is handled twice."""
    fill(bootstrap, topic, 20)
    crews = [Crew(bootstrap, topic, unique(f"lanes{lanes}"), lanes) for lanes in (1, 2)]
    try:
        for crew in crews:
            crew.apps["first"].start()
        assert all(crew.begun.wait(20) for crew in crews)
        for crew in crews:
            crew.apps["second"].start()
        eventually(lambda: all(("first", 0) in crew.handled for crew in crews))
        fill(bootstrap, topic, 20)
        eventually(lambda: all(len(crew.handled) >= 40 for crew in crews))
    finally:
        for crew in crews:
            crew.close()
    for crew in crews:
        assert Counter(number for _, number in crew.handled) == Counter([*range(20), *range(20)])
        assert {name for name, _ in crew.handled} == {"first", "second"}
        assert sum(committed(bootstrap, crew.group, topic, 2).values()) == 40
        for app in crew.apps.values():
            (figures,) = app.figures().values()
            assert (figures.lost_in_hand, figures.restarts) == (0, 0)
