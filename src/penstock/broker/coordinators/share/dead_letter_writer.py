"""One share partition's dead letters, a plan at a time: read them, store the plan, append, settle.

A plan that is found open was begun by somebody who is gone: it is carried out again, with the same producer and
sequence, so that what was appended is not appended twice. A record that has gone meanwhile leaves a dead letter without
it, because a plan's number of records never changes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from penstock.broker.group_settings import effective_group_settings
from penstock.broker.planned_append import append_batch_once, planned_producer_id
from penstock.broker.share_state.dead_letter_topic import dead_letter_topic, largest_batch_bytes
from penstock.broker.share_state.source import read_records
from penstock.groups.share_state.letters import GONE, Letters, fated, fates
from penstock.groups.share_state.ranges import Range, head, size
from penstock.groups.share_state.records import Pair, Plan, Producer, Settled, Target, pairs
from penstock.protocol.errors import ApiError, ErrorCode

if TYPE_CHECKING:
    from penstock.broker.coordinator_runtime import ActiveShard
    from penstock.broker.node import Node
    from penstock.broker.share_state.dead_letters import DeadLetters
    from penstock.cluster.state import TopicState
    from penstock.groups.share_state.burials import BurialView
    from penstock.groups.share_state.shard import ShareStateShard
    from penstock.groups.share_state.values import Key

logger = logging.getLogger("penstock.share")

#: Dead letters in one plan, and about how large its batch becomes: below what topics take by default.
_PLAN_MAX: Final = 5_000
_PLAN_BYTES_MAX: Final = 512 << 10
_APPEND_S: Final = 15.0
#: What a topic may find wrong with dead letters, each for itself.
_UNFIT: Final = frozenset(
    {
        ErrorCode.message_too_large,
        ErrorCode.record_list_too_large,
        ErrorCode.invalid_record,
        ErrorCode.invalid_timestamp,
        ErrorCode.policy_violation,
    }
)


class Burial:
    def __init__(
        self, node: Node, active: ActiveShard[ShareStateShard], key: Key, letters: DeadLetters
    ) -> None:
        self._node = node
        self._active = active
        self._key = key
        self._letters = letters
        self._plan_max = _PLAN_MAX
        #: Whether more could have gone with the last plan: the next one had better wait for company.
        self.had_room = False

    async def step(self) -> bool:
        """Whether there was something to do. Raises ApiError or TimeoutError when it has to be tried again later."""
        self.had_room = False
        key = self._key
        view = await self._active.read(lambda shard: shard.burial(key))
        topic = self._node.image.topics_by_id.get(key.topic_id)
        if view is None:
            await self._active.submit(lambda shard, token: shard.forget_burials(key, token))
            return False
        if topic is None:
            await self._give_up(view, "source deleted")
            return True
        async with self._letters.room:
            if view.plan is not None:
                await self._repeat(view, view.plan, topic)
                return True
            is_held = await self._begin(view, topic)
        if is_held:
            await self._letters.wait_for_breaker(key.group)
        return True

    async def _begin(self, view: BurialView, topic: TopicState) -> bool:
        """Whether the breaker lets none of them through at present."""
        config = effective_group_settings(self._node, self._key.group)
        name = config.dead_letter_topic_of(topic.name)
        if name is None:
            await self._give_up(view, "no dead-letter topic")
            return False
        wanted = min(view.pending_count, self._plan_max)
        allowance = self._letters.allowed(self._key, wanted)
        if allowance.left == 0:
            return True
        letters = self._new_letters(view, topic)
        try:
            plan = await self._planned(view, topic, name, head(view.pending, allowance.left), letters)
            if plan is not None:
                allowance.left -= letters.count
        finally:
            self._letters.give_back(allowance)
        if plan is not None:
            await self._carry_out(view, plan, topic, letters)
        return False

    async def _planned(
        self, view: BurialView, topic: TopicState, name: str, asked: Sequence[Range], letters: Letters
    ) -> Plan | None:
        """A plan that is stored, for as many as were read; None where there was another thing to do first."""
        target_topic = await dead_letter_topic(self._node, name, topic)
        found = await read_records(self._node, topic, self._key.partition, asked, letters.fill)
        gone = _before(asked, min(found.start_offset, found.seen_upto))
        if gone:
            await self._settle(None, gone, lost=size(gone), reason=GONE)
            return None
        resolved, offsets = _before(asked, found.seen_upto), tuple(letters.offsets)
        self.had_room = size(resolved) == view.pending_count < self._plan_max
        if not offsets:
            await self._settle(None, resolved)  # gaps, such as compaction leaves
            return None
        target = Target(target_topic.id, self._key.partition % len(target_topic.partitions))
        producer = view.producer
        if producer is None or producer.target != target:
            producer = Producer(await planned_producer_id(self._node), 0, 0, target)
        plan = Plan(
            producer.id, producer.epoch, producer.next_sequence, target_topic.name, target, resolved, offsets
        )
        key = self._key
        stored = await self._active.submit(lambda shard, token: shard.plan_burial(key, plan, token))
        return plan if stored else None

    def _new_letters(self, view: BurialView, topic: TopicState) -> Letters:
        config = effective_group_settings(self._node, self._key.group)
        return Letters(
            self._key,
            topic.name,
            now_ms=self._node.now_ms(),
            copies_record=config.dead_letter_copies_record,
            bytes_max=_PLAN_BYTES_MAX,
            errors=view.errors,
        )

    async def _repeat(self, view: BurialView, plan: Plan, topic: TopicState) -> None:
        letters, owed = self._new_letters(view, topic), fates(view.pending, plan.offsets)
        left = fated(view.pending, plan.offsets)
        while left:
            collect = partial(letters.repeat, owed)
            found = await read_records(self._node, topic, self._key.partition, left, collect)
            left = _from(left, found.seen_upto)
        for offset, fate in owed:
            letters.add_without(offset, fate, GONE)
        await self._carry_out(view, plan, topic, letters)

    async def _carry_out(self, view: BurialView, plan: Plan, topic: TopicState, letters: Letters) -> None:
        target = self._node.image.topics.get(plan.topic)
        if target is None or target.id != plan.target.topic_id:
            await self._settle(plan, (), keeps_producer=False)
            return
        try:
            await self._append(plan, letters)
        except ApiError as error:
            await self._refused(view, plan, topic, error)
            return
        await self._settle(plan, plan.resolved)
        self._letters.buried[self._key.group] += letters.count
        self._plan_max = min(self._plan_max * 2, _PLAN_MAX)

    async def _append(self, plan: Plan, letters: Letters) -> None:
        assert letters.count == size(plan.offsets), "a plan's number of records never changes"
        batch_of = partial(
            letters.batch, producer_id=plan.producer_id, epoch=plan.epoch, sequence=plan.sequence
        )
        batch, target = batch_of(), plan.target
        if letters.codec and len(batch) > largest_batch_bytes(self._node, plan.topic):
            # A record was no larger than its topic allows only because it was compressed.
            batch = await self._node.in_thread(batch_of, codec=letters.codec)
        # Not for ever: others wait for the room that this takes. The plan is there, and is carried out again.
        async with asyncio.timeout(_APPEND_S):
            await append_batch_once(self._node, plan.topic, target.partition, batch, topic_id=target.topic_id)

    async def _refused(self, view: BurialView, plan: Plan, topic: TopicState, error: ApiError) -> None:
        """Nothing was appended, and nothing will be by this plan as it is."""
        logger.warning(
            "dead letters were refused", extra={"topic": plan.topic, "reason": f"{error.code.name}: {error}"}
        )
        if error.code not in _UNFIT:
            # The topic is gone, or has lost earlier dead letters: another producer begins anew.
            await self._settle(plan, (), keeps_producer=False)
        elif size(plan.offsets) > 1:
            self._plan_max = 1  # one of them is at fault, and the others are not to wait for it
            await self._settle(plan, (), keeps_producer=False)
        else:
            await self._bury_without_record(view, plan, topic, error)

    async def _bury_without_record(
        self, view: BurialView, plan: Plan, topic: TopicState, error: ApiError
    ) -> None:
        ((offset, fate),) = fates(view.pending, plan.offsets)
        letters = self._new_letters(view, topic)
        name = f"{topic.name}-{self._key.partition}-{offset}".encode()
        letters.add_without(offset, fate, f"refused: {error.code.name}", name)
        try:
            await self._append(plan, letters)
        except ApiError:
            await self._settle(plan, plan.resolved, lost=1, reason="refused by the dead-letter topic")
            return
        await self._settle(plan, plan.resolved)
        self._letters.buried[self._key.group] += 1

    async def _give_up(self, view: BurialView, reason: str) -> None:
        count = size(view.pending)
        await self._settle(view.plan, pairs(view.pending), lost=count, reason=reason)

    async def _settle(
        self,
        plan: Plan | None,
        resolved: tuple[Pair, ...],
        *,
        lost: int = 0,
        reason: str = "",
        keeps_producer: bool = True,
    ) -> None:
        key, settled = self._key, Settled(keeps_producer, lost, resolved)
        if plan is not None and resolved == plan.resolved:
            settled = Settled(keeps_producer, lost, (), as_planned=True)
        stored = await self._active.submit(
            lambda shard, token: shard.settle_burial(key, settled, plan, token)
        )
        if stored and lost:
            self._letters.lost[key.group, reason] += lost
            logger.warning(
                "dead letters are lost", extra={"group": key.group, "count": lost, "reason": reason}
            )


def _before(ranges: Sequence[Range], offset: int) -> tuple[Pair, ...]:
    """The offsets of them before that one; those that touch as one."""
    joined: list[Pair] = []
    for first, last, _, _ in ranges:
        if first >= offset:
            break
        last = min(last, offset - 1)
        if joined and joined[-1][1] == first - 1:
            joined[-1] = (joined[-1][0], last)
        else:
            joined.append((first, last))
    return tuple(joined)


def _from(ranges: Sequence[Range], offset: int) -> list[Range]:
    return [(max(one[0], offset), *one[1:]) for one in ranges if one[1] >= offset]
