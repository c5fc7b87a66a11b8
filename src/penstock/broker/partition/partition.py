"""One partition of which this node has a replica: its role, appends, high watermark, and the requests that wait for it.

Under flush policy `ack` a replica counts only up to its synced offset. So neither a producer with acks=all nor a
consumer ever sees a record that a power loss could remove. A leader without followers advances the high watermark
to its own durable offset; a leader with followers leaves that to `leader_replica`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from enum import Enum
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, Protocol
from uuid import UUID

from penstock.broker.metrics.counters import Metrics
from penstock.broker.partition.flusher import Flusher
from penstock.broker.partition.produced_batch import BatchWithHeldRecords
from penstock.cluster.metadata_records import NO_LEADER
from penstock.cluster.topic_names import is_internal
from penstock.cluster.topic_settings import capped_isr_min, effective_isr_min, isr_floor
from penstock.log.segment import LogOffsetMetadata
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.record_batch import encode_end_marker

if TYPE_CHECKING:
    from penstock.broker.partition.leader_replica import FollowerWaiter, LeaderReplica
    from penstock.broker.partition.overflow import PartitionOverflow
    from penstock.cluster.image import PartitionState
    from penstock.log.log import Log, LogAppendInfo
    from penstock.log.producer_state import VerificationGuard
    from penstock.protocol.record_batch import EndMarker

logger = logging.getLogger("penstock.replication")

#: More bytes than any reader waits for, so that all of them wake.
_WAKE_ALL: Final = 1 << 62
#: Segment and position of a follower's high watermark, until a consumer reads up to it.
_OFFSET_ONLY: Final = -1
_NO_POSITION: Final = LogOffsetMetadata(-1, _OFFSET_ONLY, _OFFSET_ONLY)


#: Called with None once the offset is committed, or with the error why it never will be.
OnCommit = Callable[[ApiError | None], None]


class ReplicaRole(Enum):
    LEADER = "leader"
    FOLLOWER = "follower"
    OFFLINE = "offline"  # there is no leader, or this node does not know it yet


class FetchWaiter(Protocol):
    def bytes_arrived(self, count: int) -> None: ...


class Partition:
    __slots__ = (
        "_commit_waiters",
        "_fetch_waiters",
        "_flusher",
        "_flushes_on_ack",
        "_given_up",
        "_isr_floor",
        "_metrics",
        "_retired",
        "_sync_waiters",
        "_unstable",
        "_waiting_since",
        "adding_count",
        "codec",
        "dropped_before",
        "epoch_start_offset",
        "followers",
        "high",
        "index",
        "is_being_moved_here",
        "is_compacted",
        "is_follower_throttled",
        "is_in_sync",
        "is_internal",
        "is_leader",
        "is_leader_throttled",
        "is_scheduled",
        "isr_needed",
        "isr_size",
        "last_turn",
        "leader_epoch",
        "leader_id",
        "leaders_high_watermark",
        "leading",
        "log",
        "min_insync_replicas",
        "on_held",
        "overflow",
        "replicas",
        "role",
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
        executor: Executor,
        metrics: Metrics,
        loop: asyncio.AbstractEventLoop,
        behind_bytes_max: int = 0,
        high_watermark: int | None = None,
        min_insync_replicas: int = 1,
    ) -> None:
        """`high_watermark` is the saved one; None for the only replica, whose whole log counts as committed."""
        self.log = log
        self.topic = topic
        self.topic_id = topic_id
        self.index = index
        self.is_internal = is_internal(topic)
        self.role = ReplicaRole.OFFLINE
        self.is_leader = self.is_being_moved_here = self.is_in_sync = False
        #: Whether replication of this partition counts towards the throttled rates, as leader and as follower.
        self.is_leader_throttled = self.is_follower_throttled = False
        self.leader_id, self.leader_epoch = NO_LEADER, -1
        self.epoch_start_offset = log.end_offset
        self.replicas: tuple[int, ...] = ()
        self.isr_size = 0
        self.min_insync_replicas = self.isr_needed = min_insync_replicas
        self.adding_count = 0
        self._isr_floor = 1
        self.leading: LeaderReplica | None = None
        self.traffic = metrics.traffic(topic)
        # After recovery the whole log is on disk, because recovery has read it from there.
        self.high = log.end if high_watermark is None else self._bounded(high_watermark)
        #: The highest high watermark that a leader has reported, even if this replica has fewer records.
        self.leaders_high_watermark = self.high.offset
        self.last_turn: asyncio.Task[Any] | None = None
        #: Called with the offset of held records when they are appended; None until the schedule can take them over.
        self.on_held: Callable[[int], None] | None = None
        #: None if no bound, no tenant and no priority concerns the partition.
        self.overflow: PartitionOverflow | None = None
        #: Where drop-oldest has moved the log start to; -1 if it has not while this process has led.
        self.dropped_before = -1
        #: The fetch sessions of followers at this partition, in order: events wake the one that came first first.
        self.followers: dict[FollowerWaiter, None] = {}
        self._metrics = metrics
        self._retired = False
        self._unstable = _NO_POSITION  # cached position of the last stable offset
        self._commit_waiters: deque[tuple[int, OnCommit]] = deque()
        self._given_up: set[OnCommit] = set()  # abandoned commit waiters, still in the queue
        self._waiting_since = 0.0  # since when the oldest commit waiter waits, approximately
        self._fetch_waiters: dict[FetchWaiter, None] = {}
        self._sync_waiters: list[tuple[int, asyncio.Future[None]]] = []
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
        return (
            f"<Partition {self.topic}-{self.index} {self.role.value} epoch {self.leader_epoch} "
            f"high {self.high.offset} {self.log!r}>"
        )

    @property
    def key(self) -> tuple[str, int]:
        return self.topic, self.index

    @property
    def has_enough_replicas(self) -> bool:
        return self.isr_size >= self.isr_needed

    @property
    def is_replicated(self) -> bool:
        return len(self.replicas) > 1

    @property
    def durable_offset(self) -> int:
        """The end of what counts as durable: under flush policy `ack` the synced offset, else the log end offset."""
        return self._durable.offset

    @property
    def _durable(self) -> LogOffsetMetadata:
        return self.log.synced if self._flushes_on_ack else self.log.end

    @property
    def high_watermark(self) -> int:
        return self.high.offset

    @property
    def last_stable(self) -> LogOffsetMetadata:
        """Where read_committed ends: before the oldest transaction that is open or whose marker is not committed."""
        offset = self.last_stable_offset
        if offset == self.high.offset:
            return self.high
        if self._unstable.offset != offset:
            self._unstable = self.log.position_of(offset)
        return self._unstable

    @property
    def last_stable_offset(self) -> int:
        transactions, high_watermark = self.log.producers.transactions, self.high.offset
        if not transactions.is_unstable:
            return high_watermark
        unstable = transactions.first_unstable_offset(high_watermark)
        # Retention may have deleted the beginning of a transaction that never ends.
        return (
            high_watermark if unstable is None else min(high_watermark, max(unstable, self.log.start_offset))
        )

    def epoch_at(self, offset: int) -> int:
        """Return the leader epoch of the present or future record at an offset; -1 when unknown.

        The current leader's epoch begins at the log end offset that it started from, even before its first append.
        """
        epochs = self.log.epochs
        is_unwritten = epochs.latest < self.leader_epoch and offset >= self.log.end_offset
        return self.leader_epoch if is_unwritten else epochs.epoch_at(offset)

    def end_of_epoch(self, epoch: int) -> tuple[int, int]:
        """Return the largest epoch up to the requested one, and its end offset; (-1, -1) when unknown."""
        end_offset, latest = self.log.end_offset, self.log.epochs.latest
        if epoch == self.leader_epoch:
            return epoch, end_offset
        if 0 <= epoch < self.leader_epoch and epoch >= latest:
            return (latest if latest >= 0 else epoch), end_offset
        return self.log.epochs.end_offset_for(epoch, end_offset)

    def configured(self) -> None:
        """Apply the log's settings to this partition."""
        config = self.log.config
        self._flushes_on_ack = config.flush == "ack"
        self.is_compacted = config.cleanup_compact
        self.is_scheduled = config.schedule and not self.is_internal
        self.codec = None if config.compression_type == "producer" else config.compression_type
        self._choose_path()
        self._durable_moved()
        if self._flushes_on_ack and self.log.synced.offset < self.log.end.offset:
            self._flusher.request()  # sync what a weaker policy has left unsynced

    def set_min_insync_replicas(self, count: int) -> None:
        self.min_insync_replicas = count
        self.isr_needed = max(capped_isr_min(count, len(self.replicas), self.adding_count), self._isr_floor)
        if self.leading is not None:
            self.leading.configured(self.isr_needed)

    @property
    def is_retired(self) -> bool:
        return self._retired

    # -- roles ---------------------------------------------------------------------------------------

    def lead(self, state: PartitionState, *, local_id: int, lag_ms_max: int) -> None:
        """Become the leader, or apply a change as the leader.

        Raises ApiError when the log cannot be read at its high watermark.
        """
        is_new = not self.is_leader or state.leader_epoch != self.leader_epoch
        if is_new:
            self.high = self._resolved_high_watermark()
            if not (self.is_leader and state.leader_epoch == self.leader_epoch + 1):
                # Another broker may have led in between, so the records that requests wait for may be gone.
                self._fail_commit_waiters()
            self.epoch_start_offset = self.log.end_offset
            self.leading = None
        self._take_role(ReplicaRole.LEADER, state, local_id)
        if state.replicas == state.isr == (local_id,) and not state.leader_recovering:
            self.leading = None
            self._durable_moved()
        elif self.leading is None:
            from penstock.broker.partition.leader_replica import LeaderReplica

            self.leading = LeaderReplica(self, state, local_id=local_id, lag_ms_max=lag_ms_max)
            self.leading.follow_rules()
        else:
            self.leading.changed(state)
        if is_new:
            self._wake_readers()

    def follow(self, state: PartitionState, *, local_id: int) -> None:
        """Become a follower of another broker, or go offline when there is no leader."""
        is_new = self.is_leader or state.leader_epoch != self.leader_epoch
        self.leading = None
        self._take_role(ReplicaRole.FOLLOWER if state.has_leader else ReplicaRole.OFFLINE, state, local_id)
        if is_new:
            self._fail_commit_waiters()
            self._wake_readers()

    def _take_role(self, role: ReplicaRole, state: PartitionState, local_id: int) -> None:
        self.role = role
        self.is_leader = role is ReplicaRole.LEADER
        self.leader_id, self.leader_epoch = state.leader, state.leader_epoch
        self.replicas, self.isr_size = state.replicas, len(state.isr)
        self.adding_count = len(state.adding_replicas)
        self._isr_floor = isr_floor(state)
        self.isr_needed = effective_isr_min(self.min_insync_replicas, state)
        self.is_being_moved_here = local_id in state.adding_replicas
        self.is_in_sync = local_id in state.isr

    def in_sync_changed(self, before: frozenset[int], after: frozenset[int]) -> None:
        """Count and log an ISR change that the controller has made and the leader rules have applied."""
        self.isr_size = len(after)
        self._metrics.isr_shrinks += not before <= after
        self._metrics.isr_expands += not after <= before
        extra = {"partition": f"{self.topic}-{self.index}", "from": sorted(before), "to": sorted(after)}
        logger.info("in-sync set changed", extra=extra)

    def check_leader(self, leader_epoch: int = -1) -> None:
        """Raises ApiError if this node does not lead, or not in the requested epoch."""
        if not self.is_leader:
            raise ApiError(ErrorCode.not_leader_or_follower)
        self._check_epoch(leader_epoch)

    def check_readable(self, leader_epoch: int) -> None:
        """Check for a consumer, which a follower may serve too. Raises ApiError as `check_leader` does."""
        if self.role is ReplicaRole.OFFLINE:
            raise ApiError(ErrorCode.not_leader_or_follower)
        self._check_epoch(leader_epoch)
        if not self.is_leader:
            self.resolve_high_watermark()

    def _check_epoch(self, leader_epoch: int) -> None:
        if leader_epoch >= 0 and leader_epoch != self.leader_epoch:
            is_old = leader_epoch < self.leader_epoch
            raise ApiError(ErrorCode.fenced_leader_epoch if is_old else ErrorCode.unknown_leader_epoch)

    # -- following -----------------------------------------------------------------------------------

    def follower_high_watermark(self, offset: int) -> None:
        """Raise the high watermark to what the leader has committed and is durable here. For a follower only."""
        if self.role is ReplicaRole.FOLLOWER and offset > self.high.offset:
            before, self.high = self.high, self._bounded(offset)
            self.log.producers.transactions.settle(self.high.offset)
            if self._fetch_waiters:
                self._wake_follower_readers(before)

    def _wake_follower_readers(self, before: LogOffsetMetadata) -> None:
        """Wake consumers that wait at this follower for the high watermark to move."""
        try:
            self.resolve_high_watermark()
        except ApiError:
            self._wake_readers()  # their reads report the error
            return
        is_known = _OFFSET_ONLY != before.segment_base == self.high.segment_base
        size = self.high.position - before.position if is_known else _WAKE_ALL
        for waiter in tuple(self._fetch_waiters):
            waiter.bytes_arrived(size)

    def resolve_high_watermark(self) -> None:
        """Find the file position of a follower's high watermark, for consumers that read up to it. Raises ApiError."""
        if self.high.segment_base == _OFFSET_ONLY:
            self.high = self._resolved_high_watermark()

    def truncated(self) -> None:
        """Adjust to a log that was truncated, or emptied and restarted at a higher offset."""
        self.high = self._bounded(self.high.offset)
        self._unstable = _NO_POSITION

    def _bounded(self, offset: int) -> LogOffsetMetadata:
        end = self.log.end
        if offset >= end.offset:
            return end
        return LogOffsetMetadata(max(offset, self.log.start_offset), _OFFSET_ONLY, _OFFSET_ONLY)

    def _resolved_high_watermark(self) -> LogOffsetMetadata:
        high = self._bounded(self.high.offset) if self.high.segment_base == _OFFSET_ONLY else self.high
        return self.log.position_of(high.offset) if high.segment_base == _OFFSET_ONLY else high

    # -- writing -------------------------------------------------------------------------------------

    def begin_turn(self, task: asyncio.Task[Any]) -> None:
        """Register a task that appends after all earlier batches; later batches wait for it."""
        self.last_turn = task
        task.add_done_callback(self._turn_over)

    def _turn_over(self, task: asyncio.Task[Any]) -> None:
        if self.last_turn is task:
            self.last_turn = None
            self._choose_path()

    def _choose_path(self) -> None:
        """Decide whether batches queue up: inspected ones go through threads, and no other batch may overtake them."""
        looks_inside = (self.is_compacted or self.codec is not None) and not self.is_internal
        self.takes_turns = looks_inside or self.is_scheduled or self.last_turn is not None

    def append(
        self,
        batch: memoryview,
        now_ms: int,
        guard: VerificationGuard | None = None,
        *,
        is_admitted: bool = False,
    ) -> LogAppendInfo:
        """Append a client's batch; `guard` comes from its verification if it needed one. Raises ApiError.

        `is_admitted`: the overflow rules of the topic have let it in.
        """
        if self.overflow is not None and not is_admitted:
            return self.overflow.append(batch, now_ms, guard)
        if batch.obj.__class__ is BatchWithHeldRecords:
            return self._append_with_held(batch, now_ms, guard)
        appended = self.log.append(batch, leader_epoch=self.leader_epoch, now_ms=now_ms, guard=guard)
        if not appended.duplicate:
            self._appended(appended, len(batch))
        return appended

    def _append_with_held(
        self, batch: memoryview, now_ms: int, guard: VerificationGuard | None
    ) -> LogAppendInfo:
        """Append the held records right before the rest of the batch, so that a retry of the rest repeats neither."""
        if self.on_held is None:
            raise ApiError(ErrorCode.not_enough_replicas, "the schedule cannot take records over yet")
        assert isinstance(batch.obj, BatchWithHeldRecords)
        control, epoch = batch.obj.stamped(now_ms), self.leader_epoch
        try:
            appended = self.log.append(batch, leader_epoch=epoch, now_ms=now_ms, guard=guard, control=control)
        except ApiError:
            self.flush()  # the held records may be in the log, if the disk became full after them
            self._durable_moved()
            raise
        if not appended.duplicate:
            self._appended(appended, len(control) + len(batch))
            self.on_held(appended.base_offset - 1)
        return appended

    def append_internal(self, batch: bytearray, now_ms: int, *, leader_epoch: int) -> int:
        """Append a batch that this broker has created, decided in this leader epoch. Returns its last offset.

        Raises ApiError.
        """
        if self._retired or not self.is_leader or leader_epoch != self.leader_epoch:
            raise ApiError(ErrorCode.not_leader_or_follower, "this node does not lead the partition")
        appended = self.log.append(
            memoryview(batch), leader_epoch=self.leader_epoch, now_ms=now_ms, internal=True
        )
        self._appended(appended, len(batch))
        return appended.last_offset

    def append_marker(
        self,
        marker: EndMarker,
        now_ms: int,
        *,
        leader_epoch: int | None = None,
        transaction_version: int = 0,
    ) -> int:
        """End a producer's transaction in this partition. Returns the offset whose commit makes that final.

        `leader_epoch` is the epoch in which the marker was decided; None means the current one. `transaction_version`
        is the version of the transaction protocol: from 2 on, a late or repeated marker can be distinguished from the
        marker of the next transaction. Raises ApiError.
        """
        self.check_leader()
        if not self.log.producers.check_marker(marker, transaction_version):
            return self.log.end.offset - 1
        decided_in = self.leader_epoch if leader_epoch is None else leader_epoch
        return self.append_internal(encode_end_marker(marker, now_ms), now_ms, leader_epoch=decided_in)

    def _appended(self, appended: LogAppendInfo, size: int) -> None:
        traffic = self.traffic
        traffic.bytes_in += size
        traffic.messages_in += appended.last_offset - appended.base_offset + 1
        leading = self.leading
        if leading is not None:
            leading.appended(appended.end, size)
        if self._flushes_on_ack:
            self._flusher.request()
        else:
            self._flusher.appended(size)
            if leading is None:
                self.advance(appended.end, size)
            else:
                leading.local_moved()

    def replicated(self, size: int) -> None:
        """Count what a follower has appended: if nothing requests syncs, its disk must not fall far behind either."""
        if not self._flushes_on_ack:
            self._flusher.appended(size)

    def flush(self) -> None:
        """Sync in the background, whatever the flush policy."""
        self._flusher.request()

    async def synced(self, offset: int) -> None:
        """Returns once the disk has everything below `offset`. Raises ApiError when the partition is closed."""
        if self.log.synced.offset >= offset:
            return
        if self._retired:
            raise _closed()
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sync_waiters.append((offset, future))
        self._flusher.request()
        await future

    def _on_synced(self) -> None:
        if self._sync_waiters:
            self._complete_sync_waiters()
        if self._flushes_on_ack:
            self._durable_moved()

    def _complete_sync_waiters(self) -> None:
        reached = self.log.synced.offset
        waiting, self._sync_waiters = self._sync_waiters, []
        for offset, future in waiting:
            if future.done():
                continue
            if self._retired:
                future.set_exception(_closed())
            elif offset <= reached:
                future.set_result(None)
            else:
                self._sync_waiters.append((offset, future))

    def _durable_moved(self) -> None:
        if self.leading is not None:
            self.leading.local_moved()
        elif self.is_leader:
            self.advance(self._durable)

    # -- the high watermark --------------------------------------------------------------------------

    def advance(self, to: LogOffsetMetadata, size: int | None = None) -> None:
        """Raise the high watermark to `to`. For the leader only."""
        before = self.high
        if to.offset <= before.offset:
            return
        self.high = to
        self.log.producers.transactions.settle(to.offset)
        if self._commit_waiters and self._commit_waiters[0][0] < to.offset:
            self._release(to.offset)
        if self.followers:
            for follower in tuple(self.followers):
                follower.high_watermark_moved()
        if self._fetch_waiters:
            if to.segment_base != before.segment_base:
                size = _WAKE_ALL  # a read ends with its segment, so waiting longer would not return more
            elif size is None:
                size = to.position - before.position
            for waiter in tuple(self._fetch_waiters):
                waiter.bytes_arrived(size)

    def _release(self, high_watermark: int) -> None:
        waiters, now = self._commit_waiters, perf_counter()
        # One measurement for all waiters that are released together: the longest wait.
        self.traffic.acks.observe(now - self._waiting_since)
        self._waiting_since = now
        while waiters and waiters[0][0] < high_watermark:
            waiters.popleft()[1](None)
        if self._given_up:
            self._drop_given_up()

    def when_committed(self, offset: int, call: OnCommit) -> None:
        """Run `call` once the high watermark has passed `offset`, or with an error once it never will.

        A replica that no longer leads always reports an error, whatever its own high watermark is.
        """
        if self._retired or not self.is_leader:
            call(_closed())
        elif offset < self.high.offset:
            call(None)
        else:
            if not self._commit_waiters:
                self._waiting_since = perf_counter()
            self._commit_waiters.append((offset, call))

    def give_up(self, call: OnCommit) -> None:
        """Abandon a commit waiter. The queue drops them once they are half of it, so that each costs little."""
        self._given_up.add(call)
        if 2 * len(self._given_up) > len(self._commit_waiters):
            self._drop_given_up()

    def _drop_given_up(self) -> None:
        # Change the queue in place, because `_release` may be taking waiters from it.
        kept = [waiter for waiter in self._commit_waiters if waiter[1] not in self._given_up]
        self._commit_waiters.clear()
        self._commit_waiters.extend(kept)
        self._given_up.clear()

    async def committed(self, offset: int) -> None:
        """Wait until the offset is committed. Raises ApiError if this node stops leading the partition first."""
        if offset < self.high.offset and self.is_leader:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def finish(error: ApiError | None) -> None:
            if not future.done():
                future.set_exception(error) if error else future.set_result(None)

        self.when_committed(offset, finish)
        try:
            await future
        except asyncio.CancelledError:
            self.give_up(finish)
            raise

    @property
    def is_settled(self) -> bool:
        """Whether `settled` would return at once."""
        if self.leading is None:
            return self.is_leader and self.high.offset >= self.log.end.offset
        return self.leading.rules.has_reached_epoch_start

    async def settled(self) -> None:
        """Wait until the high watermark includes everything that was committed before this call.

        The only replica waits for its own disk, so that an acks=1 producer finds its records counted. A leader with
        followers does not wait for them. A new leader may not know yet what its predecessor had committed; then this
        raises OFFSET_NOT_AVAILABLE.
        """
        if self.leading is None:
            await self.committed(self.log.end.offset - 1)
        elif not self.leading.rules.has_reached_epoch_start:
            raise ApiError(ErrorCode.offset_not_available, "the new leader is still finding out")

    def watch(self, waiter: FetchWaiter) -> None:
        self._fetch_waiters[waiter] = None

    def unwatch(self, waiter: FetchWaiter) -> None:
        self._fetch_waiters.pop(waiter, None)

    def add_follower(self, follower: FollowerWaiter) -> None:
        self.followers[follower] = None

    def remove_follower(self, follower: FollowerWaiter) -> None:
        self.followers.pop(follower, None)

    def start_moved(self) -> None:
        """Report a log start moved by retention or DeleteRecords: to followers soon, to consumers at the next fetch."""
        for waiter in tuple(self._fetch_waiters):
            waiter.bytes_arrived(0)
        for follower in tuple(self.followers):
            follower.high_watermark_moved()

    async def close(self) -> None:
        """End all waits and release the files, because the replica is removed or the node stops."""
        self._retired = True
        self.role, self.is_leader, self.leading = ReplicaRole.OFFLINE, False, None
        self._fail_commit_waiters()
        self._complete_sync_waiters()
        self._wake_readers()
        await self._flusher.close()

    def _fail_commit_waiters(self) -> None:
        waiting, self._commit_waiters = self._commit_waiters, deque()
        self._given_up.clear()
        for _, call in waiting:
            call(_closed())

    def _wake_readers(self) -> None:
        for waiter in (*self._fetch_waiters, *self.followers):
            waiter.bytes_arrived(_WAKE_ALL)


def _closed() -> ApiError:
    return ApiError(ErrorCode.not_leader_or_follower, "this node does not lead the partition any more")
