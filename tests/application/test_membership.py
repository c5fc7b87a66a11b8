"""Members of a group with slow handlers, expired sessions and many waiting messages."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import ConsumerGroupState
from confluent_kafka.admin import AdminClient
from tests.application.apps import QUICK, committed, running
from tests.waiting import eventually

from penstock.client import Backoff, Breaker, Message, Penstock, Retry
from penstock.client.app.librdkafka import consumer_settings
from penstock.client.app.membership import Membership

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
    """Poll does not wait for a full batch, as the library's own call does."""
    monkeypatch.setattr("penstock.client.app.worker._TAKE_S", 60.0)
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
            eventually(partial(_has, handled, number + 1))
    finally:
        closing.start()
        while closing.is_alive():
            other.publish(topic, 0)
            closing.join(0.1)
        other.close()


def _has(items: list[int], count: int) -> bool:
    return len(items) == count


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


_MEMBER = """
import json, sys, time
from penstock.client import Penstock
bootstrap, topic, group, settings = sys.argv[1:]
app = Penstock(bootstrap, settings=json.loads(settings))

@app.subscribe(topic, group=group)
def handle(number: int) -> None:
    print("handling", flush=True)
    sys.stdin.readline()

app.start()
while True:
    time.sleep(0.05)
    print("figures", json.dumps(next(iter(app.figures().values())).as_dict()), flush=True)
"""


def test_a_member_that_was_taken_for_dead_says_so(
    bootstrap: str, topic: str, group: str, tmp_path: Path
) -> None:
    """Its process is stopped in the middle of a handler for longer than its session lasts, and goes on afterwards."""
    fill(bootstrap, topic, 2)
    settings = json.dumps({**QUICK, "session.timeout.ms": 1_000, "heartbeat.interval.ms": 200})
    errors = tmp_path / "errors"
    with errors.open("w") as stderr:
        member = subprocess.Popen(
            [sys.executable, "-c", _MEMBER, bootstrap, topic, group, settings],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    try:
        lines = _Lines(member)
        eventually(lambda: "handling" in lines.seen)
        os.kill(member.pid, signal.SIGSTOP)
        with Penstock(bootstrap, settings=QUICK).consumer(topic, group=group) as other:
            eventually(lambda: other.poll(timeout="200ms"), what="the other one to take over")
            os.kill(member.pid, signal.SIGCONT)
            eventually(lambda: lines.figures().get("lost_in_hand") == 1)
    finally:
        member.kill()
        member.communicate()
    assert "lost " in errors.read_text()


class _Lines:
    """What a process has printed so far."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.seen: list[str] = []
        self._output: Any = process.stdout
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._output:
            self.seen.append(line.strip())

    def figures(self) -> dict[str, int]:
        told = [line for line in list(self.seen) if line.startswith("figures")]
        found: dict[str, int] = json.loads(told[-1].removeprefix("figures")) if told else {}
        return found


def test_no_more_is_held_than_allowed_however_much_waits(bootstrap: str, topic: str, group: str) -> None:
    """Slow handlers in lanes, and thousands of messages: what was taken and not handled is counted at every step."""
    from penstock.client.app.runners import ThreadRunner

    fill(bootstrap, topic, 4_000)
    app = Penstock(bootstrap, settings=QUICK)
    held: list[int] = []
    go_on = threading.Event()

    @app.subscribe(topic, group=group, concurrency=2, taken_max=50, in_flight_max=80)
    def handle(number: int) -> None:
        if len(held) > 3:
            go_on.wait(20)

    run = ThreadRunner.run

    def counted(self: ThreadRunner, batch: Any, arrived: Callable[[], None]) -> None:
        run(self, batch, arrived)
        held.append(len(self._open))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ThreadRunner, "run", counted)
        figures = app.figures()[handle.__qualname__]
        app.start()
        try:
            eventually(lambda: held and held[-1] == 80, what="the lanes to be full")
            go_on.set()
            eventually(lambda: figures.handled == 4_000)
        finally:
            go_on.set()
            app.close()
    assert max(held) == 80
    assert committed(bootstrap, group, topic, 2) == {0: 2_000, 1: 2_000}


# -- circuit breakers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("concurrency", [1, 4])
def test_while_a_breaker_is_open_no_attempt_is_used_up(
    bootstrap: str, topic: str, group: str, concurrency: int
) -> None:
    """What the handler depends on is down: each message that was tried meanwhile has been tried once."""
    fill(bootstrap, topic, 40)
    app = Penstock(bootstrap, settings=QUICK)
    is_down = threading.Event()
    is_down.set()
    tried: list[bool] = []

    @app.subscribe(
        topic,
        group=group,
        concurrency=concurrency,
        retry=Backoff(base="100ms", cap="100ms", attempts=10),
        breaker=Breaker(failures=3, within="10s", open_for="300ms", cap="300ms"),
    )
    def handle(number: int) -> None:
        tried.append(is_down.is_set())
        if is_down.is_set():
            raise ConnectionError("down")

    figures = app.figures()[handle.__qualname__]
    with running(app, until=lambda: figures.breaks >= 3):
        failed = len(tried)
        # Three failures opened it, or as many more as were under way; then it is one trial at a time.
        assert failed <= 3 + concurrency - 1 + figures.breaks + 1
        is_down.clear()
        eventually(lambda: figures.handled == 40)
    assert figures.dead == 0
    assert sum(not failed for failed in tried) == 40


@pytest.mark.parametrize("concurrency", [1, 4])
def test_stopping_while_a_breaker_is_open_is_prompt_and_loses_nothing(
    bootstrap: str, topic: str, group: str, concurrency: int
) -> None:
    fill(bootstrap, topic, 40)
    handled: list[int] = []

    def start(*, fails: bool) -> Penstock:
        app = Penstock(bootstrap, settings=QUICK)

        @app.subscribe(
            topic,
            group=group,
            concurrency=concurrency,
            retry=Backoff(base="1ms", cap="1ms", attempts=3),
            breaker=Breaker(failures=3, open_for="1h", cap="1h"),
        )
        def handle(number: int) -> None:
            if fails and number > 5:
                raise ConnectionError("down")
            handled.append(number)

        return app

    broken = start(fails=True)
    (figures,) = broken.figures().values()
    with running(broken, until=lambda: figures.breaks == 1):
        stopping_s = time.monotonic()
    assert time.monotonic() - stopping_s < 20, "it would be an hour if it waited for the breaker"
    with running(start(fails=False), until=lambda: len(set(handled)) == 40):
        pass
    assert set(handled) == set(range(40))
    # Positions have no gaps: what failed in one lane beyond a message that waits in another is read again.
    assert len(handled) - 40 <= (figures.retried if concurrency > 1 else 0)


class _NoWork:
    """Accepts all assigned partitions."""

    def assigned(self, topic_partitions: Any) -> dict[Any, int]:
        return {}

    def reading_from(self, positions: Any) -> None: ...

    def revoked(self, topic_partitions: Any) -> None: ...

    def lost(self, topic_partitions: Any) -> None: ...


@pytest.mark.parametrize("more", [{}, {"group.instance.id": "one"}], ids=["dynamic", "static"])
def test_partitions_that_arrive_while_a_member_leaves_do_not_hold_it_up(
    bootstrap: str, topic: str, group: str, more: dict[str, str]
) -> None:
    settings = consumer_settings(bootstrap, "late", {**QUICK, **more}, group=group)
    member = Membership(settings, [topic], start="earliest", work=_NoWork())
    admin = AdminClient({"bootstrap.servers": bootstrap})

    def is_stable() -> bool:
        (asked,) = admin.describe_consumer_groups([group]).values()
        return bool(asked.result(60).state is ConsumerGroupState.STABLE)

    eventually(is_stable, what="an assignment that the application has not polled yet")
    closing = threading.Thread(target=member.close, daemon=True)
    closing.start()
    closing.join(30)
    assert not closing.is_alive()


def test_partitions_that_were_paused_when_they_went_away_are_read_when_they_come_back(
    bootstrap: str, topic: str, group: str
) -> None:
    """Busy members pause all they have while a second thread polls for them, and may lose it within that very poll."""
    settings = consumer_settings(bootstrap, "member", QUICK, group=group)
    member = Membership(settings, [topic], start="earliest", work=_NoWork())
    other: Membership | None = None

    def polls(count: int) -> bool:
        """Both of them, since neither gets anything while the other is silent."""
        if other is not None:
            other.put_back(other.take(1, 0.05))
        member.put_back(member.take(1, 0.05))
        return len(member.topic_partitions) == count

    try:
        eventually(partial(polls, 2), what="both partitions")
        member.pause(member.topic_partitions)
        other = Membership(settings, [topic], start="earliest", work=_NoWork())
        eventually(partial(polls, 1), what="a partition goes to another member")
        other.close()
        other = None
        eventually(partial(polls, 2), what="it comes back")
        member.resume(member.topic_partitions)
        fill(bootstrap, topic, 10)
        read: list[Any] = []

        def all_read() -> bool:
            read.extend(member.take(10, 0.2))
            return len(read) == 10

        eventually(all_read, what="messages of both partitions")
        assert {message.partition() for message in read} == {0, 1}
    finally:
        if other is not None:
            other.close()
        member.close()
