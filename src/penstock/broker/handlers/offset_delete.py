"""OffsetDelete (key 47), v0. Deletes committed offsets.

The offsets of topics that the group still consumes are kept: GROUP_SUBSCRIBED_TO_TOPIC.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final

from kio.schema.offset_delete.v0.response import (
    OffsetDeleteResponse,
    OffsetDeleteResponsePartition,
    OffsetDeleteResponseTopic,
)

from penstock.broker.coordinators.requests import NO_THROTTLE
from penstock.broker.network.requests import RequestContext, in_slices
from penstock.groups.group import PartitionsReply
from penstock.protocol.errors import ApiError, ErrorCode

if TYPE_CHECKING:
    from penstock.protocol.steps import Steps

#: Offsets that one operation of the coordinator deletes. A request with more is not carried out as a whole.
_DELETED_AT_ONCE: Final = 200

_TopicPartition = tuple[str, int]


@in_slices
def handle(ctx: RequestContext, request: Any) -> Steps[Any]:
    """Each partition is looked up in the image of its step; the coordinator checks the group when it deletes."""
    errors: dict[_TopicPartition, ErrorCode] = {}
    existing: dict[_TopicPartition, None] = {}
    for topic in request.topics:
        for partition in topic.partitions:
            tp = (topic.name, partition.partition_index)
            errors[tp] = ErrorCode.unknown_topic_or_partition
            if ctx.services.image.partition(*tp) is not None:
                existing[tp] = None
            yield
    return _delete_and_respond(ctx, request, list(existing), errors)


async def _delete_and_respond(
    ctx: RequestContext,
    request: Any,
    existing: list[_TopicPartition],
    errors: dict[_TopicPartition, ErrorCode],
) -> Any:
    # What a client sends later must also take effect later, so it is held until the last operation.
    with ctx.held() if len(existing) > _DELETED_AT_ONCE else nullcontext():
        # One operation also if nothing exists: it checks the group.
        for first in range(0, max(len(existing), 1), _DELETED_AT_ONCE):
            piece = existing[first : first + _DELETED_AT_ONCE]
            reply = await _delete(ctx, request.group_id, piece)
            if reply.error is not ErrorCode.none and not first:
                return OffsetDeleteResponse(error_code=reply.error, throttle_time=NO_THROTTLE, topics=())
            # A group that has only offsets goes with the last of them.
            is_gone = reply.error is ErrorCode.group_id_not_found
            errors.update(dict.fromkeys(piece, ErrorCode.none if is_gone else reply.error))
            errors.update(((each.topic, each.partition), each.error) for each in reply.partitions)
    return await ctx.finish_in_slices(_response(request, errors))


async def _delete(ctx: RequestContext, group_id: str, partitions: list[_TopicPartition]) -> PartitionsReply:
    groups = ctx.services.groups
    if not group_id:
        return PartitionsReply(error=ErrorCode.invalid_group_id)
    try:
        reply: PartitionsReply = await groups.write(
            group_id,
            lambda shard, token: shard.delete_offsets(group_id, partitions, token, now_ms=groups.now_ms()),
        )
    except ApiError as error:
        return PartitionsReply(error=error.code)
    return reply


def _response(request: Any, errors: dict[_TopicPartition, ErrorCode]) -> Steps[Any]:
    topics = []
    for topic in request.topics:
        partitions = []
        for partition in topic.partitions:
            index = partition.partition_index
            partitions.append(
                OffsetDeleteResponsePartition(partition_index=index, error_code=errors[topic.name, index])
            )
            yield
        topics.append(OffsetDeleteResponseTopic(name=topic.name, partitions=tuple(partitions)))
        yield
    return OffsetDeleteResponse(error_code=ErrorCode.none, throttle_time=NO_THROTTLE, topics=tuple(topics))
