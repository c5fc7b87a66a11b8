"""What a share partition on its leader uses to read and write its state, wherever the coordinator is.

Questions of one moment to one coordinator travel together: on this node without the wire, to another one in a request
for each group and kind. What passes is asked again, up to a time; who runs out of time does not know whether it was
done.
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

from penstock.groups.share_state.values import (
    Answer,
    Delete,
    Explain,
    Initialize,
    Key,
    Question,
    Read,
    ShareState,
    ShareSummary,
    Summary,
    Totals,
    Write,
)
from penstock.protocol.errors import ApiError, ErrorCode, MalformedFrame
from penstock.protocol.share_failures import (
    SHARE_FAILURES,
    ShareFailures,
    WorkerFailure,
    pack_share_failures,
    read_answer,
)

if TYPE_CHECKING:
    from penstock.broker.node import Node
    from penstock.broker.share_state.coordinator import ShareStateCoordinator

#: For how long one is asked again.
PATIENCE_S: Final = 15.0
_REST_S: Final = 0.02
_REST_MAX_S: Final = 0.5
_HEADER: Final = struct.Struct(">hhih")  # api key, version, correlation id, length of the client id
_NO_CLIENT_ID: Final = -1
_CORRELATION_BYTES: Final = 4
#: The coordinator's own wait for its replicas, and the way there and back.
_ANSWER_MARGIN_S: Final = 1.0
_PASSING: Final = frozenset(
    {
        ErrorCode.not_coordinator,
        ErrorCode.coordinator_not_available,
        ErrorCode.coordinator_load_in_progress,
        ErrorCode.request_timed_out,
        ErrorCode.network_exception,
    }
)

logger = logging.getLogger("penstock.share")

Waiting = tuple[Question, "asyncio.Future[Answer]"]
Ask = Callable[[list[Question]], Awaitable[Sequence[Answer]]]


class Persister:
    """`node.share_state.persister`. Everything raises ApiError: FENCED_STATE_EPOCH, FENCED_LEADER_EPOCH and
    INVALID_REQUEST at once, what passes only after `PATIENCE_S`.
    """

    def __init__(self, node: Node, coordinator: ShareStateCoordinator) -> None:
        self._node = node
        self._coordinator = coordinator
        self._waiting: list[Waiting] = []
        self._answer_s = node.settings.integer(coordinator.topic.commit_timeout_ms) / 1000 + _ANSWER_MARGIN_S

    async def initialize(
        self, group: str, topic_id: UUID, partition: int, *, state_epoch: int, start_offset: int
    ) -> None:
        """A start offset of -1 leaves it to the first write, and what exists as it is.

        Another one begins what exists anew, which needs a larger state epoch. POLICY_VIOLATION: that would be a step
        back for a group that is at-most-once.
        """
        await self._ask(Initialize(Key(group, topic_id, partition), state_epoch, start_offset))

    async def read(self, group: str, topic_id: UUID, partition: int, leader_epoch: int) -> ShareState:
        """From now on leaders of earlier epochs are fenced. INVALID_REQUEST: it was not initialised."""
        answer = await self._ask(Read(Key(group, topic_id, partition), leader_epoch))
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
        totals: Totals | None = None,
    ) -> None:
        """Batches are (first offset, last offset, delivery state, delivery count), sorted ones being quickest.

        States 32-34 archive, and bury in the dead-letter topic. A start offset of -1 is not written, and one before
        the stored start does not take it back. The same write may come again.
        """
        key = Key(group, topic_id, partition)
        await self._ask(
            Write(key, state_epoch, leader_epoch, start_offset, delivery_complete_count, batches, totals)
        )

    async def explain(
        self, group: str, topic_id: UUID, partition: int, failures: Sequence[WorkerFailure]
    ) -> None:
        """Keep what records died of until they are buried."""
        await self._ask(Explain(Key(group, topic_id, partition), tuple(failures)))

    async def delete(self, group: str, topic_id: UUID, partition: int, *, state_epoch: int) -> None:
        """FENCED_STATE_EPOCH: it was begun anew since. POLICY_VIOLATION: the group is at-most-once."""
        await self._ask(Delete(Key(group, topic_id, partition), state_epoch))

    async def summary(
        self, group: str, topic_id: UUID, partition: int, leader_epoch: int = -1
    ) -> ShareSummary:
        """Of what was never initialised, the start offset is -1."""
        answer = await self._ask(Summary(Key(group, topic_id, partition), leader_epoch))
        assert answer.summary is not None
        return answer.summary

    # -- asking --------------------------------------------------------------------------------------

    async def _ask(self, question: Question) -> Answer:
        loop = asyncio.get_running_loop()
        deadline, rest_s = loop.time() + PATIENCE_S, _REST_S
        while True:
            try:
                answer = await self._ask_once(question)
            except ApiError as error:
                answer = Answer(error.code, error.message)
            if answer.error is ErrorCode.none:
                return answer
            rest_s = min(rest_s * 2, _REST_MAX_S)
            if not self._passes(question, answer.error) or loop.time() + rest_s > deadline:
                raise ApiError(answer.error, answer.message)
            await asyncio.sleep(rest_s * random.uniform(0.5, 1.0))

    def _passes(self, question: Question, error: ErrorCode) -> bool:
        """The coordinator may not have heard yet of a topic that is new."""
        if error is ErrorCode.unknown_topic_or_partition:
            return question.key.topic_id in self._node.image.topics_by_id
        return error in _PASSING

    async def _ask_once(self, question: Question) -> Answer:
        if not self._coordinator.has_topic:
            await self._coordinator.ensure_topic()
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[Answer] = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._send)
        self._waiting.append((question, answered))
        return await answered

    def _send(self) -> None:
        """All that has come in this turn of the loop."""
        waiting, self._waiting = self._waiting, []
        here: list[Waiting] = []
        there: dict[tuple[int, type, str], list[Waiting]] = {}
        for one in waiting:
            question = one[0]
            try:
                leader = self._coordinator.leader_of_place(self._coordinator.place_of(question.key))
            except ApiError as error:
                _give([one], [Answer(error.code, error.message)])
                continue
            if leader == self._node.node_id:
                here.append(one)
            elif leader is None:
                _give([one], [Answer(ErrorCode.coordinator_not_available)])
            else:
                there.setdefault((leader, type(question), question.key.group), []).append(one)
        if here:
            self._node.spawn(self._answer(here, self._coordinator.ask))
        for (leader, _, _), asked in there.items():
            # Those of one topic go side by side, as the message has them.
            asked.sort(key=lambda one: one[0].key.topic_id.bytes)
            self._node.spawn(self._answer(asked, partial(self._ask_there, leader)))

    async def _answer(self, waiting: list[Waiting], ask: Ask) -> None:
        try:
            answers = await ask([question for question, _ in waiting])
        except Exception as error:
            # Somebody waits for each of them, and nobody knows whether it was done.
            logger.exception("no answer about the state of share groups")
            answers = [Answer(ErrorCode.network_exception, str(error))] * len(waiting)
        _give(waiting, answers)

    async def _ask_there(self, leader: int, questions: list[Question]) -> Sequence[Answer]:
        from penstock.broker.peers import PeerUnreachable
        from penstock.broker.share_state.wire import FORMS, answers_of, request_of

        if isinstance(questions[0], Explain):
            return [await self._explain_there(leader, one) for one in questions if isinstance(one, Explain)]
        form = FORMS[type(questions[0])]
        try:
            response = await self._node.peers.call(
                leader,
                form.api_key,
                request_of(form, questions),
                timeout_s=self._answer_s,
                purpose="share-state",
            )
        except (PeerUnreachable, TimeoutError) as error:
            return [Answer(ErrorCode.network_exception, str(error))] * len(questions)
        answers = answers_of(form, response)
        if len(answers) != len(questions):
            return [Answer(ErrorCode.unknown_server_error, "some are missing")] * len(questions)
        return answers

    async def _explain_there(self, leader: int, question: Explain) -> Answer:
        from penstock.broker.peers import PeerUnreachable

        said = ShareFailures(*question.key, question.failures, for_coordinator=True)
        frame = _HEADER.pack(SHARE_FAILURES, 0, 0, _NO_CLIENT_ID) + pack_share_failures(said)
        try:
            reply = await self._node.peers.raw(leader, frame, timeout_s=self._answer_s, purpose="share-state")
            return Answer(read_answer(reply, _CORRELATION_BYTES))
        except (PeerUnreachable, TimeoutError, MalformedFrame) as error:
            return Answer(ErrorCode.network_exception, str(error))


def _give(waiting: list[Waiting], answers: Sequence[Answer]) -> None:
    for (_, answered), answer in zip(waiting, answers, strict=True):
        if not answered.done():
            answered.set_result(answer)
