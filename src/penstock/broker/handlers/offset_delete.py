"""OffsetDelete (key 47), v0. Deletes committed offsets.

The offsets of topics that the group still consumes are kept: GROUP_SUBSCRIBED_TO_TOPIC.
"""

from __future__ import annotations

from typing import Any

from kio.schema.offset_delete.v0.response import (
    OffsetDeleteResponse,
    OffsetDeleteResponsePartition,
    OffsetDeleteResponseTopic,
)

from penstock.broker.coordinators.requests import NO_THROTTLE
from penstock.broker.network.requests import RequestContext
from penstock.groups.group import PartitionsReply
from penstock.protocol.errors import ApiError, ErrorCode


async def handle(ctx: RequestContext, request: Any) -> Any:
    asked = [
        (topic.name, partition.partition_index) for topic in request.topics for partition in topic.partitions
    ]
    existing = [place for place in asked if ctx.services.image.partition(*place) is not None]
    reply = await _delete(ctx, request.group_id, existing)
    if reply.error is not ErrorCode.none:
        return OffsetDeleteResponse(error_code=reply.error, throttle_time=NO_THROTTLE, topics=())
    errors = dict.fromkeys(asked, ErrorCode.unknown_topic_or_partition)
    errors |= {(each.topic, each.partition): each.error for each in reply.partitions}
    return OffsetDeleteResponse(
        error_code=ErrorCode.none, throttle_time=NO_THROTTLE, topics=_topics(request, errors)
    )


async def _delete(ctx: RequestContext, group_id: str, places: list[tuple[str, int]]) -> PartitionsReply:
    groups = ctx.services.groups
    if not group_id:
        return PartitionsReply(error=ErrorCode.invalid_group_id)
    try:
        reply: PartitionsReply = await groups.write(
            group_id,
            lambda shard, token: shard.delete_offsets(group_id, places, token, now_ms=groups.now_ms()),
        )
    except ApiError as error:
        return PartitionsReply(error=error.code)
    return reply


def _topics(request: Any, errors: dict[tuple[str, int], ErrorCode]) -> tuple[Any, ...]:
    return tuple(
        OffsetDeleteResponseTopic(
            name=topic.name,
            partitions=tuple(
                OffsetDeleteResponsePartition(
                    partition_index=partition.partition_index,
                    error_code=errors[topic.name, partition.partition_index],
                )
                for partition in topic.partitions
            ),
        )
        for topic in request.topics
    )
