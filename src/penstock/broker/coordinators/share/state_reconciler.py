"""What the coordinator of a share group has to have done at the share coordinator before members can read.

The group's records say which share partitions are to have a state, or to lose theirs; heartbeats hand that out until it
is done. Doing it twice is harmless, so nothing is lost with a coordinator that stops on the way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final
from uuid import UUID
from weakref import WeakValueDictionary

from penstock.groups.consumer.values import Assignment, assignment
from penstock.groups.share.positions import deleted, initialized, upkeep_now
from penstock.groups.share_state.values import UNSET
from penstock.protocol.errors import ApiError, ErrorCode

if TYPE_CHECKING:
    from penstock.broker.node import Node

logger = logging.getLogger("penstock.share")

#: How long a member that joins waits for it, which otherwise would hear of its partitions with its next heartbeat.
PATIENCE_S: Final = 5.0

Place = tuple[UUID, int]
Errors = dict[Place, ApiError]


class ShareUpkeep:
    """`node.share_upkeep`. One thing at a time for a group: what was decided on before must not arrive after."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._under_way: dict[str, asyncio.Task[None]] = {}
        self._not_before_s: dict[str, float] = {}
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._rest_s = node.settings.integer("group.share.initialize.retry.interval.ms") / 1000

    def turn(self, group_id: str) -> asyncio.Lock:
        """To be held from before something is decided on until it is noted as done."""
        return self._turns.setdefault(group_id, asyncio.Lock())

    async def settle(self, group_id: str) -> None:
        """Returns when there is no use in waiting any longer: ask what is left to do."""
        task = self.begin(group_id)
        if task is not None:
            await asyncio.wait((task,), timeout=PATIENCE_S)

    def begin(self, group_id: str) -> asyncio.Task[None] | None:
        """Not twice at a time, nor soon after it did not succeed."""
        task = self._under_way.get(group_id)
        if task is not None:
            return task
        if asyncio.get_running_loop().time() < self._not_before_s.get(group_id, 0):
            return None
        self._not_before_s.pop(group_id, None)
        task = self._under_way[group_id] = self._node.spawn(self._run(group_id))
        return task

    async def _run(self, group_id: str) -> None:
        try:
            async with self.turn(group_id):
                errors = await self._catch_up(group_id)
        except ApiError as error:
            # Another one coordinates the group, or will.
            logger.info("share group %s is looked after later: %r", group_id, error)
            return
        finally:
            del self._under_way[group_id]
        for (topic_id, partition), reason in errors.items():
            logger.warning(
                "share group %s waits for partition %d of topic %s: %r", group_id, partition, topic_id, reason
            )
        if errors:
            self._not_before_s[group_id] = asyncio.get_running_loop().time() + self._rest_s

    async def _catch_up(self, group_id: str) -> Errors:
        groups = self._node.groups
        upkeep = await groups.read(group_id, lambda shard: upkeep_now(shard, group_id))
        if upkeep is None:
            return {}
        errors = await self.delete(group_id, upkeep.epoch, upkeep.delete)
        starts = dict.fromkeys(_places(upkeep.initialize), UNSET)
        return errors | await self.initialize(group_id, upkeep.epoch, starts)

    async def initialize(self, group_id: str, epoch: int, starts: dict[Place, int]) -> Errors:
        """In a turn. What did not get its state. Raises ApiError when it cannot be noted."""
        initialize = self._node.share_state.persister.initialize

        def ask(topic_id: UUID, partition: int) -> Awaitable[None]:
            start = starts[topic_id, partition]
            return initialize(group_id, topic_id, partition, state_epoch=epoch, start_offset=start)

        errors = await _ask_all(list(starts), ask)
        done = assignment(place for place in starts if place not in errors)
        if done:
            now_ms = self._node.now_ms()
            await self._node.groups.write(
                group_id, lambda shard, token: initialized(shard, group_id, done, token, now_ms=now_ms)
            )
        return errors

    async def delete(self, group_id: str, epoch: int, places: Assignment) -> Errors:
        """In a turn. What still has its state. Raises ApiError when it cannot be noted.

        What this asks may arrive when another one coordinates the group and has begun the state anew: that stays.
        """
        delete = self._node.share_state.persister.delete
        errors = await _ask_all(
            _places(places),
            lambda topic_id, partition: delete(group_id, topic_id, partition, state_epoch=epoch),
        )
        # What is not there any more has no state.
        gone = ErrorCode.unknown_topic_or_partition
        errors = {place: error for place, error in errors.items() if error.code is not gone}
        remain = {topic_id for topic_id, _ in errors}
        done = [topic_id for topic_id in places if topic_id not in remain]
        if done:
            now_ms = self._node.now_ms()
            await self._node.groups.write(
                group_id, lambda shard, token: deleted(shard, group_id, done, token, now_ms=now_ms)
            )
        return errors


def _places(assigned: Assignment) -> list[Place]:
    return [(topic_id, index) for topic_id, indexes in assigned.items() for index in sorted(indexes)]


async def _ask_all(places: list[Place], ask: Callable[[UUID, int], Awaitable[None]]) -> Errors:
    async def one(place: Place) -> ApiError | None:
        try:
            await ask(*place)
        except ApiError as error:
            return error
        return None

    answers = await asyncio.gather(*map(one, places))
    return {place: error for place, error in zip(places, answers, strict=True) if error is not None}
