"""AllocateProducerIds (key 67), v0. Gives a broker a block of producer ids that is never reused.

Only the active controller serves it.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from kio.schema.allocate_producer_ids.v0.response import AllocateProducerIdsResponse

from penstock.broker.network.requests import RequestContext
from penstock.cluster.controller.brokers import ProducerIdBlock, allocate_producer_ids
from penstock.protocol.errors import ApiError, ErrorCode


async def handle(ctx: RequestContext, request: Any) -> Any:
    try:
        block = await ctx.services.metadata.propose(
            lambda image: allocate_producer_ids(
                image, broker_id=request.broker_id, broker_epoch=request.broker_epoch
            )
        )
    except ApiError as error:
        return _response(error.code, ProducerIdBlock(-1, 0))
    return _response(ErrorCode.none, block)


def _response(error: ErrorCode, block: ProducerIdBlock) -> Any:
    return AllocateProducerIdsResponse(
        throttle_time=timedelta(0),
        error_code=error,
        producer_id_start=block.first,
        producer_id_len=block.length,
    )
