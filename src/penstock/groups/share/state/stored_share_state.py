"""The stored state of one share partition and its dead letters, as the share coordinator holds them in memory.

Only replay changes them. A dead letter is written in three steps. First the coordinator stores a plan: which offsets go
to which partition, with which producer id and sequence. Then it appends the dead letters. Then it settles the plan: one
record removes the offsets from the pending ones. A coordinator that finds an unsettled plan appends the same dead
letters again; the producer's sequence makes that harmless. There is one plan at a time.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from penstock.groups.share.state import share_state_records
from penstock.groups.share.state.share_state import (
    ARCHIVED,
    AVAILABLE,
    UNSET,
    DeliveryTotals,
    RecordDelay,
    SharePartitionKey,
    ShareState,
    ShareStateSummary,
    StateBatch,
    StateRange,
    drop_before,
    is_sorted,
    merge_into,
    normalize,
    offset_count,
    overlapping_slice,
    overlay,
    subtract,
)
from penstock.groups.share.state.share_state_records import (
    DeadLetterPlan,
    DeadLetterProducer,
    DeadLetterSnapshot,
    OffsetInterval,
    SettledPlan,
    ShareSnapshot,
    ShareUpdate,
    encode_key,
)
from penstock.protocol.share_failures import WorkerError, WorkerFailure

#: From this many delays on, those that are not needed any more are removed.
_DELAYS_MIN: Final = 100


class StoredShareState:
    """The state of a share partition. Only replay changes it."""

    __slots__ = (
        "_delays_max",
        "batches",
        "create_timestamp_ms",
        "delays",
        "delivery_complete_count",
        "leader_epoch",
        "snapshot_epoch",
        "start_offset",
        "state_epoch",
        "updates",
    )

    def __init__(self, snapshot: ShareSnapshot) -> None:
        self.leader_epoch = self.state_epoch = UNSET
        self.delays: dict[int, RecordDelay] = {}
        self._delays_max = _DELAYS_MIN
        self.install(snapshot)

    def __repr__(self) -> str:
        return (
            f"<StoredShareState from {self.start_offset}, {len(self.batches)} batches, "
            f"epochs {self.state_epoch}/{self.leader_epoch}>"
        )

    def install(self, snapshot: ShareSnapshot) -> None:
        """Replace the state by a snapshot, but never lower an epoch."""
        if snapshot.state_epoch != self.state_epoch:
            self.delays = {}
        self.snapshot_epoch = snapshot.snapshot_epoch
        self.state_epoch = max(self.state_epoch, snapshot.state_epoch)
        self.leader_epoch = max(self.leader_epoch, snapshot.leader_epoch)
        self.start_offset = snapshot.start_offset
        self.create_timestamp_ms = snapshot.create_timestamp_ms
        self.delivery_complete_count = snapshot.delivery_complete_count
        self.batches: list[StateRange] = list(normalize(snapshot.batches))
        drop_before(self.batches, self.start_offset)
        #: Updates since the last snapshot.
        self.updates = 0

    def apply(self, update: ShareUpdate) -> None:
        self.leader_epoch = max(self.leader_epoch, update.leader_epoch)
        if update.start_offset != UNSET:
            self.start_offset = update.start_offset
        self.delivery_complete_count = update.delivery_complete_count
        batches = update.batches
        merge_into(self.batches, batches if is_sorted(batches) else normalize(batches))
        drop_before(self.batches, self.start_offset)
        self.updates += 1

    def add_delays(self, delays: Sequence[RecordDelay]) -> None:
        """Add delays. A late write does not replace the delay of a later delivery."""
        for delay in delays:
            known = self.delays.get(delay.offset)
            if known is None or known.delivery_count <= delay.delivery_count:
                self.delays[delay.offset] = delay
        if len(self.delays) > self._delays_max:
            self.delays = {delay.offset: delay for delay in self.current_delays()}
            self._delays_max = max(2 * len(self.delays), _DELAYS_MIN)

    def current_delays(self) -> tuple[RecordDelay, ...]:
        """Return the delays of available records that were not delivered since."""
        batches, current = self.batches, []
        for delay in sorted(self.delays.values()):
            index = bisect_left(batches, (delay.offset + 1,)) - 1
            if index >= 0 and batches[index][1] >= delay.offset:
                _, _, state, delivery_count = batches[index]
                if state == AVAILABLE and delivery_count == delay.delivery_count:
                    current.append(delay)
        return tuple(current)

    def snapshot_with(self, update: ShareUpdate, now_ms: int) -> ShareSnapshot:
        """Return the state after `update` as a snapshot, which is stored in place of the update."""
        start_offset = self.start_offset if update.start_offset == UNSET else update.start_offset
        batches = list(self.batches)
        merge_into(batches, update.batches)
        drop_before(batches, start_offset)
        return ShareSnapshot(
            self.snapshot_epoch + 1,
            self.state_epoch,
            max(self.leader_epoch, update.leader_epoch),
            start_offset,
            self.create_timestamp_ms,
            now_ms,
            update.delivery_complete_count,
            batches,
        )

    def snapshot(self, now_ms: int) -> ShareSnapshot:
        no_change = ShareUpdate(
            self.snapshot_epoch, self.leader_epoch, UNSET, self.delivery_complete_count, ()
        )
        return self.snapshot_with(no_change, now_ms)

    def new_dead_letters(self, dead_lettered: Sequence[StateRange]) -> list[StateRange]:
        """Return the offsets of a write for which a dead letter must be written.

        Records that are final already need no second dead letter. Records whose stored delivery count is higher than
        the writer's are still being delivered, and get none either.
        """
        wanted = list(normalize(dead_lettered))
        drop_before(wanted, max(self.start_offset, 0))
        known, new = self.batches, []
        for one in wanted:
            index = bisect_left(known, (one[1] + 1,)) - 1  # the last range that begins before its end
            if index < 0 or known[index][1] < one[0]:
                new.append(one)
            elif known[index][0] > one[0] or known[index][1] < one[1]:
                new += self._new_dead_letters_in(one)
            elif known[index][2] == AVAILABLE and known[index][3] <= one[3]:
                new.append(one)
        return new

    def _new_dead_letters_in(self, one: StateRange) -> list[StateRange]:
        """The same for a range that more than one stored batch covers, or covers in part."""
        low, high = overlapping_slice(self.batches, (one,))
        known = self.batches[low:high]
        new = subtract((one,), [each for each in known if each[2] != AVAILABLE])
        held = [each for each in known if each[2] == AVAILABLE]
        return [each for each in overlay(held, new) if each[2] > ARCHIVED]

    @property
    def progress(self) -> int | None:
        """Grows by one with every record that becomes final; None while the start offset is not set."""
        if self.start_offset == UNSET:
            return None
        return self.start_offset + max(self.delivery_complete_count, 0)

    @property
    def acquired_upto(self) -> int:
        """No record from this offset on was acquired, as far as the stored state shows."""
        return max(self.start_offset, self.batches[-1][1] + 1 if self.batches else 0)

    def view(self, totals: DeliveryTotals) -> ShareState:
        batches = tuple(StateBatch._make(one) for one in self.batches)
        return ShareState(self.state_epoch, self.start_offset, batches, totals, self.current_delays())

    def summary(self) -> ShareStateSummary:
        return ShareStateSummary(
            self.state_epoch, self.leader_epoch, self.start_offset, self.delivery_complete_count
        )


def split_dead_letters(batches: Sequence[StateRange]) -> tuple[list[StateRange], list[StateRange]]:
    """Return the batches as readers see them, and the batches that need dead letters."""
    shown: list[StateRange] = []
    dead_lettered: list[StateRange] = []
    for first, last, state, count in batches:
        if state > ARCHIVED:
            dead_lettered.append((first, last, state, count))
            state = ARCHIVED
        shown.append((first, last, state, count))
    return shown, dead_lettered


_SEQUENCE_MAX: Final = (1 << 31) - 1
#: Limits of the errors of one share partition, because a checkpoint writes all of them as one record.
_ERRORS_MAX: Final = 500
_ERRORS_SIZE_MAX: Final = 128 << 10

KeyValue = tuple[bytes, bytes | None]


class DeadLetterView(NamedTuple):
    """The pending dead letters of a share partition. `pending` has (first, last, reason, delivery count)."""

    key: SharePartitionKey
    pending: tuple[StateRange, ...]
    pending_count: int
    plan: DeadLetterPlan | None
    producer: DeadLetterProducer | None
    #: By offset: the delivery count, and the error with which that delivery failed.
    errors: Mapping[int, tuple[int, WorkerError]] = MappingProxyType({})


class StoredDeadLetters:
    """The dead letters of a share partition. Only replay changes them."""

    __slots__ = ("errors", "lost", "pending", "pending_count", "plan", "producer", "written")

    def __init__(self) -> None:
        self.pending: list[StateRange] = []
        self.pending_count = 0
        self.plan: DeadLetterPlan | None = None
        self.producer: DeadLetterProducer | None = None
        self.written = 0
        self.lost = 0
        #: The errors of pending records, and of records that may soon be pending: a worker may report the error first.
        self.errors: dict[int, tuple[int, WorkerError]] = {}

    def __repr__(self) -> str:
        return f"<StoredDeadLetters {self.pending_count} pending, {self.written} written, plan {self.plan}>"

    def view(self, key: SharePartitionKey, ranges_max: int) -> DeadLetterView:
        """Show the first pending ranges or, with an open plan, all pending ranges that the plan may contain."""
        if self.plan is None:
            shown = self.pending[:ranges_max]
        else:
            low, high = overlapping_slice(self.pending, self.plan.resolved)
            shown = self.pending[low:high]
        return DeadLetterView(
            key, tuple(shown), self.pending_count, self.plan, self.producer, dict(self.errors)
        )

    def refuses(self, plan: DeadLetterPlan) -> bool:
        """Whether a plan does not match the pending offsets: it was made for a state that has changed since."""
        low, high = overlapping_slice(self.pending, plan.resolved)
        wanted = [(*one, 0, 0) for one in plan.resolved]
        return self.plan is not None or bool(subtract(wanted, self.pending[low:high]))

    # Replay

    def install(self, snapshot: DeadLetterSnapshot) -> None:
        self.written, self.lost, self.producer = snapshot.written, snapshot.lost, snapshot.producer
        self.plan = None
        self.pending = []
        self.pending_count = 0
        self.errors = {}

    def add_errors(self, failures: Sequence[WorkerFailure]) -> None:
        """Add errors, and drop the oldest ones over the limit."""
        for failure in failures:
            if failure.error is not None:
                self.errors.pop(failure.offset, None)
                self.errors[failure.offset] = failure.delivery_count, failure.error
        size = sum(sum(map(len, error)) for _, error in self.errors.values())
        while len(self.errors) > _ERRORS_MAX or size > _ERRORS_SIZE_MAX:
            first = next(iter(self.errors))
            size -= sum(map(len, self.errors.pop(first)[1]))

    def add(self, entries: Sequence[StateRange]) -> None:
        entries = normalize(entries)
        low, high = overlapping_slice(self.pending, entries)
        self.pending_count += offset_count(subtract(entries, self.pending[low:high]))
        merge_into(self.pending, entries)

    def begin(self, plan: DeadLetterPlan) -> None:
        self.plan = plan
        self.producer = DeadLetterProducer(plan.producer_id, plan.epoch, sequence_after(plan), plan.target)

    def settle(self, settled: SettledPlan) -> None:
        resolved = settled.resolved
        if settled.as_planned and self.plan is not None:
            resolved = self.plan.resolved
        if resolved:
            self._remove_pending(resolved)
            if self.errors:
                upto = resolved[-1][1]
                gone = [at for at in self.errors if at <= upto and any(a <= at <= b for a, b in resolved)]
                for offset in gone:
                    del self.errors[offset]
        if self.plan is not None and resolved and not settled.lost:
            self.written += offset_count(self.plan.offsets)
        self.lost += settled.lost
        self.plan = None
        if not settled.keeps_producer:
            self.producer = None

    def _remove_pending(self, resolved: Sequence[OffsetInterval]) -> None:
        low, high = overlapping_slice(self.pending, resolved)
        if low < high and self.pending[low][1] < resolved[0][0]:
            low += 1
        there = self.pending[low:high]
        count = offset_count(there)
        if (
            there
            and there[0][0] >= resolved[0][0]
            and there[-1][1] <= resolved[-1][1]
            and count == offset_count(resolved)
        ):
            left = []  # resolved offsets are pending, so equal counts mean that these ranges are all resolved
        else:
            left = subtract(there, resolved)
        self.pending_count -= count - offset_count(left)
        self.pending[low:high] = left

    def snapshot(self, key: SharePartitionKey) -> list[KeyValue]:
        """Return the records from which replay builds these dead letters again."""
        # A plan sets the producer, so its record comes after the snapshot with the earlier producer.
        counts = DeadLetterSnapshot(self.written, self.lost, self.producer)
        stored: list[KeyValue] = [
            (
                encode_key(share_state_records.DEAD_LETTER_SNAPSHOT, key),
                share_state_records.encode_dead_letter_snapshot(counts),
            )
        ]
        if self.pending:
            stored.append(
                (
                    encode_key(share_state_records.DEAD_LETTERS_PENDING, key),
                    share_state_records.encode_pending(self.pending),
                )
            )
        if self.errors:
            failures = [
                WorkerFailure(offset, delivery_count, error=error)
                for offset, (delivery_count, error) in self.errors.items()
            ]
            stored.append(
                (
                    encode_key(share_state_records.WORKER_ERRORS, key),
                    share_state_records.encode_errors(key, failures),
                )
            )
        if self.plan is not None:
            stored.append(
                (
                    encode_key(share_state_records.DEAD_LETTER_PLAN, key),
                    share_state_records.encode_plan(self.plan),
                )
            )
        return stored


def sequence_after(plan: DeadLetterPlan) -> int:
    """Sequences wrap from 2^31-1 to 0."""
    return (plan.sequence + offset_count(plan.offsets)) & _SEQUENCE_MAX
