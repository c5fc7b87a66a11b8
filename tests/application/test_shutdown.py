"""How an application stops: exceptions that end it, and what it waits for."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from tests.application.apps import QUICK, committed
from tests.brokers import BrokerProcess
from tests.waiting import eventually

from penstock.client import ClientError, NotPublished, Penstock
from penstock.client.app.membership import Membership
from penstock.client.app.plain_consumer import GroupPlainConsumer
from penstock.client.app.resources import Resources
from penstock.client.app.wait_reporter import WorkerPhase
from penstock.client.app.worker import SubscriptionWorker
from penstock.client.stores import StoreUnavailable


class Halt(BaseException):
    """As libraries raise them to get past `except Exception`."""


LAST = 5


def _plain(raised: BaseException, seen: list[int]) -> Callable[..., Any]:
    def handle(value: int) -> None:
        if value == LAST:
            raise raised
        seen.append(value)

    return handle


def _async(raised: BaseException, seen: list[int]) -> Callable[..., Any]:
    async def handle(value: int) -> None:
        await asyncio.sleep(0)
        if value == LAST:
            raise raised
        seen.append(value)

    return handle


def _subtask(raised: BaseException, seen: list[int]) -> Callable[..., Any]:
    async def fails() -> None:
        raise raised

    async def handle(value: int) -> None:
        if value == LAST:
            await asyncio.create_task(fails())
        seen.append(value)

    return handle


def _batch(raised: BaseException, seen: list[int]) -> Callable[..., Any]:
    def handle(values: list[int]) -> None:
        if LAST in values:
            raise raised
        seen.extend(values)

    return handle


SHAPES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "inline": (_plain, {}),
    "threads": (_plain, {"concurrency": 3}),
    "async": (_async, {"concurrency": 2}),
    "subtask": (_subtask, {"concurrency": 2}),
    "batches": (_batch, {"batch": 4}),
    "exactly-once": (_plain, {"delivery": "exactly-once"}),
    "exactly-once threads": (_plain, {"delivery": "exactly-once", "concurrency": 2}),
    "shared": (_plain, {"share": True}),
    "shared async": (_async, {"share": True}),
}


CASES = [(shape, SystemExit(0)) for shape in SHAPES] + [
    ("inline", KeyboardInterrupt()),
    ("threads", Halt()),
    ("async", asyncio.CancelledError()),
]


@pytest.mark.parametrize(
    ("shape", "raised"), CASES, ids=lambda each: each if isinstance(each, str) else repr(each)
)
def test_what_a_handler_raises_to_end_the_process_ends_it(
    bootstrap: str, unique: Callable[[str], str], shape: str, raised: BaseException
) -> None:
    topic, group = unique("orders"), unique("billing")
    make, more = SHAPES[shape]
    with Penstock(bootstrap, settings=QUICK) as app:
        app.create_topic(topic, partitions=1)
        for number in range(8):
            app.publish(topic, number, key="one key")
        app.subscribe(topic, group=group, dead_letters=False, **more)(make(raised, []))
        with pytest.raises(type(raised)) as ended:
            app.run()
    if isinstance(ended.value, SystemExit):
        assert ended.value.code == 1
    if "share" in more:
        assert LAST in _shared_again(bootstrap, topic, group)
    else:
        assert committed(bootstrap, group, topic)[0] <= LAST


def _shared_again(bootstrap: str, topic: str, group: str) -> list[int]:
    """What the next member of the share group gets, up to the last message."""
    with Penstock(bootstrap, settings=QUICK) as app, app.consumer(topic, group=group, share=True) as consumer:
        seen: list[int] = []
        while 7 not in seen:
            for message in consumer.poll(timeout="10s"):
                seen.append(message.payload(int))
                consumer.ack(message)
        return seen


# Waits, and what is still being finished

MEMBER = """
import sys
from penstock.client import Penstock

app = Penstock(sys.argv[1], name="first", settings={"session.timeout.ms": 4000, "heartbeat.interval.ms": 500})

@app.subscribe(sys.argv[2], group=sys.argv[3])
def handle(value: int) -> None:
    print("at work", flush=True)

app.run()
"""


def test_a_killed_member_is_named_while_its_session_lasts(
    app: Penstock, bootstrap: str, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    app.publish(topic, 1)
    first = subprocess.Popen(
        [sys.executable, "-c", MEMBER, bootstrap, topic, "billing-killed"], stdout=subprocess.PIPE, text=True
    )
    assert first.stdout is not None
    assert first.stdout.readline() == "at work\n"
    first.send_signal(signal.SIGKILL)
    first.wait()
    begun: list[str] = []

    @app.subscribe(topic, group="billing-killed")
    def handle(value: int) -> None:
        begun.append(caplog.text)

    app.start()
    app.publish(topic, 2)
    eventually(lambda: begun, what="the partitions of the member that was killed")
    assert f"waiting for partitions of {topic}: member first-" in begun[0]
    assert "of group billing-killed sends no heartbeats; at most" in begun[0]


def test_a_plain_consumer_says_what_it_waits_for(
    app: Penstock, bootstrap: str, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    app.publish(topic, 1)
    first = subprocess.Popen(
        [sys.executable, "-c", MEMBER, bootstrap, topic, "loop-killed"], stdout=subprocess.PIPE, text=True
    )
    assert first.stdout is not None
    assert first.stdout.readline() == "at work\n"
    first.send_signal(signal.SIGKILL)
    first.wait()
    with app.consumer(topic, group="loop-killed") as consumer:
        app.publish(topic, 2)
        eventually(
            lambda: consumer.poll(timeout="200ms"), what="the partitions of the member that was killed"
        )
    assert f"waiting for partitions of {topic}: member first-" in caplog.text
    assert "of group loop-killed sends no heartbeats; at most" in caplog.text


def test_who_has_been_given_partitions_waits_for_none(
    app: Penstock, topic: str, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the first message, which may come in the same moment, keeps its handler busy for long."""
    waits: list[Any] = []
    phases: list[WorkerPhase] = []
    assign = Membership._on_assign

    def assigned(self: Membership, *arguments: Any) -> None:
        assign(self, *arguments)
        phases.append(waits[0].stage.phase)

    monkeypatch.setattr(Membership, "_on_assign", assigned)

    @app.subscribe(topic, group=group)
    def handle(value: int) -> None: ...

    joining = SubscriptionWorker(app.subscriptions[0], app._resources)
    waits[:] = [joining]
    joining.start()
    eventually(lambda: phases, what="partitions")
    joining.stop()
    assert joining.join(30)
    assert phases[0] is WorkerPhase.RUNNING
    phases.clear()
    with app.consumer(topic, group=f"{group}-loop") as consumer:
        assert isinstance(consumer, GroupPlainConsumer)
        waits[:] = [consumer._wait]
        eventually(lambda: consumer.poll(timeout="100ms") or phases, what="partitions")
    assert phases[0] is WorkerPhase.RUNNING


def test_a_store_that_is_down_is_not_taken_for_brokers_that_do_not_answer(
    app: Penstock, topic: str, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def store_is_down(*_: Any) -> None:
        raise StoreUnavailable("the database cannot be reached")

    monkeypatch.setattr("penstock.client.app.worker.assemble", store_is_down)

    @app.subscribe(topic, group=group)
    def handle(value: int) -> None: ...

    waiting = SubscriptionWorker(app.subscriptions[0], app._resources)
    waiting.start()
    eventually(
        lambda: waiting.stage.phase is WorkerPhase.BACKING_OFF, what="a rest, about which nothing is said"
    )
    waiting.stop()
    assert waiting.join(30)


@pytest.mark.parametrize("share", [False, True])
def test_a_plain_consumer_says_that_no_broker_is_there(
    share: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait_for_brokers(*_: object) -> None:
        """As it is done for a minute, but no longer than it takes to say so."""
        eventually(lambda: "consumer waits for a broker: 127.0.0.1:1: connection refused" in caplog.text)
        raise ClientError("no broker")

    monkeypatch.setattr(Resources, "ensure_failure_topics", wait_for_brokers)
    with pytest.raises(ClientError, match="no broker"):
        Penstock("127.0.0.1:1").consumer("orders", group="billing", share=share)
    eventually(lambda: all(each.name != "penstock-waits" for each in threading.enumerate()))


def test_to_create_a_topic_without_brokers_is_reported(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait_for_brokers(*_: object) -> None:
        eventually(
            lambda: "create_topic('orders') waits for a broker: 127.0.0.1:1: connection" in caplog.text
        )
        raise ClientError("no broker")

    monkeypatch.setattr("penstock.client.app.application.create_topics", wait_for_brokers)
    with pytest.raises(ClientError, match="no broker"):
        Penstock("127.0.0.1:1").create_topic("orders")


def test_brokers_that_are_not_there_are_reported_and_hold_up_no_end(caplog: pytest.LogCaptureFixture) -> None:
    app = Penstock("127.0.0.1:1")

    @app.subscribe("orders", group="billing")
    def bill(value: int) -> None: ...

    app.start()
    eventually(lambda: "waits for a broker: 127.0.0.1:1: connection refused" in caplog.text)
    app.close()
    assert "ends without a reply from its brokers (127.0.0.1:1: connection refused)" in caplog.text


def test_brokers_that_take_connections_and_never_answer_hold_up_no_end(
    fresh_broker: BrokerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    app = Penstock(fresh_broker.bootstrap_servers, settings=QUICK)
    app.create_topic("orders", partitions=1)
    seen: list[int] = []

    @app.subscribe("orders", group="billing")
    def bill(value: int) -> None:
        seen.append(value)

    app.publish("orders", 1)
    app.start()
    eventually(lambda: seen == [1])
    os.kill(fresh_broker.pid, signal.SIGSTOP)
    try:
        app.close()
    finally:
        os.kill(fresh_broker.pid, signal.SIGCONT)
    assert "ends without a reply from its brokers" in caplog.text
    assert "no reply)" in caplog.text


@pytest.mark.parametrize("delivery", ["at-least-once", "exactly-once"])
def test_a_handler_that_publishes_does_not_hold_up_the_end_when_brokers_are_gone(
    fresh_broker: BrokerProcess, caplog: pytest.LogCaptureFixture, delivery: str
) -> None:
    app = Penstock(fresh_broker.bootstrap_servers, settings=QUICK)
    app.create_topic("orders", partitions=1)
    app.create_topic("invoices", partitions=1)
    publishing = threading.Event()

    @app.subscribe("orders", group="billing", delivery=delivery)
    def bill(value: int) -> None:
        fresh_broker.kill()
        publishing.set()
        app.publish("invoices", value)

    app.publish("orders", 1)
    app.start()
    assert publishing.wait(30)
    eventually(lambda: "no broker of" in caplog.text, what="a word about the broker")
    app.close()
    fresh_broker.start()
    if delivery == "at-least-once":  # the other may still end its transaction whole
        assert committed(fresh_broker.bootstrap_servers, "billing", "orders")[0] == 0


def test_a_handler_that_fills_the_queue_does_not_hold_up_the_end_when_brokers_are_gone(
    fresh_broker: BrokerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    app = Penstock(fresh_broker.bootstrap_servers, settings={**QUICK, "queue.buffering.max.messages": 5})
    app.create_topic("orders", partitions=1)
    app.create_topic("invoices", partitions=1)
    publishing = threading.Event()

    @app.subscribe("orders", group="billing")
    def bill(value: int) -> None:
        fresh_broker.kill()
        publishing.set()
        for number in range(20):
            app.publish_soon("invoices", number)

    app.publish("orders", 1)
    app.start()
    assert publishing.wait(30)
    app.close()
    fresh_broker.start()
    assert committed(fresh_broker.bootstrap_servers, "billing", "orders")[0] == 0


async def test_a_full_queue_does_not_hold_up_coroutines_either() -> None:
    app = Penstock("127.0.0.1:1", settings={"queue.buffering.max.messages": 1})
    app.publish_soon("orders", b"fills the queue")
    publishing = asyncio.create_task(app.apublish("orders", b"waits for room"))
    await asyncio.sleep(0)
    app._resources.ending.set()
    with pytest.raises(NotPublished, match="the application stops") as failed:
        await publishing
    assert not failed.value.may_be_there
    app.close()


def test_what_is_finished_after_a_stop_is_named(
    app: Penstock, topic: str, group: str, caplog: pytest.LogCaptureFixture
) -> None:
    begun, finish = threading.Event(), threading.Event()

    @app.subscribe(topic, group=group)
    def handle(value: int) -> None:
        begun.set()
        finish.wait(30)

    place = app.publish(topic, 1)
    app.start()
    assert begun.wait(30)
    ending = threading.Thread(target=app.close)
    ending.start()
    words = f"is stopping: it finishes {topic}[{place.partition}]@{place.offset}"
    eventually(lambda: words in caplog.text, what="what is finished")
    assert ending.is_alive()
    finish.set()
    ending.join(30)
    assert not ending.is_alive()


# At most once: what may be lost is counted

PAGER = """
import sys, time
from penstock.client import Penstock

app = Penstock(sys.argv[1], settings={"session.timeout.ms": 2000, "heartbeat.interval.ms": 200})

@app.subscribe(sys.argv[2], group=sys.argv[3], delivery="at-most-once", commit_every="0s")
def ring(value: int) -> None:
    if value == 3:
        print("in hand", flush=True)
        time.sleep(600)

app.run()
"""


def test_what_a_killed_application_may_have_lost_is_counted_once(
    bootstrap: str, unique: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    topic, group = unique("alarms"), unique("pager")
    with Penstock(bootstrap) as app:
        app.create_topic(topic, partitions=1)
        for number in range(10):
            app.publish(topic, number)
    killed = subprocess.Popen(
        [sys.executable, "-c", PAGER, bootstrap, topic, group], stdout=subprocess.PIPE, text=True
    )
    assert killed.stdout is not None
    assert killed.stdout.readline() == "in hand\n"
    killed.kill()
    killed.wait()

    def counted(until: int) -> tuple[int, list[int]]:
        """By a new life of the application, which goes on until it has handled that one."""
        seen: list[int] = []
        with Penstock(bootstrap, settings=QUICK) as app:

            @app.subscribe(topic, group=group, delivery="at-most-once")
            def ring(value: int) -> None:
                seen.append(value)

            app.publish(topic, until)
            app.start()
            eventually(lambda: until in seen, what=f"message {until}")
            return app.figures()[ring.__qualname__].lost_max, seen

    lost, seen = counted(100)
    assert (lost, seen) == (7, [100]), "0, 1 and 2 were handled; 3 to 9 were committed"
    assert f"{topic}[0]: up to 7 messages, from offset 3 on, may be lost" in caplog.text
    assert counted(101) == (0, [101]), "it ended as it should, and those before it are counted already"


def test_a_group_that_was_used_under_another_contract_is_warned_of(
    app: Penstock, bootstrap: str, topic: str, group: str, caplog: pytest.LogCaptureFixture
) -> None:
    app.publish(topic, 1)
    with app.consumer(topic, group=group) as consumer:
        assert consumer.poll(timeout="30s")
        consumer.commit()
    assert "keeps one contract" not in caplog.text
    app.publish(topic, 2)
    with app.consumer(topic, group=group, delivery="at-most-once") as consumer:
        assert consumer.poll(timeout="30s")
    assert (
        f"group {group} was used with at-least-once before, and is used with at-most-once now" in caplog.text
    )
