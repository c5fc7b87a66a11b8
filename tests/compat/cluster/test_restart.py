"""A broker that stops, crashes and restarts: no acknowledged record is lost or doubled, and groups continue."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource
from kafka import KafkaAdminClient, KafkaProducer
from tests.brokers import BrokerProcess
from tests.compat import aio, confluent, kafka_python
from tests.compat.message import CODECS, Message, numbered, values
from tests.waiting import eventually, eventually_async

CLIENTS: dict[str, ModuleType] = {"confluent": confluent, "kafka-python": kafka_python, "aiokafka": aio}
End = Callable[[BrokerProcess], int]
ENDS = [pytest.param(BrokerProcess.stop, id="stop"), pytest.param(BrokerProcess.kill, id="kill")]


def admin_of(broker: BrokerProcess) -> AdminClient:
    return AdminClient({"bootstrap.servers": broker.bootstrap_servers})


@pytest.mark.parametrize("end", ENDS)
def test_everything_acknowledged_is_still_there(fresh_broker: BrokerProcess, end: End) -> None:
    """Topics, their ids and settings, messages of every codec, groups and committed offsets."""
    bootstrap = fresh_broker.bootstrap_servers
    for codec in CODECS:
        confluent.create_topic(admin_of(fresh_broker), f"kept-{codec}", settings={"retention.ms": "86400000"})
        confluent.publish(bootstrap, f"kept-{codec}", numbered(50, size=200), codec)
    member = confluent.consumer(bootstrap, "kept-group")
    member.subscribe(["kept-none"])
    confluent.take(member, 20)
    member.commit(asynchronous=False)
    member.close()
    before = _described(fresh_broker)

    end(fresh_broker)
    assert fresh_broker.start().bootstrap_servers == bootstrap

    assert _described(fresh_broker) == before
    for codec in CODECS:
        assert values(kafka_python.read(bootstrap, f"kept-{codec}", 50)) == [
            each.value for each in numbered(50, size=200)
        ]
        assert confluent.publish(bootstrap, f"kept-{codec}", [Message(value=b"next")], codec) == [50]
    member = confluent.consumer(bootstrap, "kept-group")
    member.subscribe(["kept-none"])
    assert [each.offset for each in confluent.take(member, 31)] == list(range(20, 51))
    member.close()


def _described(broker: BrokerProcess) -> dict[str, Any]:
    """What clients can learn of topics, settings, the cluster and group offsets."""
    admin = KafkaAdminClient(bootstrap_servers=broker.bootstrap_servers)
    native = admin_of(broker)
    try:
        topics = {
            each["name"]: each["topic_id"] for each in admin.describe_topics() if not each["is_internal"]
        }
        resources = [ConfigResource(ConfigResource.Type.TOPIC, name) for name in topics]
        settings = {
            resource.name: {name: entry.value for name, entry in future.result(60).items()}
            for resource, future in native.describe_configs(resources).items()
        }
        offsets = {
            (each.topic, each.partition): stored.offset
            for each, stored in admin.list_group_offsets("kept-group")["kept-group"].items()
        }
        return {"topics": topics, "settings": settings, "offsets": offsets, "id": native.cluster_id(10)}
    finally:
        admin.close()


@pytest.mark.parametrize("end", ENDS)
def test_an_idempotent_confluent_producer_goes_on(fresh_broker: BrokerProcess, end: End) -> None:
    """The broker ends in the middle of a stream of batches; every message is there once and in order."""
    bootstrap = fresh_broker.bootstrap_servers
    confluent.create_topic(admin_of(fresh_broker), "stream")
    client = Producer(
        {
            "bootstrap.servers": bootstrap,
            "enable.idempotence": True,
            "linger.ms": 0,
            "batch.num.messages": 50,
            "reconnect.backoff.ms": 20,
            "reconnect.backoff.max.ms": 100,
            "retry.backoff.ms": 20,
        }
    )
    failures: list[Any] = []
    delivered = threading.Semaphore(0)

    def noted(error: Any, _: Any) -> None:
        delivered.release() if error is None else failures.append(error)

    for number in range(1000):
        client.produce("stream", value=b"%d" % number, on_delivery=noted)
    eventually(lambda: client.poll(0.05) and delivered.acquire(blocking=False))
    end(fresh_broker)
    for number in range(1000, 2000):
        client.produce("stream", value=b"%d" % number, on_delivery=noted)
    fresh_broker.start()
    assert client.flush(30) == 0
    assert failures == []
    assert values(confluent.read(bootstrap, "stream", 2000)) == [b"%d" % number for number in range(2000)]


@pytest.mark.parametrize("end", ENDS)
def test_an_idempotent_kafka_python_producer_goes_on(fresh_broker: BrokerProcess, end: End) -> None:
    bootstrap = fresh_broker.bootstrap_servers
    confluent.create_topic(admin_of(fresh_broker), "stream")
    settings = {"enable_idempotence": True, "reconnect_backoff_ms": 20, "reconnect_backoff_max_ms": 100}
    with KafkaProducer(bootstrap_servers=bootstrap, batch_size=500, **settings) as client:
        sent = [client.send("stream", b"%d" % number) for number in range(300)]
        sent[50].get(60)
        end(fresh_broker)
        sent += [client.send("stream", b"%d" % number) for number in range(300, 600)]
        fresh_broker.start()
        assert [each.get(30).offset for each in sent] == list(range(600))
    assert values(confluent.read(bootstrap, "stream", 600)) == [b"%d" % number for number in range(600)]


@pytest.mark.parametrize("end", ENDS)
async def test_an_idempotent_aiokafka_producer_goes_on(fresh_broker: BrokerProcess, end: End) -> None:
    bootstrap = fresh_broker.bootstrap_servers
    confluent.create_topic(admin_of(fresh_broker), "stream")
    async with aio.producing(
        bootstrap, enable_idempotence=True, max_batch_size=500, retry_backoff_ms=20
    ) as client:
        sent = [await client.send("stream", b"%d" % number) for number in range(300)]
        await sent[50]
        await asyncio.to_thread(end, fresh_broker)
        more = asyncio.create_task(_send_all(client, range(300, 600)))
        await asyncio.to_thread(fresh_broker.start)
        sent += await asyncio.wait_for(more, 30)
        stored = await asyncio.wait_for(asyncio.gather(*sent), 30)
        assert [each.offset for each in stored] == list(range(600))
    received = await asyncio.to_thread(confluent.read, bootstrap, "stream", 600)
    assert values(received) == [b"%d" % number for number in range(600)]


async def _send_all(client: Any, numbers: range) -> list[Any]:
    return [await client.send("stream", b"%d" % number) for number in numbers]


def test_consumers_and_their_group_live_through_a_restart(fresh_broker: BrokerProcess) -> None:
    bootstrap = fresh_broker.bootstrap_servers
    confluent.create_topic(admin_of(fresh_broker), "watched", partitions=4)
    quick = {"reconnect_backoff_ms": 20, "reconnect_backoff_max_ms": 100, "heartbeat_interval_ms": 200}
    with contextlib.ExitStack() as stack:
        members = [confluent.consumer(bootstrap, "watchers", **quick) for _ in range(2)]
        for member in members:
            stack.callback(member.close)
            member.subscribe(["watched"])
        eventually(lambda: [len(confluent.assigned(each, "watched")) for each in members] == [2, 2])
        fresh_broker.restart()
        confluent.publish(bootstrap, "watched", [Message(value=b"after", partition=n) for n in range(4)])
        seen: set[int] = set()

        def all_arrived() -> bool:
            for member in members:
                message = member.poll(0.05)
                if message is not None and not message.error():
                    seen.add(message.partition())
            return seen == {0, 1, 2, 3}

        eventually(all_arrived)


async def test_an_asyncio_consumer_lives_through_a_restart(fresh_broker: BrokerProcess) -> None:
    bootstrap = fresh_broker.bootstrap_servers
    confluent.create_topic(admin_of(fresh_broker), "watched")
    async with aio.consuming(bootstrap, "watched", group_id="watchers", retry_backoff_ms=50) as client:
        await aio.publish_async(bootstrap, "watched", [Message(value=b"before")])
        assert values(await aio.take(client, 1)) == [b"before"]
        await client.commit()
        await asyncio.to_thread(fresh_broker.restart)
        await aio.publish_async(bootstrap, "watched", [Message(value=b"after")])
        assert values(await aio.take(client, 1)) == [b"after"]

        async def committed() -> bool:
            with contextlib.suppress(Exception):
                await client.commit()
                return await client.committed(aio.TopicPartition("watched", 0)) == 2
            return False

        await eventually_async(committed)


def test_a_deleted_topic_stays_deleted(fresh_broker: BrokerProcess) -> None:
    bootstrap = fresh_broker.bootstrap_servers
    admin = admin_of(fresh_broker)
    confluent.create_topic(admin, "gone", partitions=3)
    confluent.publish(bootstrap, "gone", numbered(10))
    admin.delete_topics(["gone"])["gone"].result(60)
    fresh_broker.restart()
    assert "gone" not in admin_of(fresh_broker).list_topics(timeout=60).topics


def test_deleted_records_stay_deleted(fresh_broker: BrokerProcess) -> None:
    bootstrap = fresh_broker.bootstrap_servers
    admin = admin_of(fresh_broker)
    confluent.create_topic(admin, "trimmed")
    confluent.publish(bootstrap, "trimmed", numbered(10))
    [deleted] = admin.delete_records([TopicPartition("trimmed", 0, 6)]).values()
    deleted.result(60)
    fresh_broker.restart()
    assert [each.offset for each in confluent.read(bootstrap, "trimmed", 4)] == [6, 7, 8, 9]


def test_a_stopped_broker_ends_cleanly_and_quickly(fresh_broker: BrokerProcess) -> None:
    """Open connections and a fetch that waits for a minute do not hold it up."""
    client = confluent.consumer(
        fresh_broker.bootstrap_servers, fetch_wait_max_ms=60_000, socket_timeout_ms=90_000
    )
    confluent.create_topic(admin_of(fresh_broker), "quiet")
    confluent.assign(client, [TopicPartition("quiet", 0, 0)])
    client.poll(0.3)
    assert fresh_broker.stop() == 0
    client.close()
