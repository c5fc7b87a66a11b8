"""A snapshot restores the same image."""

from uuid import UUID

import pytest
from tests.unit.cluster.clusters import broker, cluster, create, fence, register, unfence

from penstock.cluster import rare_records
from penstock.cluster.controller.create_topics import NewTopic
from penstock.cluster.image import ClusterImage, PartitionState
from penstock.cluster.image_snapshot import RECORDS_MAX, snapshot_records
from penstock.cluster.metadata_records import (
    BrokerFeature,
    ConfigRecord,
    FeatureLevelRecord,
    ProducerIdsRecord,
    decode_record,
    encode_records,
)


def again(image: ClusterImage) -> ClusterImage:
    made = ClusterImage()
    for batch in snapshot_records(image):
        made.apply(map(decode_record, encode_records(batch)))
    made.check_invariants()
    return made


def full() -> ClusterImage:
    image = cluster(3)
    feature = BrokerFeature(name="f", min_supported_version=0, max_supported_version=2)
    register(image, broker(4, rack="r")._replace(features=(feature,)), epoch=4)
    create(
        image,
        NewTopic(name="a.b", assignments=((0, (1, 2)), (1, (2, 3))), configs=(("retention.ms", "5"),)),
        NewTopic(name="c", partitions=3, replication_factor=3),
    )
    fence(image, 1)
    fence(image, 2)
    entity = (rare_records.QuotaEntity(entity_type="user", entity_name="u"),)
    image.apply(
        [
            ConfigRecord(resource_type=4, resource_name="", name="num.partitions", value="3"),
            FeatureLevelRecord(name="f", feature_level=2),
            ProducerIdsRecord(broker_id=1, broker_epoch=1, next_producer_id=3000),
            rare_records.ClientQuotaRecord(entity=entity, key="producer_byte_rate", value=5.0, remove=False),
            rare_records.ClientQuotaRecord(entity=entity, key="consumer_byte_rate", value=6.0, remove=False),
            rare_records.BrokerRegistrationChangeRecord(
                broker_id=3, broker_epoch=3, in_controlled_shutdown=1
            ),
        ]
    )
    return image


def test_everything_is_there_again() -> None:
    image = full()
    made = again(image)
    assert made == image
    assert made.colliding_topic("a_b") == "a.b"
    assert made.security.quotas == image.security.quotas
    assert any(partition.elr for partition in made.topics["a.b"].partitions.values())


def test_an_image_that_differs_is_not_equal() -> None:
    image = full()
    for change in (
        ConfigRecord(resource_type=4, resource_name="", name="num.partitions", value="4"),
        FeatureLevelRecord(name="f", feature_level=1),
        ProducerIdsRecord(broker_id=1, broker_epoch=1, next_producer_id=4000),
        rare_records.FenceBrokerRecord(id=3, epoch=3),
    ):
        other = image.fork()
        assert other == image
        other.replay(change)
        assert other != image
    unfenced = image.fork()
    unfence(unfenced, 2)
    assert unfenced != image


def test_no_batch_grows_with_the_cluster() -> None:
    image = cluster(1)
    create(image, *(NewTopic(name=f"t{n}", partitions=20) for n in range(5)))
    for number in range(100, 900):
        image.replay(ConfigRecord(resource_type=32, resource_name=f"g{number}", name="x", value="1"))
    sizes = [len(batch) for batch in snapshot_records(image)]
    assert max(sizes) == RECORDS_MAX
    assert len(sizes) == 2
    assert again(image) == image


def test_an_empty_image_needs_no_records() -> None:
    assert list(snapshot_records(ClusterImage())) == []


def test_half_a_transaction_has_no_snapshot() -> None:
    image = cluster(1)
    image.replay(rare_records.BeginTransactionRecord())
    with pytest.raises(AssertionError, match="transaction"):
        list(snapshot_records(image))


@pytest.mark.parametrize(
    "wrong",
    [
        {"isr": (1, 4)},
        {"isr": (1, 1)},
        {"elr": (1,)},
        {"elr": (9,)},
        {"last_known_elr": (9,)},
        {"leader": 3},
        {"isr": ()},
        {"adding_replicas": (9,)},
        {"removing_replicas": (9,)},
        {"adding_replicas": (2,), "removing_replicas": (2,)},
        {"directories": (UUID(int=500),)},
    ],
)
def test_an_unsound_partition_is_noticed(wrong: dict[str, tuple[int, ...]]) -> None:
    image = cluster(3)
    create(image, NewTopic(name="t", assignments=((0, (1, 2, 3)),)))
    sound: PartitionState = image.topics["t"].partitions[0]._replace(isr=(1, 2))
    image.topics["t"].partitions[0] = sound
    image.check_invariants()
    image.topics["t"].partitions[0] = sound._replace(**wrong)  # type: ignore[arg-type]
    with pytest.raises(AssertionError):
        image.check_invariants()
