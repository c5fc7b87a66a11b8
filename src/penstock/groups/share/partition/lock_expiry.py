"""Timers of a share partition: acquisition locks expire, and the delays of released records end."""

from heapq import heappop
from itertools import groupby

from penstock.groups.share.partition.in_flight_records import (
    AVAILABLE,
    DELAYED,
    RUN,
    WITH_DEADLINE,
    runs_where,
)
from penstock.groups.share.partition.share_partition_state import (
    SharePartitionPolicy,
    SharePartitionState,
    SpanTimer,
)


def tick(core: SharePartitionState, policy: SharePartitionPolicy, *, now_ms: int, chance: float) -> None:
    """Process all expired locks and delays."""
    later: list[SpanTimer] = []
    while core.timers and core.timers[0][0] <= now_ms:
        _, first, end = heappop(core.timers)
        next_ms = _time_out(core, first, end, policy, now_ms, chance)
        if next_ms is not None:
            later.append((next_ms, first, end))
    for timer in later:
        core.set_timer(*timer)
    core.drop_final_prefix()


def _time_out(
    core: SharePartitionState, first: int, end: int, policy: SharePartitionPolicy, now_ms: int, chance: float
) -> int | None:
    """Return when the next delay in the range ends: one timer covers all of them."""
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
            _expire_locks(core, low + at, low + after, policy, now_ms, chance)
    return next_ms


def _uniform_runs(core: SharePartitionState, low: int, high: int) -> list[tuple[int, int]]:
    """Runs of records in the same state, of the states that have a deadline."""
    states = core.window.states
    return [
        run.span()
        for timed in WITH_DEADLINE.finditer(states, low, high)
        for run in RUN.finditer(states, timed.start(), timed.end())
    ]


def _end_delays(core: SharePartitionState, low: int, is_over: list[bool]) -> None:
    for at, after in runs_where(is_over):
        core.window.states[low + at : low + after] = bytes((AVAILABLE,)) * (after - at)


def _expire_locks(
    core: SharePartitionState, low: int, high: int, policy: SharePartitionPolicy, now_ms: int, chance: float
) -> None:
    for number, same in groupby(core.window.owners[low:high]):
        core.members.give_back(number, sum(1 for _ in same))
    core.release_range(low, high, policy, now_ms, chance, expired=True)
