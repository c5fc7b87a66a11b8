"""The topics of the cluster's image, as the rules of groups see them."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING
from uuid import UUID

from penstock.groups.topics import Topic

if TYPE_CHECKING:
    from penstock.broker.node import Node
    from penstock.cluster.delta import ImageDelta
    from penstock.cluster.state import TopicState


class GroupTopics:
    """`node.groups.topics`. Leaders and in-sync sets change often and do not concern groups: no new version."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._known: dict[str, Topic] = {}
        self._racks: dict[int, str | None] = {}
        self.version = 0

    def get(self, name: str) -> Topic | None:
        known = self._known.get(name)
        if known is None:
            state = self._node.image.topics.get(name)
            if state is not None:
                known = self._known[name] = self._topic(state)
        return known

    def by_id(self, id: UUID) -> Topic | None:
        state = self._node.image.topics_by_id.get(id)
        return None if state is None else self.get(state.name)

    def names(self) -> Collection[str]:
        return self._node.image.topics.keys()

    def image_changed(self, delta: ImageDelta) -> None:
        """Called as soon as the new image can be seen, before anyone asks about it."""
        is_news = bool(delta.topics_deleted or delta.topics_created)
        for topic in (*delta.topics_deleted, *delta.topics_created):
            self._known.pop(topic.name, None)
        if delta.brokers_changed and self._racks_changed():
            self._known.clear()
            is_news = True
        for name in dict.fromkeys(topic for topic, _ in delta.partitions_changed):
            known = self._known.pop(name, None)
            is_news |= known is not None and known != self.get(name)
        self.version += is_news

    def _topic(self, state: TopicState) -> Topic:
        """Numbers run from 0 without gaps, in any order."""
        partitions = state.partitions
        racks = (self._racks_of(partitions[number].replicas) for number in range(len(partitions)))
        return Topic(state.name, state.id, tuple(racks))

    def _racks_of(self, replicas: tuple[int, ...]) -> frozenset[str]:
        racks = (self._racks.get(broker_id) for broker_id in replicas)
        return frozenset(rack for rack in racks if rack is not None)

    def _racks_changed(self) -> bool:
        racks = {broker.id: broker.rack for broker in self._node.image.brokers.values()}
        changed = racks != self._racks
        self._racks = racks
        return changed
