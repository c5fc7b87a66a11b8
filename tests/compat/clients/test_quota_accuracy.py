"""What librdkafka's producer and consumer get of their quotas on a broker of its own, on the real clock.

A slow machine may give them less, so only too much fails. As in Apache Kafka, what is used within all windows but one
never exceeds what all of them allow. The default windows, and clients that use all of their quota, are in
tests/unit/broker/network/test_quota_accuracy.py.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from tests.compat import kafka_python

from penstock.client.admin.quotas import alter_quotas
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.settings import ConnectionSettings
from penstock.testing import EmbeddedBroker

BYTES_PER_SECOND = 50_000
WINDOWS = 3
VALUE_BYTES = 1_000
#: More than two rounds of all windows.
VALUES = 7 * BYTES_PER_SECOND // VALUE_BYTES
#: One request passes after each wait.
TOLERANCE = 1.1
#: The broker may stop for a moment between counting a request and appending its records.
PAUSE_S = 0.5
TIMEOUT_S = 120


@pytest.fixture(scope="module")
def broker() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(settings={"quota.window.num": WINDOWS}) as broker:
        with Cluster(ConnectionSettings.parse({"bootstrap.servers": broker.bootstrap_servers})) as cluster:
            alter_quotas(cluster, {"client-id": "loader"}, {"producer_byte_rate": BYTES_PER_SECOND})
            alter_quotas(cluster, {"client-id": "reader"}, {"consumer_byte_rate": BYTES_PER_SECOND})
        yield broker


def produce(broker: EmbeddedBroker, topic: str, client_id: str) -> None:
    settings = {"bootstrap.servers": broker.bootstrap_servers, "client.id": client_id, "log_level": 0}
    producer = Producer({**settings, "batch.size": 2 * VALUE_BYTES, "linger.ms": 0})
    for _ in range(VALUES):
        producer.produce(topic, bytes(VALUE_BYTES))
    assert producer.flush(TIMEOUT_S) == 0


def test_a_producer_appends_no_more_than_its_quota(broker: EmbeddedBroker) -> None:
    broker.create_topic("produced", message_timestamp_type="LogAppendTime")
    produce(broker, "produced", "loader")
    times = [
        each.message.timestamp_ms for each in kafka_python.read(broker.bootstrap_servers, "produced", VALUES)
    ]
    allowed, span_ms = TOLERANCE * WINDOWS * BYTES_PER_SECOND, (WINDOWS - 1 - PAUSE_S) * 1000
    for first, begin in enumerate(times):
        within = itertools.takewhile(lambda at, begin=begin: at < begin + span_ms, times[first:])
        assert sum(VALUE_BYTES for _ in within) <= allowed


def test_a_consumer_receives_no_more_than_its_quota(broker: EmbeddedBroker) -> None:
    broker.create_topic("consumed")
    produce(broker, "consumed", "unlimited")
    consumer = Consumer(
        {
            "bootstrap.servers": broker.bootstrap_servers,
            "client.id": "reader",
            "group.id": "readers",
            "max.partition.fetch.bytes": 2 * VALUE_BYTES,
            "log_level": 0,
        }
    )
    began = time.monotonic()
    consumer.assign([TopicPartition("consumed", 0, 0)])
    received = 0
    while received < VALUES * VALUE_BYTES:
        assert time.monotonic() < began + TIMEOUT_S
        for message in consumer.consume(100, timeout=1.0):
            assert message.error() is None
            received += len(message.value())
        # It may have what all windows allow at once.
        elapsed_s = time.monotonic() - began
        assert received <= TOLERANCE * BYTES_PER_SECOND * (elapsed_s + WINDOWS)
    consumer.close()
