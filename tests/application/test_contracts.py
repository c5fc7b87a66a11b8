"""Each contract on a real broker: messages that succeed, fail, or come again."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.application.apps import QUICK, committed, header, read_all, running

from penstock.client import ApplicationError, Backoff, Message, Penstock, Reject, Retry
from penstock.client.deadletters.headers import dead_letter_topic, retry_topic
from penstock.protocol import dead_letter_headers


@dataclass
class Order:
    id: int
    customer: str


def fill(app: Penstock, topic: str, count: int) -> list[Any]:
    futures = [
        app.publish_soon(topic, Order(number, f"c{number % 7}"), key=f"c{number % 7}")
        for number in range(count)
    ]
    return [future.result(30) for future in futures]


def test_publish_answers_with_the_place_where_the_message_is(
    app: Penstock, topic: str, bootstrap: str
) -> None:
    first = app.publish(topic, {"n": 1}, key="a", headers={"colour": "red"})
    second = app.publish(topic, b"raw", key="a")
    app.close()

    assert (second.partition, second.offset) == (first.partition, first.offset + 1)
    assert int(first) == first.offset
    found = {
        each.offset(): each for each in read_all(bootstrap, topic) if each.partition() == first.partition
    }
    assert json.loads(found[first.offset].value()) == {"n": 1}
    assert header(found[first.offset], "colour") == "red"
    ids = {header(each, dead_letter_headers.MESSAGE_ID) for each in found.values()}
    assert None not in ids
    assert len(ids) == 2


def test_keys_go_where_java_clients_send_them(app: Penstock, topic: str) -> None:
    from kafka.partitioner.default import murmur2

    for key in ("a", "customer-17", "ø", "x" * 99):
        expected = (murmur2(key.encode()) & 0x7FFFFFFF) % 2
        assert app.publish(topic, b"", key=key).partition == expected
    app.close()


@pytest.mark.parametrize("delivery", ["at-least-once", "at-most-once", "effectively-once", "exactly-once"])
@pytest.mark.parametrize("concurrency", [1, 4])
def test_every_message_is_handled_once_where_nothing_breaks(
    app: Penstock, topic: str, group: str, bootstrap: str, tmp_path: Path, delivery: str, concurrency: int
) -> None:
    places = fill(app, topic, 300)
    handled: list[int] = []
    store = f"sqlite:///{tmp_path}/seen.db" if delivery == "effectively-once" else None

    @app.subscribe(topic, group=group, delivery=delivery, concurrency=concurrency, store=store)
    def bill(order: Order) -> None:
        handled.append(order.id)

    with running(app, until=lambda: len(handled) >= 300):
        pass
    assert sorted(handled) == list(range(300))
    ends = {partition: sum(place.partition == partition for place in places) for partition in (0, 1)}
    assert committed(bootstrap, group, topic, 2) == ends
    assert app.figures()[bill.__qualname__].handled == 300


@pytest.mark.parametrize("concurrency", [1, 8])
def test_messages_of_a_key_are_handled_in_their_order(
    app: Penstock, topic: str, group: str, concurrency: int
) -> None:
    fill(app, topic, 400)
    seen: dict[str, list[int]] = {}

    @app.subscribe(topic, group=group, concurrency=concurrency)
    def bill(order: Order) -> None:
        seen.setdefault(order.customer, []).append(order.id)

    with running(app, until=lambda: sum(map(len, seen.values())) >= 400):
        pass
    assert all(ids == sorted(ids) for ids in seen.values())


def test_async_handlers_run_together_and_keep_the_order_of_keys(
    app: Penstock, topic: str, group: str
) -> None:
    import asyncio

    fill(app, topic, 100)
    seen: dict[str, list[int]] = {}
    together = {"now": 0, "most": 0}

    @app.subscribe(topic, group=group, concurrency=5)
    async def bill(order: Order, message: Message) -> None:
        together["now"] += 1
        together["most"] = max(together["most"], together["now"])
        await asyncio.sleep(0.002)
        together["now"] -= 1
        seen.setdefault(order.customer, []).append(order.id)

    with running(app, until=lambda: sum(map(len, seen.values())) >= 100):
        pass
    assert together["most"] > 1
    assert all(ids == sorted(ids) for ids in seen.values())


@pytest.mark.parametrize("delivery", ["at-least-once", "effectively-once", "exactly-once"])
def test_a_failure_is_retried_and_then_a_dead_letter(
    app: Penstock, topic: str, group: str, bootstrap: str, tmp_path: Path, delivery: str
) -> None:
    fill(app, topic, 20)
    attempts: dict[int, list[int]] = {}
    store = f"sqlite:///{tmp_path}/seen.db" if delivery == "effectively-once" else None
    retry = Backoff(base="50ms", cap="200ms", attempts=3)

    @app.subscribe(topic, group=group, delivery=delivery, retry=retry, store=store)
    def bill(order: Order, message: Message) -> None:
        attempts.setdefault(order.id, []).append(message.attempt)
        if order.id == 7 or (order.id == 11 and message.attempt == 1):
            raise RuntimeError(f"order {order.id} cannot be billed")

    figures = app.figures()[bill.__qualname__]
    with running(app, until=lambda: len(attempts) == 20 and figures.dead == 1 and len(attempts[11]) == 2):
        pass
    assert attempts[7] == [1, 2, 3]
    assert attempts[11] == [1, 2]
    assert all(tried == [1] for number, tried in attempts.items() if number not in (7, 11))
    (letter,) = read_all(bootstrap, dead_letter_topic(topic))
    assert json.loads(letter.value())["id"] == 7
    assert header(letter, dead_letter_headers.TOPIC_HEADER) == topic
    assert header(letter, dead_letter_headers.GROUP_HEADER) == group
    assert header(letter, dead_letter_headers.DELIVERY_COUNT_HEADER) == "3"
    assert header(letter, dead_letter_headers.ERROR_CLASS_HEADER) == "RuntimeError"
    assert header(letter, dead_letter_headers.ERROR_MESSAGE_HEADER) == "order 7 cannot be billed"
    stack = header(letter, dead_letter_headers.ERROR_STACK_HEADER) or ""
    assert "cannot be billed" in stack
    assert "penstock/client/app" not in stack
    assert header(letter, dead_letter_headers.HANDLER_HEADER) == bill.__qualname__
    assert header(letter, dead_letter_headers.MESSAGE_ID)


def test_at_most_once_goes_on_after_a_handler_that_cannot_publish(
    app: Penstock, topic: str, group: str, bootstrap: str
) -> None:
    """It is not read again, so it is a dead letter as any other failure, and those behind it are handled."""
    fill(app, topic, 20)
    handled: list[int] = []

    @app.subscribe(topic, group=group, delivery="at-most-once")
    def bill(order: Order) -> None:
        if order.id == 7:
            app.publish(f"{topic}-elsewhere", b"", partition=99)
        handled.append(order.id)

    with running(app, until=lambda: len(handled) == 19):
        pass
    (letter,) = read_all(bootstrap, dead_letter_topic(topic))
    assert json.loads(letter.value())["id"] == 7
    assert app.figures()[bill.__qualname__].restarts == 0


@pytest.mark.parametrize("delivery", ["at-most-once", "at-least-once", "exactly-once"])
@pytest.mark.parametrize("concurrency", [1, 4])
def test_without_a_dead_letter_topic_a_failure_ends_the_application(
    app: Penstock, topic: str, group: str, delivery: str, concurrency: int
) -> None:
    fill(app, topic, 20)

    @app.subscribe(topic, group=group, delivery=delivery, concurrency=concurrency, dead_letters=False)
    def bill(order: Order) -> None:
        if order.id == 7:
            raise LookupError("no such customer")

    with pytest.raises(LookupError, match="no such customer"):
        app.run()
    app.close()


def test_a_payload_that_does_not_fit_is_a_dead_letter_with_the_reason(
    app: Penstock, topic: str, group: str, bootstrap: str
) -> None:
    app.publish(topic, b'{"id": "not a number", "customer": "c"}')
    app.publish(topic, b"no JSON")
    app.publish(topic, Order(1, "c"))
    handled: list[int] = []

    @app.subscribe(topic, group=group, retry=Backoff(base="50ms"))
    def bill(order: Order) -> None:
        handled.append(order.id)

    figures = app.figures()[bill.__qualname__]
    with running(app, until=lambda: handled == [1] and figures.dead == 2):
        pass
    dead = read_all(bootstrap, dead_letter_topic(topic))
    assert {header(letter, dead_letter_headers.REASON_HEADER) for letter in dead} == {"unreadable"}
    assert any("id" in (header(letter, dead_letter_headers.ERROR_MESSAGE_HEADER) or "") for letter in dead)


def test_a_handler_may_reject_or_ask_for_another_delay(
    app: Penstock, topic: str, group: str, bootstrap: str
) -> None:
    app.publish(topic, Order(1, "c"))
    app.publish(topic, Order(2, "c"))
    tried: list[int] = []

    @app.subscribe(topic, group=group, retry=Backoff(base="10m", cap="1h", attempts=3))
    def bill(order: Order, message: Message) -> None:
        tried.append(order.id)
        if order.id == 1:
            raise Reject("no such customer")
        if message.attempt == 1:
            raise Retry("not yet", delay="50ms")

    with running(app, until=lambda: tried.count(2) == 2):
        pass
    (letter,) = read_all(bootstrap, dead_letter_topic(topic))
    assert header(letter, dead_letter_headers.REASON_HEADER) == "rejected"
    assert header(letter, dead_letter_headers.ERROR_CLASS_HEADER) == "penstock.client.Reject"
    assert header(letter, dead_letter_headers.DELIVERY_COUNT_HEADER) == "1"


def test_another_group_leaves_retries_alone(app: Penstock, topic: str, unique: Callable[[str], str]) -> None:
    app.publish(topic, Order(1, "c"))
    calls: dict[str, int] = {"failing": 0, "fine": 0}
    retry = Backoff(base="50ms", cap="50ms", attempts=2)

    @app.subscribe(topic, group=unique("failing"), retry=retry)
    def failing(order: Order) -> None:
        calls["failing"] += 1
        raise RuntimeError("no")

    @app.subscribe(topic, group=unique("fine"), retry=retry)
    def fine(order: Order) -> None:
        calls["fine"] += 1

    figures = app.figures()
    with running(
        app, until=lambda: figures[failing.__qualname__].dead == 1 and figures[fine.__qualname__].skipped == 1
    ):
        pass
    assert calls == {"failing": 2, "fine": 1}


def test_exactly_once_publishes_nothing_of_a_handler_that_fails_halfway(
    app: Penstock, topic: str, group: str, bootstrap: str, unique: Callable[[str], str]
) -> None:
    invoices = unique("invoices")
    app.create_topic(invoices, partitions=2)
    fill(app, topic, 50)

    @app.subscribe(topic, group=group, delivery="exactly-once", retry=Backoff(base="50ms", attempts=2))
    def bill(order: Order, message: Message) -> None:
        app.publish(invoices, {"order": order.id, "half": 1})
        if order.id == 13 and message.attempt == 1:
            raise RuntimeError("halfway")
        app.publish(invoices, {"order": order.id, "half": 2})

    figures = app.figures()[bill.__qualname__]
    with running(app, until=lambda: figures.handled == 50):
        pass
    found = sorted(
        (json.loads(m.value())["order"], json.loads(m.value())["half"]) for m in read_all(bootstrap, invoices)
    )
    assert found == [(number, half) for number in range(50) for half in (1, 2)]


def test_what_a_handler_returns_goes_to_the_topic_that_to_names(
    app: Penstock, topic: str, group: str, bootstrap: str, unique: Callable[[str], str]
) -> None:
    invoices = unique("invoices")
    app.create_topic(invoices, partitions=1)
    fill(app, topic, 10)

    @app.subscribe(topic, group=group, to=invoices)
    def bill(order: Order) -> dict[str, int] | None:
        return {"order": order.id} if order.id % 2 else None

    with running(app, until=lambda: app.figures()[bill.__qualname__].handled == 10):
        pass
    found = read_all(bootstrap, invoices)
    assert sorted(json.loads(m.value())["order"] for m in found) == [1, 3, 5, 7, 9]
    assert all(m.key() == f"c{json.loads(m.value())['order'] % 7}".encode() for m in found)


def test_effectively_once_leaves_out_a_message_that_is_published_twice(
    app: Penstock, topic: str, group: str, tmp_path: Path
) -> None:
    for number in (1, 2, 1, 3, 2):
        app.publish(
            topic, Order(number, "c"), key="c", headers={dead_letter_headers.MESSAGE_ID: f"order-{number}"}
        )
    handled: list[int] = []

    @app.subscribe(topic, group=group, delivery="effectively-once", store=f"sqlite:///{tmp_path}/seen.db")
    def bill(order: Order) -> None:
        handled.append(order.id)

    figures = app.figures()[bill.__qualname__]
    with running(app, until=lambda: figures.duplicates == 2):
        pass
    assert handled == [1, 2, 3]


def test_result_and_mark_are_one_transaction_where_the_handler_takes_the_connection(
    app: Penstock, topic: str, group: str, tmp_path: Path
) -> None:
    import sqlite3

    path = tmp_path / "shop.db"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE bills (id INTEGER)")
    for number in (1, 2, 1):
        app.publish(
            topic, Order(number, "c"), key="c", headers={dead_letter_headers.MESSAGE_ID: f"order-{number}"}
        )

    @app.subscribe(
        topic,
        group=group,
        delivery="effectively-once",
        store=f"sqlite:///{path}",
        retry=Backoff(base="50ms", attempts=2),
    )
    def bill(order: Order, message: Message, connection: Any) -> None:
        connection.execute("INSERT INTO bills VALUES (?)", (order.id,))
        if order.id == 2 and message.attempt == 1:
            raise RuntimeError("after the write")

    figures = app.figures()[bill.__qualname__]
    with running(
        app, until=lambda: figures.duplicates == 1 and figures.retried == 1 and figures.handled >= 2
    ):
        pass
    assert figures.handled == 2, "a duplicate is not handled"
    with sqlite3.connect(path) as database:
        assert sorted(row[0] for row in database.execute("SELECT id FROM bills")) == [1, 2]


def test_later_messages_of_a_failed_key_follow_it(app: Penstock, topic: str, group: str) -> None:
    for number in range(6):
        app.publish(
            topic,
            Order(number, "bad" if number % 2 == 0 else "good"),
            key="bad" if number % 2 == 0 else "good",
        )
    handled: dict[str, list[int]] = {"bad": [], "good": []}

    @app.subscribe(topic, group=group, keep_order=True, retry=Backoff(base="100ms", cap="100ms", attempts=4))
    def bill(order: Order, message: Message) -> None:
        if order.id == 0 and message.attempt < 3:
            raise RuntimeError("not yet")
        handled[order.customer].append(order.id)

    figures = app.figures()[bill.__qualname__]
    with running(app, until=lambda: len(handled["bad"]) == 3 and len(handled["good"]) == 3):
        pass
    assert handled == {"bad": [0, 2, 4], "good": [1, 3, 5]}
    assert figures.followed >= 2


def test_batch_handlers_get_lists_and_one_bad_message_is_found(
    app: Penstock, topic: str, group: str, bootstrap: str
) -> None:
    fill(app, topic, 60)
    sizes: list[int] = []
    done: set[int] = set()

    @app.subscribe(topic, group=group, batch=25)
    def bill(orders: list[Order]) -> None:
        sizes.append(len(orders))
        if any(order.id == 31 for order in orders):
            raise RuntimeError("31 is bad")
        done.update(order.id for order in orders)

    figures = app.figures()[bill.__qualname__]
    with running(app, until=lambda: figures.dead == 1 and len(done) == 59):
        pass
    assert max(sizes) <= 25
    (letter,) = read_all(bootstrap, dead_letter_topic(topic))
    assert json.loads(letter.value())["id"] == 31


def test_stopping_finishes_what_is_in_hand_and_commits_it(
    app: Penstock, topic: str, group: str, bootstrap: str
) -> None:
    fill(app, topic, 100)
    handled: list[int] = []

    @app.subscribe(topic, group=group, commit_every="1h")
    def bill(order: Order) -> None:
        handled.append(order.id)
        if len(handled) == 10:
            app.stop()

    app.run()
    app.close()
    reached = committed(bootstrap, group, topic, 2)
    assert sum(max(offset, 0) for offset in reached.values()) == len(handled)


def test_a_position_that_is_gone_is_an_error_and_not_a_guess(
    app: Penstock, topic: str, group: str, bootstrap: str
) -> None:
    from confluent_kafka import Consumer, TopicPartition

    member = Consumer({"bootstrap.servers": bootstrap, "group.id": group})
    member.commit(offsets=[TopicPartition(topic, number, 1_000) for number in range(2)], asynchronous=False)
    member.close()

    @app.subscribe(topic, group=group)
    def bill(order: Order) -> None: ...

    with pytest.raises(ApplicationError, match="penstock group reset"):
        app.run()


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ({"delivery": "twice"}, "must be one of at-most-once"),
        ({"delivery": "at-most-once", "retry": Backoff()}, "retries nothing"),
        ({"store": "sqlite:///x.db"}, "store= works with effectively-once"),
        ({"ledger": "sqlite:///x.db"}, "ledger= works with exactly-once"),
        ({"concurrency": 0}, "concurrency=0"),
        ({"start": "middle"}, "must be earliest or latest"),
        ({"keep_order": True}, "needs retry="),
        ({"commit_every": "soon"}, "commit_every"),
    ],
)
def test_a_declaration_that_cannot_work_is_refused(app: Penstock, how: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ApplicationError, match=sentence):

        @app.subscribe("orders", group="g", **how)
        def bill(order: Order) -> None: ...


def test_settings_that_do_not_go_together_are_told_in_a_sentence(
    bootstrap: str, topic: str, group: str
) -> None:
    wrong = Penstock(
        bootstrap, settings={**QUICK, "transaction.timeout.ms": 1_000, "socket.timeout.ms": 9_000}
    )
    wrong.publish(topic, Order(1, "c"))

    @wrong.subscribe(topic, group=group, delivery="exactly-once")
    def bill(order: Order) -> None: ...

    with pytest.raises(ApplicationError, match=r"socket\.timeout\.ms"):
        wrong.run()
    wrong.close()
    with pytest.raises(ApplicationError, match="Invalid value"):
        Penstock(bootstrap, settings={"linger.ms": "soon"}).publish(topic, b"")


def test_settings_that_would_break_a_contract_are_refused(bootstrap: str) -> None:
    with pytest.raises(ApplicationError, match=r"enable\.auto\.commit"):
        Penstock(bootstrap, settings={"enable.auto.commit": True})


def test_retry_topics_have_the_partitions_of_their_topic(app: Penstock, topic: str, group: str) -> None:
    from confluent_kafka.admin import AdminClient

    handled: list[int] = []

    @app.subscribe(topic, group=group, retry=Backoff(attempts=3))
    def bill(order: Order) -> None:
        handled.append(order.id)

    app.publish(topic, Order(1, "c"))
    with running(app, until=lambda: handled == [1]):
        known = AdminClient({"bootstrap.servers": app._resources.bootstrap}).list_topics(timeout=60).topics
        names = [retry_topic(topic, 1), retry_topic(topic, 2), dead_letter_topic(topic)]
        assert [len(known[name].partitions) for name in names] == [2, 2, 2]
        assert retry_topic(topic, 3) not in known


def test_what_a_handler_publishes_belongs_to_the_trace_of_its_message(
    app: Penstock, topic: str, group: str, bootstrap: str, unique: Callable[[str], str]
) -> None:
    from penstock.client.tracing import extract_trace

    invoices = unique("invoices")
    app.create_topic(invoices, partitions=1)
    fill(app, topic, 6)

    @app.subscribe(topic, group=group, delivery="exactly-once", to=invoices)
    def bill(order: Order) -> dict[str, int]:
        app.publish(invoices, {"order": order.id, "copy": 1})
        return {"order": order.id, "copy": 2}

    with running(app, until=lambda: app.figures()[bill.__qualname__].handled == 6):
        pass
    traces = {json.loads(m.value())["id"]: extract_trace(m.headers()) for m in read_all(bootstrap, topic)}
    assert len({trace.trace_id for trace in traces.values() if trace is not None}) == 6
    for message in read_all(bootstrap, invoices):
        trace, origin = extract_trace(message.headers()), traces[json.loads(message.value())["order"]]
        assert trace is not None
        assert origin is not None
        assert trace.trace_id == origin.trace_id
        assert trace.span_id != origin.span_id


def test_a_payload_that_a_handler_cannot_publish_is_its_own_failure(
    app: Penstock, topic: str, group: str, bootstrap: str
) -> None:
    app.publish(topic, Order(1, "c"))
    tried: list[int] = []

    @app.subscribe(topic, group=group, retry=Backoff(base="50ms", attempts=2))
    def bill(order: Order) -> None:
        tried.append(order.id)
        app.publish(topic, object())

    with running(app, until=lambda: app.figures()[bill.__qualname__].dead == 1):
        pass
    assert tried == [1, 1]
    (letter,) = read_all(bootstrap, dead_letter_topic(topic))
    assert header(letter, dead_letter_headers.REASON_HEADER) == "attempts exhausted"


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
def test_many_messages_go_in_one_compressed_batch(
    bootstrap: str, unique: Callable[[str], str], codec: str
) -> None:
    from penstock.client.wire.cluster import Cluster
    from penstock.client.wire.fetch import PartitionReader, checked_batches
    from penstock.client.wire.settings import ConnectionSettings

    topic = unique("orders")
    app = Penstock(bootstrap, settings={"compression.type": codec, "linger.ms": 200})
    app.create_topic(topic, partitions=1)
    for future in [app.publish_soon(topic, Order(number, "c" * 50), key="k") for number in range(100)]:
        future.result(30)
    app.close()
    cluster = Cluster(ConnectionSettings.parse({"bootstrap.servers": bootstrap}))
    try:
        data = PartitionReader(cluster, topic, None, 0).fetch(0, wait_ms=1_000).data
        (batch,) = checked_batches(data)
        assert batch.header.codec.name.lower() == codec
        assert batch.header.record_count == 100
    finally:
        cluster.close()


@pytest.mark.parametrize("delivery", ["at-least-once", "effectively-once", "exactly-once"])
def test_what_no_broker_takes_is_a_failure_of_the_handler(
    app: Penstock, topic: str, group: str, bootstrap: str, tmp_path: Path, delivery: str
) -> None:
    """It would be refused for ever, and must not stop the others."""
    fill(app, topic, 6)
    store = f"sqlite:///{tmp_path}/seen.db" if delivery == "effectively-once" else None
    tried: list[int] = []

    @app.subscribe(topic, group=group, delivery=delivery, store=store, retry=Backoff(base="50ms", attempts=2))
    def bill(order: Order) -> None:
        tried.append(order.id)
        if order.id == 3:
            app.publish(topic, b"x" * 3_000_000)

    figures = app.figures()[bill.__qualname__]
    with running(app, until=lambda: figures.dead == 1 and figures.handled >= 5 and len(set(tried)) == 6):
        pass
    assert set(tried) == {0, 1, 2, 3, 4, 5}
    (letter,) = read_all(bootstrap, dead_letter_topic(topic))
    kind = "OutputRefused" if delivery == "exactly-once" else "NotPublished"
    assert header(letter, dead_letter_headers.ERROR_CLASS_HEADER) == f"penstock.client.{kind}"


def test_a_message_too_large_for_its_retry_topic_is_dead_lettered(
    app: Penstock, group: str, bootstrap: str, unique: Callable[[str], str]
) -> None:
    topic = unique("orders")
    app.create_topic(topic, partitions=1, settings={"max.message.bytes": "3000000"})
    app.create_topic(retry_topic(topic, 1), partitions=1, settings={"max.message.bytes": "10000"})
    app.create_topic(dead_letter_topic(topic), partitions=1, settings={"max.message.bytes": "20000"})
    for size in (10, 15_000, 1_500_000, 11):
        app.publish(topic, b"x" * size, key="k")
    sizes: list[int] = []

    @app.subscribe(topic, group=group, retry=Backoff(base="50ms", attempts=2))
    def bill(value: bytes) -> None:
        sizes.append(len(value))
        if len(value) > 1_000:
            raise RuntimeError("too much")

    figures = app.figures()[bill.__qualname__]
    with running(app, until=lambda: figures.handled == 2 and len(sizes) == 4):
        pass
    whole, bare = read_all(bootstrap, dead_letter_topic(topic))
    assert len(whole.value()) == 15_000
    assert bare.value() is None
    assert header(bare, dead_letter_headers.WITHOUT_RECORD_HEADER)
    assert header(bare, dead_letter_headers.OFFSET_HEADER) == "2"
