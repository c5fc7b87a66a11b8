"""A node with few file descriptors: idle partitions hold none, and it survives running out."""

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic
from tests.brokers import BrokerProcess, executable
from tests.topics import create_topics

LIMIT = 160
PARTITIONS = 300


@pytest.fixture
def frugal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BrokerProcess]:
    """The hard limit too, as `penstock serve` raises the other one to it."""
    (program,) = executable()
    command = tmp_path / "penstock-frugal"
    command.write_text(f'#!/bin/sh\nulimit -n {LIMIT}\nexec "{program}" "$@"\n')
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PENSTOCK_TEST_EXECUTABLE", str(command))
    broker = BrokerProcess(tmp_path / "data")
    try:
        yield broker.start()
    finally:
        broker.kill()


def write(bootstrap: str, round_: int) -> None:
    failed: list[KafkaError] = []
    producer = Producer({"bootstrap.servers": bootstrap, "acks": "all", "linger.ms": 0, "log_level": 0})
    for partition in range(PARTITIONS):
        producer.produce(
            "t",
            f"{round_}:{partition}".encode(),
            partition=partition,
            on_delivery=lambda error, _: error and failed.append(error),
        )
    assert producer.flush(60) == 0
    assert not failed


def read(bootstrap: str, rounds: int) -> set[bytes]:
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "checker", "log_level": 0})
    found: set[bytes] = set()
    try:
        consumer.assign([TopicPartition("t", partition, 0) for partition in range(PARTITIONS)])
        while len(found) < rounds * PARTITIONS:
            message = consumer.poll(20)
            assert message is not None, f"only {len(found)} were found"
            assert message.error() is None, message.error()
            found.add(message.value())
    finally:
        consumer.close()
    return found


def test_more_partitions_than_open_files_are_written_read_and_opened_again(frugal: BrokerProcess) -> None:
    admin = AdminClient({"bootstrap.servers": frugal.bootstrap_servers, "log_level": 0})
    create_topics(admin, NewTopic("t", PARTITIONS, 1, config={"segment.bytes": "1000"}))
    for round_ in range(2):
        write(frugal.bootstrap_servers, round_)
    assert len(read(frugal.bootstrap_servers, 2)) == 2 * PARTITIONS
    frugal.kill()
    frugal.start()
    write(frugal.bootstrap_servers, 2)
    assert len(read(frugal.bootstrap_servers, 3)) == 3 * PARTITIONS
    assert frugal.stop() == 0
    assert "Traceback" not in "".join(frugal.output)
    frugal.start()
    assert len(read(frugal.bootstrap_servers, 3)) == 3 * PARTITIONS


def test_partitions_far_beyond_the_limit_are_refused_when_they_are_created(frugal: BrokerProcess) -> None:
    admin = AdminClient({"bootstrap.servers": frugal.bootstrap_servers, "log_level": 0})
    too_many = 20 * LIMIT + 1
    with pytest.raises(KafkaException, match=f"penstock.broker.partitions.max allows {20 * LIMIT}"):
        admin.create_topics([NewTopic("t", too_many, 1)])["t"].result(60)
    create_topics(admin, NewTopic("t", 1, 1))
    with pytest.raises(KafkaException) as refused:
        admin.create_partitions([NewPartitions("t", too_many)])["t"].result(60)
    assert refused.value.args[0].code() == KafkaError.POLICY_VIOLATION


def test_a_limit_that_is_too_low_is_named_at_the_start(frugal: BrokerProcess, tmp_path: Path) -> None:
    frugal.kill()
    command = tmp_path / "penstock-frugal"
    command.write_text(command.read_text().replace(f"ulimit -n {LIMIT}", "ulimit -n 100"))
    with pytest.raises(AssertionError, match="the limit of open files is 100, and a node needs 128"):
        frugal.start()
    assert "Traceback" not in "".join(frugal.output)
