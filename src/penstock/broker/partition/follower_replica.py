"""One partition that follows a leader for one leader epoch: carries out on its log what the follower's rules decide.

Appends happen on the loop, batch by batch as the leader stamped them; truncations in a thread, while nothing else
touches the log. Nothing is asked again before what was appended is durable.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from enum import Enum
from typing import TYPE_CHECKING, Any

from penstock.broker.flusher import end_process
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.records import iter_batches
from penstock.replication.follower import (
    Append,
    EpochEnd,
    FetchAnswer,
    FetchPosition,
    FollowerAction,
    FollowerRules,
    RaiseHighWatermark,
    RaiseStart,
    Refresh,
    RestartAt,
    Retry,
    Truncate,
)

if TYPE_CHECKING:
    from penstock.broker.node import Node
    from penstock.broker.partition import Partition
    from penstock.protocol.replica_fetch import FetchedPartition

logger = logging.getLogger("penstock.replication")


class Outcome(Enum):
    """What is to become of the partition after an answer."""

    SAME = "nothing moved"
    MOVED = "ask from another position"
    REST = "ask again after a rest"
    REFRESH = "the image is behind, here or there: ask again soon"
    OVER = "no longer followed"


class _LogOf:
    """The log of a partition, as the rules want to see it."""

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


class Following:
    def __init__(self, node: Node, partition: Partition, leader_id: int, leader_epoch: int) -> None:
        self._node = node
        self.partition = partition
        self.rules = FollowerRules(leader_id=leader_id, leader_epoch=leader_epoch)
        self.key = (partition.topic_id.bytes, partition.index)
        #: The leader's high watermark when it last answered; -1 before.
        self.leader_high_watermark = -1
        self.bytes_fetched = 0
        #: Records given up although they had been called committed, which only unclean elections bring about.
        self.records_lost = 0
        self._log = _LogOf(partition)
        self._is_over = False
        self._rearranging: asyncio.Future[None] | None = None
        self._syncing: asyncio.Task[Any] | None = None

    def __repr__(self) -> str:
        return f"<Following {self.partition.topic}-{self.partition.index} {self.rules!r}>"

    @property
    def is_over(self) -> bool:
        return self._is_over or self.partition.is_retired

    @property
    def is_rearranging(self) -> bool:
        """The log is being truncated in a thread, and nobody else may touch it."""
        return self._rearranging is not None

    @property
    def lag_records(self) -> int:
        """What the leader has called committed and this replica does not have yet; -1 before the first answer."""
        if self.leader_high_watermark < 0:
            return -1
        return max(0, self.leader_high_watermark - self.partition.log.end_offset)

    @property
    def is_catching_up(self) -> bool:
        """Being moved here, and not there yet: only then may it be slowed, or it would slow its leader down."""
        return self.partition.is_being_moved_here and self.lag_records != 0

    @property
    def is_behind_in_commits(self) -> bool:
        """There are records here of which it is not known that they are committed."""
        return self.partition.high.offset < self.partition.log.end_offset

    @property
    def is_throttled(self) -> bool:
        """Named by the topic's follower.replication.throttled.replicas, and neither in sync nor caught up."""
        partition = self.partition
        return partition.is_follower_throttled and not partition.is_in_sync and self.lag_records != 0

    def position(self) -> FetchPosition:
        return self.rules.position(self._log)

    @property
    def is_durable(self) -> bool:
        """A leader of old has to sync what it wrote before it may ask for more."""
        return self.partition.durable_offset >= self.partition.log.end_offset

    async def made_durable(self) -> bool:
        """False: it was stopped or closed first."""
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
        """Nothing more is done to the log; done when a truncation under way has ended."""
        self._is_over = True
        if self._syncing is not None:
            self._syncing.cancel()
        if self._rearranging is not None:
            return self._rearranging
        idle = asyncio.get_running_loop().create_future()
        idle.set_result(None)
        return idle

    async def apply(self, asked: FetchPosition, answer: FetchedPartition) -> Outcome:
        outcome = self.take(asked, answer)
        return outcome if isinstance(outcome, Outcome) else await outcome

    def take(self, asked: FetchPosition, answer: FetchedPartition) -> Outcome | Coroutine[Any, Any, Outcome]:
        """As far as it goes at once; the rest, where the disk has to be waited for, as a coroutine."""
        if self.is_over or self.is_rearranging:
            return Outcome.OVER if self.is_over else Outcome.SAME
        actions = self.rules.answered(asked, _as_answer(answer), self._log)
        if not actions:
            # Another question is to be asked by now, but not before the log is durable.
            return Outcome.MOVED if self.is_durable else self._finish([], Outcome.MOVED)
        outcome = Outcome.SAME
        for place, action in enumerate(actions):
            if isinstance(action, Truncate | RestartAt):
                self._rearranging = asyncio.get_running_loop().create_future()
                return self._rearrange(action, self._rearranging)
            if isinstance(action, Append):
                outcome = self._append(answer.records, answer.log_start_offset)
                if not self.is_durable:
                    return self._finish(actions[place + 1 :], outcome)
            else:
                outcome = self._carry_out(action, outcome)
        return self._or_told_start(asked, outcome)

    def _or_told_start(self, asked: FetchPosition, outcome: Outcome) -> Outcome:
        """Where the log starts is news to the leader, which may keep somebody waiting for it."""
        is_news = outcome is Outcome.SAME and asked.log_start != self.partition.log.start_offset
        return Outcome.MOVED if is_news else outcome

    async def _finish(self, actions: list[FollowerAction], outcome: Outcome) -> Outcome:
        if not await self.made_durable():
            return Outcome.OVER
        for action in actions:
            outcome = self._carry_out(action, outcome)
        return outcome

    def _carry_out(self, action: FollowerAction, outcome: Outcome) -> Outcome:
        """What takes no time. Returns the outcome of this and what came before."""
        match action:
            case RaiseHighWatermark(offset):
                self.leader_high_watermark = self.partition.leaders_high_watermark = offset
                high = self.rules.bounded_high_watermark(offset, self._log)
                if high > self.partition.high.offset:
                    self.partition.follower_high_watermark(high)
            case RaiseStart(offset):
                self.partition.log.delete_records_before(self.rules.bounded_start(offset, self._log))
            case Retry(reason):
                self._warn("leader's answer cannot be used", reason)
                return Outcome.REST
            case Refresh(_):
                return Outcome.REFRESH
        return outcome

    # -- appending -----------------------------------------------------------------------------------

    def _append(self, records: memoryview, leaders_start: int) -> Outcome:
        log, now_ms = self.partition.log, self._node.now_ms()
        before, bytes_before = log.end_offset, self.bytes_fetched
        try:
            for header, batch in iter_batches(records):
                if self._is_cut_by_its_start(header.base_offset, header.last_offset, leaders_start):
                    log.truncate_fully_and_start_at(header.base_offset, now_ms)
                log.append_replicated(batch, now_ms=now_ms)
                self.bytes_fetched += len(batch)
        except ApiError as error:
            # A damaged batch is never kept: the leader, or the one after it, is asked again.
            is_full = error.code is ErrorCode.kafka_storage_error and self._node.store.space.is_full
            if not is_full:  # which the disk itself has said, once
                self._warn("replicated batch refused", str(error))
            return Outcome.REST
        if log.end_offset == before:
            self._warn("replicated batch refused", f"{len(records)} bytes are no whole batch")
            return Outcome.REST
        self.partition.replicated(self.bytes_fetched - bytes_before)
        return Outcome.MOVED

    def _is_cut_by_its_start(self, base_offset: int, last_offset: int, leaders_start: int) -> bool:
        """Deleting records may leave a log's start in the middle of a batch, which still comes as a whole."""
        log = self.partition.log
        return (
            base_offset < log.end_offset <= last_offset
            and log.start_offset == log.end_offset
            and base_offset <= leaders_start
        )

    # -- truncating ----------------------------------------------------------------------------------

    async def _rearrange(self, action: Truncate | RestartAt, done: asyncio.Future[None]) -> Outcome:
        try:
            await self._cut(action)
        finally:
            self._rearranging = None
            done.set_result(None)
        return Outcome.OVER if self.is_over else Outcome.MOVED

    async def _cut(self, action: Truncate | RestartAt) -> None:
        node, partition = self._node, self.partition
        end_offset = partition.log.end_offset
        self._report_cut(action, end_offset)
        cut = node.store.truncate if isinstance(action, Truncate) else node.store.restart_at
        try:
            await node.in_thread(cut, partition.topic, partition.index, action.offset, now_ms=node.now_ms())
        except ApiError as error:
            if partition.log.end_offset != end_offset:
                end_process(error, "truncation failed")
            # Where to cut could not be read, and nothing has been cut.
            node.partitions.unreadable(partition, error)
            raise
        except Exception as error:
            # Half a truncation is put right only by the recovery of a start.
            end_process(error, "truncation failed")
            raise
        node.housekeeping.truncated(partition)

    def _report_cut(self, action: Truncate | RestartAt, end_offset: int) -> None:
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


def _as_answer(answer: FetchedPartition) -> FetchAnswer:
    diverging = answer.diverging_epoch
    return FetchAnswer(
        error_of(answer.error),
        answer.high_watermark,
        answer.log_start_offset,
        None if diverging is None else EpochEnd(*diverging),
        len(answer.records) > 0,
    )


def error_of(code: int) -> ErrorCode:
    try:
        return ErrorCode(code)
    except ValueError:
        return ErrorCode.unknown_server_error
