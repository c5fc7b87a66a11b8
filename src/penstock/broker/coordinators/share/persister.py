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
_ANSWER_MARGIN_S: Final = 1.0
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
        self._answer_s = commit_timeout_ms / 1000 + _ANSWER_MARGIN_S

    async def initialize(
        self, group: str, topic_id: UUID, partition: int, *, state_epoch: int, start_offset: int
    ) -> None:
        """With a start offset of -1, the first write sets it, and existing state stays as it is.

        With another start offset, existing state is reset, which needs a larger state epoch. Raises POLICY_VIOLATION if
        that would move an at-most-once group backwards.
        """
        await self._ask(
            state.InitializeState(
                state.SharePartitionKey(group, topic_id, partition), state_epoch, start_offset
            )
        )

    async def read(self, group: str, topic_id: UUID, partition: int, leader_epoch: int) -> state.ShareState:
        """Read the state and fence the leaders of earlier epochs. Raises INVALID_REQUEST if it is not initialised."""
        answer = await self._ask(
            state.ReadState(state.SharePartitionKey(group, topic_id, partition), leader_epoch)
        )
        assert answer.state is not None
        return answer.state

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
    ) -> None:
        """Batches are (first offset, last offset, delivery state, delivery count); sorted batches are fastest.

        States 32-34 archive records and write dead letters for them. A start offset of -1 is not written, and one
        before the stored start does not move it back. A write may be repeated.
        """
        key = state.SharePartitionKey(group, topic_id, partition)
        await self._ask(
            state.WriteState(
                key, state_epoch, leader_epoch, start_offset, delivery_complete_count, batches, totals
            )
        )

    async def explain(
        self, group: str, topic_id: UUID, partition: int, failures: Sequence[WorkerFailure]
    ) -> None:
        """Store the errors of failed records until their dead letters are written."""
        await self._ask(
            state.StoreWorkerErrors(state.SharePartitionKey(group, topic_id, partition), tuple(failures))
        )

    async def delete(self, group: str, topic_id: UUID, partition: int, *, state_epoch: int) -> None:
        """Raises FENCED_STATE_EPOCH if the state was initialised again, POLICY_VIOLATION for at-most-once groups."""
        await self._ask(state.DeleteState(state.SharePartitionKey(group, topic_id, partition), state_epoch))

    async def summary(
        self, group: str, topic_id: UUID, partition: int, leader_epoch: int = -1
    ) -> state.ShareStateSummary:
        """The start offset is -1 if the state was never initialised."""
        answer = await self._ask(
            state.ReadStateSummary(state.SharePartitionKey(group, topic_id, partition), leader_epoch)
        )
        assert answer.summary is not None
        return answer.summary

    # -- sending -------------------------------------------------------------------------------------

    async def _ask(self, question: state.ShareStateRequest) -> state.ShareStateReply:
        loop = asyncio.get_running_loop()
        deadline, attempt = loop.time() + RETRY_TIMEOUT_S, 0
        while True:
            try:
                answer = await self._ask_once(question)
            except ApiError as error:
                answer = state.ShareStateReply(error.code, error.message)
            if answer.error is ErrorCode.none:
                return answer
            delay_s = _BACKOFF.spread_ms(attempt, random, longest=1) / 1000
            if not self._is_retriable(question, answer.error) or loop.time() + delay_s > deadline:
                raise ApiError(answer.error, answer.message)
            await asyncio.sleep(delay_s)
            attempt += 1

    def _is_retriable(self, question: state.ShareStateRequest, error: ErrorCode) -> bool:
        """Whether to retry. The coordinator may not know a new topic yet."""
        if error is ErrorCode.unknown_topic_or_partition:
            return question.key.topic_id in self._context.metadata.image.topics_by_id
        return error in _RETRIABLE_CODES

    async def _ask_once(self, question: state.ShareStateRequest) -> state.ShareStateReply:
        if not self._coordinator.has_topic:
            await self._coordinator.ensure_topic()
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[state.ShareStateReply] = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._send)
        self._waiting.append((question, answered))
        return await answered

    def _send(self) -> None:
        """Send all requests of this event loop iteration."""
        waiting, self._waiting = self._waiting, []
        here: list[PendingRequest] = []
        there: dict[tuple[int, type, str], list[PendingRequest]] = {}
        for one in waiting:
            question = one[0]
            try:
                leader = self._coordinator.leader_of_shard(self._coordinator.shard_of_key(question.key))
            except ApiError as error:
                _complete([one], [state.ShareStateReply(error.code, error.message)])
                continue
            if leader == self._context.node_id:
                here.append(one)
            elif leader is None:
                _complete([one], [state.ShareStateReply(ErrorCode.coordinator_not_available)])
            else:
                there.setdefault((leader, type(question), question.key.group), []).append(one)
        if here:
            self._context.environment.spawn(self._answer(here, self._coordinator.ask))
        for (leader, _, _), asked in there.items():
            # The message groups partitions by topic.
            asked.sort(key=lambda one: one[0].key.topic_id.bytes)
            self._context.environment.spawn(self._answer(asked, partial(self._request_remote, leader)))

    async def _answer(self, waiting: list[PendingRequest], ask: SendRequests) -> None:
        try:
            answers = await ask([question for question, _ in waiting])
        except Exception as error:
            # Every caller needs a reply, and it is unknown whether the request was carried out.
            logger.exception("a request for share group state failed")
            answers = [state.ShareStateReply(ErrorCode.network_exception, str(error))] * len(waiting)
        _complete(waiting, answers)

    async def _request_remote(
        self, leader: int, questions: list[state.ShareStateRequest]
    ) -> Sequence[state.ShareStateReply]:
        from penstock.broker.coordinators.share.state_messages import (
            STATE_APIS,
            decode_response,
            encode_request,
        )
        from penstock.broker.network.peers import PeerUnreachable

        if isinstance(questions[0], state.StoreWorkerErrors):
            return [
                await self._explain_remote(leader, one)
                for one in questions
                if isinstance(one, state.StoreWorkerErrors)
            ]
        form = STATE_APIS[type(questions[0])]
        try:
            response = await self._peers().call(
                leader,
                form.api_key,
                encode_request(form, questions),
                timeout_s=self._answer_s,
                purpose="share-state",
            )
        except (PeerUnreachable, TimeoutError) as error:
            return [state.ShareStateReply(ErrorCode.network_exception, str(error))] * len(questions)
        answers = decode_response(form, response)
        if len(answers) != len(questions):
            return [
                state.ShareStateReply(ErrorCode.unknown_server_error, "the reply lacks partitions")
            ] * len(questions)
        return answers

    async def _explain_remote(self, leader: int, question: state.StoreWorkerErrors) -> state.ShareStateReply:
        from penstock.broker.network.peers import PeerUnreachable

        message = ShareFailures(*question.key, question.failures, for_coordinator=True)
        frame = _HEADER.pack(SHARE_FAILURES, 0, 0, _NO_CLIENT_ID) + encode_share_failures(message)
        try:
            reply = await self._peers().raw(leader, frame, timeout_s=self._answer_s, purpose="share-state")
            return state.ShareStateReply(parse_share_failures_response(reply, _CORRELATION_BYTES))
        except (PeerUnreachable, TimeoutError, MalformedFrame) as error:
            return state.ShareStateReply(ErrorCode.network_exception, str(error))


def _complete(waiting: list[PendingRequest], answers: Sequence[state.ShareStateReply]) -> None:
    for (_, answered), answer in zip(waiting, answers, strict=True):
        if not answered.done():
            answered.set_result(answer)
