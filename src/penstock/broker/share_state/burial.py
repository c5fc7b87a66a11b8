"""One share partition's dead letters, a plan at a time: read them, store the plan, append, settle.

A plan that is found open was begun by somebody who is gone: it is carried out again, with the same producer and
sequence, so that what was appended is not appended twice. A record that has gone meanwhile leaves a dead letter without
it, because a plan's number of records never changes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from penstock.broker.group_settings import effective_group_settings
from penstock.broker.planned_append import append_once
from penstock.broker.share_state.dead_letter_topic import dead_letter_topic
from penstock.broker.share_state.source import Found, read_records
from penstock.groups.share_state.letters import dead_letter, fates
from penstock.groups.share_state.ranges import head, size
from penstock.groups.share_state.records import Pair, Plan, Producer, Settled, Target, pairs
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.records import Record

if TYPE_CHECKING:
    from penstock.broker.coordinator_runtime import ActiveShard
    from penstock.broker.node import Node
    from penstock.broker.share_state.dead_letters import DeadLetters
    from penstock.cluster.state import TopicState
    from penstock.groups.share_state.burials import BurialView
    from penstock.groups.share_state.shard import ShareStateShard
    from penstock.groups.share_state.values import Key

logger = logging.getLogger("penstock.share")

#: Dead letters in one plan.
_PLAN_MAX: Final = 500
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

    async def step(self) -> bool:
        """Whether there was something to do. Raises ApiError when it has to be tried again later."""
        key = self._key
        view = await self._active.read(lambda shard: shard.burial(key))
        topic = self._node.image.topics_by_id.get(key.topic_id)
        if view is None:
            if topic is None:
                await self._active.submit(lambda shard, token: shard.forget_burials(key, token))
            return False
        if topic is None:
            await self._give_up(view, "source deleted")
        elif view.plan is not None:
            await self._repeat(view, view.plan, topic)
        else:
            await self._begin(view, topic)
        return True

    async def _begin(self, view: BurialView, topic: TopicState) -> None:
        config = effective_group_settings(self._node, self._key.group)
        name = config.dead_letter_topic_of(topic.name)
        if name is None:
            await self._give_up(view, "no dead-letter topic")
            return
        wanted = min(view.pending_count, self._plan_max)
        allowed = await self._letters.allowed(self._active, self._key.group, wanted)
        if allowed == 0:
            await self._letters.wait_for_breaker(self._key.group)
            return
        target_topic = await dead_letter_topic(self._node, name, topic)
        asked = pairs(head(view.pending, allowed))
        found = await read_records(self._node, topic, self._key.partition, asked)
        gone = _before(asked, min(found.start_offset, found.seen_upto))
        if gone:
            await self._settle(None, gone, lost=size(gone), reason="gone from the source")
            return
        await self._plan(view, topic, target_topic, _before(asked, found.seen_upto), found)

    async def _plan(
        self,
        view: BurialView,
        topic: TopicState,
        target_topic: TopicState,
        resolved: tuple[Pair, ...],
        found: Found,
    ) -> None:
        offsets = _joined(sorted(found.records))
        if not offsets:
            await self._settle(None, resolved)  # gaps, such as compaction leaves
            return
        target = Target(target_topic.id, self._key.partition % len(target_topic.partitions))
        producer = view.producer
        if producer is None or producer.target != target:
            producer = Producer(await self._node.producer_ids.fresh(), 0, 0, target)
        plan = Plan(
            producer.id, producer.epoch, producer.next_sequence, target_topic.name, target, resolved, offsets
        )
        key = self._key
        if await self._active.submit(lambda shard, token: shard.plan_burial(key, plan, token)):
            self._letters.planned(key.group, size(offsets))
            await self._carry_out(view, plan, topic, found.records)

    async def _repeat(self, view: BurialView, plan: Plan, topic: TopicState) -> None:
        records: dict[int, Record] = {}
        left = plan.offsets
        while left:
            found = await read_records(self._node, topic, self._key.partition, left)
            records |= found.records
            left = _from(left, found.seen_upto)
        await self._carry_out(view, plan, topic, records)

    async def _carry_out(
        self, view: BurialView, plan: Plan, topic: TopicState, records: dict[int, Record]
    ) -> None:
        target = self._node.image.topics.get(plan.topic)
        if target is None or target.id != plan.target.topic_id:
            await self._settle(plan, (), keeps_producer=False)
            return
        try:
            await self._append(plan, self._dead_letters(view, plan, topic, records))
        except ApiError as error:
            await self._refused(view, plan, topic, error)
            return
        await self._settle(plan, plan.resolved)
        self._letters.buried[self._key.group] += size(plan.offsets)
        self._plan_max = min(self._plan_max * 2, _PLAN_MAX)

    def _dead_letters(
        self, view: BurialView, plan: Plan, topic: TopicState, records: dict[int, Record]
    ) -> list[Record]:
        config = effective_group_settings(self._node, self._key.group)
        now_ms = self._node.now_ms()
        return [
            dead_letter(
                self._key,
                topic.name,
                offset,
                fate,
                records.get(offset),
                now_ms=now_ms,
                copies_record=config.dead_letter_copies_record,
                without="gone from the source",
            )
            for offset, fate in fates(view.pending, plan.offsets)
        ]

    async def _append(self, plan: Plan, letters: Sequence[Record]) -> None:
        await append_once(
            self._node,
            plan.topic,
            plan.target.partition,
            letters,
            producer_id=plan.producer_id,
            epoch=plan.epoch,
            sequence=plan.sequence,
        )

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
        letter = dead_letter(
            self._key,
            topic.name,
            offset,
            fate,
            None,
            now_ms=self._node.now_ms(),
            without=f"refused: {error.code.name}",
        )
        named = letter._replace(key=f"{topic.name}-{self._key.partition}-{offset}".encode())
        try:
            await self._append(plan, [named])
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
        stored = await self._active.submit(
            lambda shard, token: shard.settle_burial(key, settled, plan, token)
        )
        if stored and lost:
            self._letters.lost[key.group, reason] += lost
            logger.warning(
                "dead letters are lost", extra={"group": key.group, "count": lost, "reason": reason}
            )


def _before(ranges: Sequence[Pair], offset: int) -> tuple[Pair, ...]:
    return tuple((first, min(last, offset - 1)) for first, last in ranges if first < offset)


def _from(ranges: Sequence[Pair], offset: int) -> tuple[Pair, ...]:
    return tuple((max(first, offset), last) for first, last in ranges if last >= offset)


def _joined(offsets: Sequence[int]) -> tuple[Pair, ...]:
    """Sorted offsets as ranges."""
    joined: list[Pair] = []
    for offset in offsets:
        if joined and joined[-1][1] == offset - 1:
            joined[-1] = (joined[-1][0], offset)
        else:
            joined.append((offset, offset))
    return tuple(joined)
