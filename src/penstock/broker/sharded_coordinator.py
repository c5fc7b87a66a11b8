"""A coordinator: shards of an internal topic on the coordinator runtime, coming and going with leadership."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from penstock.broker.coordinator_runtime import ActiveShard, CoordinatorRuntime, ShardT, Token, Work
from penstock.broker.sharded_topic import ShardedTopic
from penstock.cluster.delta import ImageDelta

if TYPE_CHECKING:
    from penstock.broker.internal_topics import InternalTopic
    from penstock.broker.node import Node

Result = TypeVar("Result")


class ShardedCoordinator(ShardedTopic, ABC, Generic[ShardT]):
    """What the coordinators of groups, transactions and share state have in common."""

    def __init__(self, node: Node, topic: InternalTopic) -> None:
        super().__init__(node, topic)
        self._runtime: CoordinatorRuntime[ShardT] = CoordinatorRuntime(
            new_shard=self._new_shard,
            find_partition=lambda index: node.partitions.led(topic.name, index),
            now_ms=node.now_ms,
            in_thread=node.in_thread,
            commit_timeout_s=node.settings.integer(topic.commit_timeout_ms) / 1000,
        )

    @abstractmethod
    def _new_shard(self) -> ShardT:
        """The rules and their schemas are to be loaded here, with the first shard, not with the node."""

    def _led(self, index: int) -> None:
        """This node has begun to lead a shard, or does so in a new epoch; it is loading."""

    async def start(self) -> None:
        """Load what was stored, one shard after the other: time runs out for absent members unasked."""
        for index in self.shards():
            await asyncio.wait((self._runtime.load(index),))
            self._led(index)

    def image_changed(self, delta: ImageDelta) -> None:
        """Shards begin to serve where they are led, and end elsewhere."""
        for topic, index in delta.partitions_changed:
            if topic != self.topic.name:
                continue
            if self._node.partitions.led(topic, index) is not None:
                self._runtime.load(index)
                self._led(index)
            else:
                self._runtime.unload(index)

    def close(self) -> None:
        self._runtime.close()

    def loaded_shards(self) -> list[ShardT]:
        """As they are now, committed or not: for numbers, not for answers."""
        return self._runtime.loaded_shards()

    async def write(self, key: str, operation: Callable[[ShardT, Token], Work]) -> Any:
        return await self._runtime.write(self.shard_of(key), operation)

    async def write_shard(self, index: int, operation: Callable[[ShardT, Token], Work]) -> Any:
        return await self._runtime.write(index, operation)

    async def active_shard(self, index: int) -> ActiveShard[ShardT]:
        """A shard in its present life. Raises ApiError."""
        return await self._runtime.active(index)

    async def read(self, key: str, question: Callable[[ShardT], Result]) -> Result:
        return await self._runtime.read(self.shard_of(key), question)

    async def read_all(self, question: Callable[[ShardT], Result]) -> Sequence[Result]:
        """Of every shard that this node leads."""
        return await asyncio.gather(*(self._runtime.read(index, question) for index in self.shards()))

    async def read_each(self, question: Callable[[ShardT], Result]) -> AsyncIterator[Result]:
        """As `read_all`, one shard after the other, with the loop free in between: for what there may be much of."""
        for index in self.shards():
            yield await self._runtime.read(index, question)
            await asyncio.sleep(0)
