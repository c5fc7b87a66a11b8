"""ListGroups (key 16), v0-5. Filtered by state (v4) and by type (v5), whatever their case."""

from __future__ import annotations

from typing import Any

from kio.schema.list_groups.v5.response import ListedGroup as ListedGroupResponse
from kio.schema.list_groups.v5.response import ListGroupsResponse

from penstock.broker.context import RequestContext
from penstock.broker.group_requests import NO_THROTTLE
from penstock.groups.messages import ListedGroup
from penstock.protocol.errors import ApiError, ErrorCode


async def handle(ctx: RequestContext, request: Any) -> Any:
    try:
        shards = await ctx.node.groups.read_all(lambda shard: shard.list_groups())
    except ApiError as error:
        return ListGroupsResponse(throttle_time=NO_THROTTLE, error_code=error.code, groups=())
    states = {state.strip().lower() for state in request.states_filter}
    types = {kind.strip().lower() for kind in request.types_filter}
    groups = tuple(_listed(group) for groups in shards for group in groups if _passes(group, states, types))
    return ListGroupsResponse(throttle_time=NO_THROTTLE, error_code=ErrorCode.none, groups=groups)


def _passes(group: ListedGroup, states: set[str], types: set[str]) -> bool:
    """No filter lets everything pass."""
    return (not states or group.state.lower() in states) and (not types or group.kind in types)


def _listed(group: ListedGroup) -> Any:
    return ListedGroupResponse(
        group_id=group.group_id,
        protocol_type=group.protocol_type,
        group_state=group.state,
        group_type=group.kind,
    )
