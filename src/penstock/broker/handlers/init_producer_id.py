"""InitProducerId (key 22), v0-5. A fresh producer id, epoch 0, for every idempotent producer that asks.

As in Apache Kafka a producer without a transactional id gets a new id even when it names its old one. There
are no transactions yet: a transactional id is refused with the one code that every client takes as final.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from kio.schema.init_producer_id.v6.response import InitProducerIdResponse

from penstock.broker.context import RequestContext
from penstock.protocol.errors import ApiError, ErrorCode

_NONE = -1


async def handle(ctx: RequestContext, request: Any) -> Any:
    try:
        _refuse_impossible(request)
        if not ctx.node.settings.is_broker:
            raise ApiError(ErrorCode.coordinator_not_available)
        return _response(ErrorCode.none, await ctx.node.producer_ids.fresh(), 0)
    except ApiError as error:
        return _response(error.code, _NONE, _NONE)


def _refuse_impossible(request: Any) -> None:
    half_named = (request.producer_id == _NONE) != (request.producer_epoch == _NONE)
    if half_named or request.transactional_id == "":
        raise ApiError(ErrorCode.invalid_request)
    if request.transactional_id is not None:
        raise ApiError(ErrorCode.transactional_id_authorization_failed)


def _response(error: ErrorCode, producer_id: int, epoch: int) -> Any:
    return InitProducerIdResponse(
        throttle_time=timedelta(0), error_code=error, producer_id=producer_id, producer_epoch=epoch
    )
