"""The topics of a node's image, as groups look at them."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING
from uuid import UUID

from penstock.groups.topics import Topic

if TYPE_CHECKING:
    from penstock.cluster.image import TopicState
    from simulation.node import Node


class ImageTopics:
    def __init__(self, node: Node) -> None:
        self._node = node

    @property
    def version(self) -> int:
        return self._node.metadata.applied

    def get(self, name: str) -> Topic | None:
        found = self._node.image.topics.get(name)
        return None if found is None else self._topic(found)

    def by_id(self, id: UUID) -> Topic | None:
        found = self._node.image.topics_by_id.get(id)
        return None if found is None else self._topic(found)

    def names(self) -> Collection[str]:
        return tuple(self._node.image.topics)

    def _topic(self, state: TopicState) -> Topic:
        racks = self._node.cluster.machines
        return Topic(
            state.name,
            state.id,
            tuple(
                frozenset(racks[replica].rack for replica in state.partitions[index].replicas)
                for index in sorted(state.partitions)
            ),
        )
