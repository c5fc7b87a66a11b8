"""Only replay changes the image, and it returns what has changed."""

from uuid import UUID

import pytest
from tests.unit.cluster.clusters import broker, cluster, create

from penstock.cluster import metadata_records, rare_records
from penstock.cluster.controller.create_topics import NewTopic
from penstock.cluster.image import (
    ClusterImage,
    ConfigResource,
    Endpoint,
    PartitionState,
    ResourceType,
    TopicPartition,
)

TOPIC = UUID(int=77)


def partition_record(index: int = 0, topic_id: UUID = TOPIC) -> metadata_records.PartitionRecord:
    return metadata_records.PartitionRecord(
        partition_id=index,
        topic_id=topic_id,
        replicas=(1, 2, 3),
        isr=(1, 2, 3),
        leader=1,
        leader_epoch=0,
        partition_epoch=0,
        directories=(metadata_records.UNASSIGNED_DIRECTORY,) * 3,
    )


def with_topic() -> ClusterImage:
    image = cluster(3)
    image.apply([metadata_records.TopicRecord(name="t", topic_id=TOPIC), partition_record()])
    return image


def changed(**what: object) -> PartitionState:
    image = with_topic()
    image.replay(metadata_records.PartitionChangeRecord(partition_id=0, topic_id=TOPIC, **what))  # type: ignore[arg-type]
    image.check_invariants()
    return image.topics["t"].partitions[0]


def test_a_topic_is_found_by_name_and_by_id() -> None:
    image = with_topic()
    assert image.topics["t"] is image.topics_by_id[TOPIC]
    assert image.partition("t", 0) is image.topics["t"].partitions[0]
    assert image.partition("t", 1) is None
    assert image.partition("other", 0) is None


def test_a_new_leader_starts_an_epoch() -> None:
    partition = changed(leader=2)
    assert (partition.leader, partition.leader_epoch, partition.partition_epoch) == (2, 1, 1)


def test_naming_the_same_leader_starts_an_epoch_too() -> None:
    partition = changed(leader=1)
    assert (partition.leader, partition.leader_epoch, partition.partition_epoch) == (1, 1, 1)


def test_an_isr_change_keeps_the_leader_epoch() -> None:
    partition = changed(isr=(1, 3))
    assert partition.isr == (1, 3)
    assert (partition.leader, partition.leader_epoch, partition.partition_epoch) == (1, 0, 1)


def test_what_a_change_does_not_name_stays() -> None:
    partition = changed(eligible_leader_replicas=(2,), isr=(1, 3), leader_recovery_state=1)
    assert partition.elr == (2,)
    assert partition.replicas == (1, 2, 3)
    assert partition.leader_recovering


def test_removing_a_topic_takes_its_settings_along() -> None:
    image = with_topic()
    config = metadata_records.ConfigRecord(resource_type=2, resource_name="t", name="retention.ms", value="1")
    image.replay(config)
    assert image.config(ResourceType.TOPIC, "t") == {"retention.ms": "1"}
    image.replay(metadata_records.RemoveTopicRecord(topic_id=TOPIC))
    assert image.topics == {}
    assert image.configs == {}
    image.check_invariants()


def test_a_setting_without_a_value_is_gone() -> None:
    image = ClusterImage()
    for value in ("5", None):
        image.replay(
            metadata_records.ConfigRecord(
                resource_type=4, resource_name="", name="num.partitions", value=value
            )
        )
    assert image.configs == {}


def test_brokers_are_known_by_what_they_said_last() -> None:
    image = cluster(1)
    assert image.brokers[1].endpoints == {"PLAINTEXT": Endpoint("b1", 9092, 0)}
    assert image.brokers[1].is_active
    change = rare_records.BrokerRegistrationChangeRecord(
        broker_id=1, broker_epoch=1, in_controlled_shutdown=1
    )
    image.replay(change)
    assert not image.brokers[1].is_active
    assert not image.brokers[1].fenced
    image.replay(rare_records.FenceBrokerRecord(id=1, epoch=1))
    assert image.brokers[1].fenced
    image.replay(rare_records.UnregisterBrokerRecord(broker_id=1, broker_epoch=1))
    assert image.brokers == {}


def test_a_record_of_an_earlier_broker_epoch_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="epoch"):
        cluster(1).replay(rare_records.FenceBrokerRecord(id=1, epoch=0))


def test_producer_ids_never_go_back() -> None:
    image = ClusterImage()
    image.replay(metadata_records.ProducerIdsRecord(broker_id=1, broker_epoch=1, next_producer_id=1000))
    with pytest.raises(AssertionError):
        image.replay(metadata_records.ProducerIdsRecord(broker_id=1, broker_epoch=1, next_producer_id=1000))


def test_features_have_levels_until_they_have_none() -> None:
    image = ClusterImage()
    image.replay(metadata_records.FeatureLevelRecord(name="group.version", feature_level=1))
    assert image.features == {"group.version": 1}
    image.replay(metadata_records.FeatureLevelRecord(name="group.version", feature_level=0))
    assert image.features == {}


def test_a_metadata_transaction_shows_at_its_end() -> None:
    image = cluster(3)
    begun = [
        rare_records.BeginTransactionRecord(),
        metadata_records.TopicRecord(name="t", topic_id=TOPIC),
        partition_record(),
    ]
    assert not image.apply(begun)
    assert image.topics == {}
    delta = image.apply([rare_records.EndTransactionRecord()])
    assert [topic.name for topic in delta.topics_created] == ["t"]
    image.check_invariants()


def test_an_aborted_metadata_transaction_never_happened() -> None:
    image = cluster(3)
    image.apply(
        [rare_records.BeginTransactionRecord(), metadata_records.TopicRecord(name="t", topic_id=TOPIC)]
    )
    image.apply([rare_records.AbortTransactionRecord(), rare_records.NoOpRecord()])
    assert image.topics == {}
    image.check_invariants()


def test_tenants_are_remembered() -> None:
    image = ClusterImage()
    entity = (rare_records.QuotaEntity(entity_type="user", entity_name="a"),)
    image.replay(
        rare_records.ClientQuotaRecord(entity=entity, key="producer_byte_rate", value=5.0, remove=False)
    )
    assert image.security.quotas == {(("user", "a"),): {"producer_byte_rate": 5.0}}
    image.replay(
        rare_records.ClientQuotaRecord(entity=entity, key="producer_byte_rate", value=0.0, remove=True)
    )
    assert image.security.quotas == {}


# --- what changed ---


def test_a_delta_names_new_topics_partitions_settings_and_brokers() -> None:
    image = cluster(3)
    delta = image.apply(
        [
            metadata_records.TopicRecord(name="t", topic_id=TOPIC),
            metadata_records.ConfigRecord(resource_type=2, resource_name="t", name="retention.ms", value="1"),
            partition_record(0),
            partition_record(1),
            metadata_records.PartitionChangeRecord(partition_id=0, topic_id=TOPIC, leader=2),
            rare_records.FenceBrokerRecord(id=3, epoch=3),
            metadata_records.FeatureLevelRecord(name="f", feature_level=1),
        ]
    )
    assert delta.topics_created == (image.topics["t"],)
    assert delta.partitions_changed == (TopicPartition("t", 0), TopicPartition("t", 1))
    assert delta.configs_changed == (ConfigResource(2, "t"),)
    assert delta.brokers_changed == (3,)
    assert delta.features_changed
    assert delta


def test_a_topic_that_came_and_went_is_in_no_delta() -> None:
    image = cluster(3)
    delta = image.apply(
        [
            metadata_records.TopicRecord(name="t", topic_id=TOPIC),
            metadata_records.ConfigRecord(resource_type=2, resource_name="t", name="retention.ms", value="1"),
            partition_record(),
            metadata_records.RemoveTopicRecord(topic_id=TOPIC),
        ]
    )
    assert not delta


def test_a_topic_recreated_under_its_name_is_deleted_and_created() -> None:
    image = with_topic()
    again = UUID(int=78)
    delta = image.apply(
        [
            metadata_records.RemoveTopicRecord(topic_id=TOPIC),
            metadata_records.TopicRecord(name="t", topic_id=again),
            partition_record(0, again),
        ]
    )
    assert [topic.id for topic in delta.topics_deleted] == [TOPIC]
    assert list(delta.topics_deleted[0].partitions) == [0]
    assert [topic.id for topic in delta.topics_created] == [again]
    assert delta.partitions_changed == (TopicPartition("t", 0),)


def test_each_delta_is_its_own() -> None:
    image = with_topic()
    assert not image.apply([])
    delta = image.apply([metadata_records.PartitionChangeRecord(partition_id=0, topic_id=TOPIC, leader=2)])
    assert delta.topics_created == ()
    assert delta.partitions_changed == (TopicPartition("t", 0),)


def test_colliding_names_follow_the_topics() -> None:
    image = cluster()
    create(image, NewTopic(name="a.b"))
    assert image.colliding_topic("a_b") == "a.b"
    assert image.colliding_topic("a.b") is None
    image.replay(metadata_records.RemoveTopicRecord(topic_id=image.topics["a.b"].id))
    assert image.colliding_topic("a_b") is None


def test_a_fresh_image_shows_what_it_holds() -> None:
    assert repr(cluster(2)) == "<ClusterImage 0 topics, brokers [1, 2], {}>"
    assert broker(1).rack is None
