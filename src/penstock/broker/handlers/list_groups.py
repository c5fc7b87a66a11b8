"""ListGroups (key 16), v0-5. Filters by state (v4) and by type (v5) ignore case."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from kio.schema.list_groups.v5.response import ListedGroup as ListedGroupResponse
from kio.schema.list_groups.v5.response import ListGroupsResponse

from penstock.broker.coordinators.requests import NO_THROTTLE
from penstock.broker.network.requests import RequestContext
from penstock.groups.group import ListedGroup
from penstock.protocol.acls import Operation, ResourceType
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.schemas import EncodedElements, response_element_encoder

#: After this many groups the handler yields to the event loop.
_GROUPS_PER_CHUNK: Final = 100


async def handle(ctx: RequestContext, request: Any) -> Any:
    async with ctx.services.groups.scan_lock:
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
    sees_all = ctx.may(Operation.DESCRIBE, ResourceType.CLUSTER)
    async for groups in ctx.services.groups.read_each(lambda shard: shard.list_groups()):
        for count, group in enumerate(groups, start=1):
            if _matches_filters(group, states, types) and (
                sees_all or ctx.may(Operation.DESCRIBE, ResourceType.GROUP, group.group_id)
            ):
                encoded.append(encode(_listed(group)))
            if count % _GROUPS_PER_CHUNK == 0:
                await asyncio.sleep(0)
    return encoded


def _matches_filters(group: ListedGroup, states: set[str], types: set[str]) -> bool:
    """An empty filter matches every group."""
    return (not states or group.state.lower() in states) and (not types or group.kind in types)


def _listed(group: ListedGroup) -> Any:
    return ListedGroupResponse(
        group_id=group.group_id,
        protocol_type=group.protocol_type,
        group_state=group.state,
        group_type=group.kind,
    )
