"""The data of a share partition: in-flight records, lock holders, timers, pending writes, policy.

The requests and replies of a share partition are here too. One write is in progress at a time, and the next one takes
everything that has changed meanwhile. A write that fails may have been stored all the same, so nothing is undone: its
changes stay decided and invisible, and are written again until they are known to be stored.
"""

from collections.abc import Sequence
from heapq import heappush
from typing import Final, NamedTuple

from penstock.groups.share.partition.in_flight_records import (
    ACKNOWLEDGED,
    ACQUIRED_FINAL,
    ARCHIVED,
    AVAILABLE,
    BEGIN_WRITE,
    DELAYED,
    DELIVERY_LIMIT_REACHED,
    FINAL_ONCE_WRITTEN,
    FINAL_PREFIX,
    FINAL_PREFIX_ONCE_WRITTEN,
    FINISH_WRITE,
    LOCK_EXPIRED,
    NOT_STORED,
    QUEUED,
    RUN,
    RUNS,
    STORED_STATE_INDEX,
    STORED_STATES,
    WRITING,
    InFlightWindow,
    LockHolders,
    OffsetSpan,
    as_integer,
    merge_spans,
)
from penstock.groups.share.state.share_state import DeliveryTotals, RecordDelay


class RedeliveryBackoff(NamedTuple):
    """The delay of a released record: `min(cap, base * 2^attempt)` and a random part of the jitter."""

    base_ms: int
    cap_ms: int
    jitter_ms: int
    is_exponential: bool

    def delay_ms(self, delivery_count: int, chance: float) -> int:
        """`chance` is from 0 to 1; the first release is attempt 0."""
        wait_ms = self.base_ms
        if self.is_exponential:
            wait_ms = min(self.cap_ms, self.base_ms << min(max(delivery_count - 1, 0), 32))
        return wait_ms + int(self.jitter_ms * chance)


class SharePartitionPolicy(NamedTuple):
    lock_ms: int = 30_000
    delivery_limit: int = 5
    locks_max: int = 2_000
    may_renew: bool = True
    is_at_most_once: bool = False
    writes_dead_letters: bool = False  # records that are not delivered again go to a dead-letter topic
    backoff: RedeliveryBackoff | None = None

    @property
    def window_max(self) -> int:
        """The maximum distance from the oldest record that is not final to the newest that was acquired.

        Larger than `locks_max`, so that one slow record does not stop its neighbours, and bounded, because the whole
        window is kept in memory.
        """
        return 10 * self.locks_max


GAP, ACCEPT, RELEASE, REJECT, RENEW = range(5)


class AcknowledgementBatch(NamedTuple):
    """`types` has one byte per offset, or one for all. Any tuple of this shape is accepted."""

    first_offset: int
    last_offset: int
    types: bytes


AcknowledgementTuple = tuple[int, int, bytes]


class ReadableRecords(NamedTuple):
    """The result of a log read from `first_offset` up to, but not including, `next_offset`.

    `spans` are runs of records for members, as (first offset, offset after the last). Between them are gaps from
    compaction, control records, and aborted transactions. `ends` are the offsets after each batch.
    """

    first_offset: int
    next_offset: int
    spans: Sequence[tuple[int, int]]
    ends: Sequence[int]


class AcquireLimits(NamedTuple):
    """`exact`: never more records than requested; otherwise whole batches, so that the reply has fewer ranges."""

    records_max: int
    batch_records: int = 1 << 31
    exact: bool = False


class AcquiredBatch(NamedTuple):
    first_offset: int
    last_offset: int
    delivery_count: int


class PendingWrite(NamedTuple):
    """`batches` are (first offset, last offset, delivery state, delivery count), in order.

    `totals` are the totals at the same moment; None if they are known to be stored.
    """

    start_offset: int
    delivery_complete_count: int
    batches: list[tuple[int, int, int, int]]
    totals: DeliveryTotals | None = None
    delays: Sequence[RecordDelay] = ()


class ShareCounters:
    """Acknowledgements and their effects, over all share partitions of a group on a node."""

    __slots__ = (
        "accepted", "acquired", "dead_lettered", "expired", "gaps", "limited", "rejected", "released", "renewed",
    )  # fmt: skip

    def __init__(self) -> None:
        self.acquired = self.accepted = self.released = self.rejected = self.renewed = self.gaps = 0
        self.expired = 0  # locks
        self.limited = 0  # records that reached the delivery limit
        self.dead_lettered = 0  # records for which a dead letter is to be written


#: deadline, first offset, offset after the last
SpanTimer = tuple[int, int, int]


class SharePartitionState:
    __slots__ = (
        "counters",
        "deleted_upto",
        "in_flight_delays",
        "in_flight_totals",
        "in_flight_write",
        "members",
        "queued",
        "requested_delays",
        "stored_totals",
        "timers",
        "totals",
        "totals_pending",
        "unstored_delays",
        "window",
    )

    def __init__(self, start: int, counters: ShareCounters, totals: DeliveryTotals) -> None:
        self.window = InFlightWindow(start)
        self.members = LockHolders()
        self.counters = counters
        self.deleted_upto = 0  # the log has deleted all records before this offset, acquired or not
        #: A heap. An outdated timer does no harm, because the records have their own times.
        self.timers: list[SpanTimer] = []
        self.queued: list[OffsetSpan] = []  # the spans that the next write must cover
        self.in_flight_write: list[OffsetSpan] | None = None  # the spans of the write in progress
        #: Written together with the state, so that both are stored at the same time.
        self.totals = self.in_flight_totals = self.stored_totals = totals
        self.totals_pending = False  # a reply waits until the totals are stored
        #: By offset: the delivery count, and the delay if the record is released from that delivery.
        self.requested_delays: dict[int, tuple[int, int]] = {}
        #: By offset: the delivery count of records that were released with a requested delay, until that is stored.
        self.unstored_delays: dict[int, int] = {}
        self.in_flight_delays: Sequence[RecordDelay] = ()

    def add_totals(self, *, handed_out: int = 0, confirmed: int = 0) -> None:
        before = self.totals
        self.totals = before._replace(
            handed_out=before.handed_out + handed_out, confirmed=before.confirmed + confirmed
        )
        self.totals_pending = True

    def set_timer(self, time_ms: int, first: int, end: int) -> None:
        heappush(self.timers, (time_ms, first, end))

    def release_range(
        self, low: int, high: int, policy: SharePartitionPolicy, now_ms: int, chance: float, *, expired: bool
    ) -> None:
        """Release unprocessed records. The caller has already subtracted them from what their holder holds."""
        window = self.window
        if window.states[low] == ACQUIRED_FINAL:
            window.states[low:high] = bytes((ACKNOWLEDGED,)) * (high - low)
            return
        for run_low, run_high, delivery_count in window.count_runs(low, high):
            code = release_code(policy, delivery_count, expired=expired)
            if code == DELAYED | QUEUED:
                assert policy.backoff is not None
                due_ms = now_ms + policy.backoff.delay_ms(delivery_count, chance)
                window.set_time(run_low, run_high, due_ms)
            window.states[run_low:run_high] = bytes((code,)) * (run_high - run_low)
            self.count_archived(code, run_high - run_low)
        self.queued.append((window.start + low, window.start + high))

    def count_archived(self, code: int, count: int) -> None:
        target = code & ~QUEUED
        if target in (DELIVERY_LIMIT_REACHED, LOCK_EXPIRED, ARCHIVED):
            self.counters.limited += count
            self.counters.dead_lettered += count if target != ARCHIVED else 0

    def drop_final_prefix(self) -> None:
        """Start the window at the oldest record that is not final."""
        match = FINAL_PREFIX.match(self.window.states)
        assert match is not None
        self.window.drop_below(self.window.start + match.end())


def release_code(policy: SharePartitionPolicy, delivery_count: int, *, expired: bool = False) -> int:
    """The new state of a record that was not processed."""
    if policy.is_at_most_once:
        return ARCHIVED | QUEUED
    if delivery_count >= policy.delivery_limit:
        if not policy.writes_dead_letters:
            return ARCHIVED | QUEUED
        return (LOCK_EXPIRED if expired else DELIVERY_LIMIT_REACHED) | QUEUED
    return (AVAILABLE if policy.backoff is None else DELAYED) | QUEUED


def load_share_partition(
    start: int,
    batches: Sequence[tuple[int, int, int, int]],
    counters: ShareCounters,
    policy: SharePartitionPolicy,
    totals: DeliveryTotals,
    delays: Sequence[RecordDelay],
    *,
    now_ms: int,
    chance: float,
) -> SharePartitionState:
    """Build the state from the stored batches. Offsets between the batches count as never delivered.

    Delays of the group start again, because their start is not stored, and too late is better than too early. Delays
    that consumers chose end when they would have ended.
    """
    core = SharePartitionState(start, counters, totals)
    window = core.window
    for first, last, state, delivery_count in batches:
        if last < window.end:
            continue
        low = max(first, window.end) - start
        if first > window.end:
            window.extend(first, AVAILABLE)
        window.extend(last + 1, state)
        window.counts[low:] = bytes((min(delivery_count, 255),)) * (len(window) - low)
        if state == AVAILABLE and delivery_count and policy.backoff is not None:
            due_ms = now_ms + policy.backoff.delay_ms(delivery_count, chance)
            window.states[low:] = bytes((DELAYED,)) * (len(window) - low)
            window.set_time(low, len(window), due_ms)
            core.set_timer(due_ms, start + low, window.end)
    for offset, delivery_count, due_ms in delays:
        low, high = window.clip(offset, offset + 1)
        if low < high and window.states[low] in (AVAILABLE, DELAYED) and window.counts[low] == delivery_count:
            window.states[low] = DELAYED if due_ms > now_ms else AVAILABLE
            window.set_time(low, high, due_ms)
            core.set_timer(due_ms, offset, offset + 1)
    core.drop_final_prefix()
    return core


_STATE_BITS: Final = 3
_STATE_MASK: Final = (1 << _STATE_BITS) - 1
#: A larger count does not fit beside the state. No count yields NOT_STORED, because its low bits are not a state.
_PACKED_COUNT_MAX: Final = 255 >> _STATE_BITS


def take_write(core: SharePartitionState) -> PendingWrite | None:
    """None if there is nothing to write."""
    assert core.in_flight_write is None, "one write at a time"
    window = core.window
    if not core.queued and not core.totals_pending:
        return None
    done = FINAL_PREFIX_ONCE_WRITTEN.match(window.states)
    assert done is not None
    core.in_flight_write, core.queued = merge_spans(core.queued), []
    batches: list[tuple[int, int, int, int]] = []
    for first, end in core.in_flight_write:
        low, high = window.clip(first, end)
        window.states[low:high] = window.states[low:high].translate(BEGIN_WRITE)
        _add_batches(core, max(low, done.end()), high, batches)
    open_part = window.states[done.end() :]
    complete = len(open_part) - len(open_part.translate(None, FINAL_ONCE_WRITTEN))
    core.totals_pending = False
    totals = None if core.totals == core.stored_totals else core.totals
    core.in_flight_totals = core.totals
    if core.unstored_delays:
        core.in_flight_delays = _unstored_delays(core)
    return PendingWrite(window.start + done.end(), complete, batches, totals, core.in_flight_delays)


def _unstored_delays(core: SharePartitionState) -> list[RecordDelay]:
    window, delays = core.window, []
    for offset, delivery_count in core.unstored_delays.items():
        low, high = window.clip(offset, offset + 1)
        if low < high and window.states[low] & WRITING and window.counts[low] == delivery_count:
            delays.append(RecordDelay(offset, delivery_count, window.times[low]))
    return delays


def _add_batches(
    core: SharePartitionState, low: int, high: int, batches: list[tuple[int, int, int, int]]
) -> None:
    """Add runs of the same state and count. Records before the new start need no batch."""
    if high <= low:
        return
    window = core.window
    stored, counts = window.states[low:high].translate(STORED_STATE_INDEX), window.counts[low:high]
    base = window.start + low
    if max(counts) > _PACKED_COUNT_MAX:
        _add_batches_of_many_deliveries(base, stored, counts, batches)
        return
    # State and count in one byte, so that one search finds where either changes.
    row = ((as_integer(counts) << _STATE_BITS) | as_integer(stored)).to_bytes(high - low, "little")
    at = base
    for run, _ in RUNS.findall(row):
        after = at + len(run)
        if (code := run[0]) != NOT_STORED:
            batches.append((at, after - 1, STORED_STATES[code & _STATE_MASK], code >> _STATE_BITS))
        at = after


def _add_batches_of_many_deliveries(
    base: int, stored: bytearray, counts: bytearray, batches: list[tuple[int, int, int, int]]
) -> None:
    for same_count in RUN.finditer(counts):
        for run in RUN.finditer(stored, *same_count.span()):
            state = stored[run.start()]
            if state != NOT_STORED:
                first, last = base + run.start(), base + run.end() - 1
                batches.append((first, last, STORED_STATES[state], counts[run.start()]))


def written(core: SharePartitionState) -> None:
    """Make the changes of the write in progress visible, because it is stored."""
    window = core.window
    assert core.in_flight_write is not None, "no write is in progress"
    for first, end in core.in_flight_write:
        low, high = window.clip(first, end)
        settled = window.states[low:high].translate(FINISH_WRITE)
        window.states[low:high] = settled
        if DELAYED in settled:
            due_ms = min(
                time for time, state in zip(window.times[low:high], settled, strict=True) if state == DELAYED
            )
            core.set_timer(due_ms, first, end)
    for delay in core.in_flight_delays:
        core.unstored_delays.pop(delay.offset, None)
    core.in_flight_delays = ()
    core.in_flight_write = None
    core.stored_totals = core.in_flight_totals
    core.drop_final_prefix()


def write_failed(core: SharePartitionState) -> None:
    """Queue the changes again, together with all changes since."""
    assert core.in_flight_write is not None, "no write is in progress"
    core.queued = [*core.in_flight_write, *core.queued]
    core.totals_pending = core.totals != core.stored_totals
    core.in_flight_write = None
