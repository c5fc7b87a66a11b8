"""An internal topic whose partitions are shards: made when first needed, each shard with the broker that leads it.

The controller raises its replication when brokers join. Which shard a key lives in is decided by its hash, as in Kafka.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from penstock.broker.group_requests import is_longer
from penstock.broker.topic_creation import create_topics_in_cluster
from penstock.cluster.controller.create_topics import NewTopic
from penstock.groups.hashing import partition_of
from penstock.protocol.errors import ApiError, ErrorCode

if TYPE_CHECKING:
    from penstock.broker.internal_topics import InternalTopic
    from penstock.broker.node import Node

logger = logging.getLogger("penstock.coordinator")

#: Made by us, by another broker a moment ago, or made but without room on a disk for now.
_TOPIC_IS_THERE: Final = frozenset(
    {ErrorCode.none, ErrorCode.topic_already_exists, ErrorCode.kafka_storage_error}
)


class ShardedTopic:
    #: What a key is answered that nobody could store.
    _IMPOSSIBLE_KEY = ErrorCode.invalid_request
    #: What a key may have besides an id that a client has chosen.
    _KEY_EXTRA_BYTES = 0

    def __init__(self, node: Node, topic: InternalTopic) -> None:
        self._node = node
        self.topic = topic
        self._key_bytes_max = node.settings.integer("penstock.id.max.bytes") + self._KEY_EXTRA_BYTES
        self._creating: asyncio.Task[None] | None = None

    @property
    def has_topic(self) -> bool:
        """Whether the topic is there, with all its partitions."""
        return self.topic.name in self._node.image.topics and self._creating is None

    async def ensure_topic(self) -> None:
        """The topic is made when it is first needed. Raises ApiError when it cannot be."""
        if self.has_topic:
            return
        if self._creating is None:
            self._creating = self._node.spawn(self._create_topic())
        await asyncio.shield(self._creating)

    def shard_of(self, key: str) -> int:
        """Raises ApiError while there are no shards, and for a key longer than `penstock.id.max.bytes` allows."""
        if is_longer(key, self._key_bytes_max):
            raise ApiError(
                self._IMPOSSIBLE_KEY,
                f"An id is longer than penstock.id.max.bytes ({self._key_bytes_max - self._KEY_EXTRA_BYTES}) allows.",
            )
        topic = self._node.image.topics.get(self.topic.name)
        if topic is None:
            raise ApiError(ErrorCode.not_coordinator)
        return partition_of(key, len(topic.partitions))

    def leader_of(self, key: str) -> int | None:
        """The broker that answers for a key; None while nobody does. Raises ApiError while there are no shards."""
        partition = self._node.image.partition(self.topic.name, self.shard_of(key))
        return None if partition is None or not partition.has_leader else partition.leader

    def shards(self) -> list[int]:
        """Those that this node leads."""
        topic = self._node.image.topics.get(self.topic.name)
        if topic is None:
            return []
        led = self._node.partitions.led
        return [index for index in topic.partitions if led(self.topic.name, index) is not None]

    def image_shows(self, index: int, leader_epoch: int) -> bool:
        """Whether the image is as new as this leadership: what a shard speaks of and is not there has been deleted.

        A node leads before it shows so: until then it may just as well be yet to come.
        """
        state = self._node.image.partition(self.topic.name, index)
        return state is not None and state.leader_epoch >= leader_epoch

    def now_ms(self) -> int:
        return self._node.now_ms()

    async def _create_topic(self) -> None:
        try:
            (result,) = await create_topics_in_cluster(self._node, [self._new_topic()])
        finally:
            self._creating = None
        if result.error not in _TOPIC_IS_THERE:
            logger.error("cannot create %s: %s", self.topic.name, result.message)
            raise ApiError(ErrorCode.coordinator_not_available, result.message)

    def _new_topic(self) -> NewTopic:
        settings = self._node.settings
        # Fewer while there are fewer brokers; the controller raises it when there are more.
        brokers = len(self._node.image.active_brokers())
        return NewTopic(
            name=self.topic.name,
            partitions=settings.integer(self.topic.partitions),
            replication_factor=max(1, min(settings.integer(self.topic.replication_factor), brokers)),
            configs=self.topic.topic_configs(settings),
        )
