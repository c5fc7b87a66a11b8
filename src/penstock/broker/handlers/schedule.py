"""Schedule (key 30000), v0. Between nodes only: hands held records over to the schedule shard that keeps them."""

from __future__ import annotations

from penstock.broker.coordinators.schedule.messages import (
    ScheduleRequest,
    ScheduleResponse,
    decode_request,
    encode_response,
)
from penstock.broker.network.connection import CLOSE_CONNECTION, Connection, PendingReply, Reply
from penstock.broker.network.requests import RequestContext, reply_later
from penstock.protocol.acls import Operation, ResourceType
from penstock.protocol.errors import ApiError, ErrorCode


def handle(
    ctx: RequestContext, connection: Connection, frame: memoryview, position: int, correlation_id: int
) -> Reply | PendingReply:
    """Raises MalformedFrame."""
    if not ctx.demand(Operation.CLUSTER_ACTION, ResourceType.CLUSTER):
        return CLOSE_CONNECTION
    ask = decode_request(frame, position)
    return reply_later(ctx, connection, correlation_id, _respond(ctx, ask))


async def _respond(ctx: RequestContext, ask: ScheduleRequest) -> bytes:
    try:
        response = ScheduleResponse(ErrorCode.none, await ctx.services.schedule.answer(ask))
    except ApiError as error:
        response = ScheduleResponse(error.code)
    return encode_response(response)
