"""Acquisition: give records to a member in offset order, first records that were released, then new ones."""

import re
from bisect import bisect_left
from collections.abc import Iterator
from typing import Final, NamedTuple

from penstock.groups.share.partition.in_flight_records import (
    ACQUIRED,
    ACQUIRED_FINAL,
    ARCHIVE_GAP,
    ARCHIVED,
    AVAILABLE,
    HAS_DEADLINE,
    NO,
    ONE_MORE_DELIVERY,
    QUEUED,
    RESERVED,
    RUNS,
    YES,
    Bytes,
    at_least,
    bitwise_and,
    code_table,
    equals_table,
    mask_table,
    select_bytes,
)
from penstock.groups.share.partition.share_partition_state import (
    AcquiredBatch,
    AcquireLimits,
    ReadableRecords,
    SharePartitionPolicy,
    SharePartitionState,
)

_AVAILABLE: Final = re.compile(rb"\x00+")
_AVAILABLE_OR_RESERVED: Final = re.compile(rb"[\x00\x06]+")
#: With a lower limit the rule for last deliveries would apply to every redelivery.
_LIMIT_WITH_LAST_DELIVERY: Final = 3


class _Eligibility(NamedTuple):
    """Which states can be acquired, and the state that each becomes."""

    is_ready: bytes
    acquire: bytes


_AVAILABLE_AND_RESERVED: Final = _Eligibility(
    mask_table(AVAILABLE, RESERVED), code_table({AVAILABLE: ACQUIRED, RESERVED: ACQUIRED_FINAL})
)
_RESERVED_ONLY: Final = _Eligibility(mask_table(RESERVED), code_table({RESERVED: ACQUIRED_FINAL}))


def next_offset(core: SharePartitionState, policy: SharePartitionPolicy) -> int | None:
    """Where to read; None if no record is available and there is no room for more."""
    window = core.window
    found = _AVAILABLE_OR_RESERVED.search(window.states)
    if found is not None:
        return window.start + found.start()
    return window.end if _room(core, policy) > 0 else None


def offsets_to_read(core: SharePartitionState, records_max: int, policy: SharePartitionPolicy) -> int:
    """How many offsets to read from the next one to find that many records, including unavailable ones between them."""
    states = core.window.states
    ready = states.count(AVAILABLE) + states.count(RESERVED)
    if not ready:
        return records_max
    found = _AVAILABLE_OR_RESERVED.search(states)
    assert found is not None, "some are ready"
    more = min(records_max - ready, _room(core, policy))
    return len(states) - found.start() + max(more, 0)


def acquire(
    core: SharePartitionState,
    member: str,
    found: ReadableRecords,
    limits: AcquireLimits,
    policy: SharePartitionPolicy,
    *,
    now_ms: int,
) -> list[AcquiredBatch]:
    """Under at-most-once only reserved records are acquired; `reserve` makes them final first."""
    if not core.members.has_room_for(member):
        return []
    kind = _RESERVED_ONLY if policy.is_at_most_once else _AVAILABLE_AND_RESERVED
    acquisition = _MemberAcquisition(core, member, kind, policy, now_ms)
    left = limits.records_max
    for first, end in _spans_in_window(core, found):
        if left <= 0:
            continue  # so that gaps further on are archived too
        left -= acquisition.again(first, end, left)
        if left > 0 and not policy.is_at_most_once:
            new_first, new_end = _extend(core, found, end, left, limits, policy)
            if new_end > new_first:
                acquisition.new(found, limits, new_first, new_end)
                left -= new_end - new_first
    core.drop_final_prefix()
    return acquisition.acquired


def reserve(
    core: SharePartitionState, found: ReadableRecords, limits: AcquireLimits, policy: SharePartitionPolicy
) -> int:
    """At-most-once: make records final before a member gets them. Return how many have to be written."""
    start, left = core.window.start, limits.records_max
    for first, end in _spans_in_window(core, found):
        for low, high in _runs(core, _AVAILABLE, first, end):
            left -= _reserve_range(core, low, min(high, low + left)) if left > 0 else 0
        if left <= 0:
            continue
        new_first, new_end = _extend(core, found, end, left, limits, policy)
        if new_end > new_first:
            left -= _reserve_range(core, new_first - start, new_end - start)
    core.drop_final_prefix()
    return limits.records_max - left


def _room(core: SharePartitionState, policy: SharePartitionPolicy) -> int:
    window = core.window
    return min(policy.locks_max - window.open_count, policy.window_max - len(window))


def _spans_in_window(core: SharePartitionState, found: ReadableRecords) -> Iterator[tuple[int, int]]:
    """Yield the spans that begin in the window or at its end, which may grow meanwhile, and archive the gaps.

    The log has no records for members in the gaps, so no acknowledgements will come for them.
    """
    window, at = core.window, found.first_offset
    for first, end in found.spans:
        if window.end < at:
            return
        _archive_gap(core, at, first)
        yield first, end
        at = end
    if window.end >= at:
        _archive_gap(core, at, found.next_offset)


def _archive_gap(core: SharePartitionState, first: int, end: int) -> None:
    window = core.window
    low, high = window.clip(first, end)
    if high > low:
        window.states[low:high] = window.states[low:high].translate(ARCHIVE_GAP)
    if end > window.end:
        window.extend(end, ARCHIVED)


def _runs(
    core: SharePartitionState, pattern: re.Pattern[bytes], first: int, end: int
) -> list[tuple[int, int]]:
    low, high = core.window.clip(first, end)
    return [run.span() for run in pattern.finditer(core.window.states, low, high)]


def _extend(
    core: SharePartitionState,
    found: ReadableRecords,
    end: int,
    left: int,
    limits: AcquireLimits,
    policy: SharePartitionPolicy,
) -> tuple[int, int]:
    """Add new records, up to `end`, to the window. Return their first offset and the offset after the last."""
    window = core.window
    first = window.end
    if end <= first or (room := _room(core, policy)) <= 0:
        return first, first
    wanted = min(left, room)
    if end - first > wanted:
        cut = first + wanted
        # A span may end within a batch, where compaction has left a gap.
        end = cut if limits.exact else min(end, found.ends[bisect_left(found.ends, cut)])
    window.extend(end, AVAILABLE)
    return first, end


def _reserve_range(core: SharePartitionState, low: int, high: int) -> int:
    """A record that was delivered before the group became at-most-once is not delivered again."""
    window = core.window
    for run_low, run_high, delivery_count in window.count_runs(low, high):
        count = run_high - run_low
        window.states[run_low:run_high] = (
            bytes(((ARCHIVED if delivery_count else RESERVED) | QUEUED,)) * count
        )
        if delivery_count:
            core.counters.limited += count
        else:
            window.counts[run_low:run_high] = b"\x01" * count
            core.add_totals(handed_out=count)
    core.queued.append((window.start + low, window.start + high))
    return high - low


def _index_after(mask: bytearray, count: int) -> int:
    """The index after the first `count` YES bytes of a mask, which has more of them."""
    low, high = count, len(mask)
    while low < high:
        middle = (low + high) // 2
        if mask.count(YES, 0, middle) < count:
            low = middle + 1
        else:
            high = middle
    return low


class _MemberAcquisition:
    """Gives records to one member, with one lock deadline."""

    def __init__(
        self,
        core: SharePartitionState,
        member: str,
        kind: _Eligibility,
        policy: SharePartitionPolicy,
        now_ms: int,
    ) -> None:
        self._kind = kind
        self._core = core
        self._member = member
        self._until_ms = now_ms + policy.lock_ms
        limit = policy.delivery_limit
        self._is_last_time = at_least(limit - 1) if limit >= _LIMIT_WITH_LAST_DELIVERY else None
        self._has_last_time = False
        self.acquired: list[AcquiredBatch] = []

    def again(self, first: int, end: int, left: int) -> int:
        """Acquire records that are already in the window: never more than requested, even within a batch."""
        window = self._core.window
        low, high = window.clip(first, end)
        mask = window.states[low:high].translate(self._kind.is_ready)
        if self._is_last_time is not None:
            last_times = window.counts[low:high].translate(self._is_last_time)
            mask = self._one_last_delivery(mask, last_times) if YES in last_times else mask
        taken = mask.count(YES)
        if taken > left:
            del mask[_index_after(mask, left) :]
            taken = left
        if taken:
            at = mask.find(YES)
            self._take_marked(low + at, mask[at : mask.rfind(YES) + 1], taken)
        return taken

    def _one_last_delivery(self, ready: bytearray, last_times: bytearray) -> bytearray:
        """Keep only the first record with one delivery left: if it kills the member, no other record reaches its
        limit."""
        held_back = bytearray(bitwise_and(ready, last_times))
        at = held_back.find(YES)
        if at >= 0 and not self._has_last_time:
            self._has_last_time, held_back[at] = True, NO
        return bytearray(select_bytes(ready, bytes(len(ready)), held_back))

    def _take_marked(self, low: int, mask: bytearray, taken: int) -> None:
        core, window, high = self._core, self._core.window, low + len(mask)
        before = window.states[low:high]
        has_times = HAS_DEADLINE.search(before) is not None
        self._take(low, high, mask, taken, before.count(RESERVED))
        core.set_timer(self._until_ms, window.start + low, window.start + high)
        if not has_times:
            window.set_time(low, high, self._until_ms)
        at, offset = low, window.start + low
        # A delivered record has a count, so zero marks a record that is not acquired here.
        for run, _ in RUNS.findall(bitwise_and(window.counts[low:high], mask)):
            length = len(run)
            if run[0]:
                self.acquired.append(AcquiredBatch(offset, offset + length - 1, run[0]))
                if has_times:
                    window.set_time(at, at + length, self._until_ms)
            at, offset = at + length, offset + length

    def new(self, found: ReadableRecords, limits: AcquireLimits, first: int, end: int) -> None:
        """Split at batch boundaries into ranges of about the size that the client prefers."""
        window, ends = self._core.window, found.ends
        low, high = first - window.start, end - window.start
        self._take(low, high, bytes((YES,)) * (high - low), high - low, 0)
        window.set_time(low, high, self._until_ms)
        self._core.set_timer(self._until_ms, first, end)
        while end - first > limits.batch_records:
            cut = ends[bisect_left(ends, first + limits.batch_records)]
            if cut >= end:
                break
            self.acquired.append(AcquiredBatch(first, cut - 1, 1))
            first = cut
        self.acquired.append(AcquiredBatch(first, end - 1, 1))

    def _take(self, low: int, high: int, mask: Bytes, count: int, paid: int) -> None:
        """Give the records in the mask to the member; `paid` of them are reserved, and already counted as delivered."""
        core, window = self._core, self._core.window
        before, counts = window.states[low:high], window.counts[low:high]
        number = core.members.take(self._member, count)
        window.states[low:high] = select_bytes(before, before.translate(self._kind.acquire), mask)
        is_available = mask if not paid else bitwise_and(mask, before.translate(equals_table(AVAILABLE)))
        window.counts[low:high] = select_bytes(counts, counts.translate(ONE_MORE_DELIVERY), is_available)
        window.owners[low:high] = select_bytes(window.owners[low:high], bytes((number,)) * (high - low), mask)
        core.counters.acquired += count - paid
