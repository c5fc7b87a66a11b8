"""EndTxn (key 26), v0-5. Commit or abort: answered once the decision is safe, while the markers are on their way.

From v5 on every transaction has an epoch of its own, and the answer is the producer id and epoch of the next one, so
that a request that comes late never ends a later transaction (KIP-890). Before v5 its connection shows that it is late:
see `Callers`.
"""

from __future__ import annotations

from typing import Any, Final

from kio.schema.end_txn.v5.response import EndTxnResponse

from penstock.broker.context import RequestContext
from penstock.broker.group_requests import NO_THROTTLE
from penstock.broker.transactions.requests import FENCED_FROM, protocol_version, refuse_nameless, told
from penstock.protocol.errors import ApiError
from penstock.transactions.messages import EndReply, EndRequest

_EPOCH_PER_TRANSACTION_FROM: Final = 5


async def handle(ctx: RequestContext, request: Any) -> Any:
    try:
        refuse_nameless(request.transactional_id)
        if ctx.version < _EPOCH_PER_TRANSACTION_FROM:
            ctx.node.transactions.callers.refuse_late(ctx, request.transactional_id)
        reply = await ctx.node.transactions.end(
            EndRequest(
                request.transactional_id,
                request.producer_id,
                request.producer_epoch,
                request.committed,
                protocol_version(ctx.version >= _EPOCH_PER_TRANSACTION_FROM),
            )
        )
    except ApiError as error:
        reply = EndReply(error.code)
    return EndTxnResponse(
        throttle_time=NO_THROTTLE,
        error_code=told(reply.error, knows_fenced=ctx.version >= FENCED_FROM),
        producer_id=reply.producer_id,
        producer_epoch=reply.epoch,
    )
