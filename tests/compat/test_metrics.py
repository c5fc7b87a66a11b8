"""Metrics and health of a broker that real clients use."""

import contextlib
import json
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient
from prometheus_client.parser import text_string_to_metric_families
from tests.brokers import BrokerProcess
from tests.compat import confluent
from tests.compat.message import numbered
from tests.waiting import eventually

from penstock.testing import EmbeddedBroker

Scrape = Callable[..., float | None]


@pytest.fixture
def metered() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(settings={"penstock.http.listen": "127.0.0.1:0", "penstock.flush": "ack"}) as broker:
        yield broker


@pytest.fixture
def scrape(metered: EmbeddedBroker) -> Scrape:
    """`scrape("penstock_group_members", group="g")` is the value now, or None where there is no such sample."""

    def value(name: str, **labels: str) -> float | None:
        for family in text_string_to_metric_families(_get(f"{metered.http_url}/metrics")[1]):
            for sample in family.samples:
                if (sample.name, sample.labels) == (name, labels):
                    return sample.value
        return None

    return value


def _get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_traffic_of_a_topic(metered: EmbeddedBroker, scrape: Scrape) -> None:
    topic = metered.create_topic("orders")
    confluent.publish(metered.bootstrap_servers, topic, numbered(10))
    confluent.read(metered.bootstrap_servers, topic, 10)
    assert scrape("penstock_topic_in_messages_total", topic=topic) == 10
    assert scrape("penstock_topic_out_messages_total", topic=topic) == 10
    stored = scrape("penstock_partition_size_bytes", topic=topic, partition="0")
    assert stored
    assert scrape("penstock_topic_in_bytes_total", topic=topic) == stored
    assert scrape("penstock_topic_out_bytes_total", topic=topic) == stored
    assert scrape("penstock_partition_end_offset", topic=topic, partition="0") == 10
    assert scrape("penstock_request_seconds_count", api="produce")
    assert scrape("penstock_request_seconds_count", api="fetch")
    assert scrape("penstock_flush_seconds_count")


def test_lag_and_members_of_a_group(metered: EmbeddedBroker, scrape: Scrape) -> None:
    topic = metered.create_topic("orders")
    confluent.publish(metered.bootstrap_servers, topic, numbered(10))
    member = confluent.consumer(metered.bootstrap_servers, "billing")
    member.subscribe([topic])
    confluent.take(member, 10)
    assert scrape("penstock_group_members", group="billing") == 1
    member.commit(offsets=[TopicPartition(topic, 0, 4)], asynchronous=False)
    labels = {"group": "billing", "topic": topic, "partition": "0"}
    assert scrape("penstock_group_committed_offset", **labels) == 4
    assert scrape("penstock_group_lag_messages", **labels) == 6
    member.commit(offsets=[TopicPartition(topic, 0, 10)], asynchronous=False)
    assert scrape("penstock_group_lag_messages", **labels) == 0
    member.close()
    eventually(lambda: scrape("penstock_group_members", group="billing") == 0)


def test_lag_is_there_after_a_restart(metered: EmbeddedBroker, scrape: Scrape) -> None:
    topic = metered.create_topic("orders")
    confluent.publish(metered.bootstrap_servers, topic, numbered(10))
    client = Consumer({"bootstrap.servers": metered.bootstrap_servers, "group.id": "billing"})
    client.commit(offsets=[TopicPartition(topic, 0, 3)], asynchronous=False)
    client.close()
    metered.restart()
    assert scrape("penstock_group_lag_messages", group="billing", topic=topic, partition="0") == 7


def test_errors_by_code(metered: EmbeddedBroker, scrape: Scrape) -> None:
    topic = metered.create_topic("small", max_message_bytes=200)
    with pytest.raises(KafkaException, match="MSG_SIZE_TOO_LARGE"):
        confluent.publish(metered.bootstrap_servers, topic, numbered(1, size=1000))
    assert scrape("penstock_request_errors_total", api="produce", error="message_too_large") == 1


def test_clients_that_do_not_speak_the_protocol(metered: EmbeddedBroker, scrape: Scrape) -> None:
    with socket.create_connection(("127.0.0.1", metered.port)) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        client.settimeout(20)
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(1) == b""
    assert scrape("penstock_malformed_frames_total") == 1


def test_connections(metered: EmbeddedBroker, scrape: Scrape) -> None:
    assert scrape("penstock_connections", listener="PLAINTEXT") == 0
    with socket.create_connection(("127.0.0.1", metered.port)):
        eventually(lambda: scrape("penstock_connections", listener="PLAINTEXT") == 1)
    eventually(lambda: scrape("penstock_connections", listener="PLAINTEXT") == 0)


def test_a_deleted_topic_is_no_longer_shown(metered: EmbeddedBroker, scrape: Scrape) -> None:
    topic = metered.create_topic("orders")
    assert scrape("penstock_topic_in_bytes_total", topic=topic) == 0
    admin = AdminClient({"bootstrap.servers": metered.bootstrap_servers})
    admin.delete_topics([topic])[topic].result(60)
    assert scrape("penstock_topic_in_bytes_total", topic=topic) is None
    assert scrape("penstock_partition_size_bytes", topic=topic, partition="0") is None


def test_health_and_readiness(metered: EmbeddedBroker) -> None:
    status, body = _get(f"{metered.http_url}/health")
    assert (status, json.loads(body)) == (200, {"status": "ok", "node_id": 1, "state": "serving"})
    assert _get(f"{metered.http_url}/ready") == (200, '{"ready": true}\n')
    assert _get(f"{metered.http_url}/elsewhere")[0] == 404


def test_the_served_broker_answers_too(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    broker = BrokerProcess(tmp_path / "data", {"penstock.http.listen": f"127.0.0.1:{port}"}).start()
    try:
        assert _get(f"http://127.0.0.1:{port}/ready")[0] == 200
        assert "penstock_build_info" in _get(f"http://127.0.0.1:{port}/metrics")[1]
    finally:
        assert broker.stop() == 0
    with pytest.raises(urllib.error.URLError):
        _get(f"http://127.0.0.1:{port}/health")
