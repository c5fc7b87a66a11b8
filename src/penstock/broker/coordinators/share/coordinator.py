"""Share state on the coordinator runtime: what its five handlers, and share partitions on this node, talk to."""

from __future__ import annotations

import asyncio
import logging
from base64 import urlsafe_b64encode
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from penstock.broker.group_settings import effective_group_settings
from penstock.broker.internal_topics import SHARE_STATE
from penstock.broker.sharded_coordinator import ShardedCoordinator
from penstock.broker.share_state.dead_letters import DeadLetters
from penstock.broker.share_state.persister import Persister
from penstock.broker.share_state.pruning import Pruning
from penstock.groups.share_state.values import Answer, Delete, Initialize, Key, Question, Read, Write
from penstock.protocol.errors import ApiError, ErrorCode

if TYPE_CHECKING:
    from penstock.broker.context import RequestContext
    from penstock.broker.coordinator_runtime import ActiveShard
    from penstock.broker.node import Node
    from penstock.broker.share_state.wire import Form
    from penstock.cluster.delta import ImageDelta
    from penstock.groups.share_state.shard import ShareStateShard

logger = logging.getLogger("penstock.share")

#: Share partitions whose places are remembered; working one out takes as long as a small write.
_PLACES_MAX: Final = 100_000
#: Strings are stored with a length of 16 bits.
_GROUP_BYTES_MAX: Final = 32_767
#: How many elections of a partition this node may not have heard of yet.
_EPOCHS_AHEAD_MAX: Final = 100


def coordinator_key(key: Key) -> str:
    """By which Kafka finds the coordinator of a share partition; ids are in its own base 64."""
    topic_id = urlsafe_b64encode(key.topic_id.bytes).rstrip(b"=").decode()
    return f"{key.group}:{topic_id}:{key.partition}"


class ShareStateCoordinator(ShardedCoordinator["ShareStateShard"]):
    """`node.share_state`."""

    #: A topic id and a partition beside the group.
    _KEY_EXTRA_BYTES = 64

    def __init__(self, node: Node) -> None:
        super().__init__(node, SHARE_STATE)
        self._places: dict[Key, int] = {}
        self._places_count = 0
        self.persister = Persister(node, self)
        self.dead_letters = DeadLetters(node, self)
        self._pruning = Pruning(node, self)

    def _new_shard(self) -> ShareStateShard:
        from penstock.groups.share_state.shard import ShareStateShard

        updates = self._node.settings.integer("share.coordinator.snapshot.update.records.per.snapshot")
        return ShareStateShard(updates_per_snapshot=updates)

    def _led(self, index: int) -> None:
        self.dead_letters.serve(index)
        self._pruning.start()

    def image_changed(self, delta: ImageDelta) -> None:
        super().image_changed(delta)
        deleted = tuple(topic.id for topic in delta.topics_deleted)
        if deleted and self.shards():
            self._node.spawn(self._forget_topics(deleted))

    async def forget_deleted(self, active: ActiveShard[ShareStateShard]) -> None:
        """State of topics that were deleted while nobody served the shard. The image must show that it is led here.

        Raises ApiError.
        """
        known = self._node.image.topics_by_id
        gone = [topic_id for topic_id in active.shard.topic_ids() if topic_id not in known]
        if gone:
            await active.submit(lambda shard, token: shard.forget_topics(gone, token))

    async def _forget_topics(self, topic_ids: tuple[UUID, ...]) -> None:
        """A shard that is not reached keeps their state until it is served again."""
        asked = (
            self.write_shard(index, lambda shard, token: shard.forget_topics(topic_ids, token))
            for index in self.shards()
        )
        for result in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(result, Exception):
                logger.info("some share state of deleted topics remains: %r", result)

    # -- where it is ---------------------------------------------------------------------------------

    def place_of(self, key: Key) -> int:
        """The shard of a share partition. Raises ApiError while there are no shards."""
        topic = self._node.image.topics.get(self.topic.name)
        count = 0 if topic is None else len(topic.partitions)
        if count != self._places_count or len(self._places) > _PLACES_MAX:
            self._places, self._places_count = {}, count
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = self.shard_of(coordinator_key(key))
        return place

    def leader_of_place(self, place: int) -> int | None:
        partition = self._node.image.partition(self.topic.name, place)
        return None if partition is None or not partition.has_leader else partition.leader

    # -- what it is asked ----------------------------------------------------------------------------

    async def ask(self, questions: Sequence[Question]) -> list[Answer]:
        """Those about one shard are decided on and stored as one. Errors are answers, too."""
        answers: list[Answer] = [_UNANSWERED] * len(questions)
        by_shard: dict[int, list[int]] = {}
        again: list[int] = []
        seen: set[Key] = set()
        for number, question in enumerate(questions):
            flaw = self._flaw(question.key) or self._refusal(question)
            if flaw is not None:
                answers[number] = flaw
            elif question.key in seen:
                again.append(number)  # decided on when the first one has been stored
            else:
                seen.add(question.key)
                by_shard.setdefault(self.place_of(question.key), []).append(number)
        asked = [self._ask_shard(place, questions, numbers, answers) for place, numbers in by_shard.items()]
        if len(asked) == 1:
            await asked[0]
        else:
            await asyncio.gather(*asked)
        if again:
            rest = await self.ask([questions[number] for number in again])
            for number, answer in zip(again, rest, strict=True):
                answers[number] = answer
        return answers

    async def _ask_shard(
        self, place: int, questions: Sequence[Question], numbers: list[int], answers: list[Answer]
    ) -> None:
        mine, now_ms = [self._bound(questions[number]) for number in numbers], self.now_ms()
        try:
            given: Sequence[Answer] = await self.write_shard(
                place, lambda shard, token: shard.ask(mine, token, now_ms=now_ms)
            )
        except ApiError as error:
            given = [Answer(error.code, error.message)] * len(mine)
        for number, answer in zip(numbers, given, strict=True):
            answers[number] = answer

    def _bound(self, question: Question) -> Question:
        """A group that is at-most-once does not go back, whoever asks for it."""
        if type(question) is Initialize:
            group = effective_group_settings(self._node, question.key.group)
            return question._replace(only_forward=group.is_at_most_once)
        return question

    def _refusal(self, question: Question) -> Answer | None:
        """What a group that is at-most-once was handed is not forgotten, whoever asks for it."""
        if isinstance(question, Read | Write) and question.leader_epoch > self._leader_epoch_max(
            question.key
        ):
            return _NO_SUCH_EPOCH
        if type(question) is not Delete:
            return None
        group = effective_group_settings(self._node, question.key.group)
        return _NOT_FORGOTTEN if group.is_at_most_once else None

    def _leader_epoch_max(self, key: Key) -> int:
        """A later leader epoch would shut out every true leader of the partition until it is reached."""
        partition = self._node.image.topics_by_id[key.topic_id].partitions[key.partition]
        return partition.leader_epoch + _EPOCHS_AHEAD_MAX

    def _flaw(self, key: Key) -> Answer | None:
        """What is wrong with a share partition, whatever its state is."""
        if not key.group or len(key.group.encode()) > _GROUP_BYTES_MAX:
            return Answer(
                ErrorCode.invalid_request, "The group id cannot be empty, nor longer than can be stored."
            )
        if key.topic_id is None:
            return Answer(ErrorCode.invalid_request, "The topic id cannot be null.")
        if key.partition < 0:
            return Answer(ErrorCode.invalid_request, "The partition id cannot be a negative number.")
        topic = self._node.image.topics_by_id.get(key.topic_id)
        if topic is None or key.partition not in topic.partitions:
            return Answer(ErrorCode.unknown_topic_or_partition)
        try:
            self.place_of(key)
        except ApiError as error:
            return Answer(error.code, error.message)
        return None


_UNANSWERED: Final = Answer(ErrorCode.unknown_server_error)
_NO_SUCH_EPOCH: Final = Answer(ErrorCode.invalid_request, "a leader epoch that the partition has not had")
_NOT_FORGOTTEN: Final = Answer(
    ErrorCode.policy_violation,
    "The positions of the group stay, because penstock.share.delivery is at-most-once.",
)


async def serve(ctx: RequestContext, form: Form, request: Any) -> Any:
    """What all five handlers do."""
    from penstock.broker.share_state.wire import questions_of, response_of

    questions = questions_of(form, request)
    answers = await ctx.node.share_state.ask(questions)
    asked = [(question.key.topic_id, question.key.partition) for question in questions]
    return response_of(form, asked, answers)
