"""What decisions about leaders are made of."""

from collections.abc import Iterator

from penstock.cluster.image import ClusterImage
from penstock.cluster.records import NO_LEADER_CHANGE, PartitionChangeRecord
from penstock.cluster.state import PartitionState, TopicState


def all_partitions(image: ClusterImage) -> Iterator[tuple[TopicState, int, PartitionState]]:
    for topic in image.topics.values():
        for index, partition in topic.partitions.items():
            yield topic, index, partition


def partition_change(
    topic: TopicState, index: int, *, leader: int = NO_LEADER_CHANGE
) -> PartitionChangeRecord:
    return PartitionChangeRecord(partition_id=index, topic_id=topic.id, leader=leader)
