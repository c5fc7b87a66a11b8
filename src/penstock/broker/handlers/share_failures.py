"""ShareFailures (key 30001), v0: a worker's own delay for records it releases, and its errors for those it gives up.

Our own, hand packed, and sent ahead of the acknowledgement by our client only. Asked of the partition's leader, which
keeps delays, and passes errors on to the coordinator of the share partition; answered when these are stored.
"""

from __future__ import annotations

import struct
from typing import Final

from penstock.broker.connection import Connection, Reply, Slot
from penstock.broker.context import RequestContext
from penstock.groups.share_state.values import Explain, Key
from penstock.protocol.errors import ApiError, ErrorCode, MalformedFrame
from penstock.protocol.share_failures import (
    ShareFailures,
    pack_answer,
    read_share_failures,
)

_HEAD: Final = struct.Struct(">ii")  # size, correlation id
#: Below what a topic takes in one batch by default, since all of it is stored as one record.
_BYTES_MAX: Final = 768 << 10


def handle(
    ctx: RequestContext, connection: Connection, frame: memoryview, position: int, correlation_id: int
) -> Reply | Slot:
    """Raises MalformedFrame."""
    if len(frame) > _BYTES_MAX:
        raise MalformedFrame("more about failures than can be stored together")
    asked = read_share_failures(frame, position)
    if asked.for_coordinator and not connection.for_nodes:
        raise MalformedFrame("what leaders tell coordinators is for nodes")
    slot = connection.defer(ctx.api_key)

    async def answer() -> None:
        try:
            packed = pack_answer(await _error(ctx, asked))
        except Exception:
            ctx.node.server.failed(connection)
        else:
            connection.fulfil(slot, _HEAD.pack(len(packed) + 4, correlation_id) + packed)

    ctx.node.spawn(answer())
    return slot


async def _error(ctx: RequestContext, asked: ShareFailures) -> ErrorCode:
    try:
        if asked.for_coordinator:
            (told,) = await ctx.node.share_state.ask([_explanation(asked)])
            return told.error
        await _take(ctx, asked)
    except ApiError as error:
        ctx.node.metrics.count_error("share_failures", error.code.name)
        return error.code
    return ErrorCode.none


def _explanation(asked: ShareFailures) -> Explain:
    return Explain(Key(asked.group, asked.topic_id, asked.partition), tuple(asked.failures))


async def _take(ctx: RequestContext, asked: ShareFailures) -> None:
    """Raises ApiError."""
    led = ctx.node.share.get(asked.group, (asked.topic_id.bytes, asked.partition))
    if led is None:
        raise ApiError(ErrorCode.invalid_record_state, "nobody holds records here")
    await led.take_failures(asked.failures)
