"""The coordinator runtime: runs a pure shard on the log of its partition.

An operation decides on records and replies. The records are appended as one batch and replayed into the
shard at once, so that the next operation sees them; the replies are given out when the high watermark has
passed them, so that nobody outside does before they are safe. Whatever breaks that order discards the shard,
and it is loaded again from the log. A shard lives as long as the leader epoch in which it was loaded: what it
decides on later is refused, and whoever leads then has loaded it from everything that was committed.

While nothing is committed, because too few replicas are in sync or this leader has been left alone, those who wait
are sent away after a while and newcomers at once: what they asked for may or may not have been done. Members do not
run out of time meanwhile, as they cannot be heard.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic

from penstock.broker.active_shard import ActiveShard, Clock, Partition, Result, ShardT, Token, Work
from penstock.broker.coordinator_replay import replay_log
from penstock.protocol.errors import ApiError, ErrorCode

if TYPE_CHECKING:
    from penstock.log.transactions import VerificationGuard
    from penstock.protocol.records import EndMarker

__all__ = ("ActiveShard", "CoordinatorRuntime", "ShardT", "Token", "Work")

logger = logging.getLogger("penstock.coordinator")

#: A request that finds its shard loading waits this long before it is sent away to try again.
_LOAD_PATIENCE_S: Final = 0.25


class CoordinatorRuntime(Generic[ShardT]):
    """The shards of one internal topic that live on this node."""

    def __init__(
        self,
        *,
        new_shard: Callable[[], ShardT],
        find_partition: Callable[[int], Partition | None],
        now_ms: Clock,
        in_thread: Callable[..., Awaitable[Any]],
        commit_timeout_s: float = 5.0,
    ) -> None:
        """Who waits for longer than `commit_timeout_s` for a commit is told COORDINATOR_NOT_AVAILABLE."""
        self._new_shard = new_shard
        self._find_partition = find_partition
        self._now_ms = now_ms
        self._in_thread = in_thread
        self._commit_timeout_s = commit_timeout_s
        self._active: dict[int, ActiveShard[ShardT]] = {}
        self._loads: dict[int, asyncio.Task[None]] = {}
        self._is_closed = False

    async def write(
        self,
        index: int,
        operation: Callable[[ShardT, Token], Work],
        guard: VerificationGuard | None = None,
    ) -> Any:
        """The reply, once it is committed. Raises ApiError when this node cannot give it."""
        return await (await self._ready(index)).submit(operation, guard)

    async def read(self, index: int, question: Callable[[ShardT], Result]) -> Result:
        return await (await self._ready(index)).read(question)

    async def write_marker(self, index: int, marker: EndMarker, transaction_version: int = 0) -> None:
        """Returns once the end of the transaction is committed. Raises ApiError when this node cannot say so."""
        await (await self._ready(index)).write_marker(marker, transaction_version)

    async def active(self, index: int) -> ActiveShard[ShardT]:
        """The shard in its present life, which ends with the leader epoch: `is_closed` says so. Raises ApiError."""
        return await self._ready(index)

    def loaded_shards(self) -> list[ShardT]:
        return [active.shard for active in self._active.values()]

    def loaded_shard(self, index: int) -> ShardT | None:
        active = self._active.get(index)
        return None if active is None else active.shard

    def load(self, index: int) -> asyncio.Task[None]:
        """Begin to load a shard, if nobody has. Timeouts run from when it is loaded."""
        self._unload_outdated(index)
        task = self._loads.get(index)
        if task is None:
            task = self._loads[index] = asyncio.get_running_loop().create_task(self._load(index))
            task.add_done_callback(lambda _: self._loads.pop(index, None))
        return task

    def unload(self, index: int) -> None:
        """The partition is gone: whoever waits must look for its new place."""
        if (task := self._loads.get(index)) is not None:
            task.cancel()
        if (active := self._active.pop(index, None)) is not None:
            active.close(ErrorCode.not_coordinator)

    def _unload_outdated(self, index: int) -> None:
        active = self._active.get(index)
        if active is not None and not self._is_current(active.partition, index, active.leader_epoch):
            self.unload(index)

    def _is_current(self, partition: Partition, index: int, leader_epoch: int) -> bool:
        """Still the same topic, led from here without a break."""
        return self._find_partition(index) is partition and partition.leader_epoch == leader_epoch

    def close(self) -> None:
        self._is_closed = True
        for index in {*self._loads, *self._active}:
            self.unload(index)

    async def _ready(self, index: int) -> ActiveShard[ShardT]:
        self._unload_outdated(index)
        active = self._active.get(index)
        if active is not None:
            return active
        if self._is_closed or self._find_partition(index) is None:
            raise ApiError(ErrorCode.not_coordinator)
        await asyncio.wait((self.load(index),), timeout=_LOAD_PATIENCE_S)
        active = self._active.get(index)
        if active is None:
            is_loading = index in self._loads
            code = (
                ErrorCode.coordinator_load_in_progress if is_loading else ErrorCode.coordinator_not_available
            )
            raise ApiError(code)
        return active

    async def _load(self, index: int) -> None:
        while index not in self._active and not self._is_closed:
            partition = self._find_partition(index)
            if partition is None:
                return
            # All that is in the log counts: what is not committed yet will be, or this node leads no more.
            shard, end, epoch = self._new_shard(), partition.log.end, partition.leader_epoch
            try:
                await replay_log(shard, partition.log, end, self._in_thread)
            except Exception:
                logger.exception("cannot load shard %d", index)
                return
            if self._is_current(partition, index, epoch):
                self._activate(index, shard, partition, end.offset - 1)
                return

    def _activate(self, index: int, shard: ShardT, partition: Partition, last_offset: int) -> None:
        active = ActiveShard(
            shard,
            partition,
            leader_epoch=partition.leader_epoch,
            last_offset=last_offset,
            now_ms=self._now_ms,
            on_failure=partial(self._on_failure, index),
            commit_timeout_s=self._commit_timeout_s,
        )
        if not active.is_closed:
            self._active[index] = active

    def _on_failure(self, index: int, failed: ActiveShard[ShardT]) -> None:
        if self._active.get(index) is failed:
            del self._active[index]
        if not self._is_closed and self._find_partition(index) is not None:
            self.load(index)
