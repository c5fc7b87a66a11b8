"""The rules of a follower: reconcile with the leader by epoch, then append, then raise the high watermark.

Only leader epochs decide where two logs diverge: a follower never truncates to its high watermark. Each rule has a
method of its own.
"""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

from penstock.protocol.errors import ErrorCode

#: Errors that end when the image, ours or the leader's, has caught up.
_STALE_IMAGE: Final = frozenset(
    {
        ErrorCode.fenced_leader_epoch,
        ErrorCode.unknown_leader_epoch,
        ErrorCode.not_leader_or_follower,
        ErrorCode.unknown_topic_or_partition,
        ErrorCode.unknown_topic_id,
    }
)


class FollowerLog(Protocol):
    """What the rules may ask of the log; nothing of it blocks."""

    @property
    def start_offset(self) -> int: ...
    @property
    def end_offset(self) -> int: ...
    @property
    def durable_offset(self) -> int: ...
    @property
    def high_watermark(self) -> int: ...
    def epoch_at(self, offset: int) -> int:
        """The leader epoch that an offset was written in, -1 when unknown."""
        ...

    def end_offset_for(self, epoch: int) -> tuple[int, int]:
        """The largest epoch known up to the asked one, and where it ended; (-1, -1) when unknown."""
        ...


class FetchPosition(NamedTuple):
    """What a follower asks: from where, in which epoch, and what it believes comes before."""

    offset: int
    leader_epoch: int
    last_fetched_epoch: int
    log_start: int


class EpochEndOffset(NamedTuple):
    epoch: int
    end_offset: int


class ReplicaFetchReply(NamedTuple):
    error: ErrorCode
    high_watermark: int
    log_start: int
    diverging: EpochEndOffset | None
    has_records: bool


class Truncate(NamedTuple):
    """Drop everything from `offset` on, durably, before anything else. `lost` records had been called committed."""

    offset: int
    lost: int = 0


class TruncateFully(NamedTuple):
    """Drop the whole log; the next batch gets this offset. `lost` as in Truncate."""

    offset: int
    lost: int = 0


class Append(NamedTuple):
    """Append the records of the answer and make them durable before going on with the next action."""


class RaiseHighWatermark(NamedTuple):
    """The leader's; carried out with `FollowerRules.bounded_high_watermark`."""

    offset: int


class RaiseLogStart(NamedTuple):
    """The leader's log start; carried out with `FollowerRules.bounded_start`.

    It comes after records too, as they may bring back some from before it: batches come as a whole.
    """

    offset: int


class Retry(NamedTuple):
    """Ask again after a rest."""

    reason: str


class AwaitImage(NamedTuple):
    """Leader and follower know different states: ask again once the image has moved, or after a rest."""

    reason: str


FollowerAction = Truncate | TruncateFully | Append | RaiseHighWatermark | RaiseLogStart | Retry | AwaitImage


class FollowerRules:
    __slots__ = ("leader_epoch", "leader_id")

    def __init__(self, *, leader_id: int, leader_epoch: int) -> None:
        self.leader_id = leader_id
        self.leader_epoch = leader_epoch

    def __repr__(self) -> str:
        return f"<FollowerRules of {self.leader_id} epoch {self.leader_epoch}>"

    def position(self, log: FollowerLog) -> FetchPosition:
        offset = self._confirmed_offset(log)
        return FetchPosition(offset, self.leader_epoch, self._last_epoch(log, offset), log.start_offset)

    def answered(
        self, asked: FetchPosition, answer: ReplicaFetchReply, log: FollowerLog
    ) -> list[FollowerAction]:
        """What to do, in order. Nothing when the answer is to another question than would be asked now."""
        if not self._is_current(asked, log):
            return []
        if answer.error is ErrorCode.offset_out_of_range:
            return [self._out_of_range(asked, answer, log)]
        if answer.error is not ErrorCode.none:
            return [self._refused(answer.error)]
        if answer.diverging is not None:
            # Neither high watermark nor records are believed before the histories have met.
            return [self._diverged(answer.diverging, log)]
        return self._continued(answer, log)

    # -- rules ---------------------------------------------------------------------------------------

    def _confirmed_offset(self, log: FollowerLog) -> int:
        """The leader takes a fetch for a promise, so nothing is asked beyond what is durable."""
        return log.durable_offset

    def _last_epoch(self, log: FollowerLog, offset: int) -> int:
        return log.epoch_at(offset - 1) if offset > log.start_offset else -1

    def _is_current(self, asked: FetchPosition, log: FollowerLog) -> bool:
        """What would be asked now, of a log that has not moved since: it neither grew nor was truncated.

        An answer that comes twice may find the log at the offset it was asked for, but with another history.
        """
        return asked.offset == log.end_offset and asked[:3] == self.position(log)[:3]

    def _continued(self, answer: ReplicaFetchReply, log: FollowerLog) -> list[FollowerAction]:
        actions: list[FollowerAction] = [Append()] if answer.has_records else []
        actions.append(RaiseHighWatermark(answer.high_watermark))
        if answer.has_records or answer.log_start > log.start_offset:
            actions.append(RaiseLogStart(answer.log_start))
        return actions

    def _diverged(self, diverging: EpochEndOffset, log: FollowerLog) -> FollowerAction:
        offset = self._common_end(diverging, log)
        if offset >= log.end_offset:
            return Retry(f"{diverging} parts nothing from a log that ends at {log.end_offset}")
        return Truncate(offset, self._lost(offset, log))

    def _common_end(self, diverging: EpochEndOffset, log: FollowerLog) -> int:
        """The end of the largest epoch that both have, as the shorter of them has it."""
        own_epoch, own_end = log.end_offset_for(diverging.epoch)
        if own_epoch < 0:
            return min(diverging.end_offset, log.end_offset)
        return min(own_end, diverging.end_offset, log.end_offset)

    def _out_of_range(
        self, asked: FetchPosition, answer: ReplicaFetchReply, log: FollowerLog
    ) -> FollowerAction:
        """The leader checked the epoch before the range, so its log start can be believed."""
        is_left_behind = answer.log_start > log.end_offset
        has_nothing = log.start_offset == log.end_offset and asked.last_fetched_epoch < 0
        if answer.log_start >= 0 and (is_left_behind or (has_nothing and answer.log_start < asked.offset)):
            return TruncateFully(answer.log_start, self._lost(answer.log_start, log))
        if asked.last_fetched_epoch > self.leader_epoch:
            # No leader can have written that. The epoch in the header of a batch is damaged, which no checksum covers.
            _, offset = log.end_offset_for(self.leader_epoch)
            return Truncate(offset, self._lost(offset, log))
        return Retry(f"leader has no offset {asked.offset} of epoch {asked.last_fetched_epoch}")

    def _refused(self, error: ErrorCode) -> FollowerAction:
        return AwaitImage(error.name) if error in _STALE_IMAGE else Retry(error.name)

    def _lost(self, offset: int, log: FollowerLog) -> int:
        """Only an unclean election makes a follower give up what was committed."""
        return max(0, log.high_watermark - offset)

    def bounded_high_watermark(self, leaders: int, log: FollowerLog) -> int:
        """Never beyond what this replica itself would keep; never back."""
        return max(log.high_watermark, min(leaders, log.durable_offset))

    def bounded_start(self, leaders: int, log: FollowerLog) -> int:
        """Records go from the start only once they are committed here too."""
        return max(log.start_offset, min(leaders, log.high_watermark))
