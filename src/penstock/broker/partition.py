"""One partition this node leads: appends, the high watermark, and who waits for it.

Under flush policy `ack` the high watermark is what is synced, so that neither a producer's acks=all nor a
consumer ever sees a record that a power loss could take back.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Final, Protocol
from uuid import UUID

from penstock.broker.flusher import Flusher
from penstock.broker.metrics import Metrics
from penstock.cluster.names import is_internal
from penstock.protocol.errors import ApiError, ErrorCode

if TYPE_CHECKING:
    from penstock.log.log import Appended, Log, LogPosition


#: More than any reader waits for.
_WAKE_ALL: Final = 1 << 62


class FetchWaiter(Protocol):
    def bytes_arrived(self, count: int) -> None: ...


class Partition:
    __slots__ = (
        "_commit_waiters",
        "_fetch_waiters",
        "_flusher",
        "_flushes_on_ack",
        "_metrics",
        "_retired",
        "codec",
        "high",
        "index",
        "is_compacted",
        "is_internal",
        "isr_size",
        "last_turn",
        "leader_epoch",
        "log",
        "min_insync_replicas",
        "replica_count",
        "takes_turns",
        "topic",
        "topic_id",
        "traffic",
    )  # fmt: skip

    def __init__(
        self,
        log: Log,
        *,
        topic: str,
        topic_id: UUID,
        index: int,
        leader_epoch: int,
        executor: Executor,
        metrics: Metrics,
        loop: asyncio.AbstractEventLoop,
        behind_bytes_max: int = 0,
    ) -> None:
        self.log = log
        self.topic = topic
        self.topic_id = topic_id
        self.index = index
        self.is_internal = is_internal(topic)
        self.leader_epoch = leader_epoch
        self.isr_size = self.replica_count = 1
        self.min_insync_replicas = 1
        self.traffic = metrics.traffic(topic)
        # After recovery everything that is left is on disk: the log was read back from it.
        self.high: LogPosition = log.end
        self.last_turn: asyncio.Task[None] | None = None
        self._metrics = metrics
        self._retired = False
        self._commit_waiters: deque[tuple[int, Callable[[ApiError | None], None]]] = deque()
        self._fetch_waiters: set[FetchWaiter] = set()
        self._flusher = Flusher(
            log,
            executor=executor,
            metrics=metrics,
            on_synced=self._on_synced,
            loop=loop,
            behind_bytes_max=behind_bytes_max,
        )
        self.configured()

    def __repr__(self) -> str:
        return f"<Partition {self.topic}-{self.index} epoch {self.leader_epoch} {self.log!r}>"

    @property
    def high_watermark(self) -> int:
        return self.high.offset

    @property
    def last_stable(self) -> LogPosition:
        """Where read_committed ends: before the first record of the oldest open transaction."""
        first_open = self.log.producers.first_open_offset
        if first_open is None or first_open >= self.high.offset:
            return self.high
        return self.log.position_of(first_open)

    def epoch_at(self, offset: int) -> int:
        """The leader epoch of what stands, or will stand, at an offset; -1 when unknown.

        This leader's own epoch begins at the end of the log it found, before anything is written in it.
        """
        epochs = self.log.epochs
        is_unwritten = epochs.latest < self.leader_epoch and offset >= self.log.end_offset
        return self.leader_epoch if is_unwritten else epochs.epoch_at(offset)

    def end_of_epoch(self, epoch: int) -> tuple[int, int]:
        """The largest epoch up to the asked one, and where it ended; (-1, -1) when that is unknown."""
        end_offset, latest = self.log.end_offset, self.log.epochs.latest
        if epoch == self.leader_epoch:
            return epoch, end_offset
        if 0 <= epoch < self.leader_epoch and epoch >= latest:
            return (latest if latest >= 0 else epoch), end_offset
        return self.log.epochs.end_offset_for(epoch, end_offset)

    def configured(self) -> None:
        """Take over what the log's settings decide here."""
        config = self.log.config
        self._flushes_on_ack = config.flush == "ack"
        self.is_compacted = config.cleanup_compact
        self.codec = None if config.compression_type == "producer" else config.compression_type
        self._choose_path()
        if not self._flushes_on_ack:
            self._advance(self.log.end)
        elif self.log.synced.offset < self.log.end.offset:
            self._flusher.request()  # what an easier policy has let through is made good

    @property
    def is_retired(self) -> bool:
        return self._retired

    # -- writing -------------------------------------------------------------------------------------

    def begin_turn(self, task: asyncio.Task[None]) -> None:
        """This task appends after all that came before it; what comes later waits for it."""
        self.last_turn = task
        task.add_done_callback(self._turn_over)

    def _turn_over(self, task: asyncio.Task[None]) -> None:
        if self.last_turn is task:
            self.last_turn = None
            self._choose_path()

    def _choose_path(self) -> None:
        """Clients' batches that must be looked into go through threads, and none may overtake them."""
        looks_inside = (self.is_compacted or self.codec is not None) and not self.is_internal
        self.takes_turns = looks_inside or self.last_turn is not None

    def append(self, batch: memoryview, now_ms: int) -> Appended:
        """Append what a client sent. Raises ApiError."""
        appended = self.log.append(batch, leader_epoch=self.leader_epoch, now_ms=now_ms)
        if not appended.duplicate:
            self._appended(appended, len(batch))
        return appended

    def append_internal(self, batch: bytearray, now_ms: int) -> int:
        """Append a batch of our own making; returns its last offset. Raises ApiError."""
        if self._retired:
            raise ApiError(ErrorCode.not_leader_or_follower, "partition is closed")
        appended = self.log.append(
            memoryview(batch), leader_epoch=self.leader_epoch, now_ms=now_ms, internal=True
        )
        self._appended(appended, len(batch))
        return appended.last_offset

    def _appended(self, appended: Appended, size: int) -> None:
        traffic = self.traffic
        traffic.bytes_in += size
        traffic.messages_in += appended.last_offset - appended.base_offset + 1
        if self._flushes_on_ack:
            self._flusher.request()
        else:
            self._flusher.appended(size)
            self._advance(appended.end, size)

    def flush(self) -> None:
        """Sync in the background, whatever the policy."""
        self._flusher.request()

    def _on_synced(self) -> None:
        if self._flushes_on_ack:
            self._advance(self.log.synced)

    # -- the high watermark --------------------------------------------------------------------------

    def _advance(self, to: LogPosition, size: int | None = None) -> None:
        before = self.high
        if to.offset <= before.offset:
            return
        self.high = to
        while self._commit_waiters and self._commit_waiters[0][0] < to.offset:
            self._commit_waiters.popleft()[1](None)
        if self._fetch_waiters:
            if to.segment_base != before.segment_base:
                size = _WAKE_ALL  # a read ends with its segment, so waiting for more would not bring more
            elif size is None:
                size = to.position - before.position
            for waiter in tuple(self._fetch_waiters):
                waiter.bytes_arrived(size)

    def when_committed(self, offset: int, call: Callable[[ApiError | None], None]) -> None:
        """Call once the high watermark has passed `offset`, or with an error once it never will."""
        if offset < self.high.offset:
            call(None)
        elif self._retired:
            call(ApiError(ErrorCode.not_leader_or_follower, "partition is closed"))
        else:
            self._commit_waiters.append((offset, call))

    async def committed(self, offset: int) -> None:
        """Raises ApiError when the partition goes away first."""
        if offset < self.high.offset:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def finish(error: ApiError | None) -> None:
            if not future.done():
                future.set_exception(error) if error else future.set_result(None)

        self.when_committed(offset, finish)
        await future

    async def settled(self) -> None:
        """What was appended before this call is committed, so that an acks=1 publisher finds its records counted."""
        await self.committed(self.log.end.offset - 1)

    def watch(self, waiter: FetchWaiter) -> None:
        self._fetch_waiters.add(waiter)

    def unwatch(self, waiter: FetchWaiter) -> None:
        self._fetch_waiters.discard(waiter)

    async def close(self) -> None:
        """The topic is gone or the node stops: nobody may wait for ever, and the files are let go of."""
        self._retire()
        await self._flusher.close()

    def _retire(self) -> None:
        self._retired = True
        error = ApiError(ErrorCode.not_leader_or_follower, "partition is closed")
        while self._commit_waiters:
            self._commit_waiters.popleft()[1](error)
        for waiter in tuple(self._fetch_waiters):
            waiter.bytes_arrived(_WAKE_ALL)
