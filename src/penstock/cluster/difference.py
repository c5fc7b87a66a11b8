"""What is different between two images, for who has to follow from one to the other without the records between."""

from collections.abc import Mapping
from typing import TypeVar

from penstock.cluster.delta import ImageDelta, TopicPartition
from penstock.cluster.image import ClusterImage

Key = TypeVar("Key")


def image_difference(old: ClusterImage, new: ClusterImage) -> ImageDelta:
    """As if the records between them had been replayed."""
    return ImageDelta(
        topics_deleted=tuple(topic for id, topic in old.topics_by_id.items() if id not in new.topics_by_id),
        topics_created=tuple(topic for id, topic in new.topics_by_id.items() if id not in old.topics_by_id),
        partitions_changed=tuple(_partitions_changed(old, new)),
        configs_changed=_changed(old.configs, new.configs),
        brokers_changed=_changed(old.brokers, new.brokers),
        features_changed=old.features != new.features,
    )


def _partitions_changed(old: ClusterImage, new: ClusterImage) -> list[TopicPartition]:
    changed = []
    for id, topic in new.topics_by_id.items():
        before = old.topics_by_id.get(id)
        if before is topic:
            continue
        known = before.partitions if before is not None else {}
        changed += [
            TopicPartition(topic.name, index)
            for index, state in topic.partitions.items()
            if known.get(index) != state
        ]
    return changed


def _changed(old: Mapping[Key, object], new: Mapping[Key, object]) -> tuple[Key, ...]:
    return tuple(key for key in {**old, **new} if old.get(key) != new.get(key))
