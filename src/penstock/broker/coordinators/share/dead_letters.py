"""Dead letters: for each shard that is led here, somebody who buries what its share partitions owe.

Nothing is remembered here that a fail-over could lose: what is pending, and what is being done about it, is in the
shard, and whoever leads it next goes on from there. Work begun in one life of a shard ends with it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from dataclasses import dataclass
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
#: Share partitions whose dead letters are in memory at a time.
_AT_ONCE_MAX: Final = 32


@dataclass(slots=True)
class Allowance:
    """Dead letters that a group's breaker lets through. `left` are not planned yet."""

    group: str
    left: int
    taken_at_ms: int


class DeadLetters:
    """`node.share_state.dead_letters`. The counters are since this node's start, by group."""

    def __init__(self, node: Node, coordinator: ShareStateCoordinator) -> None:
        self._node = node
        self._coordinator = coordinator
        self._serving: dict[int, asyncio.Task[None]] = {}
        self._breakers: dict[str, Breaker] = {}
        self._held: dict[str, set[Key]] = {}  # share partitions that wait for their group's breaker
        #: For whoever reads and copies records: each holds a megabyte or two meanwhile.
        self.room = asyncio.Semaphore(_AT_ONCE_MAX)
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
                active = await self._coordinator.active_shard(index)
                if self._coordinator.image_shows(index, active.leader_epoch):
                    await self._coordinator.forget_deleted(active)
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
        try:
            await self._bury_all(active, key)
        finally:
            self._note(key, is_held=False)

    async def _bury_all(self, active: ActiveShard[ShareStateShard], key: Key) -> None:
        burial, rest_s = Burial(self._node, active, key, self), _REST_S
        while not active.is_closed:
            try:
                if not await burial.step():
                    return
                rest_s = _REST_S
                if burial.had_room:
                    await asyncio.sleep(_COMPANY_S)
                continue
            except (ApiError, TimeoutError) as error:
                logger.info("dead letters of %s have to wait: %r", key, error)
            except Exception:
                logger.exception("dead letters of %s have to wait", key)
            rest_s = min(rest_s * 2, _REST_MAX_S)
            await asyncio.sleep(rest_s * random.uniform(0.5, 1.0))

    # -- the breaker ---------------------------------------------------------------------------------

    def allowed(self, key: Key, wanted: int) -> Allowance:
        """How many of a share partition's dead letters may be buried now, as its group's settings say now."""
        self._hear_of_traffic()
        breaker, now_ms = self._breaker(key.group), self._node.now_ms()
        config = effective_group_settings(self._node, key.group)
        breaker.configure(config.dead_letter_rate_max, config.dead_letter_share_max)
        taken = breaker.take(wanted, now_ms)
        self._note(key, is_held=taken < wanted)
        return Allowance(key.group, taken, now_ms)

    def _hear_of_traffic(self) -> None:
        """A group's share partitions may be in many shards."""
        for shard in self._coordinator.loaded_shards():
            for finished in shard.take_finished():
                for group, count in finished.counts.items():
                    self._breaker(group).finished(count, finished.at_ms)

    def give_back(self, allowance: Allowance) -> None:
        """Those that are left were not planned, and others may be in their place."""
        self._breaker(allowance.group).give_back(allowance.left, allowance.taken_at_ms)
        allowance.left = 0

    def _note(self, key: Key, *, is_held: bool) -> None:
        held = self._held.setdefault(key.group, set())
        was_open = bool(held)
        if is_held:
            held.add(key)
        else:
            held.discard(key)
        if held and not was_open:
            self.held_back[key.group] += 1
            logger.warning("too many dead letters: some wait", extra={"group": key.group})
        elif was_open and not held:
            logger.info("dead letters are buried again as they come", extra={"group": key.group})

    async def wait_for_breaker(self, group: str) -> None:
        await asyncio.sleep(self._breaker(group).wait_ms() / 1000)

    # -- for metrics ---------------------------------------------------------------------------------

    def open_breakers(self) -> dict[str, bool]:
        return {group: bool(held) for group, held in self._held.items()}

    def pending(self) -> Counter[str]:
        """By group, in the shards that are led here."""
        pending: Counter[str] = Counter()
        for shard in self._coordinator.loaded_shards():
            pending.update(shard.pending_by_group())
        return pending

    def _breaker(self, group: str) -> Breaker:
        breaker = self._breakers.get(group)
        if breaker is None:
            breaker = self._breakers[group] = Breaker()
        return breaker
