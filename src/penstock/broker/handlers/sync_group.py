"""SyncGroup (key 14), v0-5. Followers get their reply when the leader's assignment is stored.

From v5 on the protocol type and name are mandatory, and must match the group's.
"""

from __future__ import annotations

from typing import Any, Final

from kio.schema.sync_group.v5.response import SyncGroupResponse

from penstock.broker.coordinators.requests import NO_THROTTLE
from penstock.broker.network.requests import RequestContext
from penstock.groups.group import SyncReply, SyncRequest
from penstock.protocol.errors import ApiError, ErrorCode

_PROTOCOL_MANDATORY_FROM: Final = 5


async def handle(ctx: RequestContext, request: Any) -> Any:
    reply = await _sync(ctx, request)
    return SyncGroupResponse(
        throttle_time=NO_THROTTLE,
        error_code=reply.error,
        protocol_type=reply.protocol_type,
        protocol_name=reply.protocol,
        assignment=reply.assignment,
    )


async def _sync(ctx: RequestContext, request: Any) -> SyncReply:
    groups = ctx.services.groups
    if not request.group_id:
        return SyncReply(error=ErrorCode.invalid_group_id)
    names_protocol = request.protocol_type is not None and request.protocol_name is not None
    if ctx.version >= _PROTOCOL_MANDATORY_FROM and not names_protocol:
        return SyncReply(error=ErrorCode.inconsistent_group_protocol)
    wanted = SyncRequest(
        group_id=request.group_id,
        generation=request.generation_id,
        member_id=request.member_id,
        instance_id=request.group_instance_id,
        protocol_type=request.protocol_type,
        protocol=request.protocol_name,
        assignments=tuple((each.member_id, each.assignment) for each in request.assignments),
    )
    try:
        reply: SyncReply = await groups.write(
            wanted.group_id, lambda shard, token: shard.sync(wanted, token, now_ms=groups.now_ms())
        )
    except ApiError as error:
        return SyncReply(error=error.code)
    return reply
