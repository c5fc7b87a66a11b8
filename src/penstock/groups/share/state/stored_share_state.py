"""What the share coordinator stores of one share partition: its state, and its pending dead letters.

Only replay changes either of them. Dead letters are written by plan. First the plan is stored: these offsets, to
that partition, under the next sequence of this producer. Then the records are appended there. Then the plan is
settled, in one batch with the offsets that are no longer pending. A coordinator that finds an unsettled plan carries
it out again; the producer's sequence makes the repetition harmless. While a plan is open there is no other.
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


class StoredShareState:
    """Changed by replay only."""

    __slots__ = (
        "batches",
        "create_timestamp_ms",
        "delivery_complete_count",
        "leader_epoch",
        "snapshot_epoch",
        "start_offset",
        "state_epoch",
        "updates",
    )

    def __init__(self, snapshot: ShareSnapshot) -> None:
        self.leader_epoch = self.state_epoch = UNSET
        self.install(snapshot)

    def __repr__(self) -> str:
        return (
            f"<PartitionState from {self.start_offset}, {len(self.batches)} batches, "
            f"epochs {self.state_epoch}/{self.leader_epoch}>"
        )

    def install(self, snapshot: ShareSnapshot) -> None:
        """Epochs never go back, whatever a snapshot says."""
        self.snapshot_epoch = snapshot.snapshot_epoch
        self.state_epoch = max(self.state_epoch, snapshot.state_epoch)
        self.leader_epoch = max(self.leader_epoch, snapshot.leader_epoch)
        self.start_offset = snapshot.start_offset
        self.create_timestamp_ms = snapshot.create_timestamp_ms
        self.delivery_complete_count = snapshot.delivery_complete_count
        self.batches: list[StateRange] = list(normalize(snapshot.batches))
        drop_before(self.batches, self.start_offset)
        #: How many since the last snapshot.
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

    def snapshot_with(self, update: ShareUpdate, now_ms: int) -> ShareSnapshot:
        """The same as `apply`, as one record that stands alone."""
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
        nothing = ShareUpdate(self.snapshot_epoch, self.leader_epoch, UNSET, self.delivery_complete_count, ())
        return self.snapshot_with(nothing, now_ms)

    def new_dead_letters(self, buried: Sequence[StateRange]) -> list[StateRange]:
        """Those that a write ends for good. What is final already, or was written before, is taken care of; what is
        known to have been delivered more often than the writer knew of goes on.
        """
        asked = list(normalize(buried))
        drop_before(asked, max(self.start_offset, 0))
        known, fresh = self.batches, []
        for one in asked:
            place = bisect_left(known, (one[1] + 1,)) - 1  # the last that begins before its end
            if place < 0 or known[place][1] < one[0]:
                fresh.append(one)
            elif known[place][0] > one[0] or known[place][1] < one[1]:
                fresh += self._new_dead_letters_in(one)
            elif known[place][2] == AVAILABLE and known[place][3] <= one[3]:
                fresh.append(one)
        return fresh

    def _new_dead_letters_in(self, one: StateRange) -> list[StateRange]:
        """Where more than one thing is known of them."""
        low, high = overlapping_slice(self.batches, (one,))
        known = self.batches[low:high]
        fresh = subtract((one,), [each for each in known if each[2] != AVAILABLE])
        held = [each for each in known if each[2] == AVAILABLE]
        return [each for each in overlay(held, fresh) if each[2] > ARCHIVED]

    @property
    def progress(self) -> int | None:
        """Grows by one with every record that becomes final; None while it is not known where they begin."""
        if self.start_offset == UNSET:
            return None
        return self.start_offset + max(self.delivery_complete_count, 0)

    @property
    def acquired_upto(self) -> int:
        """Nothing from here on was handed to anyone, as far as was written."""
        return max(self.start_offset, self.batches[-1][1] + 1 if self.batches else 0)

    def shown(self, totals: DeliveryTotals) -> ShareState:
        batches = tuple(StateBatch._make(one) for one in self.batches)
        return ShareState(self.state_epoch, self.start_offset, batches, totals)

    def summary(self) -> ShareStateSummary:
        return ShareStateSummary(
            self.state_epoch, self.leader_epoch, self.start_offset, self.delivery_complete_count
        )


def split_dead_letters(batches: Sequence[StateRange]) -> tuple[list[StateRange], list[StateRange]]:
    """The batches as everyone sees them, and apart those that are to be buried."""
    shown: list[StateRange] = []
    buried: list[StateRange] = []
    for first, last, state, count in batches:
        if state > ARCHIVED:
            buried.append((first, last, state, count))
            state = ARCHIVED
        shown.append((first, last, state, count))
    return shown, buried


_SEQUENCE_MAX: Final = (1 << 31) - 1
#: Errors kept for one share partition, and their length in all: they are written again as one record.
_ERRORS_MAX: Final = 500
_ERRORS_SIZE_MAX: Final = 128 << 10

KeyValue = tuple[bytes, bytes | None]


class DeadLetterView(NamedTuple):
    """What there is to do. `pending` entries are (first, last, reason, delivery count)."""

    key: SharePartitionKey
    pending: tuple[StateRange, ...]
    pending_count: int
    plan: DeadLetterPlan | None
    producer: DeadLetterProducer | None
    #: What records died of, by their offsets: the number of the delivery, and the error.
    errors: Mapping[int, tuple[int, WorkerError]] = MappingProxyType({})


class StoredDeadLetters:
    """Changed by replay only."""

    __slots__ = ("buried", "errors", "lost", "pending", "pending_count", "plan", "producer")

    def __init__(self) -> None:
        self.pending: list[StateRange] = []
        self.pending_count = 0
        self.plan: DeadLetterPlan | None = None
        self.producer: DeadLetterProducer | None = None
        self.buried = 0
        self.lost = 0
        #: The errors of pending records, and of records that may soon be pending: a worker may report the error first.
        self.errors: dict[int, tuple[int, WorkerError]] = {}

    def __repr__(self) -> str:
        return f"<PartitionBurials {self.pending_count} pending, {self.buried} buried, plan {self.plan}>"

    def view(self, key: SharePartitionKey, ranges_max: int) -> DeadLetterView:
        """Of the pending ones, the first few; with a plan, all that it may be about."""
        if self.plan is None:
            shown = self.pending[:ranges_max]
        else:
            low, high = overlapping_slice(self.pending, self.plan.resolved)
            shown = self.pending[low:high]
        return DeadLetterView(
            key, tuple(shown), self.pending_count, self.plan, self.producer, dict(self.errors)
        )

    def refuses(self, plan: DeadLetterPlan) -> bool:
        """Whether a plan does not fit what is known: it was made for a state that has changed since."""
        low, high = overlapping_slice(self.pending, plan.resolved)
        wanted = [(*one, 0, 0) for one in plan.resolved]
        return self.plan is not None or bool(subtract(wanted, self.pending[low:high]))

    # Replay

    def install(self, burials: DeadLetterSnapshot) -> None:
        self.buried, self.lost, self.producer = burials.buried, burials.lost, burials.producer
        self.plan = None
        self.pending = []
        self.pending_count = 0
        self.errors = {}

    def explain(self, failures: Sequence[WorkerFailure]) -> None:
        """Those that were said first go first, where there are too many."""
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
            self._forget(resolved)  # among perhaps very many others
            if self.errors:
                upto = resolved[-1][1]
                gone = [at for at in self.errors if at <= upto and any(a <= at <= b for a, b in resolved)]
                for offset in gone:
                    del self.errors[offset]
        if self.plan is not None and resolved and not settled.lost:
            self.buried += offset_count(self.plan.offsets)
        self.lost += settled.lost
        self.plan = None
        if not settled.keeps_producer:
            self.producer = None

    def _forget(self, resolved: Sequence[OffsetInterval]) -> None:
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
            left = []  # what is resolved is pending, so it is all of that
        else:
            left = subtract(there, resolved)
        self.pending_count -= count - offset_count(left)
        self.pending[low:high] = left

    def snapshot(self, key: SharePartitionKey) -> list[KeyValue]:
        """The records that bring back all of it."""
        # A plan brings its producer's next sequence with it, and leaves that of before unneeded.
        counts = DeadLetterSnapshot(self.buried, self.lost, self.producer)
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
