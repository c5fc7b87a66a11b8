"""What a run of metadata records changed: all that a broker needs to look at after replaying them."""

from typing import NamedTuple
from uuid import UUID

from penstock.cluster.state import ConfigResource, ResourceType, TopicState


class TopicPartition(NamedTuple):
    topic: str
    partition: int


class ImageDelta(NamedTuple):
    """A topic that came and went within the run is in neither list; one made anew under its old name is in
    both, so deletions are to be acted on first."""

    topics_deleted: tuple[TopicState, ...] = ()  # as they were
    topics_created: tuple[TopicState, ...] = ()
    partitions_changed: tuple[TopicPartition, ...] = ()  # new ones included; all exist in the image
    configs_changed: tuple[ConfigResource, ...] = ()
    brokers_changed: tuple[int, ...] = ()
    features_changed: bool = False

    def __bool__(self) -> bool:
        return self != _NOTHING


class DeltaNotes:
    """Collects an ImageDelta while records are replayed. Dictionaries keep the order and drop repeats."""

    __slots__ = ("brokers", "configs", "created", "deleted", "features_changed", "partitions")

    def __init__(self) -> None:
        self.created: dict[UUID, TopicState] = {}
        self.deleted: dict[UUID, TopicState] = {}
        self.partitions: dict[tuple[UUID, int], TopicPartition] = {}
        self.configs: dict[ConfigResource, None] = {}
        self.brokers: dict[int, None] = {}
        self.features_changed = False

    def topic_created(self, topic: TopicState) -> None:
        self.created[topic.id] = topic

    def topic_deleted(self, topic: TopicState) -> None:
        if self.created.pop(topic.id, None) is None:
            self.deleted[topic.id] = topic
        for index in topic.partitions:
            self.partitions.pop((topic.id, index), None)
        self.configs.pop(ConfigResource(ResourceType.TOPIC, topic.name), None)

    def partition_changed(self, topic: TopicState, index: int) -> None:
        self.partitions[topic.id, index] = TopicPartition(topic.name, index)

    def finish(self) -> ImageDelta:
        return ImageDelta(
            topics_deleted=tuple(self.deleted.values()),
            topics_created=tuple(self.created.values()),
            partitions_changed=tuple(self.partitions.values()),
            configs_changed=tuple(self.configs),
            brokers_changed=tuple(self.brokers),
            features_changed=self.features_changed,
        )


_NOTHING = ImageDelta()
