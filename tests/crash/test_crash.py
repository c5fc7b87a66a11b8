"""Records acknowledged with acks=all are neither lost nor doubled when a broker is killed or loses power."""

import random
import stat
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from tests.brokers import BrokerProcess
from tests.crash import power
from tests.topics import create_topics

ROUNDS = 4
ACKNOWLEDGED_PER_ROUND = 300
PARTITIONS = 2


class Writer:
    """An idempotent producer of numbered messages that remembers what was acknowledged, and where."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self._topic = topic
        self._next = 0
        self.acknowledged: dict[int, tuple[int, int]] = {}
        self.refused: list[KafkaError] = []
        self._producer = Producer(
            {
                "bootstrap.servers": bootstrap,
                "enable.idempotence": True,
                "linger.ms": 1,
                "message.timeout.ms": 60_000,
                "retry.backoff.ms": 20,
                "reconnect.backoff.ms": 10,
                "reconnect.backoff.max.ms": 100,
                "log_level": 0,
            }
        )

    def write_until_acknowledged(self, count: int) -> None:
        """Keeps some messages in flight, so that the broker dies with work in hand."""
        target = len(self.acknowledged) + count
        while len(self.acknowledged) < target:
            if len(self._producer) < 50:
                self._send()
            self._producer.poll(0.001)

    def _send(self) -> None:
        number = self._next
        self._next += 1

        def delivered(error: KafkaError | None, message: Any) -> None:
            if error is not None:
                self.refused.append(error)
            else:
                self.acknowledged[number] = (message.partition(), message.offset())

        self._producer.produce(
            self._topic, str(number).encode(), partition=number % PARTITIONS, on_delivery=delivered
        )

    def finish(self) -> None:
        assert self._producer.flush(60) == 0
        assert not self.refused


def read_everything(bootstrap: str, topic: str) -> dict[int, list[tuple[int, int]]]:
    """partition -> [(offset, number)] up to the high watermark."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "checker", "enable.partition.eof": True})
    found: dict[int, list[tuple[int, int]]] = {}
    try:
        for partition in range(PARTITIONS):
            consumer.assign([TopicPartition(topic, partition, 0)])
            rows = found[partition] = []
            while True:
                message = consumer.poll(60)
                assert message is not None, "the broker has stopped answering"
                if message.error():
                    assert message.error().code() == KafkaError._PARTITION_EOF
                    break
                rows.append((message.offset(), int(message.value())))
    finally:
        consumer.close()
    return found


def judge(writer: Writer, found: dict[int, list[tuple[int, int]]]) -> None:
    for partition, rows in found.items():
        offsets, numbers = [offset for offset, _ in rows], [number for _, number in rows]
        assert offsets == list(range(len(offsets))), "offsets are contiguous"
        assert numbers == sorted(numbers), "order is kept"
        assert len(set(numbers)) == len(numbers), "nothing is doubled"
        at = dict(rows)
        lost = {
            number: place
            for number, place in writer.acknowledged.items()
            if place[0] == partition and at.get(place[1]) != number
        }
        assert not lost, "nothing acknowledged is lost or moved"


def create_topic(bootstrap: str, topic: str) -> None:
    settings = {"segment.bytes": "20000"}  # so that rolled segments are in it too
    admin = AdminClient({"bootstrap.servers": bootstrap})
    create_topics(admin, NewTopic(topic, PARTITIONS, 1, config=settings))


def test_kill_loses_and_doubles_nothing(fresh_broker: BrokerProcess) -> None:
    create_topic(fresh_broker.bootstrap_servers, "t")
    writer = Writer(fresh_broker.bootstrap_servers, "t")
    for _ in range(ROUNDS):
        writer.write_until_acknowledged(ACKNOWLEDGED_PER_ROUND)
        fresh_broker.kill()
        fresh_broker.start()
    writer.write_until_acknowledged(ACKNOWLEDGED_PER_ROUND)
    writer.finish()
    judge(writer, read_everything(fresh_broker.bootstrap_servers, "t"))


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "journal"


@pytest.fixture
def mortal_broker(tmp_path: Path, journal: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BrokerProcess]:
    """A broker whose syncs are written down."""
    command = tmp_path / "penstock-recorded"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{power.__file__}" "$@"\n')
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PENSTOCK_TEST_EXECUTABLE", str(command))
    monkeypatch.setenv(power.JOURNAL, str(journal))
    process = BrokerProcess(tmp_path / "data").start()
    yield process
    process.stop()


@pytest.mark.parametrize("seed", range(3))
def test_power_loss_loses_and_doubles_nothing(mortal_broker: BrokerProcess, journal: Path, seed: int) -> None:
    chance = random.Random(seed)
    create_topic(mortal_broker.bootstrap_servers, "t")
    writer = Writer(mortal_broker.bootstrap_servers, "t")
    for _ in range(ROUNDS):
        writer.write_until_acknowledged(ACKNOWLEDGED_PER_ROUND + chance.randrange(50))
        mortal_broker.kill()
        power.lose_power(mortal_broker.data_dir, journal, chance)
        mortal_broker.start()
    writer.write_until_acknowledged(ACKNOWLEDGED_PER_ROUND)
    writer.finish()
    judge(writer, read_everything(mortal_broker.bootstrap_servers, "t"))


def test_power_loss_does_cost_what_was_never_synced(mortal_broker: BrokerProcess, journal: Path) -> None:
    """The instrument itself: without syncs the same kill must lose something, or the tests above prove nothing."""
    admin = AdminClient({"bootstrap.servers": mortal_broker.bootstrap_servers})
    create_topics(admin, NewTopic("t", PARTITIONS, 1, config={"penstock.flush": "never"}))
    writer = Writer(mortal_broker.bootstrap_servers, "t")
    writer.write_until_acknowledged(ACKNOWLEDGED_PER_ROUND)
    mortal_broker.kill()
    assert power.lose_power(mortal_broker.data_dir, journal, random.Random(1)) > 0
    mortal_broker.start()
    found = read_everything(mortal_broker.bootstrap_servers, "t")
    assert sum(map(len, found.values())) < ACKNOWLEDGED_PER_ROUND


def test_deleted_records_stay_deleted_through_a_power_loss(
    mortal_broker: BrokerProcess, journal: Path
) -> None:
    create_topic(mortal_broker.bootstrap_servers, "t")
    writer = Writer(mortal_broker.bootstrap_servers, "t")
    writer.write_until_acknowledged(ACKNOWLEDGED_PER_ROUND)
    writer.finish()
    admin = AdminClient({"bootstrap.servers": mortal_broker.bootstrap_servers})
    ends = Counter(partition for partition, _ in writer.acknowledged.values())
    wanted = {TopicPartition("t", 0, 7): 7, TopicPartition("t", 1, -1): ends[1]}
    for partition, future in admin.delete_records(list(wanted)).items():
        assert future.result(30).low_watermark == wanted[partition]
    mortal_broker.kill()
    power.lose_power(mortal_broker.data_dir, journal, random.Random(1))
    mortal_broker.start()
    consumer = Consumer({"bootstrap.servers": mortal_broker.bootstrap_servers, "group.id": "checker"})
    for partition, start in wanted.items():
        watermarks = consumer.get_watermark_offsets(partition, timeout=30)
        assert watermarks == (start, ends[partition.partition])
    consumer.close()


def test_a_recreated_topic_keeps_its_own_records_through_a_power_loss(
    mortal_broker: BrokerProcess, journal: Path
) -> None:
    """What was written down of the old one, its start offset above all, is not the new one's."""
    admin = AdminClient({"bootstrap.servers": mortal_broker.bootstrap_servers})
    create_topic(mortal_broker.bootstrap_servers, "t")
    old = Writer(mortal_broker.bootstrap_servers, "t")
    old.write_until_acknowledged(ACKNOWLEDGED_PER_ROUND)
    old.finish()
    for future in admin.delete_records([TopicPartition("t", n, -1) for n in range(PARTITIONS)]).values():
        future.result(30)
    admin.delete_topics(["t"])["t"].result(30)
    create_topic(mortal_broker.bootstrap_servers, "t")
    new = Writer(mortal_broker.bootstrap_servers, "t")
    new.write_until_acknowledged(20)
    new.finish()
    mortal_broker.kill()
    power.lose_power(mortal_broker.data_dir, journal, random.Random(1))
    mortal_broker.start()
    judge(new, read_everything(mortal_broker.bootstrap_servers, "t"))
