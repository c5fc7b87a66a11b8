"""A share partition: a group's view of one partition, on the partition's leader.

Only stored changes are visible: an acknowledgement gets its reply, and a released record becomes available again, when
the write is stored. The caller takes one write after the other (`take_write`), reports the result (`written`,
`write_failed`), and calls `tick` when `next_deadline_ms` has come. A leader that is fenced discards its share
partition.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.groups.share.partition import acknowledgement, acquisition, lock_expiry, share_partition_state
from penstock.groups.share.partition.in_flight_records import (
    ACQUIRED,
    ACQUIRED_FINAL,
    AVAILABLE,
    BUSY,
    LOCKED,
    WRITE_PENDING,
)
from penstock.groups.share.partition.share_partition_state import (
    AcknowledgementTuple,
    AcquiredBatch,
    AcquireLimits,
    PendingWrite,
    ReadableRecords,
    ShareCounters,
    SharePartitionPolicy,
    SharePartitionState,
    load_share_partition,
)
from penstock.groups.share.state.share_state import NO_DELIVERY_TOTALS, DeliveryTotals, RecordDelay


class SharePartition:
    __slots__ = ("_core", "policy")

    def __init__(
        self,
        start_offset: int,
        batches: Sequence[tuple[int, int, int, int]],
        policy: SharePartitionPolicy,
        counters: ShareCounters,
        totals: DeliveryTotals = NO_DELIVERY_TOTALS,
        delays: Sequence[RecordDelay] = (),
        *,
        now_ms: int,
        chance: float,
    ) -> None:
        """`batches`, `totals` and `delays` are the stored ones; `policy` may be replaced at any time."""
        self.policy = policy
        self._core: SharePartitionState = load_share_partition(
            start_offset, batches, counters, policy, totals, delays, now_ms=now_ms, chance=chance
        )

    def __repr__(self) -> str:
        return f"<SharePartition {self.start_offset}..{self.end_offset} {bytes(self._core.window.states)!r}>"

    # -- queries -------------------------------------------------------------------------------------

    @property
    def start_offset(self) -> int:
        """The oldest offset that is not final."""
        return self._core.window.start

    @property
    def end_offset(self) -> int:
        """The first offset that was never acquired."""
        return self._core.window.end

    @property
    def next_offset(self) -> int | None:
        """The offset from which to read the next records for members; None if none can be acquired now."""
        return acquisition.next_offset(self._core, self.policy)

    def reach(self, records_max: int) -> int:
        """How many offsets to read from `next_offset` to find that many records."""
        return acquisition.offsets_to_read(self._core, records_max, self.policy)

    @property
    def next_deadline_ms(self) -> int | None:
        return self._core.timers[0][0] if self._core.timers else None

    @property
    def locked_count(self) -> int:
        states = self._core.window.states
        return states.count(ACQUIRED) + states.count(ACQUIRED_FINAL)

    @property
    def open_count(self) -> int:
        """In-flight records that are not final yet."""
        return self._core.window.open_count

    @property
    def totals(self) -> DeliveryTotals:
        """The current totals, stored or not."""
        return self._core.totals

    @property
    def has_writes(self) -> bool:
        core = self._core
        return bool(core.queued) or core.totals_pending or core.in_flight_write is not None

    @property
    def is_idle(self) -> bool:
        """Nothing is lost if the share partition is dropped and loaded again; the group's delays start again."""
        return not self.has_writes and BUSY.search(self._core.window.states) is None

    # -- operations ----------------------------------------------------------------------------------

    def acquire(
        self, member: str, found: ReadableRecords, limits: AcquireLimits, *, now_ms: int
    ) -> list[AcquiredBatch]:
        return acquisition.acquire(self._core, member, found, limits, self.policy, now_ms=now_ms)

    def reserve(self, found: ReadableRecords, limits: AcquireLimits) -> int:
        """At-most-once: return how many records have to be written before `acquire` hands any of them out."""
        return acquisition.reserve(self._core, found, limits, self.policy)

    def acknowledge(
        self, member: str, batches: Sequence[AcknowledgementTuple], *, now_ms: int, chance: float
    ) -> bool:
        """Return whether the reply has to wait for a write. Raises ApiError, and then nothing has changed."""
        return acknowledgement.acknowledge(
            self._core, member, batches, self.policy, now_ms=now_ms, chance=chance
        )

    def holder(self, offset: int, delivery_count: int) -> str | None:
        """Return the member that holds the record from this delivery."""
        return acknowledgement.holder(self._core, offset, delivery_count)

    def request_delay(self, offset: int, delivery_count: int, delay_ms: int) -> bool:
        """Set the delay of a record that is released from this delivery, instead of the group's backoff.

        Return False if no member holds the record from this delivery. The delay is stored when the record is released.
        """
        return acknowledgement.request_delay(self._core, offset, delivery_count, delay_ms)

    def release(self, member: str, *, now_ms: int, chance: float, with_delay: bool) -> bool:
        """Release the records of a member that has left. Return whether something has to be written."""
        policy = self.policy if with_delay else self.policy._replace(backoff=None)
        return acknowledgement.release_member(self._core, member, policy, now_ms=now_ms, chance=chance)

    def tick(self, *, now_ms: int, chance: float) -> None:
        lock_expiry.tick(self._core, self.policy, now_ms=now_ms, chance=chance)

    def log_start_moved(self, log_start: int) -> None:
        """Drop the records that the log has deleted, except those with a pending write, which stay until it is stored.

        The next write stores the new start and the expired total; a leader that loads the older state counts the
        expired records again.
        """
        core, window = self._core, self._core.window
        core.deleted_upto = max(core.deleted_upto, log_start)
        low, high = window.clip(window.start, log_start)
        waiting = WRITE_PENDING.search(window.states, low, high)
        if waiting is not None:
            log_start = window.start + waiting.start()
        expired = self._drop_deleted(min(log_start, window.end))
        if log_start > window.end:
            expired += log_start - window.end
            window.start = log_start  # the window is empty
        if expired:
            core.totals = core.totals._replace(expired=core.totals.expired + expired)
        core.drop_final_prefix()

    def _drop_deleted(self, offset: int) -> int:
        """Return how many of the dropped records were never delivered."""
        core, window = self._core, self._core.window
        _, high = window.clip(window.start, offset)
        for held in LOCKED.finditer(window.states, 0, high):
            for index in range(*held.span()):
                core.members.give_back(window.owners[index], 1)
        pairs = zip(window.states[:high], window.counts, strict=False)
        never = sum(state == AVAILABLE and not count for state, count in pairs)
        window.drop_below(offset)
        return never

    # -- writes --------------------------------------------------------------------------------------

    def take_write(self) -> PendingWrite | None:
        """None if a write is in progress, or if there is nothing to write."""
        return (
            None if self._core.in_flight_write is not None else share_partition_state.take_write(self._core)
        )

    def written(self) -> None:
        share_partition_state.written(self._core)

    def write_failed(self) -> None:
        share_partition_state.write_failed(self._core)
