"""The base classes of the coordinators.

`ShardedTopic` is an internal topic whose partitions are shards. It is created when it is first needed, and the
controller raises its replication factor when brokers join. The leader of a partition serves that shard. The hash of
a key selects the shard, as in Kafka. `ShardedCoordinator` runs the shards on the coordinator runtime: it loads a
shard when this broker becomes its leader, and unloads it when another broker does.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from penstock.broker.coordinators.requests import exceeds_utf8_bytes
from penstock.broker.coordinators.runtime.runtime import (
    ActiveShard,
    CoordinatorResult,
    CoordinatorRuntime,
    ShardT,
    Token,
)
from penstock.cluster.controller.create_topics import CreateTopicResult, NewTopic
from penstock.cluster.image import ImageDelta
from penstock.groups.topics import coordinator_partition
from penstock.protocol.errors import ApiError, ErrorCode

if TYPE_CHECKING:
    from penstock.broker.config.internal_topics import InternalTopic
    from penstock.broker.config.node_settings import NodeSettings
    from penstock.broker.environment import Environment, ImageView, Partitions
    from penstock.broker.partition.partition import Partition
    from penstock.cluster.image import ClusterImage


logger = logging.getLogger("penstock.coordinator")

#: Created by us, created by another broker a moment ago, or created while a disk has no space for a replica.
_TOPIC_EXISTS_CODES: Final = frozenset(
    {ErrorCode.none, ErrorCode.topic_already_exists, ErrorCode.kafka_storage_error}
)


#: Creates topics in the cluster; returns once the image of this node has them. Raises ApiError.
CreateTopics = Callable[[Sequence[NewTopic]], Awaitable[Sequence[CreateTopicResult]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorContext:
    """What all coordinators use of their broker."""

    node_id: int
    settings: NodeSettings
    metadata: ImageView
    partitions: Partitions
    environment: Environment
    create_topics: CreateTopics


def leads_in_epoch(partition: Partition, leader_epoch: int) -> bool:
    """Whether this node still leads the partition in this leader epoch. Work that belongs to the epoch ends with it."""
    return partition.is_leader and partition.leader_epoch == leader_epoch and not partition.is_retired


class ShardedTopic:
    #: The error code for a key that is too long to be stored.
    _INVALID_KEY_CODE = ErrorCode.invalid_request
    #: How many bytes a key may have in addition to the id that a client chooses.
    _KEY_OVERHEAD_BYTES = 0

    def __init__(self, context: CoordinatorContext, topic: InternalTopic) -> None:
        self._context = context
        self._environment = context.environment
        self.topic = topic
        self._key_bytes_max = context.settings.integer("penstock.id.max.bytes") + self._KEY_OVERHEAD_BYTES
        self._creating: asyncio.Task[None] | None = None

    @property
    def _image(self) -> ClusterImage:
        return self._context.metadata.image

    @property
    def has_topic(self) -> bool:
        """Whether the topic exists with all its partitions."""
        return self.topic.name in self._image.topics and self._creating is None

    async def ensure_topic(self) -> None:
        """Create the topic when it is first needed. Raises ApiError if that fails."""
        if self.has_topic:
            return
        if self._creating is None:
            self._creating = self._environment.spawn(self._create_topic())
        await asyncio.shield(self._creating)

    def shard_of(self, key: str) -> int:
        """The shard of a key. Raises ApiError without the topic, and for a key above `penstock.id.max.bytes`."""
        if exceeds_utf8_bytes(key, self._key_bytes_max):
            raise ApiError(
                self._INVALID_KEY_CODE,
                "An id is longer than penstock.id.max.bytes "
                f"({self._key_bytes_max - self._KEY_OVERHEAD_BYTES}) allows.",
            )
        topic = self._image.topics.get(self.topic.name)
        if topic is None:
            raise ApiError(ErrorCode.not_coordinator)
        return coordinator_partition(key, len(topic.partitions))

    def leader_of(self, key: str) -> int | None:
        """The leader of the shard of a key; None while there is none. Raises ApiError as `shard_of` does."""
        partition = self._image.partition(self.topic.name, self.shard_of(key))
        return None if partition is None or not partition.has_leader else partition.leader

    def shards(self) -> list[int]:
        """The shards that this node leads."""
        topic = self._image.topics.get(self.topic.name)
        if topic is None:
            return []
        led = self._context.partitions.led
        return [index for index in topic.partitions if led(self.topic.name, index) is not None]

    def image_includes_epoch(self, index: int, leader_epoch: int) -> bool:
        """Whether the image includes this leader epoch.

        If so, a topic that the shard refers to and that the image lacks was deleted. A node becomes leader before its
        image shows that; until then, such a topic may also be too new for the image.
        """
        state = self._image.partition(self.topic.name, index)
        return state is not None and state.leader_epoch >= leader_epoch

    def now_ms(self) -> int:
        return self._environment.now_ms()

    async def _create_topic(self) -> None:
        try:
            new_topic = self.topic.new_topic(self._context.settings, len(self._image.active_brokers()))
            (result,) = await self._context.create_topics([new_topic])
        finally:
            self._creating = None
        if result.error not in _TOPIC_EXISTS_CODES:
            logger.error("cannot create %s: %s", self.topic.name, result.message)
            raise ApiError(ErrorCode.coordinator_not_available, result.message)


Result = TypeVar("Result")


class ShardedCoordinator(ShardedTopic, ABC, Generic[ShardT]):
    """What the coordinators of groups, transactions and share group state have in common."""

    def __init__(self, context: CoordinatorContext, topic: InternalTopic) -> None:
        super().__init__(context, topic)
        self._runtime: CoordinatorRuntime[ShardT] = CoordinatorRuntime(
            new_shard=self._new_shard,
            find_partition=lambda index: context.partitions.led(topic.name, index),
            now_ms=context.environment.now_ms,
            in_thread=context.environment.in_thread,
            commit_timeout_s=context.settings.integer(topic.commit_timeout_ms) / 1000,
            on_unreadable=lambda partition, error: context.partitions.handle_read_error(partition, error),
        )

    @abstractmethod
    def _new_shard(self) -> ShardT:
        """Create an empty shard. Import its rules here, so that a node loads them with its first shard."""

    def _led(self, index: int) -> None:
        """Called when this node begins to lead a shard, or leads it in a new epoch. The shard may still be loading."""

    async def start(self) -> None:
        """Load the shards one after the other, even if no client sends a request, so that absent members time out."""
        for index in self.shards():
            await asyncio.wait((self._runtime.load(index),))
            self._led(index)

    def image_changed(self, delta: ImageDelta) -> None:
        """Load the shards that this node now leads, and unload the others."""
        for topic, index in delta.partitions_changed:
            if topic != self.topic.name:
                continue
            if self._context.partitions.led(topic, index) is not None:
                self._runtime.load(index)
                self._led(index)
            else:
                self._runtime.unload(index)

    def close(self) -> None:
        self._runtime.close()

    def loaded_shards(self) -> list[ShardT]:
        """The shards with their uncommitted state: good enough for metrics, not for replies."""
        return self._runtime.loaded_shards()

    async def write(self, key: str, operation: Callable[[ShardT, Token], CoordinatorResult]) -> Any:
        return await self._runtime.write(self.shard_of(key), operation)

    async def write_shard(self, index: int, operation: Callable[[ShardT, Token], CoordinatorResult]) -> Any:
        return await self._runtime.write(index, operation)

    async def active_shard(self, index: int) -> ActiveShard[ShardT]:
        """Return the active shard; see `CoordinatorRuntime.active`. Raises ApiError."""
        return await self._runtime.active(index)

    async def read(self, key: str, question: Callable[[ShardT], Result]) -> Result:
        return await self._runtime.read(self.shard_of(key), question)

    async def read_all(self, question: Callable[[ShardT], Result]) -> Sequence[Result]:
        """Read from every shard that this node leads."""
        return await asyncio.gather(*(self._runtime.read(index, question) for index in self.shards()))

    async def read_each(self, question: Callable[[ShardT], Result]) -> AsyncIterator[Result]:
        """Like `read_all`, but one shard at a time, and yields to the event loop in between: for large results."""
        for index in self.shards():
            yield await self._runtime.read(index, question)
            await asyncio.sleep(0)
