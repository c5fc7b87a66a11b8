"""EndTxn (key 26), v0-5. Commits or aborts; the reply waits until the decision is durable, not for the markers.

From v5 on every transaction has its own epoch, and the response carries the producer id and epoch of the next one, so
that a late request cannot end a later transaction (KIP-890). Before v5 the connection shows whether a request is late:
see `ProducerConnections`.
"""

from __future__ import annotations

from typing import Any, Final

from kio.schema.end_txn.v5.response import EndTxnResponse

from penstock.broker.coordinators.requests import NO_THROTTLE
from penstock.broker.coordinators.transactions.requests import (
    PRODUCER_FENCED_FROM_VERSION,
    check_transactional_id,
    error_for_version,
    protocol_version,
)
from penstock.broker.network.requests import RequestContext
from penstock.protocol.errors import ApiError
from penstock.transactions.messages import EndTxnReply, EndTxnRequest

_EPOCH_PER_TRANSACTION_FROM: Final = 5


async def handle(ctx: RequestContext, request: Any) -> Any:
    try:
        check_transactional_id(request.transactional_id)
        if ctx.version < _EPOCH_PER_TRANSACTION_FROM:
            ctx.services.transactions.callers.check_newest_connection(ctx, request.transactional_id)
        reply = await ctx.services.transactions.end(
            EndTxnRequest(
                request.transactional_id,
                request.producer_id,
                request.producer_epoch,
                request.committed,
                protocol_version(ctx.version >= _EPOCH_PER_TRANSACTION_FROM),
            )
        )
    except ApiError as error:
        reply = EndTxnReply(error.code)
    return EndTxnResponse(
        throttle_time=NO_THROTTLE,
        error_code=error_for_version(reply.error, knows_fenced=ctx.version >= PRODUCER_FENCED_FROM_VERSION),
        producer_id=reply.producer_id,
        producer_epoch=reply.epoch,
    )
