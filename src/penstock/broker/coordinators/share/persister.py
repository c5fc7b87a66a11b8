"""The persister: how the leader of a share partition reads and writes its state, wherever the share coordinator is.

Requests of one iteration of the event loop to the same coordinator travel together: directly when it is on this
broker, otherwise in one request per group and API. Retriable errors are retried for a bounded time. A caller that
times out does not know whether its request was carried out.
"""

from __future__ import annotations

import asyncio
import logging
import random
import struct
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final
from uuid import UUID

from penstock.groups.share.state import share_state as state
from penstock.protocol.backoff import ExponentialBackoff
from penstock.protocol.errors import ApiError, ErrorCode, MalformedFrame
from penstock.protocol.share_failures import (
    SHARE_FAILURES,
    ShareFailures,
    WorkerFailure,
    encode_share_failures,
    parse_share_failures_response,
)

if TYPE_CHECKING:
    from penstock.broker.coordinators.runtime.sharded_coordinator import CoordinatorContext
    from penstock.broker.coordinators.share.coordinator import ShareCoordinator
    from penstock.broker.environment import PeerCalls

#: How long a request is retried.
RETRY_TIMEOUT_S: Final = 15.0
_BACKOFF: Final = ExponentialBackoff(base_ms=40, cap_ms=500)
_HEADER: Final = struct.Struct(">hhih")  # api key, version, correlation id, length of the client id
_NO_CLIENT_ID: Final = -1
_CORRELATION_BYTES: Final = 4
#: Time for the network, in addition to the coordinator's own commit timeout.
_REPLY_MARGIN_S: Final = 1.0
_RETRIABLE_CODES: Final = frozenset(
    {
        ErrorCode.not_coordinator,
        ErrorCode.coordinator_not_available,
        ErrorCode.coordinator_load_in_progress,
        ErrorCode.request_timed_out,
        ErrorCode.network_exception,
    }
)

logger = logging.getLogger("penstock.share")

PendingRequest = tuple[state.ShareStateRequest, "asyncio.Future[state.ShareStateReply]"]
SendRequests = Callable[[list[state.ShareStateRequest]], Awaitable[Sequence[state.ShareStateReply]]]


class Persister:
    """All methods raise ApiError: FENCED_STATE_EPOCH, FENCED_LEADER_EPOCH and
    INVALID_REQUEST at once, retriable errors only after `RETRY_TIMEOUT_S`.
    """

    def __init__(
        self, coordinator: ShareCoordinator, context: CoordinatorContext, peers: Callable[[], PeerCalls]
    ) -> None:
        self._coordinator = coordinator
        self._context = context
        self._peers = peers
        self._waiting: list[PendingRequest] = []
        commit_timeout_ms = context.settings.integer(coordinator.topic.commit_timeout_ms)
        self._reply_timeout_s = commit_timeout_ms / 1000 + _REPLY_MARGIN_S

    async def initialize(
        self, group: str, topic_id: UUID, partition: int, *, state_epoch: int, start_offset: int
    ) -> None:
        """With a start offset of -1, the first write sets it, and existing state stays as it is.

        With another start offset, existing state is reset, which needs a larger state epoch. Raises POLICY_VIOLATION if
        that would move an at-most-once group backwards.
        """
        await self._request(
            state.InitializeState(
                state.SharePartitionKey(group, topic_id, partition), state_epoch, start_offset
            )
        )

    async def read(self, group: str, topic_id: UUID, partition: int, leader_epoch: int) -> state.ShareState:
        """Read the state and fence the leaders of earlier epochs. Raises INVALID_REQUEST if it is not initialised."""
        reply = await self._request(
            state.ReadState(state.SharePartitionKey(group, topic_id, partition), leader_epoch)
        )
        assert reply.state is not None
        return reply.state

    async def write(
        self,
        group: str,
        topic_id: UUID,
        partition: int,
        *,
        state_epoch: int,
        leader_epoch: int,
        start_offset: int,
        delivery_complete_count: int,
        batches: Sequence[tuple[int, int, int, int]],
        totals: state.DeliveryTotals | None = None,
        delays: tuple[state.RecordDelay, ...] = (),
    ) -> None:
        """Batches are (first offset, last offset, delivery state, delivery count); sorted batches are fastest.

        States 32-34 archive records and write dead letters for them. A start offset of -1 is not written, and one
        before the stored start does not move it back. A write may be repeated.
        """
        key = state.SharePartitionKey(group, topic_id, partition)
        await self._request(
            state.WriteState(
                key, state_epoch, leader_epoch, start_offset, delivery_complete_count, batches, totals, delays
            )
        )

    async def store_errors(
        self, group: str, topic_id: UUID, partition: int, failures: Sequence[WorkerFailure]
    ) -> None:
        """Store the errors of failed records until their dead letters are written."""
        await self._request(
            state.StoreWorkerErrors(state.SharePartitionKey(group, topic_id, partition), tuple(failures))
        )

    async def delete(self, group: str, topic_id: UUID, partition: int, *, state_epoch: int) -> None:
        """Raises FENCED_STATE_EPOCH if the state was initialised again, POLICY_VIOLATION for at-most-once groups."""
        await self._request(
            state.DeleteState(state.SharePartitionKey(group, topic_id, partition), state_epoch)
        )

    async def summary(
        self, group: str, topic_id: UUID, partition: int, leader_epoch: int = -1
    ) -> state.ShareStateSummary:
        """The start offset is -1 if the state was never initialised."""
        reply = await self._request(
            state.ReadStateSummary(state.SharePartitionKey(group, topic_id, partition), leader_epoch)
        )
        assert reply.summary is not None
        return reply.summary

    # -- sending -------------------------------------------------------------------------------------

    async def _request(self, request: state.ShareStateRequest) -> state.ShareStateReply:
        loop = asyncio.get_running_loop()
        deadline, attempt = loop.time() + RETRY_TIMEOUT_S, 0
        while True:
            try:
                reply = await self._request_once(request)
            except ApiError as error:
                reply = state.ShareStateReply(error.code, error.message)
            if reply.error is ErrorCode.none:
                return reply
            delay_s = _BACKOFF.spread_ms(attempt, random, longest=1) / 1000
            if not self._is_retriable(request, reply.error) or loop.time() + delay_s > deadline:
                raise ApiError(reply.error, reply.message)
            await asyncio.sleep(delay_s)
            attempt += 1

    def _is_retriable(self, request: state.ShareStateRequest, error: ErrorCode) -> bool:
        """Whether to retry. The coordinator may not know a new topic yet."""
        if error is ErrorCode.unknown_topic_or_partition:
            return request.key.topic_id in self._context.metadata.image.topics_by_id
        return error in _RETRIABLE_CODES

    async def _request_once(self, request: state.ShareStateRequest) -> state.ShareStateReply:
        if not self._coordinator.has_topic:
            await self._coordinator.ensure_topic()
        loop = asyncio.get_running_loop()
        reply_future: asyncio.Future[state.ShareStateReply] = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._send)
        self._waiting.append((request, reply_future))
        return await reply_future

    def _send(self) -> None:
        """Send all requests of this event loop iteration."""
        waiting, self._waiting = self._waiting, []
        local: list[PendingRequest] = []
        remote: dict[tuple[int, type, str], list[PendingRequest]] = {}
        for one in waiting:
            request = one[0]
            try:
                leader = self._coordinator.leader_of_shard(self._coordinator.shard_of_key(request.key))
            except ApiError as error:
                _complete([one], [state.ShareStateReply(error.code, error.message)])
                continue
            if leader == self._context.node_id:
                local.append(one)
            elif leader is None:
                _complete([one], [state.ShareStateReply(ErrorCode.coordinator_not_available)])
            else:
                remote.setdefault((leader, type(request), request.key.group), []).append(one)
        if local:
            self._context.environment.spawn(self._forward(local, self._coordinator.handle))
        for (leader, _, _), batch in remote.items():
            # The message groups partitions by topic.
            batch.sort(key=lambda one: one[0].key.topic_id.bytes)
            self._context.environment.spawn(self._forward(batch, partial(self._request_remote, leader)))

    async def _forward(self, waiting: list[PendingRequest], send: SendRequests) -> None:
        try:
            replies = await send([request for request, _ in waiting])
        except Exception as error:
            # Every caller needs a reply, and it is unknown whether the request was carried out.
            logger.exception("a request for share group state failed")
            replies = [state.ShareStateReply(ErrorCode.network_exception, str(error))] * len(waiting)
        _complete(waiting, replies)

    async def _request_remote(
        self, leader: int, requests: list[state.ShareStateRequest]
    ) -> Sequence[state.ShareStateReply]:
        from penstock.broker.coordinators.share.state_messages import (
            STATE_APIS,
            decode_response,
            encode_request,
        )
        from penstock.broker.network.peers import PeerUnreachable

        if isinstance(requests[0], state.StoreWorkerErrors):
            return [
                await self._send_errors(leader, one)
                for one in requests
                if isinstance(one, state.StoreWorkerErrors)
            ]
        form = STATE_APIS[type(requests[0])]
        try:
            response = await self._peers().call(
                leader,
                form.api_key,
                encode_request(form, requests),
                timeout_s=self._reply_timeout_s,
                purpose="share-state",
            )
        except (PeerUnreachable, TimeoutError) as error:
            return [state.ShareStateReply(ErrorCode.network_exception, str(error))] * len(requests)
        replies = decode_response(form, response)
        if len(replies) != len(requests):
            return [
                state.ShareStateReply(ErrorCode.unknown_server_error, "the reply lacks partitions")
            ] * len(requests)
        return replies

    async def _send_errors(self, leader: int, request: state.StoreWorkerErrors) -> state.ShareStateReply:
        from penstock.broker.network.peers import PeerUnreachable

        message = ShareFailures(*request.key, request.failures, for_coordinator=True)
        frame = _HEADER.pack(SHARE_FAILURES, 0, 0, _NO_CLIENT_ID) + encode_share_failures(message)
        try:
            reply = await self._peers().raw(
                leader, frame, timeout_s=self._reply_timeout_s, purpose="share-state"
            )
            return state.ShareStateReply(parse_share_failures_response(reply, _CORRELATION_BYTES))
        except (PeerUnreachable, TimeoutError, MalformedFrame) as error:
            return state.ShareStateReply(ErrorCode.network_exception, str(error))


def _complete(waiting: list[PendingRequest], replies: Sequence[state.ShareStateReply]) -> None:
    for (_, reply_future), reply in zip(waiting, replies, strict=True):
        if not reply_future.done():
            reply_future.set_result(reply)
