"""Schedule (key 30000), v0. Between nodes only: movers of held records ask the shard that keeps them."""

from __future__ import annotations

import struct
from typing import Final

from penstock.broker.connection import Connection, Reply, Slot
from penstock.broker.context import RequestContext
from penstock.broker.schedule.wire import Answer, Ask, pack_answer, read_ask
from penstock.protocol.errors import ApiError, ErrorCode

_HEAD: Final = struct.Struct(">ii")  # size, correlation id


def handle(
    ctx: RequestContext, connection: Connection, frame: memoryview, position: int, correlation_id: int
) -> Reply | Slot:
    """Raises MalformedFrame."""
    ask = read_ask(frame, position)
    slot = connection.defer(ctx.api_key)

    async def answer() -> None:
        try:
            packed = pack_answer(await _answer(ctx, ask))
        except Exception:
            ctx.node.server.failed(connection)
        else:
            connection.fulfil(slot, _HEAD.pack(len(packed) + 4, correlation_id) + packed)

    ctx.node.spawn(answer())
    return slot


async def _answer(ctx: RequestContext, ask: Ask) -> Answer:
    try:
        return Answer(ErrorCode.none, await ctx.node.schedule.answer(ask))
    except ApiError as error:
        return Answer(error.code)
