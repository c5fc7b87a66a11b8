"""Administration through kafka-python, which knows more of the protocol's calls than the other clients."""

import contextlib
import uuid
from collections.abc import Callable
from typing import Any

import kafka.errors
import pytest
from kafka import KafkaAdminClient, OffsetAndMetadata, OffsetSpec, TopicPartition
from kafka.admin import AlterConfigOp, ConfigResource, MemberToRemove
from tests.compat import confluent, kafka_python
from tests.compat.message import Message, numbered
from tests.waiting import eventually


def setting(admin: KafkaAdminClient, topic: str, name: str) -> dict[str, Any]:
    described = admin.describe_configs([ConfigResource("TOPIC", topic)], config_filter="all")
    found: dict[str, Any] = described["topic"][topic][name]
    return found


def test_a_topic_through_its_life(python_admin: KafkaAdminClient, unique: Callable[[str], str]) -> None:
    name = unique("topic")
    wanted = {name: {"num_partitions": 2, "replication_factor": 1, "configs": {"retention.ms": "1000000"}}}
    [created] = python_admin.create_topics(wanted, wait_for_metadata=True)["topics"]
    assert (created["num_partitions"], created["replication_factor"]) == (2, 1)
    assert created["configs"]["retention.ms"]["value"] == "1000000"
    with pytest.raises(kafka.errors.TopicAlreadyExistsError):
        python_admin.create_topics(wanted)
    python_admin.create_partitions({name: 3})
    eventually(lambda: len(python_admin.describe_topics([name])[0]["partitions"]) == 3)
    assert name in python_admin.list_topics()
    python_admin.delete_topics([name])
    eventually(lambda: name not in python_admin.list_topics())


def test_a_topic_is_known_by_its_id(python_admin: KafkaAdminClient, topic: str) -> None:
    [described] = python_admin.describe_topics([topic])
    topic_id = uuid.UUID(described["topic_id"])
    [by_id] = python_admin.describe_topics([topic_id])
    assert (by_id["name"], by_id["topic_id"]) == (topic, described["topic_id"])
    python_admin.delete_topics([topic_id])
    eventually(lambda: topic not in python_admin.list_topics())


def test_settings_of_a_topic(python_admin: KafkaAdminClient, topic: str) -> None:
    change = ConfigResource("TOPIC", topic, {"retention.ms": "5000", "segment.bytes": "2000000"})
    assert python_admin.alter_configs([change]) == {"topic": {topic: "OK"}}
    eventually(lambda: setting(python_admin, topic, "retention.ms")["value"] == "5000")
    modified = python_admin.describe_configs([ConfigResource("TOPIC", topic)])["topic"][topic]
    assert set(modified) == {"retention.ms", "segment.bytes"}
    removal = ConfigResource("TOPIC", topic, {"retention.ms": (AlterConfigOp.DELETE, None)})
    python_admin.alter_configs([removal])
    eventually(lambda: setting(python_admin, topic, "retention.ms")["value"] == "604800000")
    python_admin.reset_configs([ConfigResource("TOPIC", topic, [])])
    eventually(lambda: setting(python_admin, topic, "segment.bytes")["value"] == "1073741824")


def test_settings_come_with_types_and_synonyms(python_admin: KafkaAdminClient, topic: str) -> None:
    resource = ConfigResource("TOPIC", topic)
    described = python_admin.describe_configs([resource], include_synonyms=True, config_filter="all")
    assert described["topic"][topic]["retention.ms"]["config_type"] == "LONG"
    assert described["topic"][topic]["cleanup.policy"]["config_type"] == "LIST"
    [synonym] = described["topic"][topic]["cleanup.policy"]["synonyms"]
    assert (synonym["name"], synonym["value"]) == ("log.cleanup.policy", "delete")


def test_only_the_settings_asked_for_are_described(python_admin: KafkaAdminClient, topic: str) -> None:
    resource = ConfigResource("TOPIC", topic, ["retention.ms", "segment.ms"])
    described = python_admin.describe_configs([resource], config_filter="all")
    assert set(described["topic"][topic]) == {"retention.ms", "segment.ms"}


def test_the_older_way_to_alter_settings(python_admin: KafkaAdminClient, topic: str) -> None:
    change = ConfigResource("TOPIC", topic, {"retention.ms": "5000"})
    assert python_admin.alter_configs([change], incremental=False) == {"topic": {topic: "OK"}}
    eventually(lambda: setting(python_admin, topic, "retention.ms")["value"] == "5000")


def test_a_wrong_setting_is_answered_with_the_reason(python_admin: KafkaAdminClient, topic: str) -> None:
    change = ConfigResource("TOPIC", topic, {"retention.ms": "soon"})
    answer = python_admin.alter_configs([change])["topic"][topic]
    assert "retention.ms" in answer
    assert answer != "OK"


def test_the_cluster_is_described(python_admin: KafkaAdminClient, bootstrap: str) -> None:
    described = python_admin.describe_cluster()
    [node] = described["brokers"]
    assert f"{node['host']}:{node['port']}" == bootstrap
    assert described["controller_id"] == node["broker_id"]
    assert described["cluster_id"]


def test_features_are_finalized(python_admin: KafkaAdminClient) -> None:
    features = python_admin.describe_features()
    lowest, highest = features["metadata.version"]["finalized"]
    supported = features["metadata.version"]["supported"]
    assert supported[0] <= lowest <= highest <= supported[1]


def test_topic_partitions_are_described_page_by_page(
    python_admin: KafkaAdminClient, new_topic: Callable[..., str]
) -> None:
    topics = sorted([new_topic(partitions=3), new_topic(partitions=4)])
    seen: list[tuple[str, int]] = []
    cursor = None
    while True:
        page = python_admin.describe_topic_partitions(topics, response_partition_limit=2, cursor=cursor)
        seen += [
            (each["name"], part["partition_index"]) for each in page["topics"] for part in each["partitions"]
        ]
        if (cursor := page["next_cursor"]) is None:
            break
    assert len(seen) == len(set(seen)) == 7
    assert {name for name, _ in seen} == set(topics)


def test_log_directories_are_described(
    python_admin: KafkaAdminClient, bootstrap: str, new_topic: Callable[..., str]
) -> None:
    topic = new_topic(partitions=2)
    confluent.publish(bootstrap, topic, numbered(50, size=1000))
    [described] = python_admin.describe_log_dirs({topic: [0, 1]})
    sizes = {
        partition["partition_index"]: partition["partition_size"]
        for directory in described["log_dirs"]
        for each in directory["topics"]
        if each["name"] == topic
        for partition in each["partitions"]
    }
    assert sizes[0] > 50_000
    assert sizes[1] == 0


def test_producers_are_described(python_admin: KafkaAdminClient, bootstrap: str, topic: str) -> None:
    confluent.publish(bootstrap, topic, numbered(10), enable_idempotence=True)
    partition = TopicPartition(topic, 0)
    [active] = python_admin.describe_producers([partition])[partition].active_producers
    assert active.producer_id >= 0
    assert (active.producer_epoch, active.last_sequence) == (0, 9)
    assert active.current_transaction_start_offset == -1


def test_offsets_are_listed(
    python_admin: KafkaAdminClient, bootstrap: str, new_topic: Callable[..., str]
) -> None:
    topic = new_topic(**{"retention.ms": "-1"})
    partition = TopicPartition(topic, 0)
    times = [1_700_000_000_000, 1_700_000_000_900, 1_700_000_000_500]
    kafka_python.publish(bootstrap, topic, [Message(value=b"", timestamp_ms=each) for each in times])
    listed = {
        spec: python_admin.list_partition_offsets({partition: spec})[partition]
        for spec in list(OffsetSpec)[:3]
    }
    assert listed[OffsetSpec.EARLIEST].offset == 0
    assert listed[OffsetSpec.LATEST].offset == 3
    assert listed[OffsetSpec.MAX_TIMESTAMP][:2] == (1, times[1])
    assert python_admin.list_partition_offsets({partition: times[0] + 1})[partition][:2] == (1, times[1])


def test_records_are_deleted(python_admin: KafkaAdminClient, bootstrap: str, topic: str) -> None:
    confluent.publish(bootstrap, topic, numbered(10))
    partition = TopicPartition(topic, 0)
    assert python_admin.delete_records({partition: 4})[partition]["low_watermark"] == 4
    assert python_admin.list_partition_offsets({partition: OffsetSpec.EARLIEST})[partition].offset == 4
    with pytest.raises(kafka.errors.OffsetOutOfRangeError):
        python_admin.delete_records({partition: 11})


def test_groups_and_their_members(
    python_admin: KafkaAdminClient, bootstrap: str, topic: str, group: str, closing: contextlib.ExitStack
) -> None:
    member = kafka_python.consumer(
        bootstrap, topic, group_id=group, client_id="the-client", group_instance_id="me"
    )
    closing.callback(member.close)
    eventually(lambda: member.poll(50) is not None and member.assignment())
    described = python_admin.describe_groups([group])[group]
    assert (described["group_state"], described["protocol_type"]) == ("Stable", "consumer")
    [only] = described["members"]
    assert (only["client_id"], only["group_instance_id"]) == ("the-client", "me")
    assert only["client_host"].lstrip("/") in ("127.0.0.1", "::1")
    assert group in {each["group_id"] for each in python_admin.list_groups(states_filter=["Stable"])}
    assert group not in {each["group_id"] for each in python_admin.list_groups(states_filter=["Empty"])}
    removed = python_admin.remove_group_members(group, [MemberToRemove(group_instance_id="me")])
    assert list(removed.values()) == [kafka.errors.NoError]


def test_an_unknown_group_is_dead(python_admin: KafkaAdminClient, group: str) -> None:
    described = python_admin.describe_groups([group])[group]
    assert described["group_state"] == "Dead"
    assert described["members"] == []
    assert python_admin.delete_groups([group])[group] is not kafka.errors.NoError


def test_offsets_of_a_group(python_admin: KafkaAdminClient, bootstrap: str, topic: str, group: str) -> None:
    confluent.publish(bootstrap, topic, numbered(20))
    partition = TopicPartition(topic, 0)
    altered = python_admin.alter_group_offsets(group, {partition: OffsetAndMetadata(7, "note", -1)})
    assert altered == {partition: kafka.errors.NoError}
    assert python_admin.list_group_offsets(group)[group][partition].offset == 7
    assert python_admin.list_group_offsets(group)[group][partition].metadata == "note"
    python_admin.reset_group_offsets(group, {partition: OffsetSpec.LATEST})
    assert python_admin.list_group_offsets(group)[group][partition].offset == 20
    assert python_admin.delete_group_offsets(group, [partition]) == {partition: kafka.errors.NoError}
    assert python_admin.list_group_offsets({group: [partition]})[group][partition].offset == -1


def test_offsets_of_several_groups_at_once(
    python_admin: KafkaAdminClient, topic: str, unique: Callable[[str], str]
) -> None:
    partition = TopicPartition(topic, 0)
    groups = {unique("group"): offset for offset in (3, 5)}
    for group, offset in groups.items():
        python_admin.alter_group_offsets(group, {partition: OffsetAndMetadata(offset, "", -1)})
    listed = python_admin.list_group_offsets(list(groups))
    assert {group: stored[partition].offset for group, stored in listed.items()} == groups
    assert set(python_admin.delete_groups(list(groups))) == set(groups)
    assert python_admin.list_group_offsets(list(groups)) == {group: {} for group in groups}


def test_offsets_in_use_are_not_deleted(
    python_admin: KafkaAdminClient, bootstrap: str, topic: str, group: str, closing: contextlib.ExitStack
) -> None:
    member = kafka_python.consumer(bootstrap, topic, group_id=group)
    closing.callback(member.close)
    eventually(lambda: member.poll(50) is not None and member.assignment())
    partition = TopicPartition(topic, 0)
    member.commit({partition: OffsetAndMetadata(0, "", -1)})
    refused = python_admin.delete_group_offsets(group, [partition])
    assert refused == {partition: kafka.errors.GroupSubscribedToTopicError}


def test_a_commit_for_an_unknown_topic_is_refused(
    python_admin: KafkaAdminClient, group: str, unique: Callable[[str], str]
) -> None:
    partition = TopicPartition(unique("missing"), 0)
    answer = python_admin.alter_group_offsets(group, {partition: OffsetAndMetadata(1, "", -1)})
    assert answer == {partition: kafka.errors.UnknownTopicOrPartitionError}


def test_too_long_a_note_on_a_commit_is_refused(
    python_admin: KafkaAdminClient, topic: str, group: str
) -> None:
    partition = TopicPartition(topic, 0)
    answer = python_admin.alter_group_offsets(group, {partition: OffsetAndMetadata(1, "x" * 5000, -1)})
    assert answer == {partition: kafka.errors.OffsetMetadataTooLargeError}
