"""Older clients, with the protocol versions that they speak."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import KafkaException
from kafka import KafkaAdminClient, KafkaProducer, TopicPartition
from kafka.admin import ConfigResource
from tests.compat import confluent, kafka_python
from tests.compat.message import Message, numbered, values
from tests.waiting import eventually

# The oldest is the first whose versions are all still spoken, as in Apache Kafka since its release 4.0.
VERSIONS = [(1, 1), (2, 0), (2, 1), (2, 3), (2, 4), (2, 6), (2, 8), (3, 0), (3, 4), (3, 7), (3, 9), (4, 0)]


@pytest.fixture(params=VERSIONS, ids=lambda version: ".".join(map(str, version)))
def version(request: pytest.FixtureRequest) -> tuple[int, int]:
    found: tuple[int, int] = request.param
    return found


def test_publish_and_consume_in_a_group(
    bootstrap: str,
    new_topic: Callable[..., str],
    group: str,
    version: tuple[int, int],
    closing: contextlib.ExitStack,
) -> None:
    topic = new_topic(**{"retention.ms": "-1"})
    with KafkaProducer(bootstrap_servers=bootstrap, api_version=version, compression_type="gzip") as producer:
        sent = [
            producer.send(topic, b"%d" % n, key=b"k", headers=[("h", b"v")], timestamp_ms=1 + n)
            for n in range(20)
        ]
        assert [each.get(60).offset for each in sent] == list(range(20))
    member = kafka_python.consumer(bootstrap, topic, group_id=group, api_version=version)
    closing.callback(member.close)
    received = kafka_python.take(member, 20)
    assert values(received) == [b"%d" % n for n in range(20)]
    assert {each.message.headers for each in received} == {(("h", b"v"),)}
    member.commit()
    partition = TopicPartition(topic, 0)
    assert member.committed(partition) == 20
    assert member.end_offsets([partition]) == {partition: 20}
    assert member.beginning_offsets([partition]) == {partition: 0}
    assert member.offsets_for_times({partition: 5})[partition].offset == 4


def test_administration(
    bootstrap: str, unique: Callable[[str], str], version: tuple[int, int], closing: contextlib.ExitStack
) -> None:
    admin = KafkaAdminClient(bootstrap_servers=bootstrap, api_version=version)
    closing.callback(admin.close)
    name, group = unique("topic"), unique("group")
    admin.create_topics(
        {name: {"num_partitions": 1, "replication_factor": 1, "configs": {"retention.ms": "5000"}}}
    )
    eventually(lambda: name in admin.list_topics())
    described = admin.describe_configs([ConfigResource("TOPIC", name)], config_filter="all")
    assert described["topic"][name]["retention.ms"]["value"] == "5000"
    assert (
        admin.alter_configs([ConfigResource("TOPIC", name, {"retention.ms": "6000"})])["topic"][name] == "OK"
    )
    eventually(lambda: _retention(admin, name) == "6000")
    admin.create_partitions({name: 2})
    eventually(lambda: len(admin.describe_topics([name])[0]["partitions"]) == 2)
    confluent.publish(bootstrap, name, numbered(3))
    partition = TopicPartition(name, 0)
    assert admin.delete_records({partition: 2})[partition]["low_watermark"] == 2
    member = kafka_python.consumer(bootstrap, name, group_id=group)
    kafka_python.take(member, 1)
    assert admin.describe_groups([group])[group]["group_state"] == "Stable"
    member.commit()
    member.close()
    assert group in {each["group_id"] for each in admin.list_groups()}
    assert admin.list_group_offsets(group)[group][partition].offset == 3
    admin.delete_groups([group])
    admin.delete_topics([name])
    eventually(lambda: name not in admin.list_topics())


def _retention(admin: KafkaAdminClient, topic: str) -> Any:
    described = admin.describe_configs([ConfigResource("TOPIC", topic)], config_filter="all")
    return described["topic"][topic]["retention.ms"]["value"]


def test_a_client_that_asks_for_no_versions_works_as_far_as_it_can(bootstrap: str, topic: str) -> None:
    """Told to believe in an ancient broker, librdkafka sends the first versions of everything, which are gone."""
    ancient = {"api_version_request": False, "broker_version_fallback": "0.9.0", "message_timeout_ms": 2000}
    with pytest.raises((KafkaException, AssertionError)):
        confluent.publish(bootstrap, topic, [Message(value=b"x")], **ancient)
    assert confluent.publish(bootstrap, topic, [Message(value=b"y")]) == [0]
