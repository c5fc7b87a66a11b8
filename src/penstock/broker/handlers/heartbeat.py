"""Heartbeat (key 12), v0-4. While the coordinator loads the group, every heartbeat succeeds."""

from __future__ import annotations

from typing import Any

from kio.schema.heartbeat.v4.response import HeartbeatResponse

from penstock.broker.coordinators.requests import NO_THROTTLE
from penstock.broker.network.requests import RequestContext
from penstock.groups.group import HeartbeatRequest
from penstock.protocol.errors import ApiError, ErrorCode


async def handle(ctx: RequestContext, request: Any) -> Any:
    return HeartbeatResponse(throttle_time=NO_THROTTLE, error_code=await _heartbeat(ctx, request))


async def _heartbeat(ctx: RequestContext, request: Any) -> ErrorCode:
    groups = ctx.services.groups
    if not request.group_id:
        return ErrorCode.invalid_group_id
    beat = HeartbeatRequest(
        group_id=request.group_id,
        generation=request.generation_id,
        member_id=request.member_id,
        instance_id=request.group_instance_id,
    )
    try:
        reply = await groups.write(
            beat.group_id, lambda shard, token: shard.heartbeat(beat, token, now_ms=groups.now_ms())
        )
    except ApiError as error:
        is_loading = error.code is ErrorCode.coordinator_load_in_progress
        return ErrorCode.none if is_loading else error.code
    error_code: ErrorCode = reply.error
    return error_code
