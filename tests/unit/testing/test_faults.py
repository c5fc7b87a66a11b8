"""Each kind of fault as real clients see it; other requests are not affected."""

import asyncio
import socket
import struct
import threading
import time
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.errors import GroupAuthorizationFailedError, TopicAuthorizationFailedError
from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from tests.compat import confluent
from tests.compat.message import Message, values
from tests.waiting import eventually

from penstock.testing import EmbeddedBroker, ErrorCode, FaultyRequest

ONE = [Message(value=b"only one")]


@pytest.fixture
def topic(penstock: EmbeddedBroker) -> str:
    return penstock.create_topic("orders")


def _stored(broker: EmbeddedBroker, topic: str) -> list[bytes | None]:
    """Everything in the topic, read by a client that no fault touches."""
    broker.faults.clear()
    client = confluent.consumer(broker.bootstrap_servers)
    _, end = client.get_watermark_offsets(TopicPartition(topic, 0), timeout=20)
    client.close()
    return values(confluent.read(broker.bootstrap_servers, topic, end)) if end else []


# -- drop ------------------------------------------------------------------------------------------------


def test_a_dropped_request_has_not_happened(penstock: EmbeddedBroker, topic: str) -> None:
    fault = penstock.faults.drop("produce", times=2)
    assert confluent.publish(penstock.bootstrap_servers, topic, ONE) == [0]
    assert fault.hits == 2
    assert _stored(penstock, topic) == [b"only one"]


def test_dropping_without_end(penstock: EmbeddedBroker, topic: str) -> None:
    fault = penstock.faults.drop("produce")
    client = confluent.producer(penstock.bootstrap_servers, message_timeout_ms=5000)
    with pytest.raises(KafkaException, match="timed out"):
        confluent.publish_on(client, topic, ONE)
    assert fault.hits >= 1
    assert _stored(penstock, topic) == []


# -- lose the answer -------------------------------------------------------------------------------------


def test_a_lost_answer_makes_a_duplicate(penstock: EmbeddedBroker, topic: str) -> None:
    penstock.faults.lose_answer("produce", times=1)
    confluent.publish(penstock.bootstrap_servers, topic, ONE, acks="all")
    assert _stored(penstock, topic) == [b"only one"] * 2


def test_a_lost_answer_does_not_fool_an_idempotent_producer(penstock: EmbeddedBroker, topic: str) -> None:
    fault = penstock.faults.lose_answer("produce", times=1)
    assert confluent.publish(penstock.bootstrap_servers, topic, ONE, enable_idempotence=True) == [0]
    assert fault.hits == 1
    assert _stored(penstock, topic) == [b"only one"]


def test_what_was_done_can_be_disowned(penstock: EmbeddedBroker, topic: str) -> None:
    fault = penstock.faults.disown("produce", "not_leader_or_follower", times=1)
    confluent.publish(penstock.bootstrap_servers, topic, ONE, acks="all")
    assert fault.hits == 1
    assert _stored(penstock, topic) == [b"only one"] * 2


async def test_an_answer_that_comes_later_can_be_lost_too(topic: str, penstock: EmbeddedBroker) -> None:
    penstock.faults.lose_answer("join_group", times=1)
    async with AIOKafkaConsumer(
        topic, bootstrap_servers=penstock.bootstrap_servers, group_id="g", retry_backoff_ms=10
    ) as consumer:
        assert consumer.assignment()


# -- delay -----------------------------------------------------------------------------------------------


async def test_a_delayed_request_is_served_later(penstock: EmbeddedBroker, topic: str) -> None:
    async with AIOKafkaProducer(bootstrap_servers=penstock.bootstrap_servers) as producer:
        await producer.send_and_wait(topic, b"as usual")
        penstock.faults.delay("produce", seconds=0.2, times=1)
        before = time.monotonic()
        await producer.send_and_wait(topic, b"late")
        assert time.monotonic() - before >= 0.19  # timers of the event loop count whole milliseconds
    assert _stored(penstock, topic) == [b"as usual", b"late"]


def test_what_follows_on_the_connection_waits(penstock: EmbeddedBroker) -> None:
    penstock.faults.delay("list_groups", seconds=0.1, times=1)
    with socket.create_connection(("127.0.0.1", penstock.port)) as connection:
        requests = [(16, 1), (18, 2), (16, 3), (18, 4)]
        connection.sendall(b"".join(_request(api_key, number) for api_key, number in requests))
        assert [_correlation_id(connection) for _ in requests] == [1, 2, 3, 4]


def test_other_connections_do_not_wait(penstock: EmbeddedBroker) -> None:
    fault = penstock.faults.delay("list_groups", seconds=3600)
    with (
        socket.create_connection(("127.0.0.1", penstock.port)) as held,
        socket.create_connection(("127.0.0.1", penstock.port)) as free,
    ):
        held.sendall(_request(16, 1))
        eventually(lambda: fault.hits == 1)
        free.sendall(_request(18, 2))
        assert _correlation_id(free) == 2


def test_a_client_that_leaves_while_it_waits(penstock: EmbeddedBroker) -> None:
    fault = penstock.faults.delay("list_groups", seconds=0.05)
    with socket.create_connection(("127.0.0.1", penstock.port)) as connection:
        connection.sendall(_request(16, 1) + _request(18, 2))
        eventually(lambda: fault.hits == 1)
    assert AdminClient({"bootstrap.servers": penstock.bootstrap_servers}).list_topics(timeout=20).brokers


def _request(api_key: int, correlation_id: int, *, version: int = 0, body: bytes = b"") -> bytes:
    """ListGroups and ApiVersions in version 0 have nothing but a header."""
    message = struct.pack(">hhih", api_key, version, correlation_id, -1) + body
    return struct.pack(">i", len(message)) + message


def _correlation_id(connection: socket.socket) -> int:
    connection.settimeout(20)
    size, correlation_id = struct.unpack(">ii", _exactly(connection, 8))
    _exactly(connection, size - 4)
    return int(correlation_id)


def _exactly(connection: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        piece = connection.recv(count - len(received))
        assert piece, "the connection was closed"
        received += piece
    return received


# -- fail ------------------------------------------------------------------------------------------------


def test_an_error_that_clients_retry(penstock: EmbeddedBroker, topic: str) -> None:
    fault = penstock.faults.fail("produce", ErrorCode.not_leader_or_follower, times=2)
    assert confluent.publish(penstock.bootstrap_servers, topic, ONE) == [0]
    assert fault.hits == 2
    assert _stored(penstock, topic) == [b"only one"]


def test_an_error_that_clients_report(penstock: EmbeddedBroker, topic: str) -> None:
    penstock.faults.fail("Produce", "TOPIC_AUTHORIZATION_FAILED")
    with pytest.raises(KafkaException, match="TOPIC_AUTHORIZATION_FAILED"):
        confluent.publish(penstock.bootstrap_servers, topic, ONE)
    assert _stored(penstock, topic) == []


def test_a_producer_that_wants_no_answer_is_cut_off(penstock: EmbeddedBroker, topic: str) -> None:
    penstock.faults.fail("produce", "not_leader_or_follower")
    no_transaction, acks, timeout_ms, topics = -1, 0, 1000, 1
    body = struct.pack(">hhii", no_transaction, acks, timeout_ms, topics)
    body += struct.pack(">h", len(topic)) + topic.encode() + struct.pack(">iii", 1, 0, -1)
    with socket.create_connection(("127.0.0.1", penstock.port)) as connection:
        connection.sendall(_request(0, 1, version=3, body=body))
        assert _closed(connection)


def test_failing_fetches_delay_but_lose_nothing(penstock: EmbeddedBroker, topic: str) -> None:
    confluent.publish(penstock.bootstrap_servers, topic, ONE)
    fault = penstock.faults.fail("fetch", ErrorCode.not_leader_or_follower, times=1)
    assert values(confluent.read(penstock.bootstrap_servers, topic, 1)) == [b"only one"]
    assert fault.hits == 1


def test_failing_metadata(penstock: EmbeddedBroker, topic: str) -> None:
    penstock.faults.fail("metadata", ErrorCode.topic_authorization_failed)
    admin = AdminClient({"bootstrap.servers": penstock.bootstrap_servers})
    described = admin.list_topics(topic, timeout=20)
    assert described.topics[topic].error.name() == "TOPIC_AUTHORIZATION_FAILED"
    assert list(described.brokers) == [1]
    everything = admin.list_topics(timeout=20)
    assert everything.topics[topic].error.name() == "TOPIC_AUTHORIZATION_FAILED"


async def test_failing_metadata_for_another_client(penstock: EmbeddedBroker, topic: str) -> None:
    async with AIOKafkaProducer(bootstrap_servers=penstock.bootstrap_servers) as producer:
        with penstock.faults.fail("metadata", ErrorCode.topic_authorization_failed) as fault:
            with pytest.raises(TopicAuthorizationFailedError):
                await producer.send_and_wait(topic, b"x")
            assert fault.hits >= 1
        await producer.send_and_wait(topic, b"x")


@pytest.mark.parametrize(
    "api", ["find_coordinator", "join_group", "sync_group", "offset_fetch", "offset_commit"]
)
async def test_failing_a_group_member(penstock: EmbeddedBroker, topic: str, api: str) -> None:
    fault = penstock.faults.fail(api, ErrorCode.group_authorization_failed)
    consumer = AIOKafkaConsumer(
        topic, bootstrap_servers=penstock.bootstrap_servers, group_id="g", enable_auto_commit=False
    )
    try:
        with pytest.raises(GroupAuthorizationFailedError):
            await asyncio.wait_for(_take_part(consumer), 20)
        assert fault.hits >= 1
    finally:
        penstock.faults.clear()
        await consumer.stop()


async def _take_part(consumer: AIOKafkaConsumer) -> None:
    await consumer.start()
    for partition in consumer.assignment():
        await consumer.committed(partition)
        await consumer.commit({partition: 0})


async def test_a_member_gets_over_a_coordinator_that_loads(penstock: EmbeddedBroker, topic: str) -> None:
    faults = [
        penstock.faults.fail(api, ErrorCode.coordinator_load_in_progress, times=1)
        for api in ("find_coordinator", "join_group", "offset_fetch")
    ]
    async with AIOKafkaConsumer(
        topic, bootstrap_servers=penstock.bootstrap_servers, group_id="g", auto_offset_reset="earliest"
    ) as consumer:
        async with AIOKafkaProducer(bootstrap_servers=penstock.bootstrap_servers) as producer:
            await producer.send_and_wait(topic, b"x")
        assert (await asyncio.wait_for(consumer.getone(), 20)).value == b"x"
    assert [fault.hits for fault in faults] == [1, 1, 1]


def test_failing_an_administrator(penstock: EmbeddedBroker) -> None:
    admin = AdminClient({"bootstrap.servers": penstock.bootstrap_servers})
    penstock.faults.fail("create_topics", ErrorCode.policy_violation, times=1)
    with pytest.raises(KafkaException, match="policy_violation, injected by a test"):
        admin.create_topics([NewTopic("refused", 1, 1)])["refused"].result(20)
    admin.create_topics([NewTopic("made", 1, 1)])["made"].result(20)
    assert set(admin.list_topics(timeout=20).topics) == {"made"}


# -- choosing --------------------------------------------------------------------------------------------


def test_only_chosen_requests_are_struck(penstock: EmbeddedBroker, topic: str) -> None:
    other = penstock.create_topic("other")
    seen: list[FaultyRequest] = []

    def is_chosen(request: FaultyRequest) -> bool:
        seen.append(request)
        return request.topics == {topic} and request.client_id == "unlucky"

    penstock.faults.fail("produce", "invalid_topic_exception", when=is_chosen)
    address = penstock.bootstrap_servers
    assert confluent.publish(address, other, ONE, client_id="unlucky") == [0]
    assert confluent.publish(address, topic, ONE, client_id="lucky") == [0]
    with pytest.raises(KafkaException, match="TOPIC_EXCEPTION"):
        confluent.publish(address, topic, ONE, client_id="unlucky")
    assert {request.api for request in seen} == {"produce"}
    assert {request.client_host for request in seen} == {"127.0.0.1"}


def test_a_choice_can_look_at_the_message(penstock: EmbeddedBroker, topic: str) -> None:
    client = confluent.consumer(penstock.bootstrap_servers, "g")
    commits: list[Any] = []
    penstock.faults.fail(
        "offset_commit", "offset_metadata_too_large", when=lambda r: commits.append(r.body) is not None
    )
    client.commit(offsets=[TopicPartition(topic, 0, 5)], asynchronous=False)
    client.close()
    assert commits[0].group_id == "g"
    assert commits[0].topics[0].partitions[0].committed_offset == 5


def test_faults_end(penstock: EmbeddedBroker) -> None:
    with penstock.faults.drop("api_versions") as fault:
        with socket.create_connection(("127.0.0.1", penstock.port)) as connection:
            connection.sendall(_request(18, 1))
            assert _closed(connection)
        assert fault.hits == 1
        assert repr(fault) == "Fault(drop api_versions, 1 hits)"
    with socket.create_connection(("127.0.0.1", penstock.port)) as connection:
        connection.sendall(_request(18, 2))
        assert _correlation_id(connection) == 2
    assert fault.hits == 1


def _closed(connection: socket.socket) -> bool:
    connection.settimeout(20)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_the_first_that_fits_strikes_and_is_spent(penstock: EmbeddedBroker, topic: str) -> None:
    first = penstock.faults.fail("produce", "not_leader_or_follower", times=1)
    second = penstock.faults.fail("produce", "request_timed_out", times=1)
    confluent.publish(penstock.bootstrap_servers, topic, ONE)
    assert (first.hits, second.hits) == (1, 1)
    assert repr(penstock.faults) == "<Faults []>"


def test_faults_outlive_a_restart(penstock: EmbeddedBroker, topic: str) -> None:
    fault = penstock.faults.drop("produce", times=1)
    penstock.restart()
    confluent.publish(penstock.bootstrap_servers, topic, ONE)
    assert fault.hits == 1


def test_faults_come_and_go_from_any_thread(penstock: EmbeddedBroker) -> None:
    def trouble() -> None:
        for _ in range(200):
            with penstock.faults.drop("produce", when=lambda request: False):
                pass

    threads = [threading.Thread(target=trouble) for _ in range(4)]
    for thread in threads:
        thread.start()
    with socket.create_connection(("127.0.0.1", penstock.port)) as connection:
        for number in range(200):
            connection.sendall(_request(18, number))
            assert _correlation_id(connection) == number
    for thread in threads:
        thread.join()
    assert repr(penstock.faults) == "<Faults []>"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda faults: faults.drop("prodoce"), "'prodoce' is not a request; the requests are .*produce"),
        (lambda faults: faults.fail("produce", "no_such_error"), "is not an error code"),
        (lambda faults: faults.fail("produce", ErrorCode.none), "not an error"),
        (lambda faults: faults.drop("produce", times=0), "times must be at least 1"),
        (lambda faults: faults.delay("produce", seconds=-1), "must be at least 0"),
    ],
)
def test_mistakes_are_told(make: Any, message: str) -> None:
    from penstock.testing import Faults

    with pytest.raises(ValueError, match=message):
        make(Faults())
