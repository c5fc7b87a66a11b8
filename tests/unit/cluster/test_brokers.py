"""Brokers register and leave; leaders, producer ids and features follow."""

import pytest
from tests.unit.cluster.clusters import (
    CHANCE,
    CONTROLLER,
    RULES,
    broker,
    cluster,
    create,
    fence,
    register,
    unfence,
)

from penstock.cluster.controller.brokers import allocate_producer_ids, restart_sole_broker, set_feature_levels
from penstock.cluster.controller.create_topics import NewTopic, create_topics
from penstock.cluster.controller.heartbeats import fence_broker, unfence_broker, unregister_broker
from penstock.cluster.image import ClusterImage, PartitionState
from penstock.cluster.metadata_records import (
    BrokerFeature,
    MetadataRecord,
    PartitionChangeRecord,
    decode_record,
    encode_records,
)
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.steps import finish


def partition(image: ClusterImage, topic: str = "t", index: int = 0) -> PartitionState:
    image.check_invariants()
    return image.topics[topic].partitions[index]


def test_a_broker_is_fenced_until_it_is_ready() -> None:
    image = ClusterImage()
    assert register(image, broker(1), epoch=5).reply == 5
    assert image.brokers[1].fenced
    unfence(image, 1)
    assert image.brokers[1].is_active


def test_a_stale_epoch_unfences_no_broker() -> None:
    image = cluster()
    with pytest.raises(ApiError) as refused:
        unfence_broker(image, 1, broker_epoch=0, rules=CONTROLLER)
    assert refused.value.code is ErrorCode.stale_broker_epoch


def test_fencing_moves_the_lead_to_the_next_in_sync() -> None:
    image = cluster(3)
    create(image, NewTopic(name="t", assignments=((0, (1, 2, 3)), (1, (2, 1, 3)))))
    fence(image, 1)
    led, followed = partition(image, index=0), partition(image, index=1)
    assert (led.leader, led.isr, led.leader_epoch) == (2, (2, 3), 1)
    assert (followed.leader, followed.isr, followed.leader_epoch) == (2, (2, 3), 0)


def test_the_last_in_sync_replica_is_remembered_and_leads_again() -> None:
    image = cluster(2)
    create(image, NewTopic(name="t", assignments=((0, (1, 2)),)))
    fence(image, 1)
    fence(image, 2)
    alone = partition(image)
    assert (alone.leader, alone.isr, alone.elr, alone.leader_epoch) == (-1, (), (2,), 2)
    unfence(image, 1)
    assert partition(image).leader == -1, "broker 1 may lack what broker 2 acknowledged"
    unfence(image, 2)
    assert (partition(image).leader, partition(image).leader_epoch) == (2, 3)


def test_an_unregistered_broker_leads_nothing() -> None:
    image = cluster(2)
    create(image, NewTopic(name="t", assignments=((0, (1, 2)),)))
    image.apply(unregister_broker(image, 1, rules=CONTROLLER).records)
    assert partition(image).leader == 2
    assert set(image.brokers) == {2}
    with pytest.raises(ApiError) as refused:
        unregister_broker(image, 1, rules=CONTROLLER)
    assert refused.value.code is ErrorCode.broker_id_not_registered


def test_a_sole_broker_starts_and_restarts_in_one_step() -> None:
    image = ClusterImage()
    image.apply(restart_sole_broker(image, broker(1), broker_epoch=0, rules=CONTROLLER).records)
    assert image.brokers[1].is_active
    create(image, NewTopic(name="t", partitions=1))
    # The process dies without a word; its successor has another incarnation.
    image.apply(
        restart_sole_broker(image, broker(1, incarnation=1), broker_epoch=8, rules=CONTROLLER).records
    )
    assert (image.brokers[1].epoch, image.brokers[1].is_active) == (8, True)
    assert (partition(image).leader, partition(image).leader_epoch) == (1, 1)


def test_an_image_rebuilt_from_the_log_is_the_same() -> None:
    image, log = ClusterImage(), list[bytes]()

    def commit(records: tuple[MetadataRecord, ...]) -> None:
        log.extend(encode_records(records))
        image.apply(records)

    commit(restart_sole_broker(image, broker(1), broker_epoch=0, rules=CONTROLLER).records)
    topic = NewTopic(name="t", partitions=4, configs=(("retention.ms", "1"),))
    commit(finish(create_topics(image, [topic], rules=RULES, chance=CHANCE)).records)
    commit(restart_sole_broker(image, broker(1, incarnation=1), broker_epoch=9, rules=CONTROLLER).records)
    commit(allocate_producer_ids(image, broker_id=1, broker_epoch=9).records)
    again = ClusterImage()
    for value in log:
        again.replay(decode_record(value))
    again.check_invariants()
    assert again.topics == image.topics
    assert again.configs == image.configs
    assert again.brokers == image.brokers
    assert again.next_producer_id == image.next_producer_id == 1000


def test_producer_ids_come_in_blocks_that_never_overlap() -> None:
    image = cluster()
    first = allocate_producer_ids(image, broker_id=1, broker_epoch=1)
    image.apply(first.records)
    second = allocate_producer_ids(image, broker_id=1, broker_epoch=1)
    assert (first.reply.first, first.reply.length) == (0, 1000)
    assert second.reply.first == 1000


def test_a_replaced_broker_gets_no_producer_ids() -> None:
    for broker_id, epoch in ((1, 0), (2, 1)):
        with pytest.raises(ApiError) as refused:
            allocate_producer_ids(cluster(), broker_id=broker_id, broker_epoch=epoch)
        assert refused.value.code is ErrorCode.stale_broker_epoch


def test_feature_levels_are_raised_only_as_far_as_every_broker_goes() -> None:
    image = ClusterImage()
    features = (BrokerFeature(name="group.version", min_supported_version=0, max_supported_version=1),)
    registration = broker(1)._replace(features=features)
    image.apply(restart_sole_broker(image, registration, broker_epoch=0, rules=CONTROLLER).records)
    image.apply(set_feature_levels(image, {"group.version": 1}).records)
    assert image.features == {"group.version": 1}
    assert set_feature_levels(image, {"group.version": 1}).records == ()
    for levels in ({"group.version": 2}, {"share.version": 1}):
        with pytest.raises(ApiError) as refused:
            set_feature_levels(image, levels)
        assert refused.value.code is ErrorCode.invalid_update_version
    image.apply(set_feature_levels(image, {"group.version": 0}).records)
    assert image.features == {}


def test_a_leader_change_is_all_that_a_follower_change_is_not() -> None:
    image = cluster(2)
    create(image, NewTopic(name="t", assignments=((0, (1, 2)),)))
    (_, change) = fence_broker(image, 2, rules=CONTROLLER).records
    assert change == PartitionChangeRecord(partition_id=0, topic_id=image.topics["t"].id, isr=(1,))


def test_fencing_twice_changes_no_partition_twice() -> None:
    image = cluster(2)
    create(
        image, NewTopic(name="t", assignments=((0, (1, 2)),)), NewTopic(name="s", assignments=((0, (2,)),))
    )
    assert len(fence(image, 2).records) == 3
    assert len(fence_broker(image, 2, rules=CONTROLLER).records) == 1
