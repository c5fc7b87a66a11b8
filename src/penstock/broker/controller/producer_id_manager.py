"""New producer ids for this node, from blocks that the controller allocates to it permanently."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from penstock.cluster.controller.brokers import ProducerIdBlock, allocate_producer_ids
from penstock.protocol.errors import ApiError, ErrorCode

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.broker.controller.channel import ControllerChannel
    from penstock.broker.quorum.metadata_log import MetadataLog

_ALLOCATE_PRODUCER_IDS: Final = 67
#: Shorter than the request timeout of a client.
_TIMEOUT_S: Final = 5.0
_RETRIABLE: Final = frozenset(
    {ErrorCode.not_controller, ErrorCode.request_timed_out, ErrorCode.stale_broker_epoch}
)


class ProducerIdManager:
    """Hands out each id only once; the unused rest of a block is lost when the process ends."""

    def __init__(
        self,
        node_id: int,
        metadata: MetadataLog,
        channel: ControllerChannel,
        broker_epoch: Callable[[], int],
    ) -> None:
        self._node_id = node_id
        self._metadata = metadata
        self._channel = channel
        self._broker_epoch = broker_epoch
        self._next = self._end = 0
        self._refill = asyncio.Lock()

    async def fresh(self) -> int:
        """Return a new producer id. Raises ApiError: COORDINATOR_LOAD_IN_PROGRESS while no controller is reachable."""
        if self._next == self._end:
            async with self._refill:
                if self._next == self._end:
                    block = await self._block()
                    self._next, self._end = block.first, block.first + block.length
        producer_id, self._next = self._next, self._next + 1
        return producer_id

    async def _block(self) -> ProducerIdBlock:
        try:
            if self._metadata.is_active:
                epoch = self._metadata.image.brokers[self._node_id].epoch
                return await self._metadata.propose(
                    lambda image: allocate_producer_ids(image, broker_id=self._node_id, broker_epoch=epoch)
                )
            return await self._ask_for_block()
        except ApiError as error:
            if error.code in _RETRIABLE:
                # Every client retries after this error code, and none after the others.
                raise ApiError(ErrorCode.coordinator_load_in_progress, error.message) from None
            raise

    async def _ask_for_block(self) -> ProducerIdBlock:
        from kio.schema.allocate_producer_ids.v0.request import AllocateProducerIdsRequest

        request = AllocateProducerIdsRequest(broker_id=self._node_id, broker_epoch=self._broker_epoch())
        response = await self._channel.call(_ALLOCATE_PRODUCER_IDS, request, _TIMEOUT_S)
        if response.error_code is not ErrorCode.none:
            raise ApiError(response.error_code)
        return ProducerIdBlock(response.producer_id_start, response.producer_id_len)
