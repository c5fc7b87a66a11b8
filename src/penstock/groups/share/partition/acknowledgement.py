"""Ends the acquisition of records: a member acknowledges its records, or it leaves and they are released.

A request of acknowledgements is applied as a whole or not at all. A request with a type for each of a thousand records
is one row of bytes parallel to the in-flight records, with a marker where no acknowledgement is given; no code loops
over single records.
"""

import re
from collections.abc import Sequence
from functools import cache
from typing import Final, NamedTuple

from penstock.groups.share.partition.in_flight_records import (
    ACKNOWLEDGED,
    ACQUIRED,
    ACQUIRED_FINAL,
    ARCHIVED,
    AVAILABLE,
    DELAYED,
    LOCKED,
    NO,
    QUEUED,
    REJECTED,
    RUN,
    YES,
    Bytes,
    at_least,
    bitwise_and,
    equals_table,
    is_subset_mask,
    mask_table,
    runs_where,
    select_bytes,
)
from penstock.groups.share.partition.share_partition_state import (
    ACCEPT,
    GAP,
    REJECT,
    RELEASE,
    RENEW,
    AcknowledgementTuple,
    RedeliveryBackoff,
    SharePartitionPolicy,
    SharePartitionState,
    release_code,
)
from penstock.protocol.errors import ApiError, ErrorCode

_NO_ACKNOWLEDGEMENT: Final = 0xFF
_IS_ACKNOWLEDGED: Final = bytes(YES if code <= RENEW else NO for code in range(256))
_NOT: Final = bytes(NO if code else YES for code in range(256))
_IS_LOCKED: Final = mask_table(ACQUIRED, ACQUIRED_FINAL)
_RENEWALS: Final = re.compile(b"[\\x%02x]+" % RENEW)
#: At-most-once records are final already: every acknowledgement except a renewal ends the lock.
_STATE_WHEN_CONFIRMED: Final = bytes(ACQUIRED_FINAL if code == RENEW else ACKNOWLEDGED for code in range(256))


class _AcknowledgementRow(NamedTuple):
    """A range of indexes in the window, the acknowledge type at each, and a mask of the indexes that have one."""

    low: int
    high: int
    types: bytearray
    mask: Bytes


def check_acknowledgements(batches: Sequence[AcknowledgementTuple], *, may_renew: bool) -> None:
    """Check everything that does not depend on the records. Raises ApiError."""
    after = 0
    for first, last, types in batches:
        if first > last or first < after:
            raise ApiError(ErrorCode.invalid_request, "acknowledgements are not in order")
        if not types or (len(types) > 1 and len(types) != last - first + 1):
            raise ApiError(ErrorCode.invalid_request, "not one acknowledge type for each offset")
        if max(types) > (RENEW if may_renew else REJECT):
            raise ApiError(ErrorCode.invalid_request, "unknown acknowledge type")
        after = last + 1


def acknowledge(
    core: SharePartitionState,
    member: str,
    batches: Sequence[AcknowledgementTuple],
    policy: SharePartitionPolicy,
    *,
    now_ms: int,
    chance: float,
) -> bool:
    """Return whether the reply has to wait for a write. Raises ApiError."""
    if batches and batches[0][0] < core.window.start:
        batches = _not_deleted(core, batches)
    if not batches:
        return False
    number = core.members.number_of(member)
    row = _acknowledgement_row(core, batches)
    _check_locks(core, number, row, policy)
    types = row.types
    renewed = types.count(RENEW)
    is_written = _apply_acknowledgements(core, row, policy, now_ms, chance)
    if renewed:
        _renew_locks(core, row, now_ms + policy.lock_ms)
        core.counters.renewed += renewed
    core.members.give_back(number, len(types) - types.count(_NO_ACKNOWLEDGEMENT) - renewed)
    core.drop_final_prefix()
    return is_written


def _not_deleted(
    core: SharePartitionState, batches: Sequence[AcknowledgementTuple]
) -> Sequence[AcknowledgementTuple]:
    """Drop batches that the log has deleted. Raises ApiError for other records before the window: they are final."""
    start = core.window.start
    left = [batch for batch in batches if batch[1] >= min(core.deleted_upto, start)]
    if left and max(left[0][0], core.deleted_upto) < start:
        raise ApiError(ErrorCode.invalid_record_state, "the member does not hold all of these records")
    return left


def _acknowledgement_row(
    core: SharePartitionState, batches: Sequence[AcknowledgementTuple]
) -> _AcknowledgementRow:
    window = core.window
    if batches[-1][1] >= window.end:
        raise ApiError(ErrorCode.invalid_request, "offsets beyond what has been acquired")
    low, high = window.clip(batches[0][0], batches[-1][1] + 1)
    row_types = bytearray((_NO_ACKNOWLEDGEMENT,)) * (high - low)
    base = window.start + low
    for first, last, types in batches:
        if first < base:  # keep the part of the first batch that is still in the window
            types = types if len(types) == 1 else types[base - first :]
            first = base
        if len(types) == 1:
            types = types * (last - first + 1)
        row_types[first - base : last + 1 - base] = types
    return _AcknowledgementRow(low, high, row_types, row_types.translate(_IS_ACKNOWLEDGED))


def _check_locks(
    core: SharePartitionState, number: int, row: _AcknowledgementRow, policy: SharePartitionPolicy
) -> None:
    """Raises ApiError."""
    window, (low, high, types, mask) = core.window, row
    held = bitwise_and(
        window.states[low:high].translate(_IS_LOCKED), window.owners[low:high].translate(equals_table(number))
    )
    if not number or not is_subset_mask(held, mask):
        raise ApiError(ErrorCode.invalid_record_state, "the member does not hold all of these records")
    if RENEW in types and not policy.may_renew:
        raise ApiError(ErrorCode.invalid_record_state, "renewing is not enabled for the group")


def _apply_acknowledgements(
    core: SharePartitionState,
    row: _AcknowledgementRow,
    policy: SharePartitionPolicy,
    now_ms: int,
    chance: float,
) -> bool:
    """Return whether something has to be written."""
    window, (low, high, types, mask) = core.window, row
    before = window.states[low:high]
    after: Bytes = types.translate(_states_by_type(policy.writes_dead_letters, release_code(policy, 0)))
    if RELEASE in types:
        after = _apply_releases(core, row, after, policy, now_ms, chance)
    confirmed = 0
    if ACQUIRED_FINAL in before:
        is_acquired_final = bitwise_and(before.translate(equals_table(ACQUIRED_FINAL)), mask)
        after = select_bytes(after, types.translate(_STATE_WHEN_CONFIRMED), is_acquired_final)
        confirmed = bitwise_and(types.translate(equals_table(ACCEPT)), is_acquired_final).count(YES)
        if confirmed:
            core.add_totals(confirmed=confirmed)
        _count_acknowledgements(
            core, select_bytes(types, bytes((_NO_ACKNOWLEDGEMENT,)) * len(types), is_acquired_final), policy
        )
    else:
        _count_acknowledgements(core, types, policy)
    after = select_bytes(before, after, mask)
    window.states[low:high] = after
    is_written = after.translate(_IS_QUEUED) != before.translate(_IS_QUEUED)
    if is_written:
        core.queued.append((window.start + low, window.start + high))
    return is_written or confirmed > 0


_IS_QUEUED: Final = bytes(code & QUEUED for code in range(256))


def _apply_releases(
    core: SharePartitionState,
    row: _AcknowledgementRow,
    after: Bytes,
    policy: SharePartitionPolicy,
    now_ms: int,
    chance: float,
) -> Bytes:
    """Records at the delivery limit are not delivered again; the others become available, possibly after a backoff."""
    window, (low, high, types, _) = core.window, row
    released = bitwise_and(
        types.translate(equals_table(RELEASE)), window.states[low:high].translate(equals_table(ACQUIRED))
    )
    if policy.is_at_most_once:
        return after
    limited = bitwise_and(released, window.counts[low:high].translate(at_least(policy.delivery_limit)))
    count = limited.count(YES)
    if count:
        code = release_code(policy, policy.delivery_limit)
        after = select_bytes(after, bytes((code,)) * len(types), limited)
        core.count_archived(code, count)
    if policy.backoff is not None:
        _apply_backoff(core, row, released, policy.backoff, now_ms, chance)
    if core.requested_delays:
        after = _apply_requested_delays(
            core, row, bitwise_and(released, limited.translate(_NOT)), after, now_ms
        )
    return after


def holder(core: SharePartitionState, offset: int, delivery_count: int) -> str | None:
    """Return the member that holds the record from this delivery."""
    window = core.window
    low, high = window.clip(offset, offset + 1)
    if low < high and window.states[low] == ACQUIRED and window.counts[low] == min(delivery_count, 255):
        return core.members.name_of(window.owners[low])
    return None


def request_delay(core: SharePartitionState, offset: int, delivery_count: int, delay_ms: int) -> bool:
    """Set the delay for a release from this delivery. Return False if no member holds the record from it."""
    window = core.window
    if holder(core, offset, delivery_count) is None:
        return False
    if len(core.requested_delays) > len(window):
        # Drop delays of deliveries that have ended in another way.
        core.requested_delays = {
            at: delay for at, delay in core.requested_delays.items() if at >= window.start
        }
    core.requested_delays[offset] = window.counts[offset - window.start], delay_ms
    return True


def _apply_requested_delays(
    core: SharePartitionState, row: _AcknowledgementRow, released: bytes, after: Bytes, now_ms: int
) -> Bytes:
    window, base = core.window, core.window.start + row.low
    states = bytearray(after)
    for offset in [offset for offset in core.requested_delays if 0 <= offset - base < len(states)]:
        index = offset - base
        delivery_count, delay_ms = core.requested_delays[offset]
        if released[index] and window.counts[row.low + index] == delivery_count:
            states[index] = (DELAYED if delay_ms else AVAILABLE) | QUEUED
            window.set_time(row.low + index, row.low + index + 1, now_ms + delay_ms)
            core.unstored_delays[offset] = delivery_count
        if row.types[index] not in (_NO_ACKNOWLEDGEMENT, RENEW):
            del core.requested_delays[offset]
    return states


def _apply_backoff(
    core: SharePartitionState,
    row: _AcknowledgementRow,
    released: bytes,
    backoff: RedeliveryBackoff,
    now_ms: int,
    chance: float,
) -> None:
    """The delay depends on the delivery count; records that are released together share the random number."""
    window = core.window
    delivered = bitwise_and(window.counts[row.low : row.high], released)
    due_ms: dict[int, int] = {}
    for run in RUN.finditer(delivered):
        at, after = run.span()
        delivery_count = delivered[at]
        if not delivery_count:
            continue
        if delivery_count not in due_ms:
            due_ms[delivery_count] = now_ms + backoff.delay_ms(delivery_count, chance)
        window.set_time(row.low + at, row.low + after, due_ms[delivery_count])


@cache
def _states_by_type(writes_dead_letters: bool, release: int) -> bytes:
    """A table from acknowledge type to the new state of the record."""
    codes = bytearray(range(256))
    codes[GAP] = ARCHIVED | QUEUED
    codes[ACCEPT] = ACKNOWLEDGED | QUEUED
    codes[RELEASE] = release
    codes[REJECT] = (REJECTED if writes_dead_letters else ARCHIVED) | QUEUED
    codes[RENEW] = ACQUIRED
    return bytes(codes)


def _count_acknowledgements(core: SharePartitionState, types: Bytes, policy: SharePartitionPolicy) -> None:
    counters, rejected = core.counters, types.count(REJECT)
    counters.accepted += types.count(ACCEPT)
    counters.released += types.count(RELEASE)
    counters.rejected += rejected
    counters.gaps += types.count(GAP)
    counters.dead_lettered += rejected if policy.writes_dead_letters else 0


def _renew_locks(core: SharePartitionState, row: _AcknowledgementRow, until_ms: int) -> None:
    window = core.window
    for run in _RENEWALS.finditer(row.types):
        at, after = row.low + run.start(), row.low + run.end()
        window.set_time(at, after, until_ms)
        core.set_timer(until_ms, window.start + at, window.start + after)


def release_member(
    core: SharePartitionState, member: str, policy: SharePartitionPolicy, *, now_ms: int, chance: float
) -> bool:
    """Release the records of a member that has left. Return whether something has to be written."""
    window, before = core.window, len(core.queued)
    number = core.members.number_of(member)
    if not number:
        return False
    for held in list(LOCKED.finditer(window.states)):
        for run in list(RUN.finditer(window.states, held.start(), held.end())):
            owned = [owner == number for owner in window.owners[run.start() : run.end()]]
            for at, after in runs_where(owned):
                core.members.give_back(number, after - at)
                low, high = run.start() + at, run.start() + after
                core.release_range(low, high, policy, now_ms, chance, expired=False)
    core.drop_final_prefix()
    return len(core.queued) > before
