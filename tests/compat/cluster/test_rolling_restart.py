"""A rolling restart as in docs/operations.md: clients with default settings see no errors."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from tests.brokers import ClusterProcesses
from tests.topics import create_topics
from tests.waiting import eventually

PARTITIONS = 6
Spot = tuple[int, int]  # partition and offset


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ClusterProcesses]:
    processes = ClusterProcesses(tmp_path).start()
    yield processes
    processes.kill()


class Publishing:
    """Produces without a pause, with the defaults of librdkafka, and counts what became of it."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self._producer = Producer({"bootstrap.servers": bootstrap})
        self._topic = topic
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.acknowledged: dict[Spot, bytes] = {}
        self.failed: list[str] = []

    def __enter__(self) -> "Publishing":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        number = 0
        while not self._stop.is_set():
            self._producer.produce(self._topic, str(number).encode(), on_delivery=self._delivered)
            number += 1
            self._producer.poll(0.002)
        self._producer.flush(60)

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self.failed.append(str(error))
        else:
            self.acknowledged[message.partition(), message.offset()] = message.value()


def test_a_rolling_restart_fails_no_produce(cluster: ClusterProcesses) -> None:
    bootstrap = cluster.bootstrap_servers
    admin = AdminClient({"bootstrap.servers": bootstrap})
    create_topics(admin, NewTopic("orders", PARTITIONS, 3))
    with Publishing(bootstrap, "orders") as publishing:
        for node in cluster.nodes.values():
            before = len(publishing.acknowledged)
            assert node.stop() == 0, f"node {node.node_id} did not stop cleanly"
            node.start()
            eventually(lambda: _all_in_sync(admin), what=f"all in sync after node {node.node_id}")
            eventually(lambda: len(publishing.acknowledged) > before, what="more acknowledged writes")  # noqa: B023
    assert publishing.failed == []
    stored = _stored(bootstrap)
    # A retry without idempotence may be written twice; what was acknowledged is where it was said to be.
    assert {place: stored.get(place) for place in publishing.acknowledged} == publishing.acknowledged
    assert set(stored.values()) == set(publishing.acknowledged.values())
    eventually(lambda: _leaders(admin) == {1, 2, 3}, what="leaders back at their preferred replicas")


def _leaders(admin: AdminClient) -> set[int]:
    return {partition.leader for partition in _partitions(admin)}


def _partitions(admin: AdminClient) -> list[Any]:
    return list(admin.list_topics("orders", timeout=10).topics["orders"].partitions.values())


def _all_in_sync(admin: AdminClient) -> bool:
    return all(len(partition.isrs) == 3 and partition.leader >= 0 for partition in _partitions(admin))


def _stored(bootstrap: str) -> dict[Spot, bytes]:
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "none",
            "enable.partition.eof": True,
            "enable.auto.commit": False,
        }
    )
    consumer.assign([TopicPartition("orders", partition, 0) for partition in range(PARTITIONS)])
    found: dict[Spot, bytes] = {}
    ended: set[int] = set()
    while len(ended) < PARTITIONS:
        for message in consumer.consume(1000, 1.0):
            if message.error() is None:
                found[message.partition(), message.offset()] = message.value()
            else:
                assert message.error().code() == KafkaError._PARTITION_EOF, message.error()
                ended.add(message.partition())
    consumer.close()
    return found
