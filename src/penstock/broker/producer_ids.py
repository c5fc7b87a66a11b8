"""Fresh producer ids for this node, out of blocks that the cluster has given it for good."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from penstock.cluster.controller.producer_ids import ProducerIdBlock, allocate_producer_ids

if TYPE_CHECKING:
    from penstock.broker.node import Node


class ProducerIds:
    """What is left of a block is lost with the process; an id is never given out twice."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._next = self._end = 0
        self._refill = asyncio.Lock()

    async def fresh(self) -> int:
        """Raises ApiError when the metadata log cannot be written."""
        if self._next == self._end:
            async with self._refill:
                if self._next == self._end:
                    block = await self._block()
                    self._next, self._end = block.first, block.first + block.length
        producer_id, self._next = self._next, self._next + 1
        return producer_id

    async def _block(self) -> ProducerIdBlock:
        broker_id = self._node.node_id
        epoch = self._node.image.brokers[broker_id].epoch
        return await self._node.metadata.propose(
            lambda image: allocate_producer_ids(image, broker_id=broker_id, broker_epoch=epoch)
        )
