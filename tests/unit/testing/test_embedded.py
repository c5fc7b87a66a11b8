"""The embedded broker: start, data, kill, restart and errors."""

import asyncio
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource
from tests.compat import aio, confluent
from tests.compat.message import Message

from penstock.broker.environment import StartFailed
from penstock.log.data_directory import LOG_SUFFIX, offset_file_name
from penstock.log.log_manager import CLEAN_SHUTDOWN_FILE
from penstock.protocol.config_def import InvalidSetting
from penstock.testing import EmbeddedBroker

TEN = [Message(value=b"%d" % number) for number in range(10)]


def _values(broker: EmbeddedBroker, topic: str, count: int) -> list[bytes | None]:
    return [each.message.value for each in confluent.read(broker.bootstrap_servers, topic, count)]


def test_clients_publish_and_read(penstock: EmbeddedBroker) -> None:
    topic = penstock.create_topic("orders")
    assert confluent.publish(penstock.bootstrap_servers, topic, TEN) == list(range(10))
    assert [each.message.value for each in aio.read(penstock.bootstrap_servers, topic, 10)] == [
        m.value for m in TEN
    ]


async def test_asyncio_tests_use_it_as_it_is(penstock: EmbeddedBroker) -> None:
    topic = penstock.create_topic("orders")
    async with AIOKafkaProducer(bootstrap_servers=penstock.bootstrap_servers) as producer:
        await producer.send_and_wait(topic, b"hello")
    async with AIOKafkaConsumer(
        topic, bootstrap_servers=penstock.bootstrap_servers, group_id="g", auto_offset_reset="earliest"
    ) as consumer:
        record = await asyncio.wait_for(consumer.getone(), 20)
    assert record.value == b"hello"


def test_restart_keeps_data_port_and_positions(penstock: EmbeddedBroker) -> None:
    topic, address = penstock.create_topic("orders"), penstock.bootstrap_servers
    confluent.publish(address, topic, TEN)
    _commit(address, topic, 4)
    penstock.restart()
    assert penstock.bootstrap_servers == address
    assert _values(penstock, topic, 10) == [m.value for m in TEN]
    assert _committed(address, topic) == 4


def _commit(address: str, topic: str, offset: int) -> None:
    client = Consumer({"bootstrap.servers": address, "group.id": "g"})
    client.commit(offsets=[TopicPartition(topic, 0, offset)], asynchronous=False)
    client.close()


def _committed(address: str, topic: str) -> int:
    client = Consumer({"bootstrap.servers": address, "group.id": "g"})
    (found,) = client.committed([TopicPartition(topic, 0)], timeout=20)
    client.close()
    return int(found.offset)


def test_stopping_is_clean_and_killing_is_not(penstock: EmbeddedBroker) -> None:
    penstock.stop()
    assert (penstock.data_dir / CLEAN_SHUTDOWN_FILE).exists()
    penstock.start()
    penstock.kill()
    assert not (penstock.data_dir / CLEAN_SHUTDOWN_FILE).exists()


def test_a_killed_broker_recovers(penstock: EmbeddedBroker) -> None:
    topic = penstock.create_topic("orders")
    confluent.publish(penstock.bootstrap_servers, topic, TEN)
    _commit(penstock.bootstrap_servers, topic, 7)
    penstock.kill()
    with (penstock.data_dir / f"{topic}-0" / offset_file_name(0, LOG_SUFFIX)).open("ab") as log:
        log.write(b"a batch that was cut short")
    penstock.start()
    assert confluent.publish(penstock.bootstrap_servers, topic, TEN[:1]) == [10]
    assert _values(penstock, topic, 11) == [m.value for m in [*TEN, TEN[0]]]
    assert _committed(penstock.bootstrap_servers, topic) == 7


def test_restart_after_kill_just_starts(penstock: EmbeddedBroker) -> None:
    penstock.kill()
    penstock.restart()
    assert penstock.is_running


def test_a_client_lives_through_a_restart(penstock: EmbeddedBroker) -> None:
    topic = penstock.create_topic("orders")
    client = confluent.producer(penstock.bootstrap_servers, reconnect_backoff_max_ms=100)
    assert confluent.publish_on(client, topic, TEN[:1]) == [0]
    penstock.kill()
    penstock.start()
    assert confluent.publish_on(client, topic, TEN[1:2]) == [1]


def test_brokers_side_by_side_have_nothing_in_common(penstock: EmbeddedBroker) -> None:
    topic = penstock.create_topic("orders")
    confluent.publish(penstock.bootstrap_servers, topic, TEN)
    with EmbeddedBroker() as other:
        other.create_topic("orders")
        assert confluent.publish(other.bootstrap_servers, topic, TEN[:1]) == [0]
        assert other.bootstrap_servers != penstock.bootstrap_servers


def test_a_given_folder_outlives_the_broker(tmp_path: Path) -> None:
    with EmbeddedBroker(data_dir=tmp_path / "data") as first:
        topic = first.create_topic("orders")
        confluent.publish(first.bootstrap_servers, topic, TEN)
    with EmbeddedBroker(data_dir=tmp_path / "data") as second:
        assert _values(second, topic, 10) == [m.value for m in TEN]


def test_a_temporary_folder_goes_with_the_block() -> None:
    with EmbeddedBroker() as broker:
        assert broker.data_dir.is_dir()
        broker.restart()
    assert not broker.data_dir.exists()
    assert not broker.is_running


def test_a_broker_left_running_does_not_outlive_the_process(tmp_path: Path) -> None:
    script = "from penstock.testing import EmbeddedBroker; print(EmbeddedBroker().start().data_dir)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert not Path(done.stdout.strip()).exists()


def test_settings_have_their_names_in_kafka() -> None:
    with EmbeddedBroker(settings={"num.partitions": 3, "auto.create.topics.enable": True}) as broker:
        admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
        producer = Producer({"bootstrap.servers": broker.bootstrap_servers})
        producer.produce("made-by-use", b"x")
        assert producer.flush(20) == 0
        assert len(admin.list_topics("made-by-use", timeout=20).topics["made-by-use"].partitions) == 3


def test_topic_settings(penstock: EmbeddedBroker) -> None:
    penstock.create_topic("a", partitions=2, retention_ms=1234, cleanup_policy=["compact", "delete"])
    penstock.create_topic("b", **{"retention.ms": 4321, "unclean.leader.election.enable": True})
    assert _described(penstock, "a", "retention.ms", "cleanup.policy") == ["1234", "compact,delete"]
    assert _described(penstock, "b", "retention.ms", "unclean.leader.election.enable") == ["4321", "true"]


def _described(broker: EmbeddedBroker, topic: str, *names: str) -> list[str]:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    resource = ConfigResource(ConfigResource.Type.TOPIC, topic)
    described: Any = admin.describe_configs([resource])[resource].result(20)
    return [described[name].value for name in names]


def test_names_are_unique(penstock: EmbeddedBroker) -> None:
    first, second = penstock.new_topic("orders"), penstock.new_topic("orders")
    assert first.startswith("orders-")
    assert first != second
    assert penstock.unique_name("group") != penstock.unique_name("group")


def test_wrong_settings_are_refused_before_anything_starts() -> None:
    with pytest.raises(InvalidSetting, match=r"num\.partitionz.*did you mean num\.partitions"):
        EmbeddedBroker(settings={"num.partitionz": 1})
    with pytest.raises(InvalidSetting, match="must be a whole number"):
        EmbeddedBroker(settings={"num.partitions": "many"})


def test_a_topic_that_is_refused(penstock: EmbeddedBroker) -> None:
    penstock.create_topic("orders")
    with pytest.raises(ValueError, match=r"'orders' was not created: .*already exists"):
        penstock.create_topic("orders")
    with pytest.raises(ValueError, match=r"not created: .*retention\.bites"):
        penstock.create_topic("other", retention_bites=1)


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        broker = EmbeddedBroker(port=port)
        with pytest.raises(StartFailed, match=str(port)):
            broker.start()
        assert not broker.is_running
    with broker:
        assert broker.port == port


def test_using_it_wrongly_is_told(penstock: EmbeddedBroker) -> None:
    with pytest.raises(RuntimeError, match="is already running"):
        penstock.start()
    penstock.stop()
    penstock.stop()
    with pytest.raises(RuntimeError, match="not running"):
        penstock.create_topic("orders")


def test_two_brokers_cannot_share_a_folder(tmp_path: Path) -> None:
    with EmbeddedBroker(data_dir=tmp_path), pytest.raises(StartFailed):
        EmbeddedBroker(data_dir=tmp_path).start()
