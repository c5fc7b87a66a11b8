"""Handing records out: those that came back first, in order, then new ones."""

import re
from bisect import bisect_left
from collections.abc import Iterator
from typing import Final, NamedTuple

from penstock.groups.share_partition.core import Core
from penstock.groups.share_partition.messages import Acquired, Appetite, Found
from penstock.groups.share_partition.policy import Policy
from penstock.groups.share_partition.states import (
    ACQUIRED,
    ARCHIVED,
    AVAILABLE,
    HANDED,
    HAS_TIME,
    HOLE,
    ONE_MORE_DELIVERY,
    PAID,
    QUEUED,
    RUNS,
    code_table,
)
from penstock.groups.share_partition.vectors import NO, YES, Bytes, at_least, blend, both, mask_table, only

_AVAILABLE: Final = re.compile(rb"\x00+")
_EITHER: Final = re.compile(rb"[\x00\x06]+")
#: Below that every delivery but the first would be the last one.
_LIMIT_WITH_LAST_TIMES: Final = 3


class _Kind(NamedTuple):
    """Which records are handed out, and how."""

    is_ready: bytes
    hand_out: bytes


_ANY: Final = _Kind(mask_table(AVAILABLE, PAID), code_table({AVAILABLE: ACQUIRED, PAID: HANDED}))
_ONLY_PAID: Final = _Kind(mask_table(PAID), code_table({PAID: HANDED}))


def next_offset(core: Core, policy: Policy) -> int | None:
    """Where to read; None while there is nothing to hand out and no room for more."""
    window = core.window
    found = _EITHER.search(window.states)
    if found is not None:
        return window.start + found.start()
    return window.end if _room(core, policy) > 0 else None


def reach(core: Core, records_max: int, policy: Policy) -> int:
    """How many offsets from the next one on hold that many records, those between that nobody can have included."""
    states = core.window.states
    ready = states.count(AVAILABLE) + states.count(PAID)
    if not ready:
        return records_max
    found = _EITHER.search(states)
    assert found is not None, "some are ready"
    more = min(records_max - ready, _room(core, policy))
    return len(states) - found.start() + max(more, 0)


def acquire(
    core: Core, member: str, found: Found, appetite: Appetite, policy: Policy, *, now_ms: int
) -> list[Acquired]:
    """Under at-most-once only what has been paid for is handed out; `reserve` pays."""
    if not core.members.has_room_for(member):
        return []
    kind = _ONLY_PAID if policy.is_at_most_once else _ANY
    hand_out = _HandOut(core, member, kind, policy, now_ms)
    left = appetite.records_max
    for first, end in _in_reach(core, found):
        if left <= 0:
            continue  # holes further on are closed all the same
        left -= hand_out.again(first, end, left)
        if left > 0 and not policy.is_at_most_once:
            new_first, new_end = _extend(core, found, end, left, appetite, policy)
            if new_end > new_first:
                hand_out.new(found, appetite, new_first, new_end)
                left -= new_end - new_first
    core.drop_done()
    return hand_out.acquired


def reserve(core: Core, found: Found, appetite: Appetite, policy: Policy) -> int:
    """At most once: make records final before anybody gets them. Returns how many have to be written."""
    start, left = core.window.start, appetite.records_max
    for first, end in _in_reach(core, found):
        for low, high in _runs(core, _AVAILABLE, first, end):
            left -= _reserve(core, low, min(high, low + left)) if left > 0 else 0
        if left <= 0:
            continue
        new_first, new_end = _extend(core, found, end, left, appetite, policy)
        if new_end > new_first:
            left -= _reserve(core, new_first - start, new_end - start)
    core.drop_done()
    return appetite.records_max - left


def _room(core: Core, policy: Policy) -> int:
    window = core.window
    return min(policy.locks_max - window.open_count, policy.window_max - len(window))


def _in_reach(core: Core, found: Found) -> Iterator[tuple[int, int]]:
    """The spans that begin in the window or at its end, as it grows; holes on the way are closed.

    Where the log has nothing to hand out, nothing is waited for.
    """
    window, at = core.window, found.first_offset
    for first, end in found.spans:
        if window.end < at:
            return
        _close_hole(core, at, first)
        yield first, end
        at = end
    if window.end >= at:
        _close_hole(core, at, found.next_offset)


def _close_hole(core: Core, first: int, end: int) -> None:
    window = core.window
    low, high = window.clip(first, end)
    if high > low:
        window.states[low:high] = window.states[low:high].translate(HOLE)
    if end > window.end:
        window.extend(end, ARCHIVED)


def _runs(core: Core, pattern: re.Pattern[bytes], first: int, end: int) -> list[tuple[int, int]]:
    low, high = core.window.clip(first, end)
    return [run.span() for run in pattern.finditer(core.window.states, low, high)]


def _extend(
    core: Core, found: Found, end: int, left: int, appetite: Appetite, policy: Policy
) -> tuple[int, int]:
    """Bring new records, up to `end`, into the window: the first and the one after the last."""
    window = core.window
    first = window.end
    if end <= first or (room := _room(core, policy)) <= 0:
        return first, first
    wanted = min(left, room)
    if end - first > wanted:
        cut = first + wanted
        # A span may end within a batch, where compaction has left a hole.
        end = cut if appetite.exact else min(end, found.ends[bisect_left(found.ends, cut)])
    window.extend(end, AVAILABLE)
    return first, end


def _reserve(core: Core, low: int, high: int) -> int:
    """One that was delivered before the group asked for at-most-once is not delivered again."""
    window = core.window
    for run_low, run_high, delivery_count in window.count_runs(low, high):
        count = run_high - run_low
        window.states[run_low:run_high] = bytes(((ARCHIVED if delivery_count else PAID) | QUEUED,)) * count
        if delivery_count:
            core.counters.limited += count
        else:
            window.counts[run_low:run_high] = b"\x01" * count
            core.add_totals(handed_out=count)
    core.queued.append((window.start + low, window.start + high))
    return high - low


def _place_after(mask: bytearray, count: int) -> int:
    """Behind so many of a mask's YES, of which there are more."""
    low, high = count, len(mask)
    while low < high:
        middle = (low + high) // 2
        if mask.count(YES, 0, middle) < count:
            low = middle + 1
        else:
            high = middle
    return low


class _HandOut:
    """One member gets records, with one lock time."""

    def __init__(self, core: Core, member: str, kind: _Kind, policy: Policy, now_ms: int) -> None:
        self._kind = kind
        self._core = core
        self._member = member
        self._until_ms = now_ms + policy.lock_ms
        limit = policy.delivery_limit
        self._is_last_time = at_least(limit - 1) if limit >= _LIMIT_WITH_LAST_TIMES else None
        self._has_last_time = False
        self.acquired: list[Acquired] = []

    def again(self, first: int, end: int, left: int) -> int:
        """Those in the window: never more than asked for, whatever the batches are."""
        window = self._core.window
        low, high = window.clip(first, end)
        mask = window.states[low:high].translate(self._kind.is_ready)
        if self._is_last_time is not None:
            last_times = window.counts[low:high].translate(self._is_last_time)
            mask = self._one_at_a_time(mask, last_times) if YES in last_times else mask
        taken = mask.count(YES)
        if taken > left:
            del mask[_place_after(mask, left) :]
            taken = left
        if taken:
            at = mask.find(YES)
            self._take_marked(low + at, mask[at : mask.rfind(YES) + 1], taken)
        return taken

    def _one_at_a_time(self, ready: bytearray, last_times: bytearray) -> bytearray:
        """Of those with one delivery left only the first: who dies of it takes no others to their end with it."""
        held_back = bytearray(both(ready, last_times))
        at = held_back.find(YES)
        if at >= 0 and not self._has_last_time:
            self._has_last_time, held_back[at] = True, NO
        return bytearray(blend(ready, bytes(len(ready)), held_back))

    def _take_marked(self, low: int, mask: bytearray, taken: int) -> None:
        core, window, high = self._core, self._core.window, low + len(mask)
        before = window.states[low:high]
        has_times = HAS_TIME.search(before) is not None
        self._take(low, high, mask, taken, before.count(PAID))
        core.set_timer(self._until_ms, window.start + low, window.start + high)
        if not has_times:
            window.set_time(low, high, self._until_ms)
        at, offset = low, window.start + low
        # Whoever has been delivered has a count, so that zero is for those that are not handed out.
        for run, _ in RUNS.findall(both(window.counts[low:high], mask)):
            length = len(run)
            if run[0]:
                self.acquired.append(Acquired(offset, offset + length - 1, run[0]))
                if has_times:
                    window.set_time(at, at + length, self._until_ms)
            at, offset = at + length, offset + length

    def new(self, found: Found, appetite: Appetite, first: int, end: int) -> None:
        """In ranges of about the size that the client likes, at the borders of batches."""
        window, ends = self._core.window, found.ends
        low, high = first - window.start, end - window.start
        self._take(low, high, bytes((YES,)) * (high - low), high - low, 0)
        window.set_time(low, high, self._until_ms)
        self._core.set_timer(self._until_ms, first, end)
        while end - first > appetite.batch_records:
            cut = ends[bisect_left(ends, first + appetite.batch_records)]
            if cut >= end:
                break
            self.acquired.append(Acquired(first, cut - 1, 1))
            first = cut
        self.acquired.append(Acquired(first, end - 1, 1))

    def _take(self, low: int, high: int, mask: Bytes, count: int, paid: int) -> None:
        """The places in the mask, which are available or paid for, change hands."""
        core, window = self._core, self._core.window
        before, counts = window.states[low:high], window.counts[low:high]
        number = core.members.take(self._member, count)
        window.states[low:high] = blend(before, before.translate(self._kind.hand_out), mask)
        is_available = mask if not paid else both(mask, before.translate(only(AVAILABLE)))
        window.counts[low:high] = blend(counts, counts.translate(ONE_MORE_DELIVERY), is_available)
        window.owners[low:high] = blend(window.owners[low:high], bytes((number,)) * (high - low), mask)
        core.counters.acquired += count - paid
