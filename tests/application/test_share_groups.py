"""Share groups in applications, by handler and by plain calls, with failures."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, ConfigResource
from tests.application.apps import QUICK, header, read_all, running
from tests.brokers import BrokerProcess
from tests.compat.share import SHARE_SETTINGS
from tests.waiting import eventually

from penstock.client import (
    ApplicationError,
    Backoff,
    ClientError,
    CommitRefused,
    Message,
    Penstock,
    Reject,
    Retry,
)
from penstock.client.app import share_group
from penstock.client.deadletters.headers import dead_letter_topic
from penstock.protocol import dead_letter_headers


@dataclass
class Job:
    id: int


@pytest.fixture(scope="module")
def broker(broker_with: Callable[..., BrokerProcess]) -> BrokerProcess:
    return broker_with(SHARE_SETTINGS)


def fill(app: Penstock, topic: str, count: int, first: int = 0) -> None:
    for future in [app.publish_soon(topic, Job(number)) for number in range(first, first + count)]:
        future.result(30)


def group_settings(bootstrap: str, group: str) -> dict[str, str]:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    (future,) = admin.describe_configs([ConfigResource(ConfigResource.Type.GROUP, group)]).values()
    return {name: entry.value for name, entry in future.result(60).items()}


# -- handlers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("concurrency", [1, 4])
def test_every_job_is_done_once_where_nothing_breaks(
    app: Penstock, topic: str, group: str, concurrency: int
) -> None:
    fill(app, topic, 200)
    done: Counter[int] = Counter()

    @app.subscribe(topic, group=group, share=True, concurrency=concurrency)
    def work(job: Job) -> None:
        done[job.id] += 1

    with running(app, until=lambda: done.total() >= 200):
        pass
    assert done == Counter(range(200))
    figures = app.figures()[work.__qualname__]
    assert (figures.handled, figures.late, figures.overdue) == (200, 0, 0)


def test_async_handlers_work_together(app: Penstock, topic: str, group: str) -> None:
    fill(app, topic, 40)
    done: list[int] = []
    together = {"now": 0, "most": 0}

    @app.subscribe(topic, group=group, share=True, concurrency=8)
    async def work(job: Job) -> None:
        together["now"] += 1
        together["most"] = max(together.values())
        await asyncio.sleep(0.01)
        together["now"] -= 1
        done.append(job.id)

    with running(app, until=lambda: len(done) >= 40):
        pass
    assert sorted(done) == list(range(40))
    assert 1 < together["most"] <= 8


def test_one_slow_job_does_not_hold_up_its_neighbours(app: Penstock, topic: str, group: str) -> None:
    """They are in the same batch, and some are published later."""
    fill(app, topic, 20)
    done: list[int] = []
    enough = threading.Event()

    @app.subscribe(topic, group=group, share=True, concurrency=4)
    def work(job: Job) -> None:
        if job.id == 0:
            assert enough.wait(20)
        done.append(job.id)

    app.start()
    eventually(lambda: len(done) == 19)
    fill(app, topic, 20, first=20)
    try:
        eventually(lambda: len(done) == 39)
    finally:
        enough.set()
    eventually(lambda: len(done) == 40)
    app.close()


def test_the_group_delays_counts_and_buries_what_fails(
    app: Penstock, topic: str, group: str, bootstrap: str
) -> None:
    fill(app, topic, 10)
    app.publish(topic, b"no JSON")
    tried: dict[int, list[int]] = {}
    moments: list[float] = []

    @app.subscribe(
        topic, group=group, share=True, retry=Backoff(base="300ms", cap="1s", attempts=3), lock="60s"
    )
    def work(job: Job, message: Message) -> None:
        tried.setdefault(job.id, []).append(message.attempt)
        if job.id == 1:
            moments.append(time.monotonic())
            raise RuntimeError("never")
        if job.id == 2 and message.attempt == 1:
            raise RuntimeError("once")
        if job.id == 3:
            raise Reject("no such customer")

    figures = app.figures()[work.__qualname__]
    with running(app, until=lambda: figures.handled == 8 and figures.dead == 3):
        eventually(lambda: len(read_all(bootstrap, dead_letter_topic(topic))) == 3)
    assert tried == {number: [1] for number in range(10)} | {1: [1, 2, 3], 2: [1, 2]}
    # As long as the group says, never shorter: the broker counted from when it heard of the failure.
    assert moments[1] - moments[0] > 0.25
    assert moments[2] - moments[1] > 0.5
    assert figures.retried == 3
    dead = {each.value(): each for each in read_all(bootstrap, dead_letter_topic(topic))}
    assert set(dead) == {b'{"id":1}', b'{"id":3}', b"no JSON"}
    assert header(dead[b'{"id":1}'], dead_letter_headers.DELIVERY_COUNT_HEADER) == "3"
    assert header(dead[b'{"id":3}'], dead_letter_headers.REASON_HEADER) == "rejected"
    assert header(dead[b'{"id":3}'], dead_letter_headers.GROUP_HEADER) == group


def test_what_the_subscription_says_is_set_in_the_group_once(
    app: Penstock, topic: str, group: str, bootstrap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: list[Any] = []
    change = share_group._GroupSettings.change

    def noted(self: Any, asked: Any) -> None:
        changes.append(asked)
        change(self, asked)

    monkeypatch.setattr(share_group._GroupSettings, "change", noted)
    retry = Backoff(base="2s", cap="5m", attempts=7)
    for _ in range(2):
        with app.consumer(topic, group=group, share=True, retry=retry, lock="20s", start="latest"):
            pass
    assert len(changes) == 1
    told = group_settings(bootstrap, group)
    expected = {
        "share.auto.offset.reset": "latest",
        "share.isolation.level": "read_committed",
        "share.delivery.count.limit": "7",
        "share.record.lock.duration.ms": "20000",
        "penstock.share.backoff": "exponential",
        "penstock.share.backoff.ms": "2000",
        "penstock.share.backoff.max.ms": "300000",
        "penstock.share.delivery": "at-least-once",
    }
    assert {name: told[name] for name in expected} == expected
    with app.consumer(topic, group=group, share=True, start="latest"):
        pass
    assert len(changes) == 1, "without retry= and lock= the group keeps what it has"


def test_stopping_finishes_what_is_in_hand_and_gives_the_rest_to_others(
    app: Penstock, topic: str, group: str, bootstrap: str
) -> None:
    fill(app, topic, 30)
    done: list[int] = []

    @app.subscribe(topic, group=group, share=True, concurrency=2, retry=Backoff(base="1h", cap="1h"))
    def work(job: Job) -> None:
        done.append(job.id)
        if len(done) == 5:
            app.stop()
        time.sleep(0.05)

    app.run()
    stopped = list(done)
    assert 5 <= len(stopped) < 30
    with Penstock(bootstrap, settings=QUICK) as other, other.consumer(topic, group=group, share=True) as rest:
        while len(done) < 30:
            for message in rest.poll(timeout="20s"):
                done.append(message.payload(Job).id)
                rest.ack(message)
    assert sorted(done) == list(range(30))


def test_a_job_that_waited_for_longer_than_its_lock_is_given_back_untried(
    app: Penstock, topic: str, group: str
) -> None:
    """One batch, handled one after the other, for longer than it is ours."""
    tried: dict[int, list[int]] = {}
    fill(app, topic, 6)

    @app.subscribe(topic, group=group, share=True, lock="1s", taken_max=6)
    def work(job: Job, message: Message) -> None:
        time.sleep(0 if tried else 1.2)
        tried.setdefault(job.id, []).append(message.attempt)

    figures = app.figures()[work.__qualname__]
    with running(app, until=lambda: len(tried) == 6):
        pass
    assert figures.overdue > 0
    # Some more than once, where the machine is slow, and the one that was late may be among those that came again.
    given_back = sum(attempts[0] - 1 for attempts in tried.values())
    assert 0 < given_back <= figures.overdue, "and no worker had them meanwhile"


def test_a_handler_that_outlives_its_lock_is_told_of(
    app: Penstock, topic: str, group: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Locks cannot be renewed by this client library, so the job is done again."""
    fill(app, topic, 1)
    attempts: list[int] = []

    @app.subscribe(topic, group=group, share=True, lock="1s", concurrency=4)
    def work(message: Message) -> None:
        attempts.append(message.attempt)
        if message.attempt == 1:
            eventually(lambda: len(attempts) > 1)

    figures = app.figures()[work.__qualname__]
    with running(app, until=lambda: figures.handled == 2):
        pass
    assert attempts[:2] == [1, 2]
    assert figures.late >= 1, "the second time, too, where the machine is slow"
    assert "acknowledging failed" in caplog.text


def test_at_most_once_the_broker_hands_out_once_and_a_failure_is_a_letter(
    app: Penstock, topic: str, group: str, bootstrap: str
) -> None:
    fill(app, topic, 20)
    tried: Counter[int] = Counter()

    @app.subscribe(topic, group=group, share=True, delivery="at-most-once", concurrency=2)
    def work(job: Job) -> None:
        tried[job.id] += 1
        if job.id == 7:
            raise RuntimeError("no")

    figures = app.figures()[work.__qualname__]
    with running(app, until=lambda: figures.handled == 19 and figures.dead == 1):
        pass
    assert tried == Counter(range(20))
    assert group_settings(bootstrap, group)["penstock.share.delivery"] == "at-most-once"
    (letter,) = read_all(bootstrap, dead_letter_topic(topic))
    assert header(letter, dead_letter_headers.ERROR_CLASS_HEADER) == "RuntimeError"


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ({"delivery": "exactly-once"}, "at-least-once or at-most-once, not exactly-once"),
        ({"delivery": "effectively-once"}, "not effectively-once"),
        ({"delivery": "at-most-once", "retry": Backoff()}, "retries nothing"),
        ({"keep_order": True, "retry": Backoff()}, "in no order"),
        ({"lock": "0s"}, "longer than 0"),
    ],
)
def test_what_a_share_group_cannot_do_is_refused(app: Penstock, how: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ApplicationError, match=sentence):

        @app.subscribe("jobs", group="g", share=True, **how)
        def work(job: Job) -> None: ...


def test_what_the_broker_does_not_allow_is_told_in_its_words(app: Penstock, topic: str, group: str) -> None:
    @app.subscribe(topic, group=group, share=True, retry=Backoff(attempts=50))
    def work(job: Job) -> None: ...

    with pytest.raises(ApplicationError, match=r"group\.share\.max\.delivery\.count\.limit"):
        app.run()


def test_brokers_without_delays_are_used_as_they_are(
    app: Penstock,
    topic: str,
    group: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As Apache Kafka is: none of our own settings, and the members see to it that nothing is handed out twice."""
    described = share_group._GroupSettings.described

    def without_ours(self: Any) -> dict[str, str]:
        return {name: value for name, value in described(self).items() if not name.startswith("penstock.")}

    monkeypatch.setattr(share_group._GroupSettings, "described", without_ours)
    fill(app, topic, 10)
    attempts: Counter[int] = Counter()

    @app.subscribe(topic, group=group, share=True, retry=Backoff(base="1h", cap="1h", attempts=3))
    def work(job: Job) -> None:
        attempts[job.id] += 1
        if job.id == 1 and attempts[1] == 1:
            raise RuntimeError("once")

    @app.subscribe(topic, group=f"{group}-2", share=True, delivery="at-most-once")
    def once(job: Job) -> None:
        if job.id == 1:
            raise RuntimeError("no")

    figures = app.figures()
    with running(
        app,
        until=lambda: figures[work.__qualname__].handled == 10 and figures[once.__qualname__].handled == 9,
    ):
        pass
    assert attempts[1] == 2
    assert [each.message for each in caplog.records if "do not support all settings" in each.message] == [
        f"{group}: these brokers do not support all settings of the group: failed messages are retried at once"
    ]


# -- plain calls -----------------------------------------------------------------------------------------


def test_plain_calls_answer_for_each_job(app: Penstock, topic: str, group: str, bootstrap: str) -> None:
    fill(app, topic, 5)
    retry = Backoff(base="100ms", cap="100ms", attempts=2)
    with app.consumer(topic, group=group, share=True, retry=retry) as consumer:
        seen: list[tuple[int, int]] = []
        while len(seen) < 7:
            for message in consumer.poll(2, timeout="20s"):
                number = message.payload(Job).id
                seen.append((number, message.attempt))
                if number in (1, 2):
                    consumer.nack(message)
                elif number == 3:
                    consumer.reject(message, reason="bad")
                else:
                    consumer.ack(message)
        figures = consumer.figures
        assert (figures.handled, figures.retried, figures.dead) == (2, 2, 3)
    assert sorted(seen) == [(0, 1), (1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (4, 1)]
    eventually(lambda: len(read_all(bootstrap, dead_letter_topic(topic))) == 3)


def test_plain_commit_is_known_and_a_lock_that_ran_out_is_told(app: Penstock, topic: str, group: str) -> None:
    fill(app, topic, 2)
    with app.consumer(topic, group=group, share=True, lock="1s") as consumer:
        assert consumer.poll(1, timeout="20s")
        time.sleep(1.5)  # longer than the lock, which is what this is about
        with pytest.raises(CommitRefused):
            consumer.commit()
    with app.consumer(topic, group=group, share=True) as consumer:
        seen: set[int] = set()
        while len(seen) < 2:
            seen |= {message.payload(Job).id for message in consumer.poll(timeout="20s")}
            consumer.commit()


def test_plain_calls_say_what_a_share_group_cannot_do(app: Penstock, topic: str, group: str) -> None:
    fill(app, topic, 1)
    with app.consumer(topic, group=group, share=True) as consumer:
        (message,) = consumer.poll(timeout="20s")
        with pytest.raises(ApplicationError, match="have no positions"):
            consumer.seek(topic, 0, offset=0)
        with pytest.raises(ClientError, match="1 messages are not acknowledged"):
            consumer.poll()
        consumer.ack(message)
        consumer.ack(message)
        assert consumer.figures.late == 1


def test_plain_at_most_once_no_other_member_gets_delivered_records(
    app: Penstock, topic: str, group: str
) -> None:
    fill(app, topic, 10)
    seen: list[int] = []
    for _ in range(2):
        with app.consumer(topic, group=group, share=True, delivery="at-most-once") as consumer:
            while messages := consumer.poll(timeout="1s" if seen else "20s"):
                seen += [message.payload(Job).id for message in messages]
                if len(seen) >= 10:
                    break
                with pytest.raises(ApplicationError, match="retries nothing"):
                    consumer.nack(messages[0])
    assert sorted(seen) == list(range(10))


def test_a_delay_that_a_handler_asks_for_wins_over_the_groups(app: Penstock, topic: str, group: str) -> None:
    fill(app, topic, 3)
    moments: dict[int, list[float]] = {}

    @app.subscribe(topic, group=group, share=True, retry=Backoff(base="1h", cap="1h", attempts=3))
    def work(job: Job, message: Message) -> None:
        moments.setdefault(job.id, []).append(time.monotonic())
        if message.attempt == 1:
            raise Retry("not yet", delay=f"{300 * job.id}ms")

    figures = app.figures()[work.__qualname__]
    with running(app, until=lambda: figures.handled == 3):
        pass
    # Never sooner than it was asked for, and the group's hour is not waited for.
    assert all(second - first >= 0.3 * number for number, (first, second) in moments.items())


def test_plain_calls_delay_one_message(app: Penstock, topic: str, group: str) -> None:
    fill(app, topic, 2)
    with app.consumer(
        topic, group=group, share=True, retry=Backoff(base="1h", cap="1h", attempts=3)
    ) as consumer:
        released: dict[int, float] = {}
        again: dict[int, float] = {}
        while len(again) < 2:
            for message in consumer.poll(timeout="20s"):
                number = message.payload(Job).id
                if message.attempt == 1:
                    released[number] = time.monotonic()
                    consumer.nack(message, delay=0.4 * number)
                else:
                    again[number] = time.monotonic()
                    consumer.ack(message)
        fill(app, topic, 1, first=2)
        (message,) = consumer.poll(timeout="20s")
        with pytest.raises(ApplicationError, match="not a duration"):
            consumer.nack(message, delay="soon")
    assert again[1] - released[1] >= 0.4


def test_dead_letters_of_a_share_group_say_what_the_worker_said(
    app: Penstock, topic: str, group: str, bootstrap: str
) -> None:
    fill(app, topic, 3)

    @app.subscribe(topic, group=group, share=True, retry=Backoff(base="50ms", attempts=2))
    def work(job: Job) -> None:
        if job.id == 0:
            raise RuntimeError("no such customer")
        if job.id == 1:
            raise Reject("not ours")

    figures = app.figures()[work.__qualname__]
    with running(app, until=lambda: figures.handled == 1 and figures.dead == 2):
        eventually(lambda: len(read_all(bootstrap, dead_letter_topic(topic))) == 2)
    dead = {each.value(): each for each in read_all(bootstrap, dead_letter_topic(topic))}
    often, rejected = dead[b'{"id":0}'], dead[b'{"id":1}']
    assert header(often, dead_letter_headers.ERROR_CLASS_HEADER) == "RuntimeError"
    assert header(often, dead_letter_headers.ERROR_MESSAGE_HEADER) == "no such customer"
    assert "raise RuntimeError" in header(often, dead_letter_headers.ERROR_STACK_HEADER)
    assert (
        header(often, dead_letter_headers.REASON_HEADER),
        header(often, dead_letter_headers.DELIVERY_COUNT_HEADER),
    ) == ("limit", "2")
    assert header(rejected, dead_letter_headers.ERROR_CLASS_HEADER) == "penstock.client.Reject"
    assert header(rejected, dead_letter_headers.ERROR_MESSAGE_HEADER) == "not ours"
    assert header(rejected, dead_letter_headers.REASON_HEADER) == "rejected"


def test_plain_rejections_say_why(app: Penstock, topic: str, group: str, bootstrap: str) -> None:
    fill(app, topic, 2)
    with app.consumer(topic, group=group, share=True) as consumer:
        left = 2
        while left:
            for message in consumer.poll(timeout="20s"):
                left -= 1
                if message.payload(Job).id == 0:
                    consumer.reject(message, reason="unknown customer")
                    continue
                try:
                    raise KeyError("colour")
                except KeyError:
                    consumer.reject(message)
    eventually(lambda: len(read_all(bootstrap, dead_letter_topic(topic))) == 2)
    dead = {each.value(): each for each in read_all(bootstrap, dead_letter_topic(topic))}
    assert header(dead[b'{"id":0}'], dead_letter_headers.ERROR_MESSAGE_HEADER) == "unknown customer"
    assert header(dead[b'{"id":1}'], dead_letter_headers.ERROR_CLASS_HEADER) == "KeyError"
