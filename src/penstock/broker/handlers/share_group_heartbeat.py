"""ShareGroupHeartbeat (key 76), v1. Join (epoch 0), heartbeat, and leave (-1).

The heartbeat also initialises share partitions that the group needs and that have no state. A joining member waits a
moment for that, so that its first reply has its partitions. While the cluster is at level 0 of `share.version` the
protocol does not exist: UNSUPPORTED_VERSION.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kio.schema.share_group_heartbeat.v1.response import (
    Assignment,
    ShareGroupHeartbeatResponse,
    TopicPartitions,
)

from penstock.broker.coordinators.requests import (
    check_id_lengths,
    check_protocol,
    client_host,
    heartbeat_response,
)
from penstock.broker.network.requests import RequestContext
from penstock.groups.modern_group import JOIN_GROUP_MEMBER_EPOCH
from penstock.groups.share.share_group import ShareHeartbeatReply, ShareHeartbeatRequest
from penstock.groups.share.share_heartbeat import share_group_heartbeat
from penstock.protocol.errors import ApiError, ErrorCode

if TYPE_CHECKING:
    from penstock.groups.modern_group import Assignment as Partitions


#: Topics that one member subscribes to. The group decides about all of them at once.
_TOPICS_MAX: Final = 5_000


async def handle(ctx: RequestContext, request: Any) -> Any:
    try:
        check_protocol(ctx, "share.version", "share")
        reply = await _process(ctx, _heartbeat_request(ctx, request))
    except ApiError as error:
        reply = ShareHeartbeatReply(error=error.code, message=error.message)
    return _response(reply)


async def _process(ctx: RequestContext, beat: ShareHeartbeatRequest) -> ShareHeartbeatReply:
    check_id_lengths(ctx, beat.member_id, beat.rack_id)
    if len(beat.topic_names or ()) > _TOPICS_MAX:
        message = f"A member of a share group subscribes to at most {_TOPICS_MAX} topics."
        raise ApiError(ErrorCode.invalid_request, message)
    if beat.member_epoch == JOIN_GROUP_MEMBER_EPOCH:
        await ctx.services.groups.ensure_topic()
        ctx.services.groups.check_group_limit(beat.group_id)
    reply = await _write_heartbeat(ctx, beat)
    if reply.upkeep is None:
        return reply
    upkeep = ctx.services.share_state_reconciler
    if beat.member_epoch != JOIN_GROUP_MEMBER_EPOCH:
        upkeep.begin(beat.group_id)
        return reply
    await upkeep.settle(beat.group_id)
    # Joining is idempotent; this time the reply has the initialised partitions.
    return await _write_heartbeat(ctx, beat)


async def _write_heartbeat(ctx: RequestContext, beat: ShareHeartbeatRequest) -> ShareHeartbeatReply:
    groups = ctx.services.groups
    reply: ShareHeartbeatReply = await groups.write(
        beat.group_id, lambda shard, token: share_group_heartbeat(shard, beat, token, now_ms=groups.now_ms())
    )
    return reply


def _heartbeat_request(ctx: RequestContext, request: Any) -> ShareHeartbeatRequest:
    config = ctx.services.groups.config(request.group_id)
    return ShareHeartbeatRequest(
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
    return heartbeat_response(
        ShareGroupHeartbeatResponse,
        reply,
        assignment=None if reply.assigned is None else _assignment(reply.assigned),
    )


def _assignment(assigned: Partitions) -> Any:
    return Assignment(
        topic_partitions=tuple(
            TopicPartitions(topic_id=topic_id, partitions=tuple(sorted(partitions)))
            for topic_id, partitions in assigned.items()
        )
    )
