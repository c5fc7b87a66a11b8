"""ListGroups (key 16), v0-5. Filtered by state (v4) and by type (v5), whatever their case."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from kio.schema.list_groups.v5.response import ListedGroup as ListedGroupResponse
from kio.schema.list_groups.v5.response import ListGroupsResponse

from penstock.broker.context import RequestContext
from penstock.broker.group_requests import NO_THROTTLE
from penstock.groups.messages import ListedGroup
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.schemas import response_element_encoder
from penstock.protocol.writing import EncodedElements

#: Groups that are encoded before the loop gets to do something else.
_PIECE_GROUPS: Final = 100


async def handle(ctx: RequestContext, request: Any) -> Any:
    async with ctx.node.describing:
        try:
            groups = await _encoded_groups(ctx, request)
        except ApiError as error:
            return ListGroupsResponse(throttle_time=NO_THROTTLE, error_code=error.code, groups=())
    return ListGroupsResponse(
        throttle_time=NO_THROTTLE, error_code=ErrorCode.none, groups=EncodedElements(groups)
    )


async def _encoded_groups(ctx: RequestContext, request: Any) -> list[bytes]:
    states = {state.strip().lower() for state in request.states_filter}
    types = {kind.strip().lower() for kind in request.types_filter}
    encode = response_element_encoder(ctx.api_key, ctx.version, "groups")
    encoded: list[bytes] = []
    async for groups in ctx.node.groups.read_each(lambda shard: shard.list_groups()):
        for count, group in enumerate(groups, start=1):
            if _passes(group, states, types):
                encoded.append(encode(_listed(group)))
            if count % _PIECE_GROUPS == 0:
                await asyncio.sleep(0)
    return encoded


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
