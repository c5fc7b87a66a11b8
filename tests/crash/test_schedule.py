"""Held records are delivered once, after their time, when nodes are killed at any stage."""

import random
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from tests.brokers import BrokerProcess, ClusterProcesses
from tests.topics import create_topics
from tests.waiting import eventually

PARTITIONS = 3
DELAY_MS_MAX = 2500
SCHEDULED = {"penstock.schedule.enable": "true"}
SETTINGS = {"penstock.schedule.topic.num.partitions": "3", "penstock.schedule.topic.replication.factor": "3"}


class Writer(threading.Thread):
    """Sends numbered messages, each to be delivered after some time, until it is stopped."""

    def __init__(self, bootstrap: str, seed: int, rate: float = 400.0) -> None:
        super().__init__(daemon=True)
        self._chance = random.Random(seed)
        self._pause_s = 1 / rate
        self._stopping = threading.Event()
        self.acknowledged: dict[int, int] = {}  # the earliest time at which each may come
        self.refused: list[KafkaError] = []
        self.sent = 0
        self._producer = Producer(
            {
                "bootstrap.servers": bootstrap,
                "enable.idempotence": True,
                "linger.ms": 2,
                "message.timeout.ms": 120_000,
                "retry.backoff.ms": 20,
                "reconnect.backoff.ms": 10,
                "reconnect.backoff.max.ms": 200,
                "log_level": 0,
            }
        )

    def run(self) -> None:
        while not self._stopping.is_set():
            if len(self._producer) < 500:
                self._send()
            self._producer.poll(0)
            time.sleep(self._pause_s)
        self._producer.flush(120)

    def _send(self) -> None:
        number, delay_ms = self.sent, self._chance.randrange(DELAY_MS_MAX)
        self.sent += 1
        earliest_ms = time.time_ns() // 1_000_000 + delay_ms

        def delivered(error: KafkaError | None, message: Any) -> None:
            if error is None:
                self.acknowledged[number] = earliest_ms
            else:
                self.refused.append(error)

        self._producer.produce(
            "jobs",
            b"%d" % number,
            partition=number % PARTITIONS,
            headers=[("penstock-deliver-after", b"%d" % delay_ms)],
            on_delivery=delivered,
        )

    def finish(self) -> None:
        self._stopping.set()
        self.join(150)
        assert not self.is_alive()
        assert not self.refused

    def acknowledges(self, more: int) -> None:
        target = len(self.acknowledged) + more
        eventually(lambda: len(self.acknowledged) >= target, what=f"{more} more are acknowledged")


def check(bootstrap: str, writer: Writer, isolation: str) -> None:
    """Reads until everything that was acknowledged is there; nothing comes twice or early."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "check",
            "auto.offset.reset": "earliest",
            "isolation.level": isolation,
            "log_level": 0,
        }
    )
    consumer.assign([TopicPartition("jobs", index, 0) for index in range(PARTITIONS)])
    came: Counter[int] = Counter()
    last_due_ms = [0] * PARTITIONS
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not came.keys() >= writer.acknowledged.keys():
        for message in consumer.consume(1000, 0.2):
            assert message.error() is None
            number, stamped_ms = int(message.value()), message.timestamp()[1]
            came[number] += 1
            due_ms = int(dict(message.headers())["penstock-scheduled-for"])
            assert stamped_ms >= due_ms, "none comes early"
            if number in writer.acknowledged:
                assert stamped_ms >= writer.acknowledged[number], "by the time that it was sent, too"
            last_due_ms[message.partition()] = max(last_due_ms[message.partition()], due_ms)
    consumer.close()
    missing = writer.acknowledged.keys() - came.keys()
    assert not missing, f"{len(missing)} of {len(writer.acknowledged)} never came: {sorted(missing)[:10]}"
    assert not [number for number, times in came.items() if times > 1], "none comes twice"


def create_topic(bootstrap: str, replication_factor: int) -> None:
    topic = NewTopic("jobs", PARTITIONS, replication_factor, config=SCHEDULED)
    admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
    create_topics(admin, topic)


def test_a_broker_is_killed_while_it_holds_and_releases(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path / "data", SETTINGS).start()
    create_topic(broker.bootstrap_servers, 1)
    writer = Writer(broker.bootstrap_servers, seed=7)
    writer.start()
    for _ in range(4):
        writer.acknowledges(400)
        broker.kill()
        broker.start()
    writer.acknowledges(400)
    writer.finish()
    for isolation in ("read_uncommitted", "read_committed"):
        check(broker.bootstrap_servers, writer, isolation)
    assert broker.stop() == 0


def test_nodes_of_a_cluster_are_killed_while_they_hold_and_release(tmp_path: Path) -> None:
    cluster = ClusterProcesses(tmp_path, settings=SETTINGS).start()
    try:
        create_topic(cluster.bootstrap_servers, 3)
        writer = Writer(cluster.bootstrap_servers, seed=11)
        writer.start()
        for node in (1, 2, 3):
            writer.acknowledges(300)
            cluster.nodes[node].kill()
            writer.acknowledges(300)  # two are enough
            cluster.nodes[node].start()
        writer.acknowledges(300)
        writer.finish()
        for isolation in ("read_uncommitted", "read_committed"):
            check(cluster.bootstrap_servers, writer, isolation)
    finally:
        cluster.kill()
