"""LeaveGroup (key 13), v0-5. One member before v3, whose error is the top-level error; from v3 on many.

A static member can be removed by its instance id alone, with an empty member id.
"""

from __future__ import annotations

from typing import Any, Final

from kio.schema.leave_group.v5.response import LeaveGroupResponse, MemberResponse

from penstock.broker.coordinators.requests import NO_THROTTLE
from penstock.broker.network.requests import RequestContext
from penstock.groups.group import LeaveReply, LeaveRequest, LeavingMember
from penstock.protocol.errors import ApiError, ErrorCode

_MANY_MEMBERS_FROM: Final = 3


async def handle(ctx: RequestContext, request: Any) -> Any:
    reply = await _leave(ctx, request)
    error = reply.error
    if ctx.version < _MANY_MEMBERS_FROM and reply.members:
        ((_, error),) = reply.members
    members = await ctx.mapped(_member, reply.members)
    return LeaveGroupResponse(throttle_time=NO_THROTTLE, error_code=error, members=members)


def _member(left: tuple[LeavingMember, ErrorCode]) -> Any:
    member, error = left
    return MemberResponse(member_id=member.member_id, group_instance_id=member.instance_id, error_code=error)


async def _leave(ctx: RequestContext, request: Any) -> LeaveReply:
    groups = ctx.services.groups
    if not request.group_id:
        return LeaveReply(error=ErrorCode.invalid_group_id)
    leaving = LeaveRequest(group_id=request.group_id, members=_members(ctx, request))
    try:
        reply: LeaveReply = await groups.write(
            leaving.group_id, lambda shard, token: shard.leave(leaving, token, now_ms=groups.now_ms())
        )
    except ApiError as error:
        return LeaveReply(error=error.code)
    return reply


def _members(ctx: RequestContext, request: Any) -> tuple[LeavingMember, ...]:
    if ctx.version < _MANY_MEMBERS_FROM:
        return (LeavingMember(member_id=request.member_id),)
    return tuple(
        LeavingMember(member_id=member.member_id, instance_id=member.group_instance_id)
        for member in request.members
    )
