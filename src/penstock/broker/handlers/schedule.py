"""Schedule (key 30000), v0. Between nodes only: hands held records over to the schedule shard that keeps them."""

from __future__ import annotations

import struct
from typing import Final

from penstock.broker.coordinators.schedule.messages import (
    ScheduleRequest,
    ScheduleResponse,
    decode_request,
    encode_response,
)
from penstock.broker.network.connection import Connection, PendingReply, Reply
from penstock.broker.network.requests import RequestContext
from penstock.protocol.errors import ApiError, ErrorCode

_HEAD: Final = struct.Struct(">ii")  # size, correlation id


def handle(
    ctx: RequestContext, connection: Connection, frame: memoryview, position: int, correlation_id: int
) -> Reply | PendingReply:
    """Raises MalformedFrame."""
    ask = decode_request(frame, position)
    slot = connection.defer(ctx.api_key)

    async def answer() -> None:
        try:
            packed = encode_response(await _respond(ctx, ask))
        except Exception:
            ctx.services.server.failed(connection)
        else:
            connection.fulfil(slot, _HEAD.pack(len(packed) + 4, correlation_id) + packed)

    ctx.services.spawn(answer())
    return slot


async def _respond(ctx: RequestContext, ask: ScheduleRequest) -> ScheduleResponse:
    try:
        return ScheduleResponse(ErrorCode.none, await ctx.services.schedule.answer(ask))
    except ApiError as error:
        return ScheduleResponse(error.code)
