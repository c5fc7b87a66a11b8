"""The rules of a follower: reconcile with the leader by epoch, then append, then raise the high watermark.

Only leader epochs decide where two logs diverge: a follower never truncates to its high watermark. Each rule has a
method of its own.
"""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

from penstock.protocol.errors import ErrorCode

#: Errors that last until the image of this broker or of the leader has caught up.
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
    """The part of a log that the rules read. No call blocks."""

    @property
    def start_offset(self) -> int: ...
    @property
    def end_offset(self) -> int: ...
    @property
    def durable_offset(self) -> int: ...
    @property
    def high_watermark(self) -> int: ...
    def epoch_at(self, offset: int) -> int:
        """The leader epoch in which an offset was written, -1 if unknown."""
        ...

    def end_offset_for(self, epoch: int) -> tuple[int, int]:
        """The largest known epoch up to this one, and its end offset; (-1, -1) if unknown."""
        ...


class FetchPosition(NamedTuple):
    """What a fetch request says: the fetch offset, the follower's leader epoch, and the epoch before the offset."""

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
    """Remove everything from `offset` on, durably, before anything else. `lost` of the records were committed."""

    offset: int
    lost: int = 0


class TruncateFully(NamedTuple):
    """Remove the whole log; the next batch gets this offset. `lost` as in Truncate."""

    offset: int
    lost: int = 0


class Append(NamedTuple):
    """Append the records of the reply and make them durable before the next action."""


class RaiseHighWatermark(NamedTuple):
    """The leader's high watermark; the follower takes `FollowerRules.bounded_high_watermark` of it."""

    offset: int


class RaiseLogStart(NamedTuple):
    """The leader's log start offset; the follower takes `FollowerRules.bounded_start` of it.

    It follows every append, because a fetched batch may begin before the log start.
    """

    offset: int


class Retry(NamedTuple):
    """Fetch again after a pause."""

    reason: str


class AwaitImage(NamedTuple):
    """Leader and follower have different images: fetch again when the image has changed, or after a pause."""

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
        self, asked: FetchPosition, reply: ReplicaFetchReply, log: FollowerLog
    ) -> list[FollowerAction]:
        """The actions for a reply, in order; none if the log has changed since the request."""
        if not self._is_current(asked, log):
            return []
        if reply.error is ErrorCode.offset_out_of_range:
            return [self._out_of_range(asked, reply, log)]
        if reply.error is not ErrorCode.none:
            reason = reply.error.name
            return [AwaitImage(reason) if reply.error in _STALE_IMAGE else Retry(reason)]
        if reply.diverging is not None:
            # The reply's high watermark does not apply to this log until it is truncated.
            return [self._diverged(reply.diverging, log)]
        actions: list[FollowerAction] = [Append()] if reply.has_records else []
        actions.append(RaiseHighWatermark(reply.high_watermark))
        if reply.has_records or reply.log_start > log.start_offset:
            actions.append(RaiseLogStart(reply.log_start))
        return actions

    # -- rules ---------------------------------------------------------------------------------------

    def _confirmed_offset(self, log: FollowerLog) -> int:
        """The leader counts everything before the fetch offset as durable here."""
        return log.durable_offset

    def _last_epoch(self, log: FollowerLog, offset: int) -> int:
        return log.epoch_at(offset - 1) if offset > log.start_offset else -1

    def _is_current(self, asked: FetchPosition, log: FollowerLog) -> bool:
        """Whether the log has neither grown nor been truncated since the request.

        A duplicate reply may find the log at the same offset again, but with other records before it.
        """
        return asked.offset == log.end_offset and asked[:3] == self.position(log)[:3]

    def _diverged(self, diverging: EpochEndOffset, log: FollowerLog) -> FollowerAction:
        offset = self._common_end(diverging, log)
        if offset >= log.end_offset:
            return Retry(f"{diverging} truncates nothing of a log that ends at {log.end_offset}")
        return Truncate(offset, self._lost(offset, log))

    def _common_end(self, diverging: EpochEndOffset, log: FollowerLog) -> int:
        """The end of the largest epoch that both logs have, in the log where it ends first."""
        own_epoch, own_end = log.end_offset_for(diverging.epoch)
        if own_epoch < 0:
            return min(diverging.end_offset, log.end_offset)
        return min(own_end, diverging.end_offset, log.end_offset)

    def _out_of_range(
        self, asked: FetchPosition, reply: ReplicaFetchReply, log: FollowerLog
    ) -> FollowerAction:
        """The leader checked the epoch before the offset, so its log start offset is that of this epoch's leader."""
        is_left_behind = reply.log_start > log.end_offset
        has_nothing = log.start_offset == log.end_offset and asked.last_fetched_epoch < 0
        if reply.log_start >= 0 and (is_left_behind or (has_nothing and reply.log_start < asked.offset)):
            return TruncateFully(reply.log_start, self._lost(reply.log_start, log))
        if asked.last_fetched_epoch > self.leader_epoch:
            # No leader can have written this epoch: it is damaged in a batch header, where no checksum covers it.
            _, offset = log.end_offset_for(self.leader_epoch)
            return Truncate(offset, self._lost(offset, log))
        return Retry(f"leader has no offset {asked.offset} of epoch {asked.last_fetched_epoch}")

    def _lost(self, offset: int, log: FollowerLog) -> int:
        """The committed records that a truncation removes: 0 except after an unclean election."""
        return max(0, log.high_watermark - offset)

    def bounded_high_watermark(self, leaders: int, log: FollowerLog) -> int:
        """Never above what is durable here, and never lower than before."""
        return max(log.high_watermark, min(leaders, log.durable_offset))

    def bounded_start(self, leaders: int, log: FollowerLog) -> int:
        """Never above the high watermark of this replica, and never lower than before."""
        return max(log.start_offset, min(leaders, log.high_watermark))
