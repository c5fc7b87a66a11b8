"""Writes the dead letters of all share groups: one task for each share state shard that this broker leads, and a
circuit breaker for each group.

Pending dead letters and open plans are in the shard, so a failover loses nothing: the next leader continues from
there. Work that was begun in one leader epoch of a shard ends with it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from penstock.broker.coordinators.share.dead_letter_writer import DeadLetterLogs, DeadLetterWriter
from penstock.groups.share.state.dead_letters import DeadLetterBreaker
from penstock.protocol.backoff import ExponentialBackoff
from penstock.protocol.errors import ApiError

if TYPE_CHECKING:
    from penstock.broker.coordinators.runtime.runtime import ActiveShard
    from penstock.broker.coordinators.runtime.sharded_coordinator import CoordinatorContext
    from penstock.broker.coordinators.share.coordinator import ShareCoordinator
    from penstock.broker.environment import PeerCalls
    from penstock.broker.partition.idempotent_append import PlannedAppends
    from penstock.groups.group_config import GroupConfig
    from penstock.groups.share.state.share_state import SharePartitionKey
    from penstock.groups.share.state.share_state_shard import ShareCoordinatorShard

logger = logging.getLogger("penstock.share")

_BACKOFF: Final = ExponentialBackoff(base_ms=40, cap_ms=1_000)
#: How long to wait for a shard that is not available; most waits are a random part of it.
_SHARD_RETRY_S: Final = 1.0
#: How soon to look again whether the image includes the shard's leader epoch.
_POLL_S: Final = 0.02
#: Wait this long after a plan that was not full, because few large plans cost less than many small ones.
_LINGER_S: Final = 0.1
#: Share partitions whose dead letters are in memory at the same time.
_CONCURRENT_WRITERS_MAX: Final = 32


@dataclass(slots=True)
class BreakerAllowance:
    """Dead letters that a group's circuit breaker allows. `left` are not planned yet."""

    group: str
    left: int
    taken_at_ms: int


class DeadLetterManager:
    """The counters count from the start of this node, by group."""

    def __init__(
        self,
        coordinator: ShareCoordinator,
        context: CoordinatorContext,
        *,
        appends: PlannedAppends,
        peers: Callable[[], PeerCalls],
        group_config: Callable[[str], GroupConfig],
    ) -> None:
        self._coordinator = coordinator
        self._partitions = context.partitions
        self._environment = context.environment
        self._logs = DeadLetterLogs(context, appends=appends, peers=peers)
        self.group_config = group_config
        self._serving: dict[int, asyncio.Task[None]] = {}
        self._breakers: dict[str, DeadLetterBreaker] = {}
        self._held: dict[
            str, set[SharePartitionKey]
        ] = {}  # share partitions that wait for their group's circuit breaker
        #: Limits the writers that read and copy records, because each holds a megabyte or two.
        self.room = asyncio.Semaphore(_CONCURRENT_WRITERS_MAX)
        self.written_by_group: Counter[str] = Counter()
        self.lost: Counter[tuple[str, str]] = Counter()  # by group and reason
        self.held_back: Counter[str] = Counter()  # how often a circuit breaker has opened

    def serve(self, index: int) -> None:
        """Write the dead letters of a shard for as long as this node leads it."""
        task = self._serving.get(index)
        if task is None or task.done():
            self._serving[index] = self._environment.spawn(self._serve(index))

    async def _serve(self, index: int) -> None:
        while self._partitions.led(self._coordinator.topic.name, index) is not None:
            try:
                active = await self._coordinator.active_shard(index)
                if self._coordinator.image_includes_epoch(index, active.leader_epoch):
                    await self._coordinator.forget_deleted(active)
                    await self._serve_while_active(active)
                else:
                    await asyncio.sleep(_POLL_S)
            except ApiError:
                # The shard is closed, or commits are stalled.
                await asyncio.sleep(_SHARD_RETRY_S * random.uniform(0.1, 1.0))
            except Exception:
                # If this task ended, no more dead letters of the shard would be written.
                logger.exception("dead letters of shard %d have to wait", index)
                await asyncio.sleep(_SHARD_RETRY_S)

    async def _serve_while_active(self, active: ActiveShard[ShareCoordinatorShard]) -> None:
        """Raises ApiError when the shard is closed."""
        writers: dict[SharePartitionKey, asyncio.Task[None]] = {}
        try:
            while True:
                request = active.submit(lambda shard, token: shard.next_dead_letters(tuple(writers), token))
                await asyncio.wait((request, *writers.values()), return_when=asyncio.FIRST_COMPLETED)
                for key in [key for key, task in writers.items() if task.done()]:
                    del writers[key]
                if not request.done():
                    request.cancel()  # request again, because the busy partitions have changed
                    continue
                for key in request.result():
                    writers[key] = self._environment.spawn(self._write_dead_letters(active, key))
        finally:
            for task in writers.values():
                task.cancel()

    async def _write_dead_letters(
        self, active: ActiveShard[ShareCoordinatorShard], key: SharePartitionKey
    ) -> None:
        try:
            await self._write_until_done(active, key)
        finally:
            self._note(key, is_held=False)

    async def _write_until_done(
        self, active: ActiveShard[ShareCoordinatorShard], key: SharePartitionKey
    ) -> None:
        writer, failures = DeadLetterWriter(self._logs, active, key, self), 0
        while not active.is_closed:
            try:
                if not await writer.step():
                    return
                failures = 0
                if writer.had_room:
                    await asyncio.sleep(_LINGER_S)
                continue
            except (ApiError, TimeoutError) as error:
                logger.info("dead letters of %s have to wait: %r", key, error)
            except Exception:
                logger.exception("dead letters of %s have to wait", key)
            await asyncio.sleep(_BACKOFF.spread_ms(failures, random, longest=1) / 1000)
            failures += 1

    # -- the circuit breaker -------------------------------------------------------------------------

    def allowed(self, key: SharePartitionKey, wanted: int) -> BreakerAllowance:
        """How many dead letters of a share partition may be written now, according to the group's current settings."""
        self._update_breakers()
        breaker, now_ms = self._breaker(key.group), self._environment.now_ms()
        config = self.group_config(key.group)
        breaker.configure(config.dead_letter_rate_max, config.dead_letter_share_max)
        taken = breaker.take(wanted, now_ms)
        self._note(key, is_held=taken < wanted)
        return BreakerAllowance(key.group, taken, now_ms)

    def _update_breakers(self) -> None:
        """Update from all loaded shards, because the share partitions of a group may be in many shards."""
        for shard in self._coordinator.loaded_shards():
            for finished in shard.take_finished():
                for group, count in finished.counts.items():
                    self._breaker(group).finished(count, finished.at_ms)

    def give_back(self, allowance: BreakerAllowance) -> None:
        """Return the part of an allowance that was not planned, so that other dead letters can use it."""
        self._breaker(allowance.group).give_back(allowance.left, allowance.taken_at_ms)
        allowance.left = 0

    def _note(self, key: SharePartitionKey, *, is_held: bool) -> None:
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
            logger.info("dead letters are written without delay again", extra={"group": key.group})

    async def wait_for_breaker(self, group: str) -> None:
        await asyncio.sleep(self._breaker(group).wait_ms() / 1000)

    # -- for metrics ---------------------------------------------------------------------------------

    def open_breakers(self) -> dict[str, bool]:
        return {group: bool(held) for group, held in self._held.items()}

    def pending(self) -> Counter[str]:
        """Pending dead letters by group, in the shards that this node leads."""
        pending: Counter[str] = Counter()
        for shard in self._coordinator.loaded_shards():
            pending.update(shard.pending_by_group())
        return pending

    def _breaker(self, group: str) -> DeadLetterBreaker:
        breaker = self._breakers.get(group)
        if breaker is None:
            breaker = self._breakers[group] = DeadLetterBreaker()
        return breaker
