"""InitProducerId (key 22), v0-6. A producer id and epoch, for an idempotent or a transactional producer.

Without a transactional id the response is a new id with epoch 0, even if the producer sends its old id, as in Apache
Kafka. With a transactional id the coordinator fences the previous producer; while it must first abort an open
transaction, the response is CONCURRENT_TRANSACTIONS and the producer retries. A producer that continues after an
error sends its id and epoch (v3). v6 adds two-phase commit: with `keep_prepared_txn` the open transaction stays, and
the response carries its producer id and epoch.
"""

from __future__ import annotations

from typing import Any, Final

from kio.schema.init_producer_id.v6.response import InitProducerIdResponse

from penstock.broker.coordinators.requests import NO_THROTTLE, milliseconds
from penstock.broker.network.requests import RequestContext
from penstock.protocol.acls import Operation, ResourceType
from penstock.protocol.errors import ApiError, ErrorCode

_NONE: Final = -1
_FENCED_FROM: Final = 4


async def handle(ctx: RequestContext, request: Any) -> Any:
    try:
        if ctx.authorizer is not None:
            _check_access(ctx, request.transactional_id, request.enable2_pc)
        _check_request(request)
        if not ctx.services.settings.is_broker:
            raise ApiError(ErrorCode.coordinator_not_available)
        if request.transactional_id is not None:
            return await _init_transactional(ctx, request)
        return _response(ErrorCode.none, await ctx.services.producer_ids.fresh(), 0)
    except ApiError as error:
        return _response(error.code)


def _check_access(ctx: RequestContext, transactional_id: str | None, two_phases: bool) -> None:
    """Raises ApiError. Who may write to any topic may be an idempotent producer."""
    if transactional_id is not None:
        needed = [Operation.WRITE, Operation.TWO_PHASE_COMMIT] if two_phases else [Operation.WRITE]
        if not all(ctx.demand(each, ResourceType.TRANSACTIONAL_ID, transactional_id) for each in needed):
            raise ApiError(ErrorCode.transactional_id_authorization_failed)
    elif not (ctx.may(Operation.IDEMPOTENT_WRITE, ResourceType.CLUSTER) or ctx.may_write_any_topic()):
        ctx.demand(Operation.IDEMPOTENT_WRITE, ResourceType.CLUSTER)
        raise ApiError(ErrorCode.cluster_authorization_failed)


def _check_request(request: Any) -> None:
    half_named = (request.producer_id == _NONE) != (request.producer_epoch == _NONE)
    if half_named or request.transactional_id == "":
        raise ApiError(ErrorCode.invalid_request)


async def _init_transactional(ctx: RequestContext, request: Any) -> Any:
    from penstock.broker.coordinators.transactions.requests import error_for_version
    from penstock.transactions.messages import InitProducerIdRequest

    reply = await ctx.services.transactions.init_producer_id(
        InitProducerIdRequest(
            request.transactional_id,
            milliseconds(request.transaction_timeout),
            request.producer_id,
            request.producer_epoch,
            request.enable2_pc,
            request.keep_prepared_txn,
        )
    )
    error = error_for_version(reply.error, knows_fenced=ctx.version >= _FENCED_FROM)
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
