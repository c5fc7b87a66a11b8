"""Administration through confluent-kafka: topics, partitions, settings, groups, offsets, records and the cluster."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import (
    ConsumerGroupState,
    ConsumerGroupTopicPartitions,
    ConsumerGroupType,
    IsolationLevel,
    KafkaError,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ConfigSource,
    NewPartitions,
    NewTopic,
    OffsetSpec,
)
from tests.compat import confluent
from tests.compat.message import Message, numbered
from tests.waiting import eventually

TIMEOUT_S = 60.0
TOPIC, BROKER = ConfigResource.Type.TOPIC, ConfigResource.Type.BROKER


def refusal(future: Any) -> int:
    """The error code with which the broker refused."""
    with pytest.raises(KafkaException) as refused:
        future.result(TIMEOUT_S)
    code: int = refused.value.args[0].code()
    return code


def settings_of(admin: AdminClient, topic: str) -> dict[str, ConfigEntry]:
    [future] = admin.describe_configs([ConfigResource(TOPIC, topic)]).values()
    described: dict[str, ConfigEntry] = future.result(TIMEOUT_S)
    return described


def alter(admin: AdminClient, topic: str, name: str, value: str | None, operation: AlterConfigOpType) -> Any:
    entry = ConfigEntry(name, value, incremental_operation=operation)
    resource = ConfigResource(TOPIC, topic, incremental_configs=[entry])
    return admin.incremental_alter_configs([resource])[resource]


def test_a_topic_is_created_described_and_deleted(admin: AdminClient, unique: Callable[[str], str]) -> None:
    name = unique("topic")
    confluent.create_topic(admin, name, partitions=3)
    described = admin.describe_topics(TopicCollection([name]))[name].result(TIMEOUT_S)
    assert described.name == name
    assert [each.id for each in described.partitions] == [0, 1, 2]
    assert all(
        len(each.replicas) == len(each.isr) == 1 and each.leader is not None for each in described.partitions
    )
    assert not described.is_internal
    admin.delete_topics([name])[name].result(TIMEOUT_S)
    eventually(lambda: name not in admin.list_topics(timeout=TIMEOUT_S).topics)
    assert refusal(admin.delete_topics([name])[name]) == KafkaError.UNKNOWN_TOPIC_OR_PART


def test_a_topic_is_created_only_once(admin: AdminClient, topic: str) -> None:
    assert refusal(admin.create_topics([NewTopic(topic, 1, 1)])[topic]) == KafkaError.TOPIC_ALREADY_EXISTS


@pytest.mark.parametrize("name", ["", ".", "..", "with space", "sl/ash", "ümlaut", "x" * 250])
def test_an_illegal_topic_name_is_refused(admin: AdminClient, name: str) -> None:
    if not name:
        with pytest.raises((KafkaException, ValueError)):
            admin.create_topics([NewTopic(name, 1, 1)])[name].result(TIMEOUT_S)
        return
    assert refusal(admin.create_topics([NewTopic(name, 1, 1)])[name]) == KafkaError.TOPIC_EXCEPTION


def test_names_that_differ_only_in_dots_and_underscores_collide(
    admin: AdminClient, unique: Callable[[str], str]
) -> None:
    name = unique("topic")
    confluent.create_topic(admin, f"{name}.a")
    other = f"{name}_a"
    assert refusal(admin.create_topics([NewTopic(other, 1, 1)])[other]) == KafkaError.TOPIC_EXCEPTION


@pytest.mark.parametrize(
    ("new_topic_arguments", "code"),
    [
        pytest.param(
            {"num_partitions": 0, "replication_factor": 1}, KafkaError.INVALID_PARTITIONS, id="partitions"
        ),
        pytest.param(
            {"num_partitions": 1, "replication_factor": 9}, KafkaError.INVALID_REPLICATION_FACTOR, id="rf"
        ),
        pytest.param(
            {"num_partitions": 1, "replication_factor": 1, "config": {"no.such.setting": "1"}},
            KafkaError.INVALID_CONFIG,
            id="unknown-setting",
        ),
        pytest.param(
            {"num_partitions": 1, "replication_factor": 1, "config": {"retention.ms": "soon"}},
            KafkaError.INVALID_CONFIG,
            id="wrong-value",
        ),
    ],
)
def test_an_impossible_topic_is_refused(
    admin: AdminClient, unique: Callable[[str], str], new_topic_arguments: Any, code: int
) -> None:
    name = unique("topic")
    assert refusal(admin.create_topics([NewTopic(name, **new_topic_arguments)])[name]) == code
    assert name not in admin.list_topics(timeout=TIMEOUT_S).topics


def test_creation_can_be_tried_without_effect(admin: AdminClient, unique: Callable[[str], str]) -> None:
    name = unique("topic")
    admin.create_topics([NewTopic(name, 2, 1)], validate_only=True)[name].result(TIMEOUT_S)
    assert name not in admin.list_topics(timeout=TIMEOUT_S).topics


def test_defaults_and_explicit_placement(admin: AdminClient, unique: Callable[[str], str]) -> None:
    by_default, placed = unique("default"), unique("placed")
    [node] = admin.list_topics(timeout=TIMEOUT_S).brokers
    topics = [NewTopic(by_default), NewTopic(placed, num_partitions=2, replica_assignment=[[node], [node]])]
    for future in admin.create_topics(topics).values():
        future.result(TIMEOUT_S)
    eventually(lambda: len(admin.list_topics(placed, timeout=TIMEOUT_S).topics[placed].partitions) == 2)
    eventually(
        lambda: len(admin.list_topics(by_default, timeout=TIMEOUT_S).topics[by_default].partitions) == 1
    )


def test_partitions_can_be_added_but_not_taken(
    admin: AdminClient, topic: str, unique: Callable[[str], str]
) -> None:
    confluent.add_partitions(admin, topic, 4)
    fewer = admin.create_partitions([NewPartitions(topic, 2)])[topic]
    assert refusal(fewer) == KafkaError.INVALID_PARTITIONS
    missing = unique("missing")
    assert (
        refusal(admin.create_partitions([NewPartitions(missing, 2)])[missing])
        == KafkaError.UNKNOWN_TOPIC_OR_PART
    )


def test_settings_are_described_with_their_defaults(
    admin: AdminClient, new_topic: Callable[..., str]
) -> None:
    described = settings_of(admin, new_topic(**{"retention.ms": "60000"}))
    assert described["retention.ms"].value == "60000"
    assert described["retention.ms"].source == ConfigSource.DYNAMIC_TOPIC_CONFIG.value
    assert not described["retention.ms"].is_default
    expected = {
        "cleanup.policy": "delete",
        "compression.type": "producer",
        "delete.retention.ms": "86400000",
        "max.message.bytes": "1048588",
        "message.timestamp.type": "CreateTime",
        "min.cleanable.dirty.ratio": "0.5",
        "retention.bytes": "-1",
        "segment.bytes": "1073741824",
        "segment.ms": "604800000",
    }
    assert {name: described[name].value for name in expected} == expected
    assert all(described[name].is_default for name in expected)
    assert described["cleanup.policy"].source == ConfigSource.DEFAULT_CONFIG.value
    assert not any(entry.is_read_only or entry.is_sensitive for entry in described.values())


def test_settings_of_a_node_are_described(admin: AdminClient) -> None:
    [node] = admin.list_topics(timeout=TIMEOUT_S).brokers
    [future] = admin.describe_configs([ConfigResource(BROKER, str(node))]).values()
    described = future.result(TIMEOUT_S)
    assert described["node.id"].value == str(node)
    assert described["node.id"].is_read_only
    assert {"message.max.bytes", "log.retention.hours", "num.partitions", "offsets.retention.minutes"} <= set(
        described
    )


def test_settings_of_a_missing_topic(admin: AdminClient, unique: Callable[[str], str]) -> None:
    [future] = admin.describe_configs([ConfigResource(TOPIC, unique("missing"))]).values()
    assert refusal(future) == KafkaError.UNKNOWN_TOPIC_OR_PART


def test_settings_are_changed_one_by_one(admin: AdminClient, new_topic: Callable[..., str]) -> None:
    topic = new_topic(**{"retention.ms": "60000", "cleanup.policy": "delete"})

    def value(name: str) -> str:
        return str(settings_of(admin, topic)[name].value)

    alter(admin, topic, "retention.bytes", "1000", AlterConfigOpType.SET).result(TIMEOUT_S)
    eventually(lambda: (value("retention.bytes"), value("retention.ms")) == ("1000", "60000"))
    alter(admin, topic, "cleanup.policy", "compact", AlterConfigOpType.APPEND).result(TIMEOUT_S)
    eventually(lambda: set(value("cleanup.policy").split(",")) == {"delete", "compact"})
    alter(admin, topic, "cleanup.policy", "delete", AlterConfigOpType.SUBTRACT).result(TIMEOUT_S)
    eventually(lambda: value("cleanup.policy") == "compact")
    alter(admin, topic, "retention.ms", None, AlterConfigOpType.DELETE).result(TIMEOUT_S)
    eventually(lambda: value("retention.ms") == "604800000")


def test_settings_are_replaced_as_a_whole(admin: AdminClient, new_topic: Callable[..., str]) -> None:
    """The older call forgets what it does not name."""
    topic = new_topic(**{"retention.ms": "60000"})
    resource = ConfigResource(TOPIC, topic, set_config={"segment.bytes": "2000000"})
    admin.alter_configs([resource])[resource].result(TIMEOUT_S)
    eventually(lambda: settings_of(admin, topic)["segment.bytes"].value == "2000000")
    assert settings_of(admin, topic)["retention.ms"].is_default


@pytest.mark.parametrize(
    ("name", "value"), [("retention.ms", "soon"), ("no.such.setting", "1"), ("cleanup.policy", "x")]
)
def test_a_wrong_setting_is_refused(admin: AdminClient, topic: str, name: str, value: str) -> None:
    assert refusal(alter(admin, topic, name, value, AlterConfigOpType.SET)) == KafkaError.INVALID_CONFIG


def test_a_change_of_settings_can_be_tried_without_effect(admin: AdminClient, topic: str) -> None:
    entry = ConfigEntry("retention.ms", "1234", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(TOPIC, topic, incremental_configs=[entry])
    admin.incremental_alter_configs([resource], validate_only=True)[resource].result(TIMEOUT_S)
    assert settings_of(admin, topic)["retention.ms"].is_default


def test_the_cluster_is_described(admin: AdminClient, bootstrap: str) -> None:
    described = admin.describe_cluster().result(TIMEOUT_S)
    assert described.cluster_id
    [node] = described.nodes
    assert f"{node.host}:{node.port}" == bootstrap
    assert described.controller.id == node.id
    assert admin.cluster_id(TIMEOUT_S) == described.cluster_id


def test_offsets_are_listed_by_every_kind_of_place(admin: AdminClient, bootstrap: str, topic: str) -> None:
    now_ms = 1_700_000_000_000
    times = [now_ms, now_ms + 900, now_ms + 500]
    alter(admin, topic, "retention.ms", "-1", AlterConfigOpType.SET).result(TIMEOUT_S)
    eventually(lambda: settings_of(admin, topic)["retention.ms"].value == "-1")
    confluent.publish(bootstrap, topic, [Message(value=b"", timestamp_ms=each) for each in times])
    places = {
        OffsetSpec.earliest(): 0,
        OffsetSpec.latest(): 3,
        OffsetSpec.max_timestamp(): 1,
        OffsetSpec.for_timestamp(now_ms + 1): 1,
    }
    partition = TopicPartition(topic, 0)
    for spec, offset in places.items():
        for level in (IsolationLevel.READ_UNCOMMITTED, IsolationLevel.READ_COMMITTED):
            listed = admin.list_offsets({partition: spec}, isolation_level=level)[partition].result(TIMEOUT_S)
            assert listed.offset == offset, spec


def test_records_are_deleted_up_to_an_offset(admin: AdminClient, bootstrap: str, topic: str) -> None:
    confluent.publish(bootstrap, topic, numbered(20))
    deleted = admin.delete_records([TopicPartition(topic, 0, 15)])
    assert [each.result(TIMEOUT_S).low_watermark for each in deleted.values()] == [15]
    assert [each.offset for each in confluent.read(bootstrap, topic, 5)] == [15, 16, 17, 18, 19]
    beyond = admin.delete_records([TopicPartition(topic, 0, 100)])
    assert [refusal(each) for each in beyond.values()] == [KafkaError.OFFSET_OUT_OF_RANGE]
    everything = admin.delete_records([TopicPartition(topic, 0, -1)])
    assert [each.result(TIMEOUT_S).low_watermark for each in everything.values()] == [20]


def test_groups_are_listed_and_described(
    admin: AdminClient, bootstrap: str, topic: str, group: str, closing: contextlib.ExitStack
) -> None:
    member = confluent.consumer(
        bootstrap, group, client_id="the-client", partition_assignment_strategy="range"
    )
    closing.callback(member.close)
    member.subscribe([topic])
    eventually(lambda: confluent.assigned(member, topic) == {0})
    described = admin.describe_consumer_groups([group])[group].result(TIMEOUT_S)
    assert described.state == ConsumerGroupState.STABLE
    assert described.partition_assignor == "range"
    assert described.type == ConsumerGroupType.CLASSIC
    assert not described.is_simple_consumer_group
    [only] = described.members
    assert only.client_id == "the-client"
    assert only.assignment.topic_partitions == [TopicPartition(topic, 0)]
    stable = admin.list_consumer_groups(states={ConsumerGroupState.STABLE}).result(TIMEOUT_S)
    assert group in {each.group_id for each in stable.valid}
    empty = admin.list_consumer_groups(states={ConsumerGroupState.EMPTY}).result(TIMEOUT_S)
    assert group not in {each.group_id for each in empty.valid}
    classic = admin.list_consumer_groups(types={ConsumerGroupType.CLASSIC}).result(TIMEOUT_S)
    assert group in {each.group_id for each in classic.valid}


def test_a_group_is_deleted_only_when_empty(
    admin: AdminClient, bootstrap: str, topic: str, group: str
) -> None:
    member = confluent.consumer(bootstrap, group)
    member.subscribe([topic])
    eventually(lambda: confluent.assigned(member, topic) == {0})
    assert refusal(admin.delete_consumer_groups([group])[group]) == KafkaError.NON_EMPTY_GROUP
    member.commit(offsets=[TopicPartition(topic, 0, 3)], asynchronous=False)
    member.close()
    eventually(lambda: _state(admin, group) == ConsumerGroupState.EMPTY)
    admin.delete_consumer_groups([group])[group].result(TIMEOUT_S)
    assert group not in {each.group_id for each in admin.list_consumer_groups().result(TIMEOUT_S).valid}
    assert refusal(admin.delete_consumer_groups([group])[group]) == KafkaError.GROUP_ID_NOT_FOUND


def _state(admin: AdminClient, group: str) -> ConsumerGroupState:
    state: ConsumerGroupState = admin.describe_consumer_groups([group])[group].result(TIMEOUT_S).state
    return state


def test_offsets_of_a_group_are_altered_and_listed(
    admin: AdminClient, bootstrap: str, topic: str, group: str
) -> None:
    wanted = ConsumerGroupTopicPartitions(group, [TopicPartition(topic, 0, 11)])
    [altered] = admin.alter_consumer_group_offsets([wanted]).values()
    assert [each.error for each in altered.result(TIMEOUT_S).topic_partitions] == [None]
    [listed] = admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)]).values()
    [stored] = listed.result(TIMEOUT_S).topic_partitions
    assert (stored.topic, stored.partition, stored.offset) == (topic, 0, 11)
    assert _state(admin, group) == ConsumerGroupState.EMPTY
    member = confluent.consumer(bootstrap, group)
    member.subscribe([topic])
    eventually(lambda: confluent.assigned(member, topic) == {0})
    [while_active] = admin.alter_consumer_group_offsets([wanted]).values()
    [refused] = while_active.result(TIMEOUT_S).topic_partitions
    assert refused.error.code() == KafkaError.UNKNOWN_MEMBER_ID
    member.close()
