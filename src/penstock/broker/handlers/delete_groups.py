"""DeleteGroups (key 42), v0-2. Only a group without members goes, and its offsets with it.

Of a share group, the state of its share partitions goes first. One that is at-most-once stays as long as it is
(POLICY_VIOLATION): the next one of its name would be handed the same records.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from kio.schema.delete_groups.v2.response import DeletableGroupResult, DeleteGroupsResponse

from penstock.broker.context import RequestContext
from penstock.broker.group_requests import NO_THROTTLE
from penstock.protocol.errors import ApiError, ErrorCode

_SHARE: Final = "share"


async def handle(ctx: RequestContext, request: Any) -> Any:
    group_ids = tuple(dict.fromkeys(request.groups_names))
    errors = await asyncio.gather(*(_delete(ctx, group_id) for group_id in group_ids))
    return DeleteGroupsResponse(
        throttle_time=NO_THROTTLE,
        results=tuple(
            DeletableGroupResult(group_id=group_id, error_code=error)
            for group_id, error in zip(group_ids, errors, strict=True)
        ),
    )


async def _delete(ctx: RequestContext, group_id: str) -> ErrorCode:
    groups = ctx.node.groups
    try:
        if await groups.read(group_id, lambda shard: shard.kind_of(group_id)) == _SHARE:
            await _delete_share_state(ctx, group_id)
        results: dict[str, ErrorCode] = await groups.write(
            group_id,
            lambda shard, token: shard.delete_groups((group_id,), token, now_ms=groups.now_ms()),
        )
    except ApiError as error:
        return error.code
    return results[group_id]


async def _delete_share_state(ctx: RequestContext, group_id: str) -> None:
    """Raises ApiError while some of it is there."""
    from penstock.broker.share.deletion import delete_positions, refuse_if_at_most_once

    refuse_if_at_most_once(ctx.node, group_id)
    deletion = await delete_positions(ctx.node, group_id, None)
    for error in deletion.errors.values():
        raise error
