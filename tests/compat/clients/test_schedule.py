"""Scheduled delivery with every client: held records are invisible, and each is delivered once after its time."""

import time
from collections.abc import Callable
from types import ModuleType

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource
from tests.brokers import BrokerProcess
from tests.compat import aio, confluent, kafka_python
from tests.compat.message import CODECS, Message, Received, values
from tests.waiting import eventually

CLIENTS = pytest.mark.parametrize(
    "client", [aio, confluent, kafka_python], ids=lambda c: c.__name__.split(".")[-1]
)
SCHEDULED = {"penstock.schedule.enable": "true"}
AT, AFTER, FOR = "penstock-deliver-at", "penstock-deliver-after", "penstock-scheduled-for"


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def due_ms(received: Received) -> int | None:
    value = dict(received.message.headers).get(FOR)
    return None if value is None else int(value)


def check(received: list[Received], expected: list[Message]) -> None:
    """Each once; what was held with the time it was due, and stamped no earlier; the rest as it was."""
    assert sorted(values(received)) == sorted(message.value for message in expected)
    asked = {message.value: dict(message.headers) for message in expected}
    for each in received:
        headers, due = asked[each.message.value], due_ms(each)
        assert each.message.key == next(m.key for m in expected if m.value == each.message.value)
        assert (due is not None) == (AT in headers or AFTER in headers)
        assert not {AT, AFTER} & dict(each.message.headers).keys()
        assert dict(each.message.headers)["trace"] == b"t"
        if due is not None:
            assert each.message.timestamp_ms is not None
            assert each.message.timestamp_ms >= due
            assert AT not in headers or due == int(headers[AT] or b"")
    dues = [due for each in received if (due := due_ms(each)) is not None]
    assert dues == sorted(dues), "in the order of their times"


def mixed(count: int) -> list[Message]:
    """One in three at once, one at a time, one after a delay."""
    at_ms = now_ms() + 900
    kinds = ((), ((AT, b"%d" % at_ms),), ((AFTER, b"600"),))
    return [Message(b"%03d" % n, b"k%d" % n, (("trace", b"t"), *kinds[n % 3])) for n in range(count)]


@CLIENTS
@pytest.mark.parametrize("codec", CODECS)
def test_each_record_comes_once_and_not_before_its_time(
    client: ModuleType, codec: str, new_topic: Callable[..., str], bootstrap: str
) -> None:
    topic, messages = new_topic(**SCHEDULED), mixed(30)
    client.publish(bootstrap, topic, messages, codec)
    for reader in (confluent, aio, kafka_python):
        at_once = reader.read(bootstrap, topic, 10)
        assert values(at_once) == [message.value for message in messages if len(message.headers) == 1]
    for reader in (confluent, aio, kafka_python):
        check(reader.read(bootstrap, topic, 30), messages)


@CLIENTS
def test_batches_that_are_held_whole_are_passed_over(
    client: ModuleType, new_topic: Callable[..., str], bootstrap: str
) -> None:
    topic = new_topic(**SCHEDULED)
    held = [Message(b"%d" % n, headers=(("trace", b"t"), (AFTER, b"PT0.5S"))) for n in range(5)]
    for message in held:
        client.publish(bootstrap, topic, [message])
    last = [Message(b"last", headers=(("trace", b"t"),))]
    client.publish(bootstrap, topic, last)
    for reader in (confluent, aio, kafka_python):
        check(reader.read(bootstrap, topic, 6), held + last)
        check(reader.read(bootstrap, topic, 6, **_committed(reader)), held + last)


def _committed(reader: ModuleType) -> dict[str, str]:
    return {"isolation_level": "read_committed"}


@CLIENTS
def test_what_is_due_already_comes_at_once(
    client: ModuleType, new_topic: Callable[..., str], bootstrap: str
) -> None:
    topic = new_topic(**SCHEDULED)
    messages = [Message(b"%d" % n, headers=(("trace", b"t"), (AT, b"%d" % (10 - n)))) for n in range(10)]
    client.publish(bootstrap, topic, messages)
    # Only what is held at the same time is put in order, and a client may send these in several batches.
    assert sorted(values(client.read(bootstrap, topic, 10))) == [b"%d" % n for n in range(10)]


def test_other_topics_take_the_headers_for_what_they_are(topic: str, bootstrap: str) -> None:
    message = Message(b"v", headers=((AT, b"tomorrow"),))
    confluent.publish(bootstrap, topic, [message])
    assert confluent.read(bootstrap, topic, 1)[0].message.headers == message.headers


@pytest.mark.parametrize(
    "headers",
    [
        ((AT, b"tomorrow"),),
        ((AFTER, b"-1"),),
        ((AFTER, None),),
        ((AT, b"1"), (AFTER, b"1")),
        ((AFTER, b"P999W"),),
    ],
)
def test_what_cannot_be_scheduled_is_refused(
    headers: tuple[tuple[str, bytes | None], ...], new_topic: Callable[..., str], bootstrap: str
) -> None:
    topic = new_topic(**SCHEDULED)
    with pytest.raises(KafkaException) as refused:
        confluent.publish(bootstrap, topic, [Message(b"v", headers=headers)])
    assert refused.value.args[0].code() == KafkaError.INVALID_RECORD
    confluent.publish(bootstrap, topic, [Message(b"next")])
    assert values(confluent.read(bootstrap, topic, 1)) == [b"next"]


def test_compacted_topics_hold_records_with_a_key_only(new_topic: Callable[..., str], bootstrap: str) -> None:
    topic = new_topic(**SCHEDULED, **{"cleanup.policy": "compact"})
    later = (("trace", b"t"), (AFTER, b"100"))
    with pytest.raises(KafkaException):
        confluent.publish(bootstrap, topic, [Message(b"v", headers=later)])
    keyed = [Message(b"v", b"k", later)]
    confluent.publish(bootstrap, topic, keyed)
    check(confluent.read(bootstrap, topic, 1), keyed)


def test_internal_topics_are_not_written_by_clients(new_topic: Callable[..., str], bootstrap: str) -> None:
    topic = new_topic(**SCHEDULED)
    confluent.publish(bootstrap, topic, [Message(b"v", headers=((AFTER, b"0"),))])
    with pytest.raises(KafkaException) as refused:
        confluent.publish(bootstrap, "__penstock_schedule", [Message(b"v")])
    assert refused.value.args[0].code() == KafkaError.TOPIC_EXCEPTION


def test_a_recreated_topic_does_not_get_records_held_for_the_old_one(
    unique: Callable[[str], str], admin: AdminClient, bootstrap: str
) -> None:
    topic = confluent.create_topic(admin, unique("topic"), settings=SCHEDULED)
    old_ms = now_ms() + 1500
    confluent.publish(bootstrap, topic, [Message(b"old", headers=((AT, b"%d" % old_ms),))] * 5)
    admin.delete_topics([topic])[topic].result(60)
    confluent.create_topic(admin, topic, settings=SCHEDULED)
    new = [Message(b"new", headers=(("trace", b"t"), (AT, b"%d" % (old_ms + 300))))]
    confluent.publish(bootstrap, topic, new)
    check(confluent.read(bootstrap, topic, 1), new)


def test_partitions_that_are_added_have_a_schedule_too(
    new_topic: Callable[..., str], admin: AdminClient, bootstrap: str
) -> None:
    topic = new_topic(**SCHEDULED)
    confluent.add_partitions(admin, topic, 3)
    messages = [Message(b"%d" % n, headers=(("trace", b"t"), (AFTER, b"300")), partition=n) for n in range(3)]
    confluent.publish(bootstrap, topic, messages)
    received = confluent.read(bootstrap, topic, 3, partitions=3)
    assert {(each.message.partition, each.message.value) for each in received} == {
        (n, b"%d" % n) for n in range(3)
    }


def test_retention_does_not_touch_what_is_held(fresh_broker: BrokerProcess) -> None:
    bootstrap = fresh_broker.bootstrap_servers
    admin = AdminClient({"bootstrap.servers": bootstrap})
    small = {"segment.bytes": "2000", "retention.bytes": "6000", "file.delete.delay.ms": "0"}
    confluent.create_topic(admin, "jobs", settings={**SCHEDULED, **small})
    held = [Message(b"%d" % n, headers=(("trace", b"t"), (AFTER, b"3000"))) for n in range(20)]
    confluent.publish(bootstrap, "jobs", held)
    confluent.publish(bootstrap, "jobs", [Message(b"x" * 500)] * 40, batch_size=1000)
    place, consumer = TopicPartition("jobs", 0), confluent.consumer(bootstrap)
    eventually(lambda: consumer.get_watermark_offsets(place, timeout=5)[0] > 21, what="the beginning is gone")
    consumer.assign([place])
    received: list[Received] = []
    while len(received) < 20:
        received += [each for each in confluent.take(consumer, 1) if due_ms(each) is not None]
    consumer.close()
    check(received, held)


def test_a_topic_can_be_given_a_schedule_and_lose_it_again(
    topic: str, admin: AdminClient, bootstrap: str
) -> None:
    def set_schedule(value: str) -> None:
        resource = ConfigResource(ConfigResource.Type.TOPIC, topic)
        resource.add_incremental_config(
            ConfigEntry("penstock.schedule.enable", value, incremental_operation=AlterConfigOpType.SET)
        )
        admin.incremental_alter_configs([resource])[resource].result(60)

    confluent.publish(bootstrap, topic, [Message(b"before", headers=(("trace", b"t"),))])
    set_schedule("true")
    held = Message(b"held", headers=(("trace", b"t"), (AFTER, b"700")))
    confluent.publish(bootstrap, topic, [held])
    set_schedule("false")
    ignored = Message(b"ignored", headers=((AFTER, b"700"),))
    confluent.publish(bootstrap, topic, [ignored])
    received = confluent.read(bootstrap, topic, 3)
    assert values(received) == [b"before", b"ignored", b"held"]
    assert received[1].message.headers == ignored.headers
    check(received[2:], [held])


def test_delete_records_does_not_touch_what_is_held(
    new_topic: Callable[..., str], admin: AdminClient, bootstrap: str
) -> None:
    topic = new_topic(**SCHEDULED)
    held = [Message(b"%d" % n, headers=(("trace", b"t"), (AFTER, b"1000"))) for n in range(20)]
    confluent.publish(bootstrap, topic, held)
    place = TopicPartition(topic, 0, -1)
    assert admin.delete_records([place])[place].result(60).low_watermark >= 20
    check(confluent.read(bootstrap, topic, 20), held)


@pytest.mark.parametrize("isolation", ["read_uncommitted", "read_committed"])
def test_what_a_transaction_holds_counts_when_it_is_committed(
    isolation: str, new_topic: Callable[..., str], unique: Callable[[str], str], bootstrap: str
) -> None:
    topic = new_topic(**SCHEDULED)
    client = confluent.producer(bootstrap, transactional_id=unique("id"))
    client.init_transactions(20)
    expected = []
    for number in range(6):
        held = [Message(b"%d-%d" % (number, n), headers=(("trace", b"t"), (AFTER, b"200"))) for n in range(3)]
        client.begin_transaction()
        confluent.publish_on(client, topic, held)
        if number % 2:
            client.abort_transaction(20)
        else:
            client.commit_transaction(20)
            expected += held
    last = Message(b"last", headers=(("trace", b"t"), (AFTER, b"600")))
    confluent.publish(bootstrap, topic, [last])
    received = confluent.read(bootstrap, topic, 10, isolation_level=isolation)
    check(received, [*expected, last])
