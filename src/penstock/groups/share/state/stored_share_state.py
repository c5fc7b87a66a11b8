"""The dead letters of one share partition: which are still to be buried, and what is being done about it.

First a plan is stored: these offsets, to that partition, under this producer's next sequence. Then the records are
appended there. Then the plan is settled, in one batch with the offsets that are no longer pending. Whoever finds a plan
that is not settled carries it out again: the producer's sequence makes the repeat harmless. As long as a plan is open
there is no other.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from penstock.groups.share_state import records
from penstock.groups.share_state.ranges import Range, around, merge_into, size, subtract, tidy
from penstock.groups.share_state.records import Burials, Pair, Plan, Producer, Settled, encode_key
from penstock.groups.share_state.values import Key
from penstock.protocol.share_failures import WorkerError, WorkerFailure

_SEQUENCE_MAX: Final = (1 << 31) - 1
#: Errors kept for one share partition, and their length in all: they are written again as one record.
_ERRORS_MAX: Final = 500
_ERRORS_SIZE_MAX: Final = 128 << 10

KeyValue = tuple[bytes, bytes | None]


class BurialView(NamedTuple):
    """What there is to do. `pending` entries are (first, last, reason, delivery count)."""

    key: Key
    pending: tuple[Range, ...]
    pending_count: int
    plan: Plan | None
    producer: Producer | None
    #: What records died of, by their offsets: the number of the delivery, and the error.
    errors: Mapping[int, tuple[int, WorkerError]] = MappingProxyType({})


class PartitionBurials:
    """Changed by replay only."""

    __slots__ = ("buried", "errors", "lost", "pending", "pending_count", "plan", "producer")

    def __init__(self) -> None:
        self.pending: list[Range] = []
        self.pending_count = 0
        self.plan: Plan | None = None
        self.producer: Producer | None = None
        self.buried = 0
        self.lost = 0
        #: Of records that are pending, and of those that may soon be: whoever says so may lose them first.
        self.errors: dict[int, tuple[int, WorkerError]] = {}

    def __repr__(self) -> str:
        return f"<PartitionBurials {self.pending_count} pending, {self.buried} buried, plan {self.plan}>"

    def view(self, key: Key, ranges_max: int) -> BurialView:
        """Of the pending ones, the first few; with a plan, all that it may be about."""
        if self.plan is None:
            shown = self.pending[:ranges_max]
        else:
            low, high = around(self.pending, self.plan.resolved)
            shown = self.pending[low:high]
        return BurialView(key, tuple(shown), self.pending_count, self.plan, self.producer, dict(self.errors))

    def refuses(self, plan: Plan) -> bool:
        """Whether a plan does not fit what is known: it was made for a state that has changed since."""
        low, high = around(self.pending, plan.resolved)
        wanted = [(*one, 0, 0) for one in plan.resolved]
        return self.plan is not None or bool(subtract(wanted, self.pending[low:high]))

    # Replay

    def install(self, burials: Burials) -> None:
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

    def add(self, entries: Sequence[Range]) -> None:
        entries = tidy(entries)
        low, high = around(self.pending, entries)
        self.pending_count += size(subtract(entries, self.pending[low:high]))
        merge_into(self.pending, entries)

    def begin(self, plan: Plan) -> None:
        self.plan = plan
        self.producer = Producer(plan.producer_id, plan.epoch, following(plan), plan.target)

    def settle(self, settled: Settled) -> None:
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
            self.buried += size(self.plan.offsets)
        self.lost += settled.lost
        self.plan = None
        if not settled.keeps_producer:
            self.producer = None

    def _forget(self, resolved: Sequence[Pair]) -> None:
        low, high = around(self.pending, resolved)
        if low < high and self.pending[low][1] < resolved[0][0]:
            low += 1
        there = self.pending[low:high]
        count = size(there)
        if (
            there
            and there[0][0] >= resolved[0][0]
            and there[-1][1] <= resolved[-1][1]
            and count == size(resolved)
        ):
            left = []  # what is resolved is pending, so it is all of that
        else:
            left = subtract(there, resolved)
        self.pending_count -= count - size(left)
        self.pending[low:high] = left

    def snapshot(self, key: Key) -> list[KeyValue]:
        """The records that bring back all of it."""
        # A plan brings its producer's next sequence with it, and leaves that of before unneeded.
        counts = Burials(self.buried, self.lost, self.producer)
        stored: list[KeyValue] = [(encode_key(records.BURIALS, key), records.encode_burials(counts))]
        if self.pending:
            stored.append((encode_key(records.PENDING, key), records.encode_pending(self.pending)))
        if self.errors:
            failures = [
                WorkerFailure(offset, delivery_count, error=error)
                for offset, (delivery_count, error) in self.errors.items()
            ]
            stored.append((encode_key(records.ERRORS, key), records.encode_errors(key, failures)))
        if self.plan is not None:
            stored.append((encode_key(records.PLAN, key), records.encode_plan(self.plan)))
        return stored


def following(plan: Plan) -> int:
    """Sequences wrap from 2^31-1 to 0."""
    return (plan.sequence + size(plan.offsets)) & _SEQUENCE_MAX
