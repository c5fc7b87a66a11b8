"""A follower replica in one leader epoch: carries out on the log what the follower rules decide.

Appends run on the event loop, batch by batch as the leader stamped them. Truncations run in a thread, while nothing
else touches the log. The follower does not fetch again before what it appended is durable.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from enum import Enum
from typing import TYPE_CHECKING, Any

from penstock.broker.environment import end_process
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.record_batch import iter_batches
from penstock.replication.follower import (
    Append,
    AwaitImage,
    EpochEndOffset,
    FetchPosition,
    FollowerAction,
    FollowerRules,
    RaiseHighWatermark,
    RaiseLogStart,
    ReplicaFetchReply,
    Retry,
    Truncate,
    TruncateFully,
)

if TYPE_CHECKING:
    from penstock.broker.environment import Environment
    from penstock.broker.partition.partition import Partition
    from penstock.log.log_manager import LogManager
    from penstock.protocol.fetch import ReplicaPartitionData

logger = logging.getLogger("penstock.replication")


class FetchOutcome(Enum):
    """What the fetcher does with the partition after a response."""

    UNCHANGED = "nothing moved"
    MOVED = "ask from another position"
    BACKOFF = "ask again after a rest"
    REFRESH = "the image is behind, here or there: ask again soon"
    STOPPED = "no longer followed"


class _FollowerLog:
    """Adapts the log of a partition to the `FollowerLog` protocol of the rules."""

    __slots__ = ("_partition",)

    def __init__(self, partition: Partition) -> None:
        self._partition = partition

    @property
    def start_offset(self) -> int:
        return self._partition.log.start_offset

    @property
    def end_offset(self) -> int:
        return self._partition.log.end_offset

    @property
    def durable_offset(self) -> int:
        return self._partition.durable_offset

    @property
    def high_watermark(self) -> int:
        return self._partition.high.offset

    def epoch_at(self, offset: int) -> int:
        return self._partition.log.epochs.epoch_at(offset)

    def end_offset_for(self, epoch: int) -> tuple[int, int]:
        return self._partition.log.end_offset_for(epoch)


class FollowerReplica:
    def __init__(
        self,
        partition: Partition,
        leader_id: int,
        leader_epoch: int,
        *,
        environment: Environment,
        store: LogManager,
        handle_read_error: Callable[[Partition, ApiError], object],
        truncated: Callable[[Partition], None],
    ) -> None:
        """`truncated` is called after each truncation of the log."""
        self._now_ms = environment.now_ms
        self._in_thread = environment.in_thread
        self._store = store
        self._handle_read_error = handle_read_error
        self._truncated = truncated
        self.partition = partition
        self.rules = FollowerRules(leader_id=leader_id, leader_epoch=leader_epoch)
        self.key = (partition.topic_id.bytes, partition.index)
        #: The leader's high watermark in its last response; -1 before the first one.
        self.leader_high_watermark = -1
        self.bytes_fetched = 0
        #: Committed records that truncations removed, which happens only after unclean elections.
        self.records_lost = 0
        self._log = _FollowerLog(partition)
        self._is_over = False
        self._truncating: asyncio.Future[None] | None = None
        self._syncing: asyncio.Task[Any] | None = None

    def __repr__(self) -> str:
        return f"<Following {self.partition.topic}-{self.partition.index} {self.rules!r}>"

    @property
    def is_over(self) -> bool:
        return self._is_over or self.partition.is_retired

    @property
    def is_truncating(self) -> bool:
        """Whether a thread is truncating the log, so that nothing else may touch it."""
        return self._truncating is not None

    @property
    def lag_records(self) -> int:
        """Number of committed records that this replica does not have yet; -1 before the leader's first response."""
        if self.leader_high_watermark < 0:
            return -1
        return max(0, self.leader_high_watermark - self.partition.log.end_offset)

    @property
    def is_catching_up(self) -> bool:
        """Whether the replica is being moved here and has not caught up.

        Only then may a quota slow it; in sync, it would slow down its leader.
        """
        return self.partition.is_being_moved_here and self.lag_records != 0

    @property
    def is_behind_in_commits(self) -> bool:
        """Whether the log has records above the high watermark that is known here."""
        return self.partition.high.offset < self.partition.log.end_offset

    @property
    def is_throttled(self) -> bool:
        """Whether follower.replication.throttled.replicas names it, and it is neither in sync nor caught up."""
        partition = self.partition
        return partition.is_follower_throttled and not partition.is_in_sync and self.lag_records != 0

    def position(self) -> FetchPosition:
        return self.rules.position(self._log)

    @property
    def is_durable(self) -> bool:
        """Whether the whole log is durable: a former leader must sync what it wrote before it fetches."""
        return self.partition.durable_offset >= self.partition.log.end_offset

    async def made_durable(self) -> bool:
        """Wait until the log is durable. Returns False if the replica was stopped or closed first."""
        if self.is_durable:
            return not self.is_over
        self._syncing = asyncio.current_task()
        try:
            await self.partition.synced(self.partition.log.end_offset)
        except ApiError:
            return False
        except asyncio.CancelledError:
            if not self.is_over:
                raise
        finally:
            self._syncing = None
        return not self.is_over

    def stop(self) -> asyncio.Future[None]:
        """Stop changing the log. The future is done when a truncation in progress has ended."""
        self._is_over = True
        if self._syncing is not None:
            self._syncing.cancel()
        if self._truncating is not None:
            return self._truncating
        idle = asyncio.get_running_loop().create_future()
        idle.set_result(None)
        return idle

    async def apply(self, asked: FetchPosition, answer: ReplicaPartitionData) -> FetchOutcome:
        outcome = self.take(asked, answer)
        return outcome if isinstance(outcome, FetchOutcome) else await outcome

    def take(
        self, asked: FetchPosition, answer: ReplicaPartitionData
    ) -> FetchOutcome | Coroutine[Any, Any, FetchOutcome]:
        """Apply a response. Returns a coroutine for the remaining work if that has to wait for the disk."""
        if self.is_over or self.is_truncating:
            return FetchOutcome.STOPPED if self.is_over else FetchOutcome.UNCHANGED
        actions = self.rules.answered(asked, _fetch_answer(answer), self._log)
        if not actions:
            # The fetch position has changed since this request. Send the new one once the log is durable.
            return FetchOutcome.MOVED if self.is_durable else self._finish([], FetchOutcome.MOVED)
        outcome = FetchOutcome.UNCHANGED
        for index, action in enumerate(actions):
            if isinstance(action, Truncate | TruncateFully):
                self._truncating = asyncio.get_running_loop().create_future()
                return self._truncate_log(action, self._truncating)
            if isinstance(action, Append):
                outcome = self._append(answer.records, answer.log_start_offset)
                if not self.is_durable:
                    return self._finish(actions[index + 1 :], outcome)
            else:
                outcome = self._carry_out(action, outcome)
        return self._moved_if_start_changed(asked, outcome)

    def _moved_if_start_changed(self, asked: FetchPosition, outcome: FetchOutcome) -> FetchOutcome:
        """Return MOVED if the log start has changed: the leader may have a DeleteRecords that waits for it."""
        is_news = outcome is FetchOutcome.UNCHANGED and asked.log_start != self.partition.log.start_offset
        return FetchOutcome.MOVED if is_news else outcome

    async def _finish(self, actions: list[FollowerAction], outcome: FetchOutcome) -> FetchOutcome:
        if not await self.made_durable():
            return FetchOutcome.STOPPED
        for action in actions:
            outcome = self._carry_out(action, outcome)
        return outcome

    def _carry_out(self, action: FollowerAction, outcome: FetchOutcome) -> FetchOutcome:
        """Carry out an action that takes no time. Returns the outcome of this action and those before it."""
        match action:
            case RaiseHighWatermark(offset):
                self.leader_high_watermark = self.partition.leaders_high_watermark = offset
                high = self.rules.bounded_high_watermark(offset, self._log)
                if high > self.partition.high.offset:
                    self.partition.follower_high_watermark(high)
            case RaiseLogStart(offset):
                self.partition.log.delete_records_before(self.rules.bounded_start(offset, self._log))
            case Retry(reason):
                self._warn("leader's answer cannot be used", reason)
                return FetchOutcome.BACKOFF
            case AwaitImage(_):
                return FetchOutcome.REFRESH
        return outcome

    # -- appending -----------------------------------------------------------------------------------

    def _append(self, records: memoryview, leaders_start: int) -> FetchOutcome:
        log, now_ms = self.partition.log, self._now_ms()
        before, bytes_before = log.end_offset, self.bytes_fetched
        try:
            for header, batch in iter_batches(records):
                if self._is_cut_by_its_start(header.base_offset, header.last_offset, leaders_start):
                    log.truncate_fully_and_start_at(header.base_offset, now_ms)
                log.append_replicated(batch, now_ms=now_ms)
                self.bytes_fetched += len(batch)
        except ApiError as error:
            # A damaged batch is never kept: the follower fetches it again, from this leader or the next one.
            is_full = error.code is ErrorCode.kafka_storage_error and self._store.space.is_full
            if not is_full:  # a full disk has already been reported, once
                self._warn("replicated batch refused", str(error))
            return FetchOutcome.BACKOFF
        if log.end_offset == before:
            self._warn("replicated batch refused", f"{len(records)} bytes are no whole batch")
            return FetchOutcome.BACKOFF
        self.partition.replicated(self.bytes_fetched - bytes_before)
        return FetchOutcome.MOVED

    def _is_cut_by_its_start(self, base_offset: int, last_offset: int, leaders_start: int) -> bool:
        """Whether the empty log starts inside this batch.

        DeleteRecords may move a log start into the middle of a batch, and the leader still sends the whole batch.
        """
        log = self.partition.log
        return (
            base_offset < log.end_offset <= last_offset
            and log.start_offset == log.end_offset
            and base_offset <= leaders_start
        )

    # -- truncating ----------------------------------------------------------------------------------

    async def _truncate_log(
        self, action: Truncate | TruncateFully, done: asyncio.Future[None]
    ) -> FetchOutcome:
        try:
            await self._run_truncation(action)
        finally:
            self._truncating = None
            done.set_result(None)
        return FetchOutcome.STOPPED if self.is_over else FetchOutcome.MOVED

    async def _run_truncation(self, action: Truncate | TruncateFully) -> None:
        partition, store = self.partition, self._store
        end_offset = partition.log.end_offset
        self._report_truncation(action, end_offset)
        cut = store.truncate if isinstance(action, Truncate) else store.truncate_fully_and_start_at
        try:
            await self._in_thread(cut, partition.topic, partition.index, action.offset, now_ms=self._now_ms())
        except ApiError as error:
            if partition.log.end_offset != end_offset:
                end_process(error, "truncation failed")
            # The truncation point could not be read, and nothing has been truncated.
            self._handle_read_error(partition, error)
            raise
        except Exception as error:
            # Only recovery at the next start can repair an incomplete truncation.
            end_process(error, "truncation failed")
            raise
        self._truncated(partition)

    def _report_truncation(self, action: Truncate | TruncateFully, end_offset: int) -> None:
        self.records_lost += action.lost
        report = logger.error if action.lost else logger.info
        report(
            "log truncated below its high watermark" if action.lost else "log truncated",
            extra={**self._named, "offset": action.offset, "end_offset": end_offset, "lost": action.lost},
        )

    @property
    def _named(self) -> dict[str, object]:
        rules = self.rules
        return {
            "partition": f"{self.partition.topic}-{self.partition.index}",
            "leader": rules.leader_id,
            "leader_epoch": rules.leader_epoch,
        }

    def _warn(self, message: str, reason: str) -> None:
        logger.warning(message, extra={**self._named, "reason": reason})


def _fetch_answer(answer: ReplicaPartitionData) -> ReplicaFetchReply:
    diverging = answer.diverging_epoch
    return ReplicaFetchReply(
        error_code_of(answer.error),
        answer.high_watermark,
        answer.log_start_offset,
        None if diverging is None else EpochEndOffset(*diverging),
        len(answer.records) > 0,
    )


def error_code_of(code: int) -> ErrorCode:
    try:
        return ErrorCode(code)
    except ValueError:
        return ErrorCode.unknown_server_error
