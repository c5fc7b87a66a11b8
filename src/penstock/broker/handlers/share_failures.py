"""ShareFailures (key 30001), v0. A worker's retry delays for released records, and its errors for rejected ones.

Our own API, encoded by hand; only our client sends it, before the acknowledgement. The partition's leader keeps the
delays and passes the errors to the coordinator of the share partition; the reply waits until the errors are stored.
"""

from __future__ import annotations

from typing import Final

from penstock.broker.network.connection import Connection, PendingReply, Reply
from penstock.broker.network.requests import RequestContext, reply_later
from penstock.groups.share.state.share_state import SharePartitionKey, StoreWorkerErrors
from penstock.protocol.errors import ApiError, ErrorCode, MalformedFrame
from penstock.protocol.share_failures import (
    ShareFailures,
    encode_share_failures_response,
    parse_share_failures,
)

#: Less than the default max.message.bytes of a topic, because the whole request is stored as one record.
_BYTES_MAX: Final = 768 << 10


def handle(
    ctx: RequestContext, connection: Connection, frame: memoryview, position: int, correlation_id: int
) -> Reply | PendingReply:
    """Raises MalformedFrame."""
    if len(frame) > _BYTES_MAX:
        raise MalformedFrame("more about failures than can be stored together")
    asked = parse_share_failures(frame, position)
    if asked.for_coordinator and not connection.is_inter_broker:
        raise MalformedFrame("what leaders tell coordinators is for nodes")
    return reply_later(ctx, connection, correlation_id, _respond(ctx, asked))


async def _respond(ctx: RequestContext, asked: ShareFailures) -> bytes:
    return encode_share_failures_response(await _store_failures(ctx, asked))


async def _store_failures(ctx: RequestContext, asked: ShareFailures) -> ErrorCode:
    try:
        if asked.for_coordinator:
            (told,) = await ctx.services.share_state.ask([_explain_request(asked)])
            return told.error
        await _apply_at_leader(ctx, asked)
    except ApiError as error:
        ctx.services.metrics.count_error("share_failures", error.code.name)
        return error.code
    return ErrorCode.none


def _explain_request(asked: ShareFailures) -> StoreWorkerErrors:
    return StoreWorkerErrors(
        SharePartitionKey(asked.group, asked.topic_id, asked.partition), tuple(asked.failures)
    )


async def _apply_at_leader(ctx: RequestContext, asked: ShareFailures) -> None:
    """Raises ApiError."""
    led = ctx.services.share.get(asked.group, (asked.topic_id.bytes, asked.partition))
    if led is None:
        raise ApiError(ErrorCode.invalid_record_state, "no member holds records of this partition")
    await led.apply_failures(asked.failures)
