"""What ConsumerGroupDescribe and ShareGroupDescribe have in common: each group by itself, assignments by topic.

The messages look alike and are other classes, so each handler brings its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any
from uuid import UUID

from penstock.broker.group_requests import GROUP_OPERATIONS, OPERATIONS_NOT_ASKED
from penstock.protocol.errors import ApiError, ErrorCode

if TYPE_CHECKING:
    from penstock.broker.context import RequestContext
    from penstock.groups.shard import GroupShard
    from penstock.groups.topics import Topics

#: Raises ApiError for a group that is not there, or of another kind.
Described = Callable[["GroupShard", str], Any]


async def describe_groups(
    ctx: RequestContext,
    request: Any,
    group_class: Any,
    described: Described,
    member_of: Callable[[Any, Topics], Any],
) -> tuple[Any, ...]:
    operations = GROUP_OPERATIONS if request.include_authorized_operations else OPERATIONS_NOT_ASKED
    topics = ctx.node.groups.topics

    async def describe(group_id: str) -> Any:
        try:
            if not group_id:
                raise ApiError(ErrorCode.invalid_group_id)
            found = await ctx.node.groups.read(group_id, lambda shard: described(shard, group_id))
        except ApiError as error:
            return _nothing(group_class, group_id, error)
        return group_class(
            error_code=ErrorCode.none,
            error_message=None,
            group_id=group_id,
            group_state=found.state,
            group_epoch=found.epoch,
            assignment_epoch=found.target_epoch,
            assignor_name=found.assignor,
            members=tuple(member_of(member, topics) for member in found.members),
            authorized_operations=operations,
        )

    return tuple(await asyncio.gather(*map(describe, request.group_ids)))


def _nothing(group_class: Any, group_id: str, error: ApiError) -> Any:
    return group_class(
        error_code=error.code,
        error_message=error.message,
        group_id=group_id,
        group_state="",
        group_epoch=0,
        assignment_epoch=0,
        assignor_name="",
        members=(),
    )


def by_topic_name(
    assigned: Mapping[UUID, frozenset[int]], topics: Topics, topic_class: Any
) -> tuple[Any, ...]:
    """Topics that are gone are left out."""
    return tuple(
        topic_class(topic_id=topic.id, topic_name=topic.name, partitions=tuple(sorted(partitions)))
        for topic_id, partitions in assigned.items()
        if (topic := topics.by_id(topic_id)) is not None
    )
