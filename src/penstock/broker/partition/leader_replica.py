"""The leader's side of a partition with followers: the rules, where in the files the high watermark is, who waits.

A partition whose only replica is this node has no such object, and does none of this work.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from penstock.broker.refetches import Refetches
from penstock.protocol.errors import ApiError
from penstock.replication.leader import IsrProposal, LeaderRules

if TYPE_CHECKING:
    from penstock.broker.partition import Partition
    from penstock.cluster.state import PartitionState
    from penstock.log.positions import LogPosition

#: Ends of recent appends that are remembered, so that the high watermark is found without reading.
_ENDS_MAX: Final = 4096


def monotonic_ms() -> int:
    """Lag is measured by a clock that nobody sets."""
    return time.monotonic_ns() // 1_000_000


class Standing(NamedTuple):
    """What a follower last asked for, and when it was last heard of."""

    replica: int
    offset: int
    broker_epoch: int
    heard_ms: int
    start_offset: int  # of its log


class FollowerWaiter(Protocol):
    """A follower's fetch session at one partition; it stays with it between its fetches."""

    def bytes_arrived(self, count: int) -> None: ...
    def high_watermark_moved(self) -> None: ...
    def standing(self, leader_epoch: int) -> Standing | None:
        """None unless its last fetch was a good one, under this leader epoch."""


class Leading:
    """One leader epoch of one partition."""

    __slots__ = ("_ends", "_partition", "is_recovering", "refetches", "rules")

    def __init__(
        self, partition: Partition, state: PartitionState, *, local_id: int, lag_ms_max: int
    ) -> None:
        self._partition = partition
        self._ends: deque[LogPosition] = deque(maxlen=_ENDS_MAX)
        self.refetches = Refetches()
        #: Elected uncleanly, and the controller has not yet been told that this is over.
        self.is_recovering = state.leader_recovering
        self.rules = LeaderRules(
            local_id=local_id,
            leader_epoch=state.leader_epoch,
            partition_epoch=state.partition_epoch,
            replicas=state.replicas,
            isr=state.isr,
            epoch_start_offset=partition.epoch_start_offset,
            high_watermark=partition.high.offset,
            local_offset=partition.durable_offset,
            lag_ms_max=lag_ms_max,
            isr_min=partition.isr_needed,
            now_ms=monotonic_ms(),
        )

    def __repr__(self) -> str:
        return f"<Leading {self.rules!r}>"

    # -- news ----------------------------------------------------------------------------------------

    def appended(self, end: LogPosition, size: int) -> None:
        """Followers get it at once, before it is durable here."""
        self._ends.append(end)
        for waiter in tuple(self._partition.followers):
            waiter.bytes_arrived(size)

    def local_moved(self) -> None:
        self._follow_rules(self.rules.local_moved(self._partition.durable_offset))

    def fetched(self, replica: int, offset: int, broker_epoch: int, now_ms: int) -> bool:
        """A good fetch of a follower. True: it may be time to ask for another in-sync set."""
        moved = self.rules.fetched(
            replica,
            offset=offset,
            log_end=self._partition.log.end_offset,
            broker_epoch=broker_epoch,
            now_ms=now_ms,
        )
        self._follow_rules(moved)
        return self.rules.can_join(replica)

    def changed(self, state: PartitionState) -> None:
        """The image tells of another in-sync set or other replicas under the same leader epoch."""
        self.is_recovering = state.leader_recovering
        rules, before = self.rules, self.rules.isr
        moved = rules.changed(
            isr=state.isr,
            partition_epoch=state.partition_epoch,
            replicas=state.replicas,
            isr_min=self._partition.isr_needed,
        )
        if before != rules.isr:
            self._partition.in_sync_changed(before, rules.isr)
        self._follow_rules(moved)

    def configured(self, isr_min: int) -> None:
        self._follow_rules(self.rules.reconfigured(isr_min=isr_min))

    # -- the in-sync set -----------------------------------------------------------------------------

    def wanted_isr(self, now_ms: int, is_eligible: Callable[[int, int], bool]) -> IsrProposal | None:
        """The change to ask the controller for. First everyone who polls without news is heard."""
        for waiter in tuple(self._partition.followers):
            heard = waiter.standing(self.rules.leader_epoch)
            if heard is not None:
                self.fetched(heard.replica, heard.offset, heard.broker_epoch, heard.heard_ms)
        self._follow_rules(self.rules.expired(now_ms))
        wanted = self.rules.wanted_isr(now_ms, is_eligible)
        # Any change says that this leader has recovered; where none is wanted, the same set says it.
        return self.rules.present_isr() if wanted is None and self.is_recovering else wanted

    def low_watermark(self, is_alive: Callable[[int], bool]) -> int:
        """Where the logs of all live replicas start, at the latest; -1 while one has not been heard of."""
        starts = {self.rules.local_id: self._partition.log.start_offset}
        for waiter in tuple(self._partition.followers):
            heard = waiter.standing(self.rules.leader_epoch)
            if heard is not None:
                starts[heard.replica] = heard.start_offset
        others = (starts.get(replica, -1) for replica in self.rules.replicas if is_alive(replica))
        return min(others, default=starts[self.rules.local_id])

    # -- the high watermark --------------------------------------------------------------------------

    def follow_rules(self) -> None:
        self._follow_rules(True)

    def _follow_rules(self, moved: bool) -> None:
        if moved:
            self._partition.advance(self._position_of(self.rules.high_watermark))

    def _position_of(self, offset: int) -> LogPosition:
        ends, end = self._ends, self._partition.log.end
        if offset == end.offset:
            ends.clear()
            return end
        found: LogPosition | None = None
        while ends and ends[0].offset <= offset:
            found = ends.popleft()
        if found is not None and found.offset == offset:
            return found
        try:
            return self._partition.log.position_of(offset)
        except ApiError:
            # The file cannot be read there; whoever reads it finds out and reports it.
            return self._partition.high
