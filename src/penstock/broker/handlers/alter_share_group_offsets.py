"""AlterShareGroupOffsets (key 91), v0. Sets the start offsets of a share group that has no members.

A group that does not exist is created. The request discards records in flight and fences share partition leaders that
hold the old state. An at-most-once group cannot move backwards, nor to records that were already delivered to it:
POLICY_VIOLATION.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kio.schema.alter_share_group_offsets.v0.response import (
    AlterShareGroupOffsetsResponse,
    AlterShareGroupOffsetsResponsePartition,
    AlterShareGroupOffsetsResponseTopic,
)

from penstock.broker.coordinators.requests import NO_THROTTLE
from penstock.broker.network.requests import RequestContext
from penstock.groups.share.share_group import AlterShareOffsetsReply, StartOffsets
from penstock.groups.share.share_group_offsets import begin_alter_offsets
from penstock.protocol.errors import ApiError, ErrorCode

if TYPE_CHECKING:
    from penstock.broker.coordinators.share.state_reconciler import StateErrors
    from penstock.protocol.steps import Steps

_UNKNOWN: Final = ApiError(ErrorCode.unknown_topic_or_partition)
_NO_ERROR: Final = ApiError(ErrorCode.none)
_NEGATIVE_OFFSET: Final = ApiError(ErrorCode.invalid_request, "The start offset is negative.")


async def handle(ctx: RequestContext, request: Any) -> Any:
    wanted = await ctx.finish_in_slices(_wanted(request))
    try:
        if not request.group_id:
            raise ApiError(ErrorCode.invalid_group_id)
        await ctx.services.groups.ensure_topic()
        reply, errors = await _alter(ctx, request.group_id, wanted)
    except ApiError as error:
        return _response(error, ())
    return _response(None, await ctx.finish_in_slices(_topics(ctx, request, reply, errors)))


def _wanted(request: Any) -> Steps[dict[str, dict[int, int]]]:
    """Return the start offsets that are possible; for a partition that is listed twice, the last one."""
    wanted: dict[str, dict[int, int]] = {}
    for topic in request.topics:
        starts = wanted[topic.topic_name] = {}
        for part in topic.partitions:
            starts[part.partition_index] = part.start_offset
            yield
        wanted[topic.topic_name] = {index: start for index, start in starts.items() if start >= 0}
        yield
    return wanted


async def _alter(
    ctx: RequestContext, group_id: str, wanted: StartOffsets
) -> tuple[AlterShareOffsetsReply, StateErrors]:
    """Completes an earlier deletion of the group's offsets first, if one is pending."""
    reply, errors = await _alter_once(ctx, group_id, wanted)
    if reply.waits_for_deletion:
        await ctx.services.share_state_reconciler.settle(group_id)
        reply, errors = await _alter_once(ctx, group_id, wanted)
    if reply.waits_for_deletion:
        raise ApiError(ErrorCode.coordinator_not_available, "The earlier offsets are still being deleted.")
    return reply, errors


async def _alter_once(
    ctx: RequestContext, group_id: str, wanted: StartOffsets
) -> tuple[AlterShareOffsetsReply, StateErrors]:
    groups, reconciler = ctx.services.groups, ctx.services.share_state_reconciler
    async with reconciler.lock(group_id):
        reply: AlterShareOffsetsReply = await groups.write(
            group_id,
            lambda shard, token: begin_alter_offsets(shard, group_id, wanted, token, now_ms=groups.now_ms()),
        )
        if reply.error is not ErrorCode.none:
            raise ApiError(reply.error, reply.message)
        named = ((groups.topics.by_id(id), indexes) for id, indexes in reply.partitions.items())
        starts = {
            (topic.id, index): wanted[topic.name][index]
            for topic, indexes in named
            if topic is not None
            for index in sorted(indexes)
        }
        return reply, await reconciler.initialize(group_id, reply.epoch, starts)


# -- responses -----------------------------------------------------------------------------------------


def _response(error: ApiError | None, topics: tuple[Any, ...]) -> Any:
    return AlterShareGroupOffsetsResponse(
        throttle_time=NO_THROTTLE,
        error_code=ErrorCode.none if error is None else error.code,
        error_message=None if error is None else error.message,
        responses=topics,
    )


def _topics(
    ctx: RequestContext, request: Any, reply: AlterShareOffsetsReply, errors: StateErrors
) -> Steps[tuple[Any, ...]]:
    topics = []
    for topic in request.topics:
        known = ctx.services.groups.topics.get(topic.topic_name)
        topic_id = None if known is None else known.id
        partitions = []
        for part in topic.partitions:
            error = _UNKNOWN
            if part.start_offset < 0:
                error = _NEGATIVE_OFFSET
            elif topic_id is not None and part.partition_index in reply.partitions.get(topic_id, ()):
                error = errors.get((topic_id, part.partition_index), _NO_ERROR)
            partitions.append(
                AlterShareGroupOffsetsResponsePartition(
                    partition_index=part.partition_index, error_code=error.code, error_message=error.message
                )
            )
            yield
        topics.append(
            AlterShareGroupOffsetsResponseTopic(
                topic_name=topic.topic_name, topic_id=topic_id, partitions=tuple(partitions)
            )
        )
        yield
    return tuple(topics)
