"""AddOffsetsToTxn (key 25), v0-4. Adds the group's partition of `__consumer_offsets` to the transaction.

Producers of the newer protocol do not send it: their TxnOffsetCommit adds the partition.
"""

from __future__ import annotations

from typing import Any

from kio.schema.add_offsets_to_txn.v4.response import AddOffsetsToTxnResponse

from penstock.broker.coordinators.requests import NO_THROTTLE
from penstock.broker.coordinators.transactions.requests import (
    PRODUCER_FENCED_FROM_VERSION,
    check_transactional_id,
    error_for_version,
)
from penstock.broker.network.requests import RequestContext
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.transactions.messages import AddPartitionsRequest


async def handle(ctx: RequestContext, request: Any) -> Any:
    try:
        error = await _add_offsets_partition(ctx, request)
    except ApiError as failed:
        error = failed.code
    return AddOffsetsToTxnResponse(
        throttle_time=NO_THROTTLE,
        error_code=error_for_version(error, knows_fenced=ctx.version >= PRODUCER_FENCED_FROM_VERSION),
    )


async def _add_offsets_partition(ctx: RequestContext, request: Any) -> ErrorCode:
    check_transactional_id(request.transactional_id)
    transactions = ctx.services.transactions
    transactions.callers.check_newest_connection(ctx, request.transactional_id)
    # The topic may not exist yet: a producer can name a group before any client has looked up its coordinator.
    await ctx.services.groups.ensure_topic()
    partition = transactions.offsets_partition(request.group_id)
    reply = await transactions.add_partitions(
        AddPartitionsRequest(
            request.transactional_id, request.producer_id, request.producer_epoch, (partition,)
        )
    )
    return reply.error
