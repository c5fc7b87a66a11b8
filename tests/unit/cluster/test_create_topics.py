"""Creating topics."""

from collections import Counter
from uuid import UUID

import pytest
from tests.unit.cluster.clusters import CHANCE, CONTROLLER, RULES, broker, cluster, create, register, unfence

from penstock.cluster.controller.create_topics import NewTopic, TopicDefaults, create_topics
from penstock.cluster.controller.heartbeats import fence_broker
from penstock.cluster.image import ClusterImage, ResourceType
from penstock.cluster.metadata_records import BrokerEndpoint, ConfigRecord, PartitionRecord, TopicRecord
from penstock.cluster.topic_settings import ConfigLayer, ConfigSource
from penstock.protocol.errors import ErrorCode
from penstock.protocol.steps import finish


def test_a_topic_gets_the_clusters_defaults() -> None:
    image = cluster()
    (result,) = create(image, NewTopic(name="orders"))
    assert result.error is ErrorCode.none
    assert (result.partitions, result.replication_factor) == (2, 1)
    topic = image.topics["orders"]
    assert topic.id == result.topic_id
    partition = topic.partitions[1]
    assert (partition.replicas, partition.isr, partition.leader) == ((1,), (1,), 1)
    assert (partition.leader_epoch, partition.partition_epoch) == (0, 0)
    assert partition.directories == (UUID(int=101),)


def test_settings_come_before_partitions() -> None:
    decision = finish(
        create_topics(
            cluster(), [NewTopic(name="t", configs=(("retention.ms", "5"),))], rules=RULES, chance=CHANCE
        )
    )
    assert [type(record) for record in decision.records] == [
        TopicRecord, ConfigRecord, PartitionRecord, PartitionRecord,
    ]  # fmt: skip


def test_the_reply_shows_the_settings_in_effect() -> None:
    image = cluster()
    node = ConfigLayer(ConfigSource.STATIC_BROKER, {"log.segment.bytes": "2000"})
    rules = TopicDefaults(partitions=1, replication_factor=1, partitions_max=10, node=(node,))
    (result,) = create(image, NewTopic(name="t", configs=(("retention.ms", "5"),)), rules=rules)
    assert result.settings["retention.ms"].text == "5"
    assert result.settings["retention.ms"].source is ConfigSource.TOPIC
    assert result.settings["segment.bytes"].source is ConfigSource.STATIC_BROKER
    assert image.config(ResourceType.TOPIC, "t") == {"retention.ms": "5"}


def test_validate_only_says_the_same_and_does_nothing() -> None:
    image = cluster()
    good, bad = create(image, NewTopic(name="t"), NewTopic(name="?"), validate_only=True)
    assert (good.error, good.partitions) == (ErrorCode.none, 2)
    assert bad.error is ErrorCode.invalid_topic_exception
    assert image.topics == {}


@pytest.mark.parametrize(
    ("topic", "code", "reason"),
    [
        (NewTopic(name=""), ErrorCode.invalid_topic_exception, "the empty string is not allowed"),
        (NewTopic(name="."), ErrorCode.invalid_topic_exception, "'.' is not allowed"),
        (NewTopic(name=".."), ErrorCode.invalid_topic_exception, "'..' is not allowed"),
        (NewTopic(name="a" * 250), ErrorCode.invalid_topic_exception, "longer than the max allowed length 249"),
        (NewTopic(name="a b"), ErrorCode.invalid_topic_exception, "other than ASCII alphanumerics"),
        (NewTopic(name="größe"), ErrorCode.invalid_topic_exception, "other than ASCII alphanumerics"),
        (NewTopic(name="a\n"), ErrorCode.invalid_topic_exception, "other than ASCII alphanumerics"),
        (NewTopic(name="taken"), ErrorCode.topic_already_exists, "Topic 'taken' already exists."),
        (NewTopic(name="is.taken"), ErrorCode.topic_already_exists, "already exists"),
        (NewTopic(name="is_taken"), ErrorCode.invalid_topic_exception, "collides with existing topic: is.taken"),
        (NewTopic(name="__cluster_metadata"), ErrorCode.invalid_request, "prohibited"),
        (NewTopic(name="t", partitions=0), ErrorCode.invalid_partitions, "non-positive"),
        (NewTopic(name="t", partitions=-2), ErrorCode.invalid_partitions, "non-positive"),
        (NewTopic(name="t", partitions=101), ErrorCode.policy_violation, "at most 100 partitions"),
        (NewTopic(name="t", partitions=2**31 - 1), ErrorCode.policy_violation, "at most 100 partitions"),
        (NewTopic(name="t", replication_factor=0), ErrorCode.invalid_replication_factor, "larger than 0"),
        (NewTopic(name="t", replication_factor=-2), ErrorCode.invalid_replication_factor, "larger than 0"),
        (NewTopic(name="t", replication_factor=4), ErrorCode.invalid_replication_factor, "only 3 broker"),
        (NewTopic(name="t", configs=(("nope", "1"),)), ErrorCode.invalid_config, "Unknown topic config name: nope"),
        (NewTopic(name="t", configs=(("retention.ms", None),)), ErrorCode.invalid_config, "Null value not supported"),
        (NewTopic(name="t", partitions=1, assignments=((0, (1,)),)), ErrorCode.invalid_request, "numPartitions"),
        (
            NewTopic(name="t", replication_factor=1, assignments=((0, (1,)),)),
            ErrorCode.invalid_request,
            "replication factor",
        ),
        (NewTopic(name="t", assignments=((0, ()),)), ErrorCode.invalid_replica_assignment, "empty replica list"),
        (NewTopic(name="t", assignments=((0, (9,)),)), ErrorCode.invalid_replica_assignment, "broker 9"),
        (NewTopic(name="t", assignments=((0, (1, 1)),)), ErrorCode.invalid_replica_assignment, "more than once"),
        (
            NewTopic(name="t", assignments=((0, (1,)), (1, (1, 2)))),
            ErrorCode.invalid_replica_assignment,
            "not consistent",
        ),
        (NewTopic(name="t", assignments=((1, (1,)),)), ErrorCode.invalid_replica_assignment, "consecutive"),
        (
            NewTopic(name="t", assignments=((0, (1,)), (0, (2,)))),
            ErrorCode.invalid_replica_assignment,
            "multiple manual partition assignments",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_with_the_reason(topic: NewTopic, code: ErrorCode, reason: str) -> None:
    image = cluster(3)
    create(image, NewTopic(name="taken"), NewTopic(name="is.taken"))
    before = set(image.topics)
    (result,) = create(image, topic)
    assert result.error is code
    assert result.message is not None
    assert reason in result.message
    assert set(image.topics) == before


def test_one_bad_topic_leaves_the_others_alone() -> None:
    image = cluster()
    results = create(image, NewTopic(name="a"), NewTopic(name="!"), NewTopic(name="b"))
    assert [result.error for result in results] == [
        ErrorCode.none, ErrorCode.invalid_topic_exception, ErrorCode.none,
    ]  # fmt: skip
    assert set(image.topics) == {"a", "b"}


def test_a_name_asked_for_twice_is_refused_once() -> None:
    image = cluster()
    results = create(image, NewTopic(name="a"), NewTopic(name="b"), NewTopic(name="a", partitions=3))
    assert [(result.name, result.error) for result in results] == [
        ("a", ErrorCode.invalid_request), ("b", ErrorCode.none),
    ]  # fmt: skip
    assert set(image.topics) == {"b"}


def test_names_of_one_request_may_not_collide_either() -> None:
    results = create(cluster(), NewTopic(name="a.b"), NewTopic(name="a_b"))
    assert [result.error for result in results] == [ErrorCode.none, ErrorCode.invalid_topic_exception]


def test_the_bound_on_partitions_is_for_the_whole_request() -> None:
    results = create(cluster(), NewTopic(name="a", partitions=60), NewTopic(name="b", partitions=60))
    assert [result.error for result in results] == [ErrorCode.none, ErrorCode.policy_violation]


def test_a_longest_name_is_fine() -> None:
    (result,) = create(cluster(), NewTopic(name="a" * 249))
    assert result.error is ErrorCode.none


def test_manual_assignments_are_kept_as_given() -> None:
    image = cluster(3)
    (result,) = create(image, NewTopic(name="t", assignments=((1, (3, 1)), (0, (2, 3)))))
    assert (result.partitions, result.replication_factor) == (2, 2)
    assert image.topics["t"].partitions[0].replicas == (2, 3)
    assert image.topics["t"].partitions[1].leader == 3


def test_a_fenced_broker_is_no_leader_and_not_in_sync() -> None:
    image = cluster(3)
    image.apply(fence_broker(image, 2, rules=CONTROLLER).records)
    create(image, NewTopic(name="t", assignments=((0, (2, 3)),)))
    partition = image.topics["t"].partitions[0]
    assert (partition.replicas, partition.isr, partition.leader) == ((2, 3), (3,), 3)
    (result,) = create(image, NewTopic(name="u", assignments=((0, (2,)),)))
    assert result.error is ErrorCode.invalid_replica_assignment


def test_leaders_spread_over_brokers() -> None:
    image = cluster(3)
    create(image, NewTopic(name="t", partitions=9, replication_factor=3))
    assert Counter(p.leader for p in image.topics["t"].partitions.values()) == {1: 3, 2: 3, 3: 3}


@pytest.mark.parametrize(("racks", "apart"), [((None, None, None), {3}), (("x", "y", "z"), {1, 2, 3})])
def test_nodes_of_one_host_count_as_one_rack_unless_they_say_otherwise(
    racks: tuple[str | None, ...], apart: set[int]
) -> None:
    """Brokers 1 and 2 share a host."""
    image = ClusterImage()
    for number, (host, rack) in enumerate(zip(("h", "h", "i"), racks, strict=True), start=1):
        endpoint = BrokerEndpoint(name="PLAINTEXT", host=host, port=9000 + number, security_protocol=0)
        register(image, broker(number, rack=rack)._replace(endpoints=(endpoint,)), epoch=number)
        unfence(image, number)
    create(image, NewTopic(name="t", partitions=6, replication_factor=2))
    pairs = [set(partition.replicas) for partition in image.topics["t"].partitions.values()]
    assert set.intersection(*pairs) == (apart if len(apart) == 1 else set())
    assert ({1, 2} in pairs) == (len(apart) == 3)
