"""AddOffsetsToTxn (key 25), v0-4. The group's partition of `__consumer_offsets` joins the transaction.

Producers of the newer protocol do not ask: their TxnOffsetCommit does it.
"""

from __future__ import annotations

from typing import Any

from kio.schema.add_offsets_to_txn.v4.response import AddOffsetsToTxnResponse

from penstock.broker.context import RequestContext
from penstock.broker.group_requests import NO_THROTTLE
from penstock.broker.transactions.requests import FENCED_FROM, refuse_nameless, told
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.transactions.messages import AddRequest


async def handle(ctx: RequestContext, request: Any) -> Any:
    try:
        error = await _add(ctx, request)
    except ApiError as failed:
        error = failed.code
    return AddOffsetsToTxnResponse(
        throttle_time=NO_THROTTLE, error_code=told(error, knows_fenced=ctx.version >= FENCED_FROM)
    )


async def _add(ctx: RequestContext, request: Any) -> ErrorCode:
    refuse_nameless(request.transactional_id)
    transactions = ctx.node.transactions
    transactions.callers.refuse_late(ctx, request.transactional_id)
    # A producer may name a group before anybody has looked for its coordinator.
    await ctx.node.groups.ensure_topic()
    partition = transactions.offsets_partition(request.group_id)
    reply = await transactions.add_partitions(
        AddRequest(request.transactional_id, request.producer_id, request.producer_epoch, (partition,))
    )
    return reply.error
