"""Dead letters: for each shard that is led here, somebody who buries what its share partitions owe.

Nothing is remembered here that a fail-over could lose: what is pending, and what is being done about it, is in the
shard, and whoever leads it next goes on from there. Work begun in one life of a shard ends with it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from typing import TYPE_CHECKING, Final

from penstock.broker.group_settings import effective_group_settings
from penstock.broker.share_state.burial import Burial
from penstock.groups.share_state.breaker import Breaker
from penstock.protocol.errors import ApiError

if TYPE_CHECKING:
    from penstock.broker.coordinator_runtime import ActiveShard
    from penstock.broker.node import Node
    from penstock.broker.share_state.coordinator import ShareStateCoordinator
    from penstock.groups.share_state.shard import ShareStateShard
    from penstock.groups.share_state.values import Key

logger = logging.getLogger("penstock.share")

_REST_S: Final = 0.02
_REST_MAX_S: Final = 1.0
#: Before the next plan of a share partition whose last one was not full: few large ones cost less than many small.
_COMPANY_S: Final = 0.1


class DeadLetters:
    """`node.share_state.dead_letters`. The counters are since this node's start, by group."""

    def __init__(self, node: Node, coordinator: ShareStateCoordinator) -> None:
        self._node = node
        self._coordinator = coordinator
        self._serving: dict[int, asyncio.Task[None]] = {}
        self._lives: dict[int, ActiveShard[ShareStateShard]] = {}
        self._breakers: dict[str, Breaker] = {}
        self.buried: Counter[str] = Counter()
        self.lost: Counter[tuple[str, str]] = Counter()  # and by reason
        self.held_back: Counter[str] = Counter()  # how often a breaker has opened

    def serve(self, index: int) -> None:
        """For as long as the shard is led here."""
        task = self._serving.get(index)
        if task is None or task.done():
            self._serving[index] = self._node.spawn(self._serve(index))

    async def _serve(self, index: int) -> None:
        while self._node.partitions.led(self._coordinator.topic.name, index) is not None:
            try:
                active = self._lives[index] = await self._coordinator.active_shard(index)
                if self._coordinator.image_shows(index, active.leader_epoch):
                    await self._serve_life(active)
                else:
                    await asyncio.sleep(_REST_S)
            except ApiError:
                # Its life is over, or nothing is committed at present.
                await asyncio.sleep(_REST_MAX_S * random.uniform(0.1, 1.0))
            except Exception:
                # Without this task none of the shard's dead letters would ever be buried.
                logger.exception("dead letters of shard %d have to wait", index)
                await asyncio.sleep(_REST_MAX_S)

    async def _serve_life(self, active: ActiveShard[ShareStateShard]) -> None:
        """Raises ApiError when it is over."""
        burying: dict[Key, asyncio.Task[None]] = {}
        try:
            while True:
                asking = active.submit(lambda shard, token: shard.next_burials(tuple(burying), token))
                await asyncio.wait((asking, *burying.values()), return_when=asyncio.FIRST_COMPLETED)
                for key in [key for key, task in burying.items() if task.done()]:
                    del burying[key]
                if not asking.done():
                    asking.cancel()  # asked anew, as others may be handed out now
                    continue
                for key in asking.result():
                    burying[key] = self._node.spawn(self._bury(active, key))
        finally:
            for task in burying.values():
                task.cancel()

    async def _bury(self, active: ActiveShard[ShareStateShard], key: Key) -> None:
        burial, rest_s = Burial(self._node, active, key, self), _REST_S
        while not active.is_closed:
            try:
                if not await burial.step():
                    return
                rest_s = _REST_S
                if burial.had_room:
                    await asyncio.sleep(_COMPANY_S)
                continue
            except ApiError as error:
                logger.info("dead letters of %s have to wait: %r", key, error)
            except Exception:
                logger.exception("dead letters of %s have to wait", key)
            rest_s = min(rest_s * 2, _REST_MAX_S)
            await asyncio.sleep(rest_s * random.uniform(0.5, 1.0))

    # -- the breaker ---------------------------------------------------------------------------------

    async def allowed(self, active: ActiveShard[ShareStateShard], group: str, wanted: int) -> int:
        """How many of a group's dead letters may be buried now, as its settings say now."""
        now_ms = self._node.now_ms()
        for other, count in (await active.read(lambda shard: shard.take_finished())).items():
            self._breaker(other).finished(count, now_ms)
        breaker = self._breaker(group)
        config = effective_group_settings(self._node, group)
        breaker.configure(config.dead_letter_rate_max, config.dead_letter_share_max)
        was_open = breaker.is_open
        allowed = breaker.allowed(wanted, now_ms)
        if breaker.is_open and not was_open:
            self.held_back[group] += 1
            logger.warning("too many dead letters: some wait", extra={"group": group, "pending": wanted})
        elif was_open and not breaker.is_open:
            logger.info("dead letters are buried again as they come", extra={"group": group})
        return allowed

    async def wait_for_breaker(self, group: str) -> None:
        await asyncio.sleep(self._breaker(group).wait_ms() / 1000)

    def planned(self, group: str, count: int) -> None:
        self._breaker(group).buried(count, self._node.now_ms())

    def is_open(self, group: str) -> bool:
        breaker = self._breakers.get(group)
        return breaker is not None and breaker.is_open

    # -- for metrics ---------------------------------------------------------------------------------

    def open_breakers(self) -> dict[str, bool]:
        return {group: breaker.is_open for group, breaker in self._breakers.items()}

    def pending(self) -> Counter[str]:
        """By group, in the shards that are led here."""
        pending: Counter[str] = Counter()
        for active in self._lives.values():
            if not active.is_closed:
                pending.update(active.shard.pending_by_group())
        return pending

    def _breaker(self, group: str) -> Breaker:
        breaker = self._breakers.get(group)
        if breaker is None:
            breaker = self._breakers[group] = Breaker()
        return breaker
