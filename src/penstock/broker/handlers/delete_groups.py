"""DeleteGroups (key 42), v0-2. Deletes groups without members, and their offsets.

For a share group, the state of its share partitions is deleted first. An at-most-once group cannot be deleted
(POLICY_VIOLATION), because a new group of the same name would get the same records again.
"""

from __future__ import annotations

from typing import Any, Final

from kio.schema.delete_groups.v2.response import DeletableGroupResult, DeleteGroupsResponse

from penstock.broker.coordinators.requests import NO_THROTTLE, gather_in_pieces
from penstock.broker.network.requests import RequestContext
from penstock.protocol.errors import ApiError, ErrorCode

_SHARE: Final = "share"


async def handle(ctx: RequestContext, request: Any) -> Any:
    group_ids = tuple(dict.fromkeys(request.groups_names))
    errors = await gather_in_pieces(lambda group_id: _delete(ctx, group_id), group_ids)
    results = await ctx.mapped(_result, zip(group_ids, errors, strict=True))
    return DeleteGroupsResponse(throttle_time=NO_THROTTLE, results=results)


def _result(deleted: tuple[str, ErrorCode]) -> Any:
    group_id, error = deleted
    return DeletableGroupResult(group_id=group_id, error_code=error)


async def _delete(ctx: RequestContext, group_id: str) -> ErrorCode:
    groups = ctx.services.groups
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
    """Raises ApiError if some of the state could not be deleted."""
    reconciler = ctx.services.share_state_reconciler
    reconciler.check_offsets_may_be_deleted(group_id)
    deletion = await reconciler.delete_offsets(group_id, None)
    for error in deletion.errors.values():
        raise error
