"""ShareAcknowledge (key 79), v1-2. Acknowledgements of a share group member, without a fetch.

Encoded by hand. The reply waits until the acknowledgements are stored. The request never opens a session (epoch 0 is
refused); epoch -1 closes it.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Final

from penstock.broker.coordinators.share.partitions import Acknowledgements, wait_until_stored
from penstock.broker.coordinators.share.sessions import FINAL_EPOCH, check_group_and_member
from penstock.broker.network.connection import Connection, PendingReply, Reply
from penstock.broker.network.requests import RequestContext, send_later
from penstock.broker.network.topic_access import check_group_access, may_use_topic
from penstock.broker.partition.client_view import LeaderHints
from penstock.protocol.acls import Operation
from penstock.protocol.errors import ApiError
from penstock.protocol.share import (
    AcknowledgedPartition,
    ShareAcknowledgeRequest,
    encode_share_acknowledge_response,
    parse_share_acknowledge_request,
    parse_share_acknowledge_request_in_steps,
)
from penstock.protocol.steps import Steps, finish

if TYPE_CHECKING:
    from penstock.broker.coordinators.share.sessions import ShareSession


#: A larger request is read in slices.
_READ_AT_ONCE_BYTES: Final = 8 * 1024


def handle(
    ctx: RequestContext, connection: Connection, frame: memoryview, position: int, correlation_id: int
) -> Reply | PendingReply:
    if len(frame) > _READ_AT_ONCE_BYTES:
        # A copy, because the buffer is used again before the last step.
        frame = memoryview(bytes(frame))
        reply = _serve_large(ctx, frame, position, correlation_id)
        return send_later(ctx, connection, reply, until_done=True)
    request = parse_share_acknowledge_request(frame, position, ctx.version)
    try:
        session = _session(ctx, request)
    except ApiError as error:
        return _refusal(ctx, correlation_id, error)
    acknowledgements = _acknowledgements(ctx, request, session)
    finish(acknowledgements.apply(request.topics))
    released = _released(ctx, request, session)
    if not acknowledgements.is_waiting and not released:
        return finish(_reply(ctx, request, correlation_id, acknowledgements))
    answer = _reply_when_stored(ctx, request, correlation_id, acknowledgements, released)
    return send_later(ctx, connection, answer, until_done=True)


async def _serve_large(ctx: RequestContext, frame: memoryview, position: int, correlation_id: int) -> Reply:
    buffers, size = ctx.services.server.buffers, len(frame)
    elements_max = ctx.services.settings.integer("penstock.request.elements.max")
    parsing = parse_share_acknowledge_request_in_steps(frame, position, ctx.version, elements_max)
    buffers.hold(size)
    try:
        request = await ctx.finish_in_slices(parsing)
    finally:
        buffers.release(size)
    try:
        session = _session(ctx, request)
    except ApiError as error:
        return _refusal(ctx, correlation_id, error)
    acknowledgements = _acknowledgements(ctx, request, session)
    await ctx.finish_in_slices(acknowledgements.apply(request.topics))
    released = _released(ctx, request, session)
    return await _reply_when_stored(ctx, request, correlation_id, acknowledgements, released)


def _session(ctx: RequestContext, request: ShareAcknowledgeRequest) -> ShareSession:
    """Return the session of the request. Raises ApiError."""
    check_group_access(ctx, request.group)
    group, member = check_group_and_member(
        request.group,
        request.member,
        group_bytes_max=ctx.services.settings.integer("penstock.id.max.bytes"),
    )
    return ctx.services.share.sessions.acknowledge(group, member, request.session_epoch, ctx.connection)


def _refusal(ctx: RequestContext, correlation_id: int, error: ApiError) -> Reply:
    ctx.services.metrics.count_error("share_acknowledge", error.code.name)
    return finish(
        encode_share_acknowledge_response(
            ctx.version, correlation_id, error=error.code.value, message=error.message
        )
    )


def _acknowledgements(
    ctx: RequestContext, request: ShareAcknowledgeRequest, session: ShareSession
) -> Acknowledgements:
    return Acknowledgements(
        ctx.services.share,
        session.group,
        session.member,
        may_renew=request.is_renewal,
        may_read=partial(may_use_topic, ctx, Operation.READ),
    )


def _released(
    ctx: RequestContext, request: ShareAcknowledgeRequest, session: ShareSession
) -> list[asyncio.Future[None]]:
    return ctx.services.share.close_session(session) if request.session_epoch == FINAL_EPOCH else []


async def _reply_when_stored(
    ctx: RequestContext,
    request: ShareAcknowledgeRequest,
    correlation_id: int,
    acknowledgements: Acknowledgements,
    released: list[asyncio.Future[None]],
) -> Reply:
    await acknowledgements.stored()
    await wait_until_stored(released)
    return await ctx.finish_in_slices(_reply(ctx, request, correlation_id, acknowledgements))


def _reply(
    ctx: RequestContext,
    request: ShareAcknowledgeRequest,
    correlation_id: int,
    acknowledgements: Acknowledgements,
) -> Steps[bytes]:
    assert request.group is not None
    hints = LeaderHints(ctx.services.metadata, ctx.services.partitions, ctx.listener, by_id=True)
    topics: dict[bytes, list[AcknowledgedPartition]] = {}
    for (topic_id, index), (error, message) in acknowledgements.outcomes.items():
        leader = hints.leader(topic_id, index, error)
        row = AcknowledgedPartition(index, error.value, message, leader)
        topics.setdefault(topic_id, []).append(row)
        yield
    return (
        yield from encode_share_acknowledge_response(
            ctx.version,
            correlation_id,
            lock_ms=ctx.services.groups.config(request.group).share_record_lock_duration_ms,
            topics=topics.items(),
            endpoints=tuple(hints.endpoints.values()),
        )
    )
