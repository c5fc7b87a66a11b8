"""DescribeGroups (key 15), v0-6. A group that does not exist as a classic group is Dead; from v6 on it is an error."""

from __future__ import annotations

from typing import Any, Final

from kio.schema.describe_groups.v6.response import (
    DescribedGroup,
    DescribedGroupMember,
    DescribeGroupsResponse,
)

from penstock.broker.coordinators.requests import (
    NO_THROTTLE,
    OPERATIONS_NOT_REQUESTED,
    gather_in_pieces,
    group_operations,
)
from penstock.broker.network.requests import RequestContext
from penstock.groups.group import DescribedGroup as Description
from penstock.protocol.errors import ApiError, ErrorCode

_NOT_FOUND_FROM: Final = 6
_DEAD: Final = "Dead"


async def handle(ctx: RequestContext, request: Any) -> Any:
    async def describe(group_id: str) -> Any:
        return await _describe(ctx, group_id, group_operations(ctx, request, group_id))

    groups = await gather_in_pieces(describe, request.groups)
    return DescribeGroupsResponse(throttle_time=NO_THROTTLE, groups=tuple(groups))


async def _describe(ctx: RequestContext, group_id: str, operations: int) -> Any:
    try:
        found = await ctx.services.groups.read(group_id, lambda shard: shard.describe(group_id))
    except ApiError as error:
        return _empty_description(group_id, "", error.code, error.message)
    if found is None and ctx.version >= _NOT_FOUND_FROM:
        return _empty_description(
            group_id, _DEAD, ErrorCode.group_id_not_found, f"Group {group_id} not found."
        )
    if found is None:
        return _empty_description(group_id, _DEAD, ErrorCode.none, None, operations)
    return _description(found, operations)


def _empty_description(
    group_id: str,
    state: str,
    error: ErrorCode,
    message: str | None,
    operations: int = OPERATIONS_NOT_REQUESTED,
) -> Any:
    return DescribedGroup(
        error_code=error,
        error_message=message,
        group_id=group_id,
        group_state=state,
        protocol_type="",
        protocol_data="",
        members=(),
        authorized_operations=operations,
    )


def _description(group: Description, operations: int) -> Any:
    return DescribedGroup(
        error_code=ErrorCode.none,
        group_id=group.group_id,
        group_state=group.state,
        protocol_type=group.protocol_type,
        protocol_data=group.protocol,
        members=tuple(
            DescribedGroupMember(
                member_id=member.member_id,
                group_instance_id=member.instance_id,
                client_id=member.client_id,
                client_host=member.client_host,
                member_metadata=member.metadata,
                member_assignment=member.assignment,
            )
            for member in group.members
        ),
        authorized_operations=operations,
    )
