"""What the rules of a share partition work on: the window, who holds what, timers, and what is to be written."""

from collections.abc import Sequence
from heapq import heappush

from penstock.groups.share_partition.members import Members
from penstock.groups.share_partition.messages import Counters
from penstock.groups.share_partition.policy import Policy
from penstock.groups.share_partition.states import (
    ACKNOWLEDGED,
    ARCHIVED,
    AVAILABLE,
    DELAYED,
    DONE,
    EXPIRED,
    HANDED,
    LIMIT,
    QUEUED,
)
from penstock.groups.share_partition.window import Range, Window
from penstock.groups.share_state.values import Totals

#: when, first offset, offset after the last
Timer = tuple[int, int, int]


class Core:
    __slots__ = (
        "counters",
        "delays_asked",
        "delays_kept",
        "deleted_upto",
        "launched",
        "launched_totals",
        "members",
        "owes_totals",
        "queued",
        "stored_totals",
        "timers",
        "totals",
        "window",
    )

    def __init__(self, start: int, counters: Counters, totals: Totals) -> None:
        self.window = Window(start)
        self.members = Members()
        self.counters = counters
        self.deleted_upto = 0  # the log has deleted what lies before, whoever held it
        #: A heap. One that is no longer true does no harm: the records themselves know their times.
        self.timers: list[Timer] = []
        self.queued: list[Range] = []  # what the next write must look at
        self.launched: list[Range] | None = None  # what the write under way contains
        #: Beside the state that they are about: what is stored of one is stored of the other.
        self.totals = self.launched_totals = self.stored_totals = totals
        self.owes_totals = False  # somebody waits for them to be stored
        #: By offset: how long a record rests if it is released from its delivery of this number.
        self.delays_asked: dict[int, tuple[int, int]] = {}
        #: Offsets that rest for a time of their own; some may rest no more.
        self.delays_kept: set[int] = set()

    def add_totals(self, *, handed_out: int = 0, confirmed: int = 0) -> None:
        before = self.totals
        self.totals = before._replace(
            handed_out=before.handed_out + handed_out, confirmed=before.confirmed + confirmed
        )
        self.owes_totals = True

    def set_timer(self, time_ms: int, first: int, end: int) -> None:
        heappush(self.timers, (time_ms, first, end))

    def let_go(
        self, low: int, high: int, policy: Policy, now_ms: int, chance: float, *, expired: bool
    ) -> None:
        """These places leave their holder's hands, who must have given them back, without having been processed."""
        window = self.window
        if window.states[low] == HANDED:
            window.states[low:high] = bytes((ACKNOWLEDGED,)) * (high - low)
            return
        for run_low, run_high, delivery_count in window.count_runs(low, high):
            code = release_code(policy, delivery_count, expired=expired)
            if code == DELAYED | QUEUED:
                assert policy.backoff is not None
                due_ms = now_ms + policy.backoff.delay_ms(delivery_count, chance)
                window.set_time(run_low, run_high, due_ms)
            window.states[run_low:run_high] = bytes((code,)) * (run_high - run_low)
            self.count_given_up(code, run_high - run_low)
        self.queued.append((window.start + low, window.start + high))

    def count_given_up(self, code: int, count: int) -> None:
        target = code & ~QUEUED
        if target in (LIMIT, EXPIRED, ARCHIVED):
            self.counters.limited += count
            self.counters.buried += count if target != ARCHIVED else 0

    def drop_done(self) -> None:
        """The window begins with the oldest record that is not final."""
        match = DONE.match(self.window.states)
        assert match is not None
        self.window.drop_below(self.window.start + match.end())


def release_code(policy: Policy, delivery_count: int, *, expired: bool = False) -> int:
    """What becomes of a record that was not processed."""
    if policy.is_at_most_once:
        return ARCHIVED | QUEUED
    if delivery_count >= policy.delivery_limit:
        if not policy.buries:
            return ARCHIVED | QUEUED
        return (EXPIRED if expired else LIMIT) | QUEUED
    return (AVAILABLE if policy.backoff is None else DELAYED) | QUEUED


def load(
    start: int,
    batches: Sequence[tuple[int, int, int, int]],
    counters: Counters,
    policy: Policy,
    totals: Totals,
    *,
    now_ms: int,
    chance: float,
) -> Core:
    """From what is stored. Offsets between the batches were never delivered, as far as anybody knows.

    A delay begins anew: when it began is not stored, and too late is better than too early.
    """
    core = Core(start, counters, totals)
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
    core.drop_done()
    return core
