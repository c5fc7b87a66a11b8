"""A forked image changes without its readers seeing it."""

from uuid import UUID

from penstock.cluster.image import ClusterImage, ResourceType
from penstock.cluster.metadata_records import (
    ConfigRecord,
    PartitionChangeRecord,
    PartitionRecord,
    RemoveTopicRecord,
    TopicRecord,
)

TOPIC = UUID(int=7)


def partition_of(topic_id: UUID) -> PartitionRecord:
    return PartitionRecord(
        partition_id=0,
        topic_id=topic_id,
        replicas=(1,),
        isr=(1,),
        leader=1,
        leader_epoch=0,
        partition_epoch=0,
        directories=(UUID(int=9),),
    )


def image_with_a_topic() -> ClusterImage:
    image = ClusterImage()
    image.apply([TopicRecord(name="a.b", topic_id=TOPIC), partition_of(TOPIC)])
    return image


def test_a_change_in_the_fork_stays_there() -> None:
    image = image_with_a_topic()
    fork = image.fork()
    fork.apply(
        [
            PartitionChangeRecord(partition_id=0, topic_id=TOPIC, leader=1),
            ConfigRecord(
                resource_type=ResourceType.TOPIC, resource_name="a.b", name="retention.ms", value="1"
            ),
            TopicRecord(name="other", topic_id=UUID(int=8)),
            partition_of(UUID(int=8)),
        ]
    )
    assert fork.topics["a.b"].partitions[0].leader_epoch == 1
    assert image.topics["a.b"].partitions[0].leader_epoch == 0
    assert set(image.topics) == {"a.b"}
    assert not image.configs
    for each in (image, fork):
        each.check_invariants()


def test_a_topic_removed_in_the_fork_still_serves_the_others() -> None:
    image = image_with_a_topic()
    fork = image.fork()
    fork.apply([RemoveTopicRecord(topic_id=TOPIC)])
    assert not fork.topics
    assert fork.colliding_topic("a_b") is None
    assert image.colliding_topic("a_b") == "a.b"
    assert image.topics["a.b"].partitions[0].leader == 1
