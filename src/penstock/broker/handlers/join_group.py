"""JoinGroup (key 11), v0-9. The reply waits until all members have joined, up to the rebalance timeout.

v0 has no rebalance timeout and uses the session timeout. From v4 on a new dynamic member first gets an id and must
join again with it. From v9 on the reply tells a returning static leader to skip the assignment.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from kio.schema.join_group.v9.response import JoinGroupResponse, JoinGroupResponseMember

from penstock.broker.coordinators.requests import NO_THROTTLE, check_id_lengths, client_host, milliseconds
from penstock.broker.network.requests import RequestContext
from penstock.groups.group import JoinReply, JoinRequest
from penstock.protocol.acls import Operation, ResourceType
from penstock.protocol.errors import ApiError

_MEMBER_ID_REQUIRED_FROM: Final = 4
_NULL_PROTOCOL_FROM: Final = 7
_SKIP_ASSIGNMENT_FROM: Final = 9


async def handle(ctx: RequestContext, request: Any) -> Any:
    groups = ctx.services.groups
    wanted = _join_request(ctx, request)
    try:
        check_id_lengths(ctx, wanted.instance_id)
        await groups.ensure_topic()
        groups.check_group_limit(wanted.group_id)
        reply = await groups.write(
            wanted.group_id,
            lambda shard, token: shard.for_client(
                partial(ctx.may, Operation.DESCRIBE, ResourceType.TOPIC),
                lambda: shard.join(
                    wanted,
                    token,
                    now_ms=groups.now_ms(),
                    new_member_id=groups.new_member_id(wanted.instance_id or wanted.client_id),
                ),
            ),
        )
    except ApiError as error:
        reply = JoinReply(error=error.code, member_id=wanted.member_id)
    return _response(ctx, reply)


def _join_request(ctx: RequestContext, request: Any) -> JoinRequest:
    session_timeout_ms = milliseconds(request.session_timeout)
    rebalance_timeout_ms = milliseconds(request.rebalance_timeout)
    return JoinRequest(
        group_id=request.group_id,
        member_id=request.member_id,
        instance_id=request.group_instance_id,
        client_id=ctx.client_id or "",
        client_host=client_host(ctx),
        session_timeout_ms=session_timeout_ms,
        rebalance_timeout_ms=session_timeout_ms if rebalance_timeout_ms < 0 else rebalance_timeout_ms,
        protocol_type=request.protocol_type,
        protocols=tuple((protocol.name, protocol.metadata) for protocol in request.protocols),
        member_id_required=ctx.version >= _MEMBER_ID_REQUIRED_FROM,
        can_skip_assignment=ctx.version >= _SKIP_ASSIGNMENT_FROM,
    )


def _response(ctx: RequestContext, reply: JoinReply) -> Any:
    protocol = reply.protocol
    if protocol is None and ctx.version < _NULL_PROTOCOL_FROM:
        protocol = ""
    return JoinGroupResponse(
        throttle_time=NO_THROTTLE,
        error_code=reply.error,
        generation_id=reply.generation,
        protocol_type=reply.protocol_type,
        protocol_name=protocol,
        leader=reply.leader,
        skip_assignment=reply.skip_assignment,
        member_id=reply.member_id,
        members=tuple(
            JoinGroupResponseMember(
                member_id=member.member_id, group_instance_id=member.instance_id, metadata=member.metadata
            )
            for member in reply.members
        ),
    )
