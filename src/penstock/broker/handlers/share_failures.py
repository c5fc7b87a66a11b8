"""ShareFailures (key 30001), v0. A worker's retry delays for released records, and its errors for rejected ones.

Our own API, encoded by hand; only our client sends it, before the acknowledgement. The partition's leader keeps the
delays and passes the errors to the coordinator of the share partition; the reply waits until the errors are stored.
Client libraries do not tell the id of their member, so a report counts if the principal that sends it is that of the
member that holds the record.
"""

from __future__ import annotations

from typing import Final

from penstock.broker.network.connection import Connection, PendingReply, Reply
from penstock.broker.network.requests import RequestContext, reply_later
from penstock.broker.network.topic_access import check_group_access, may_use_topic, topic_refused
from penstock.groups.share.state.share_state import SharePartitionKey, StoreWorkerErrors
from penstock.protocol.acls import Operation, ResourceType
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
        raise MalformedFrame("more failures than can be stored together")
    failures = parse_share_failures(frame, position)
    if failures.for_coordinator and not connection.may_send_as_node:
        raise MalformedFrame("only nodes send failures to a share coordinator")
    return reply_later(ctx, connection, correlation_id, _respond(ctx, failures))


async def _respond(ctx: RequestContext, failures: ShareFailures) -> bytes:
    return encode_share_failures_response(await _store_failures(ctx, failures))


async def _store_failures(ctx: RequestContext, failures: ShareFailures) -> ErrorCode:
    try:
        _check_access(ctx, failures)
        if failures.for_coordinator:
            (reply,) = await ctx.services.share_state.handle([_store_errors_request(failures)])
            return reply.error
        await _apply_at_leader(ctx, failures)
    except ApiError as error:
        ctx.services.metrics.count_error("share_failures", error.code.name)
        return error.code
    return ErrorCode.none


def _check_access(ctx: RequestContext, failures: ShareFailures) -> None:
    """Raises ApiError."""
    if failures.for_coordinator:
        if not ctx.demand(Operation.CLUSTER_ACTION, ResourceType.CLUSTER):
            raise ApiError(ErrorCode.cluster_authorization_failed)
        return
    check_group_access(ctx, failures.group)
    if not may_use_topic(ctx, Operation.READ, failures.topic_id.bytes):
        raise topic_refused()


def _store_errors_request(failures: ShareFailures) -> StoreWorkerErrors:
    return StoreWorkerErrors(
        SharePartitionKey(failures.group, failures.topic_id, failures.partition), tuple(failures.failures)
    )


async def _apply_at_leader(ctx: RequestContext, failures: ShareFailures) -> None:
    """Raises ApiError."""
    led = ctx.services.share.get(failures.group, (failures.topic_id.bytes, failures.partition))
    if led is None:
        raise ApiError(ErrorCode.invalid_record_state, "no member holds records of this partition")
    await led.apply_failures(failures.failures, ctx.principal)
