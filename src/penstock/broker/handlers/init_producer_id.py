"""InitProducerId (key 22), v0-6. A producer id and epoch, for an idempotent or a transactional producer.

Without a transactional id it is a fresh id with epoch 0, also for a producer that names its old one, as in Apache
Kafka. With one the coordinator fences whoever had it before; while it has to abort an open transaction for that, the
answer is CONCURRENT_TRANSACTIONS and the producer asks again. A producer that goes on after an error names itself (v3).
v6 is of two-phase transactions: with `keep_prepared_txn` the open one stays, and its producer id and epoch are told.
"""

from __future__ import annotations

from typing import Any, Final

from kio.schema.init_producer_id.v6.response import InitProducerIdResponse

from penstock.broker.context import RequestContext
from penstock.broker.group_requests import NO_THROTTLE, milliseconds
from penstock.protocol.errors import ApiError, ErrorCode

_NONE: Final = -1
_FENCED_FROM: Final = 4


async def handle(ctx: RequestContext, request: Any) -> Any:
    try:
        _refuse_impossible(request)
        if not ctx.node.settings.is_broker:
            raise ApiError(ErrorCode.coordinator_not_available)
        if request.transactional_id is not None:
            return await _init_transactional(ctx, request)
        return _response(ErrorCode.none, await ctx.node.producer_ids.fresh(), 0)
    except ApiError as error:
        return _response(error.code)


def _refuse_impossible(request: Any) -> None:
    half_named = (request.producer_id == _NONE) != (request.producer_epoch == _NONE)
    if half_named or request.transactional_id == "":
        raise ApiError(ErrorCode.invalid_request)


async def _init_transactional(ctx: RequestContext, request: Any) -> Any:
    from penstock.broker.transactions.requests import told
    from penstock.transactions.messages import InitRequest

    reply = await ctx.node.transactions.init_producer_id(
        InitRequest(
            request.transactional_id,
            milliseconds(request.transaction_timeout),
            request.producer_id,
            request.producer_epoch,
            request.enable2_pc,
            request.keep_prepared_txn,
        )
    )
    error = told(reply.error, knows_fenced=ctx.version >= _FENCED_FROM)
    return _response(error, reply.producer_id, reply.epoch, reply.ongoing_producer_id, reply.ongoing_epoch)


def _response(
    error: ErrorCode,
    producer_id: int = _NONE,
    epoch: int = _NONE,
    ongoing_producer_id: int = _NONE,
    ongoing_epoch: int = _NONE,
) -> Any:
    return InitProducerIdResponse(
        throttle_time=NO_THROTTLE,
        error_code=error,
        producer_id=producer_id,
        producer_epoch=epoch,
        ongoing_txn_producer_id=ongoing_producer_id,
        ongoing_txn_producer_epoch=ongoing_epoch,
    )
