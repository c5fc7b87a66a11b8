"""The leader's side of a replicated partition: the leader rules, the high watermark, and damage that followers notice.

A partition whose only replica is on this node has no such object and does none of this work.

A leader serves its files without checking them, so only a follower notices a damaged batch, and all that it can do
is to fetch again. When a leader has served one follower the same offset three times in a row, it reads and checks
that part of the log itself, and handles what it finds like damage that it meets when it reads.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from penstock.log.validation import read_validated
from penstock.protocol.errors import ApiError
from penstock.replication.leader import IsrProposal, LeaderRules

if TYPE_CHECKING:
    from penstock.broker.environment import Threads
    from penstock.broker.partition.partition import Partition
    from penstock.cluster.image import PartitionState
    from penstock.log.segment import LogOffsetMetadata


#: One or two lost responses are no reason to check the files.
_REPEATS_BEFORE_CHECK: Final = 3


class DamageHandler(Protocol):
    """Handles damage of replicas on this node; `partition.replica_manager.ReplicaManager` documents it."""

    def handle_read_error(self, partition: Partition, error: ApiError) -> ApiError: ...


class RepeatedFetches:
    """Detects followers that fetch the same offset again and again, in one partition and one leader epoch."""

    __slots__ = ("_is_checking", "_offsets", "_repeats")

    def __init__(self) -> None:
        self._offsets: dict[int, int] = {}  # by follower: the offset from which it was last served
        self._repeats: dict[int, int] = {}  # by follower: how often it was served from there
        self._is_checking = False

    def served(self, replica: int, offset: int) -> bool:
        """Count records sent to a follower. Returns True if it repeats the offset as if it refused them."""
        if self._offsets.get(replica) != offset:
            self._offsets[replica] = offset
            self._repeats.pop(replica, None)
            return False
        repeats = self._repeats.get(replica, 1) + 1
        self._repeats[replica] = repeats % _REPEATS_BEFORE_CHECK
        return repeats == _REPEATS_BEFORE_CHECK

    async def check_records(
        self, threads: Threads, damages: DamageHandler, partition: Partition, offset: int, size: int
    ) -> None:
        """Read the served records again, in a thread, and check them for damage."""
        if self._is_checking:
            return
        self._is_checking = True
        try:
            await threads.in_thread(read_validated, partition.log, offset, size, partition.log.end)
        except ApiError as error:
            # The error does not matter if the log was closed or the leader epoch ended in the meantime.
            is_current = partition.leading is not None and partition.leading.repeated_fetches is self
            if is_current:
                damages.handle_read_error(partition, error)
        finally:
            self._is_checking = False


#: How many ends of recent appends to remember, to find the position of the high watermark without reading the log.
_ENDS_MAX: Final = 4096


def monotonic_ms() -> int:
    """The clock for measuring lag, which is never set forward or back."""
    return time.monotonic_ns() // 1_000_000


class FollowerFetchState(NamedTuple):
    """What a follower last requested, and when its last fetch arrived."""

    replica: int
    offset: int
    broker_epoch: int
    heard_ms: int
    start_offset: int  # of its log


class FollowerWaiter(Protocol):
    """A follower's fetch session at one partition, where it stays registered between fetches."""

    def bytes_arrived(self, count: int) -> None: ...
    def high_watermark_moved(self) -> None: ...
    def fetch_state(self, leader_epoch: int) -> FollowerFetchState | None:
        """Return None unless the follower's last fetch was valid and under this leader epoch."""


class LeaderReplica:
    """One leader epoch of one partition."""

    __slots__ = ("_ends", "_partition", "is_recovering", "repeated_fetches", "rules")

    def __init__(
        self, partition: Partition, state: PartitionState, *, local_id: int, lag_ms_max: int
    ) -> None:
        self._partition = partition
        self._ends: deque[LogOffsetMetadata] = deque(maxlen=_ENDS_MAX)
        self.repeated_fetches = RepeatedFetches()
        #: True after an unclean election, until the controller knows that the leader has recovered.
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

    # -- events --------------------------------------------------------------------------------------

    def appended(self, end: LogOffsetMetadata, size: int) -> None:
        """Wake the followers: they get the records at once, before they are durable here."""
        self._ends.append(end)
        for waiter in tuple(self._partition.followers):
            waiter.bytes_arrived(size)

    def local_moved(self) -> None:
        self._follow_rules(self.rules.local_moved(self._partition.durable_offset))

    def fetched(self, replica: int, offset: int, broker_epoch: int, now_ms: int) -> bool:
        """Count a valid fetch of a follower. Returns True if the follower may join the ISR."""
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
        """Apply a new ISR or new replicas from the image, under the same leader epoch."""
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

    # -- the ISR -------------------------------------------------------------------------------------

    def wanted_isr(self, now_ms: int, is_eligible: Callable[[int, int], bool]) -> IsrProposal | None:
        """Return the ISR change to request from the controller, if any.

        Count the last fetches of the followers first: a fetch that does not name this partition has not counted yet.
        """
        for waiter in tuple(self._partition.followers):
            heard = waiter.fetch_state(self.rules.leader_epoch)
            if heard is not None:
                self.fetched(heard.replica, heard.offset, heard.broker_epoch, heard.heard_ms)
        self._follow_rules(self.rules.expired(now_ms))
        wanted = self.rules.wanted_isr(now_ms, is_eligible)
        # Any ISR change tells the controller that this leader has recovered; without one, propose the current ISR.
        return self.rules.current_isr() if wanted is None and self.is_recovering else wanted

    def low_watermark(self, is_alive: Callable[[int], bool]) -> int:
        """Return the lowest log start offset of all live replicas; -1 while one of them has not fetched yet."""
        starts = {self.rules.local_id: self._partition.log.start_offset}
        for waiter in tuple(self._partition.followers):
            heard = waiter.fetch_state(self.rules.leader_epoch)
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

    def _position_of(self, offset: int) -> LogOffsetMetadata:
        ends, end = self._ends, self._partition.log.end
        if offset == end.offset:
            ends.clear()
            return end
        found: LogOffsetMetadata | None = None
        while ends and ends[0].offset <= offset:
            found = ends.popleft()
        if found is not None and found.offset == offset:
            return found
        try:
            return self._partition.log.position_of(offset)
        except ApiError:
            # The file cannot be read there. The next read that needs it reports the error.
            return self._partition.high
