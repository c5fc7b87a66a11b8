"""ShareGroupHeartbeat (key 76), v1. Joins (epoch 0), beats, and leaves (-1).

Share partitions that the group needs and that have no state are initialised on the way; who joins waits for that a
moment, so that it is told its partitions at once. While the cluster is at level 0 of `share.version` there is no such
protocol: UNSUPPORTED_VERSION.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from kio.schema.share_group_heartbeat.v1.response import (
    Assignment,
    ShareGroupHeartbeatResponse,
    TopicPartitions,
)

from penstock.broker.context import RequestContext
from penstock.broker.group_requests import NO_THROTTLE, check_ids, client_host
from penstock.broker.group_settings import effective_group_settings
from penstock.groups.consumer.values import JOINING
from penstock.groups.share.heartbeat import heartbeat
from penstock.groups.share.messages import ShareHeartbeat, ShareHeartbeatReply
from penstock.protocol.errors import ApiError, ErrorCode

if TYPE_CHECKING:
    from penstock.groups.consumer.values import Assignment as Partitions

FEATURE: Final = "share.version"


async def handle(ctx: RequestContext, request: Any) -> Any:
    try:
        if not ctx.node.image.features.get(FEATURE):
            raise ApiError(ErrorCode.unsupported_version, "The share protocol is not enabled.")
        reply = await _answer(ctx, _beat(ctx, request))
    except ApiError as error:
        reply = ShareHeartbeatReply(error=error.code, message=error.message)
    return _response(reply)


async def _answer(ctx: RequestContext, beat: ShareHeartbeat) -> ShareHeartbeatReply:
    check_ids(ctx, beat.member_id, beat.rack_id)
    if beat.member_epoch == JOINING:
        await ctx.node.groups.ensure_topic()
        ctx.node.groups.check_room(beat.group_id)
    reply = await _say(ctx, beat)
    if reply.upkeep is None:
        return reply
    upkeep = ctx.node.share_upkeep
    if beat.member_epoch != JOINING:
        upkeep.begin(beat.group_id)
        return reply
    await upkeep.settle(beat.group_id)
    # To join twice is to join once.
    return await _say(ctx, beat)


async def _say(ctx: RequestContext, beat: ShareHeartbeat) -> ShareHeartbeatReply:
    groups = ctx.node.groups
    reply: ShareHeartbeatReply = await groups.write(
        beat.group_id, lambda shard, token: heartbeat(shard, beat, token, now_ms=groups.now_ms())
    )
    return reply


def _beat(ctx: RequestContext, request: Any) -> ShareHeartbeat:
    config = effective_group_settings(ctx.node, request.group_id)
    return ShareHeartbeat(
        group_id=request.group_id,
        member_id=request.member_id,
        member_epoch=request.member_epoch,
        rack_id=request.rack_id,
        client_id=ctx.client_id or "",
        client_host=client_host(ctx),
        topic_names=request.subscribed_topic_names,
        session_timeout_ms=config.share_session_timeout_ms,
        heartbeat_interval_ms=config.share_heartbeat_interval_ms,
    )


def _response(reply: ShareHeartbeatReply) -> Any:
    return ShareGroupHeartbeatResponse(
        throttle_time=NO_THROTTLE,
        error_code=reply.error,
        error_message=reply.message,
        member_id=reply.member_id,
        member_epoch=reply.member_epoch,
        heartbeat_interval=timedelta(milliseconds=reply.heartbeat_interval_ms),
        assignment=None if reply.assigned is None else _assignment(reply.assigned),
    )


def _assignment(assigned: Partitions) -> Any:
    return Assignment(
        topic_partitions=tuple(
            TopicPartitions(topic_id=topic_id, partitions=tuple(sorted(partitions)))
            for topic_id, partitions in assigned.items()
        )
    )
