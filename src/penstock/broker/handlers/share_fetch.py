"""ShareFetch (key 78), v1-2. Processes acknowledgements, then returns records to a share group member.

Encoded by hand. The reply waits until the acknowledgements are stored and there are records, or max_wait is over.
Epoch 0 opens a session and carries no acknowledgements; epoch -1 closes it and releases the member's records.
Renewals (v2) come without a fetch. The group coordinator checks membership; as in Apache Kafka this handler does not.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from penstock.broker.coordinators.share.fetch import AcquiredRecords, DelayedShareFetch, ReadWouldBlock
from penstock.broker.coordinators.share.partitions import (
    Acknowledgements,
    AcknowledgeResult,
    wait_until_stored,
)
from penstock.broker.coordinators.share.sessions import (
    FINAL_EPOCH,
    INITIAL_EPOCH,
    RawTopicIdPartition,
    ShareSession,
    check_group_and_member,
)
from penstock.broker.network.connection import Connection, PendingReply, Reply
from penstock.broker.network.requests import RequestContext
from penstock.broker.partition.client_view import LeaderHints
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.share import (
    ShareFetchRequest,
    SharePartitionData,
    encode_share_fetch_response,
    parse_share_fetch_request,
)

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any


def handle(
    ctx: RequestContext, connection: Connection, frame: memoryview, position: int, correlation_id: int
) -> Reply | PendingReply:
    request = parse_share_fetch_request(frame, position, ctx.version)
    try:
        group, member = check_group_and_member(
            request.group,
            request.member,
            group_bytes_max=ctx.services.settings.integer("penstock.id.max.bytes"),
        )
        _check_renewal(request)
        session = ctx.services.share.sessions.fetch(request, group, member, ctx.connection)
    except ApiError as error:
        ctx.services.metrics.count_error("share_fetch", error.code.name)
        refusal = encode_share_fetch_response(correlation_id, error=error.code.value, message=error.message)
        if error.code is ErrorCode.share_session_limit_reached:
            # The reply is delayed, because the client would retry at once.
            return _reply_later(ctx, connection, asyncio.sleep(request.max_wait_ms / 1000, refusal))
        return refusal
    answer = _ShareFetchReply(ctx, request, correlation_id, session)
    return answer.reply() if answer.is_ready else _reply_later(ctx, connection, answer.reply_later())


def _reply_later(
    ctx: RequestContext, connection: Connection, reply: Coroutine[Any, Any, Reply]
) -> PendingReply:
    slot = connection.defer(ctx.api_key)
    task = ctx.services.spawn(_fulfil(ctx, connection, slot, reply))
    slot.on_lost = task.cancel
    return slot


async def _fulfil(
    ctx: RequestContext, connection: Connection, slot: PendingReply, reply: Coroutine[Any, Any, Reply]
) -> None:
    try:
        connection.fulfil(slot, await reply)
    except asyncio.CancelledError:
        raise
    except Exception:
        ctx.services.server.failed(connection)


def _check_renewal(request: ShareFetchRequest) -> None:
    asks = request.max_bytes or request.min_bytes or request.max_records or request.max_wait_ms
    if request.is_renewal and asks:
        raise ApiError(ErrorCode.invalid_request, "renewals come without a fetch")


class _ShareFetchReply:
    """The constructor does everything that can be done at once."""

    def __init__(
        self, ctx: RequestContext, request: ShareFetchRequest, correlation_id: int, session: ShareSession
    ) -> None:
        self._ctx = ctx
        self._request = request
        self._correlation_id = correlation_id
        self._session = session
        shares = ctx.services.share
        self._said = Acknowledgements(
            shares, session.group, session.member, request.topics, may_renew=request.is_renewal
        )
        self._fetching: DelayedShareFetch | None = None
        self._released: list[asyncio.Future[None]] = []
        self._is_fetched = True
        if request.session_epoch == FINAL_EPOCH:
            self._released = shares.close_session(session)
        elif not request.is_renewal and session.places:
            self._fetching = DelayedShareFetch(shares, session, request)
            self._is_fetched = self._try(self._fetching)

    @staticmethod
    def _try(fetching: DelayedShareFetch) -> bool:
        try:
            return fetching.collect()
        except ReadWouldBlock:
            return False

    @property
    def is_ready(self) -> bool:
        return self._is_fetched and not self._released and not self._said.is_waiting

    async def reply_later(self) -> Reply:
        if self._fetching is not None and not self._is_fetched:
            await self._fetching.run()
        await self._said.stored()
        await wait_until_stored(self._released)
        return self.reply()

    def reply(self) -> Reply:
        services, session = self._ctx.services, self._session
        portions = {} if self._fetching is None else self._fetching.checked()
        places: dict[RawTopicIdPartition, None] = dict.fromkeys((*self._said.outcomes, *portions))
        if self._request.session_epoch == INITIAL_EPOCH:
            places |= session.places
        hints = LeaderHints(services.metadata, services.partitions, self._ctx.listener, by_id=True)
        topics: dict[bytes, list[SharePartitionData]] = {}
        for place in places:
            row = _fetched_partition(place, self._said.outcomes.get(place), portions.get(place), hints)
            topics.setdefault(place[0], []).append(row)
        return encode_share_fetch_response(
            self._correlation_id,
            lock_ms=services.groups.config(session.group).share_record_lock_duration_ms,
            topics=topics.items(),
            endpoints=tuple(hints.endpoints.values()),
        )


def _fetched_partition(
    place: RawTopicIdPartition,
    outcome: AcknowledgeResult | None,
    portion: AcquiredRecords | None,
    hints: LeaderHints,
) -> SharePartitionData:
    said = outcome or AcknowledgeResult()
    error = None if portion is None else portion.error
    code = ErrorCode.none if error is None else error.code
    leader = hints.leader(*place, code) or hints.leader(*place, said.error)
    return SharePartitionData(
        place[1],
        code.value,
        None if error is None else error.message,
        said.error.value,
        said.message,
        leader,
        () if portion is None else portion.records,
        () if portion is None else portion.acquired,
    )
