"""Locks that run out, delays that are over, and members that go."""

from heapq import heappop
from itertools import groupby

from penstock.groups.share_partition.core import Core, Timer
from penstock.groups.share_partition.policy import Policy
from penstock.groups.share_partition.states import AVAILABLE, DELAYED, IN_HANDS, RUN, TIMED
from penstock.groups.share_partition.window import runs_where


def tick(core: Core, policy: Policy, *, now_ms: int, chance: float) -> None:
    """Everything whose time has come."""
    later: list[Timer] = []
    while core.timers and core.timers[0][0] <= now_ms:
        _, first, end = heappop(core.timers)
        next_ms = _time_out(core, first, end, policy, now_ms, chance)
        if next_ms is not None:
            later.append((next_ms, first, end))
    for timer in later:
        core.set_timer(*timer)
    core.drop_done()


def _time_out(core: Core, first: int, end: int, policy: Policy, now_ms: int, chance: float) -> int | None:
    """Returns when the next delay in the range is over: one timer serves all of them."""
    window, next_ms = core.window, None
    for low, high in _uniform_runs(core, *window.clip(first, end)):
        times = window.times[low:high]
        is_over = [time_ms <= now_ms for time_ms in times]
        if window.states[low] == DELAYED:
            _end_delays(core, low, is_over)
            rest = [time_ms for time_ms in times if time_ms > now_ms]
            next_ms = min((*rest, next_ms)) if next_ms is not None else min(rest, default=None)
            continue
        for at, after in runs_where(is_over):
            core.counters.expired += after - at
            _take_away(core, low + at, low + after, policy, now_ms, chance)
    return next_ms


def _uniform_runs(core: Core, low: int, high: int) -> list[tuple[int, int]]:
    """Runs of records in one state, of those that have a time."""
    states = core.window.states
    return [
        run.span()
        for timed in TIMED.finditer(states, low, high)
        for run in RUN.finditer(states, timed.start(), timed.end())
    ]


def _end_delays(core: Core, low: int, is_over: list[bool]) -> None:
    for at, after in runs_where(is_over):
        core.window.states[low + at : low + after] = bytes((AVAILABLE,)) * (after - at)


def _take_away(core: Core, low: int, high: int, policy: Policy, now_ms: int, chance: float) -> None:
    for number, same in groupby(core.window.owners[low:high]):
        core.members.give_back(number, sum(1 for _ in same))
    core.let_go(low, high, policy, now_ms, chance, expired=True)


def release(core: Core, member: str, policy: Policy, *, now_ms: int, chance: float) -> bool:
    """A member has gone. Returns whether something has to be written."""
    window, before = core.window, len(core.queued)
    number = core.members.number_of(member)
    if not number:
        return False
    for held in list(IN_HANDS.finditer(window.states)):
        for run in list(RUN.finditer(window.states, held.start(), held.end())):
            owned = [owner == number for owner in window.owners[run.start() : run.end()]]
            for at, after in runs_where(owned):
                core.members.give_back(number, after - at)
                low, high = run.start() + at, run.start() + after
                core.let_go(low, high, policy, now_ms, chance, expired=False)
    core.drop_done()
    return len(core.queued) > before
