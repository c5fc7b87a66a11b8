"""Unchanged clients against a secure node with access rules: SASL_SSL with SCRAM, and TLS with client certificates.

Each client writes, reads in a group, commits, goes on from there, and writes a transaction where it has transactions.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from confluent_kafka import Consumer, KafkaError, Producer
from confluent_kafka import TopicPartition as ConfluentPartition
from faststream import FastStream
from faststream.confluent import KafkaBroker as ConfluentBroker
from faststream.kafka import KafkaBroker as AioBroker
from faststream.security import BaseSecurity, SASLScram512
from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer
from kafka import TopicPartition as PythonPartition
from kafka.errors import TopicAuthorizationFailedError, TransactionalIdAuthorizationFailedError
from tests import outcomes as delivery
from tests.brokers import external_bootstrap
from tests.compat.secure_node import PASSWORD, SecureNode
from tests.waiting import eventually

from penstock.client.admin.acls import create_acls
from penstock.client.admin.users import set_password
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.settings import ConnectionSettings
from penstock.client.wire.topics import NewTopic, create_topics
from penstock.protocol.acls import AclBinding, Operation, PatternType, Permission, ResourceType

TIMEOUT_S = 60
#: What alice may use begins with it.
OWN = "own."
OTHER = "other"
VALUES = [b"%d" % number for number in range(20)]


@pytest.fixture(scope="module", params=["scram", "certificates"])
def node(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureNode]:
    if external_bootstrap():
        pytest.skip("needs a broker with settings of its own; PENSTOCK_TEST_BOOTSTRAP names another")
    node = SecureNode(tmp_path_factory.mktemp("secure"), with_certificates=request.param == "certificates")
    node.start()
    kinds = (ResourceType.TOPIC, ResourceType.GROUP, ResourceType.TRANSACTIONAL_ID)
    with Cluster(ConnectionSettings.parse(node.librdkafka("admin"))) as cluster:
        if not node.with_certificates:
            set_password(cluster, "alice", PASSWORD)
        create_acls(
            cluster,
            [
                AclBinding(
                    kind, OWN, PatternType.PREFIXED, "User:alice", "*", Operation.ALL, Permission.ALLOW
                )
                for kind in kinds
            ],
        )
        create_topics(cluster, [NewTopic(name=OTHER, partitions=1)])
    yield node
    assert node.stop() == 0
    assert PASSWORD not in "".join(node.output)


class Names(NamedTuple):
    topic: str
    group: str
    transactional_id: str


@pytest.fixture
def names(node: SecureNode, unique: Callable[[str], str]) -> Names:
    """All of which alice may use; the topic exists."""
    made = Names(*(f"{OWN}{unique(kind)}" for kind in ("topic", "group", "transaction")))
    with Cluster(ConnectionSettings.parse(node.librdkafka("admin"))) as cluster:
        create_topics(cluster, [NewTopic(name=made.topic, partitions=1)])
    return made


def test_confluent_kafka(node: SecureNode, names: Names) -> None:
    outcomes: list[Any] = []
    producer = Producer(node.librdkafka(**{"enable.idempotence": True}))
    for value in VALUES:
        producer.produce(names.topic, value, on_delivery=lambda error, _: outcomes.append(error))
    assert producer.flush(TIMEOUT_S) == 0
    delivery.produce(producer, OTHER, b"x", outcomes.append)
    assert producer.flush(TIMEOUT_S) == 0
    assert outcomes == [None] * len(VALUES) + [KafkaError.TOPIC_AUTHORIZATION_FAILED]
    reading = {
        "group.id": names.group,
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
        "isolation.level": "read_committed",
    }

    def read(count: int) -> list[bytes | None]:
        consumer = Consumer(node.librdkafka(**reading))
        consumer.subscribe([names.topic])
        found: list[bytes | None] = []
        while len(found) < count:
            messages = consumer.consume(count - len(found), TIMEOUT_S)
            assert messages
            assert all(message.error() is None for message in messages)
            found += [message.value() for message in messages]
        consumer.commit(
            offsets=[ConfluentPartition(names.topic, 0, messages[-1].offset() + 1)], asynchronous=False
        )
        consumer.close()
        return found

    assert read(5) == VALUES[:5]
    assert read(15) == VALUES[5:]
    writer = Producer(node.librdkafka(**{"transactional.id": names.transactional_id}))
    writer.init_transactions(TIMEOUT_S)
    for value, end in ((b"aborted", writer.abort_transaction), (b"committed", writer.commit_transaction)):
        writer.begin_transaction()
        writer.produce(names.topic, value)
        writer.flush(TIMEOUT_S)
        end(TIMEOUT_S)
    assert read(1) == [b"committed"]


def test_kafka_python(node: SecureNode, names: Names) -> None:
    with contextlib.closing(KafkaProducer(**node.in_python(), acks="all")) as producer:
        sent = [producer.send(names.topic, value) for value in VALUES]
        assert [each.get(TIMEOUT_S).offset for each in sent] == list(range(len(VALUES)))
        with pytest.raises(TopicAuthorizationFailedError):
            producer.send(OTHER, b"x").get(TIMEOUT_S)
    reading = {
        "group_id": names.group,
        "auto_offset_reset": "earliest",
        "enable_auto_commit": False,
        "consumer_timeout_ms": TIMEOUT_S * 1000,
        "max_poll_records": 5,
        "isolation_level": "read_committed",
    }

    def read(count: int) -> list[bytes]:
        with contextlib.closing(KafkaConsumer(names.topic, **node.in_python(), **reading)) as consumer:
            found = [next(consumer).value for _ in range(count)]
            consumer.commit()
        return found

    assert read(5) == VALUES[:5]
    assert read(15) == VALUES[5:]
    own = {"transactional_id": names.transactional_id}
    with contextlib.closing(KafkaProducer(**node.in_python(), **own)) as writer:
        writer.init_transactions()
        for value, end in ((b"aborted", writer.abort_transaction), (b"committed", writer.commit_transaction)):
            writer.begin_transaction()
            writer.send(names.topic, value).get(TIMEOUT_S)
            end()
    assert read(1) == [b"committed"]
    with (
        contextlib.closing(KafkaProducer(**node.in_python(), transactional_id=OTHER)) as refused,
        pytest.raises(TransactionalIdAuthorizationFailedError),
    ):
        refused.init_transactions()
    with contextlib.closing(KafkaAdminClient(**node.in_python())) as admin:
        assert OTHER not in admin.list_topics()
        assert names.topic in admin.list_topics()


async def test_aiokafka(node: SecureNode, names: Names) -> None:
    async with AIOKafkaProducer(**node.in_python(), acks="all") as producer:
        for value in VALUES:
            await producer.send_and_wait(names.topic, value)
    reading = {
        "group_id": names.group,
        "auto_offset_reset": "earliest",
        "enable_auto_commit": False,
        "isolation_level": "read_committed",
    }

    async def read(count: int) -> list[bytes]:
        async with AIOKafkaConsumer(names.topic, **node.in_python(), **reading) as consumer:
            async with asyncio.timeout(TIMEOUT_S):
                messages = [await consumer.getone() for _ in range(count)]
            await consumer.commit()
        return [message.value for message in messages]

    assert await read(5) == VALUES[:5]
    assert await read(15) == VALUES[5:]
    async with AIOKafkaProducer(**node.in_python(), transactional_id=names.transactional_id) as writer:
        await writer.begin_transaction()
        await writer.send_and_wait(names.topic, b"aborted")
        await writer.abort_transaction()
        async with writer.transaction():
            await writer.send_and_wait(names.topic, b"committed")
    assert await read(1) == [b"committed"]


def faststream_broker(node: SecureNode, kind: str) -> Any:
    """FastStream's own settings for each back end; librdkafka takes files where aiokafka takes a context."""
    if kind == "aiokafka":
        context = node.context()
        login = None if node.with_certificates else SASLScram512("alice", PASSWORD, ssl_context=context)
        return AioBroker(node.bootstrap_servers, security=login or BaseSecurity(ssl_context=context))
    files = {name: value for name, value in node.librdkafka().items() if name.startswith("ssl.")}
    login = None if node.with_certificates else SASLScram512("alice", PASSWORD, use_ssl=True)
    return ConfluentBroker(node.bootstrap_servers, security=login or BaseSecurity(use_ssl=True), config=files)


@pytest.mark.parametrize("kind", ["aiokafka", "confluent"])
async def test_faststream(node: SecureNode, names: Names, kind: str) -> None:
    broker = faststream_broker(node, kind)
    seen: asyncio.Queue[str] = asyncio.Queue()

    @broker.subscriber(names.topic, group_id=names.group, auto_offset_reset="earliest")
    async def note(text: str) -> None:
        seen.put_nowait(text)

    app = FastStream(broker)
    await app.start()
    try:
        for value in VALUES:
            await broker.publish(value.decode(), topic=names.topic)
        arrived = [await asyncio.wait_for(seen.get(), TIMEOUT_S) for _ in VALUES]
    finally:
        await app.stop()
    assert arrived == [value.decode() for value in VALUES]


def test_who_is_refused(node: SecureNode, names: Names) -> None:
    """A client that does not trust the node, one without a certificate or with a wrong password, one without TLS."""
    good = node.librdkafka()
    wrong = {
        "no trust": {name: value for name, value in good.items() if name != "ssl.ca.location"},
        "plaintext": {"bootstrap.servers": node.bootstrap_servers},
        "no login": (
            {name: value for name, value in good.items() if "certificate" not in name and "key" not in name}
            if node.with_certificates
            else good | {"sasl.password": "wrong"}
        ),
    }
    for name, settings in wrong.items():
        errors: list[KafkaError] = []
        outcomes: list[Any] = []
        producer = Producer(
            {**settings, "error_cb": errors.append, "log_level": 0, "message.timeout.ms": 3000}
        )
        producer.produce(names.topic, b"x", on_delivery=lambda error, _, to=outcomes: to.append(error))
        eventually(lambda errors=errors, producer=producer: producer.poll(0.1) < 0 or errors)
        producer.flush(TIMEOUT_S)
        assert outcomes[0] is not None, name
    partition = PythonPartition(names.topic, 0)
    with contextlib.closing(KafkaConsumer(**node.in_python())) as consumer:
        assert consumer.end_offsets([partition]) == {partition: 0}
