"""What members say about the records they hold. All of it is carried out, or none of it.

A request with an answer for each of a thousand records is one row of bytes beside the window, with a gap where
nothing is said: no step looks at records one by one.
"""

import re
from collections.abc import Sequence
from functools import cache
from typing import Final, NamedTuple

from penstock.groups.share_partition.core import Core, release_code
from penstock.groups.share_partition.messages import ACCEPT, GAP, REJECT, RELEASE, RENEW, Said
from penstock.groups.share_partition.policy import Backoff, Policy
from penstock.groups.share_partition.states import (
    ACKNOWLEDGED,
    ACQUIRED,
    ARCHIVED,
    AVAILABLE,
    DELAYED,
    HANDED,
    QUEUED,
    REJECTED,
    RUN,
)
from penstock.groups.share_partition.vectors import (
    YES,
    Bytes,
    at_least,
    blend,
    both,
    covers,
    mask_table,
    only,
)
from penstock.protocol.errors import ApiError, ErrorCode

_NOTHING_SAID: Final = 0xFF
_IS_SAID: Final = bytes(YES if said <= RENEW else 0 for said in range(256))
_NOT: Final = bytes(0 if said else YES for said in range(256))
_IS_HELD: Final = mask_table(ACQUIRED, HANDED)
_RENEWALS: Final = re.compile(b"[\\x%02x]+" % RENEW)
#: At most once: final already, and it only counts whether the member has got it.
_CONFIRMED: Final = bytes(HANDED if said == RENEW else ACKNOWLEDGED for said in range(256))


class _Row(NamedTuple):
    """Places of the window, what is said of each, and which are meant at all."""

    low: int
    high: int
    said: bytearray
    mask: Bytes


def check_order(batches: Sequence[Said], *, may_renew: bool) -> None:
    """What can be said without looking at any record. Raises ApiError."""
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
    core: Core, member: str, batches: Sequence[Said], policy: Policy, *, now_ms: int, chance: float
) -> bool:
    """Returns whether something has to be written before it may be answered. Raises ApiError."""
    if batches and batches[0][0] < core.window.start:
        batches = _not_deleted(core, batches)
    if not batches:
        return False
    number = core.members.number_of(member)
    row = _row(core, batches)
    _check(core, number, row, policy)
    said = row.said
    renewed = said.count(RENEW)
    is_written = _answer(core, row, policy, now_ms, chance)
    if renewed:
        _renew(core, row, now_ms + policy.lock_ms)
        core.counters.renewed += renewed
    core.members.give_back(number, len(said) - said.count(_NOTHING_SAID) - renewed)
    core.drop_done()
    return is_written


def _not_deleted(core: Core, batches: Sequence[Said]) -> Sequence[Said]:
    """Nobody waits for what the log has deleted; what else lies before the window came to its end in other hands."""
    start = core.window.start
    left = [batch for batch in batches if batch[1] >= min(core.deleted_upto, start)]
    if left and max(left[0][0], core.deleted_upto) < start:
        raise ApiError(ErrorCode.invalid_record_state, "the member does not hold all of these records")
    return left


def _row(core: Core, batches: Sequence[Said]) -> _Row:
    window = core.window
    if batches[-1][1] >= window.end:
        raise ApiError(ErrorCode.invalid_request, "offsets beyond what has been acquired")
    low, high = window.clip(batches[0][0], batches[-1][1] + 1)
    said = bytearray((_NOTHING_SAID,)) * (high - low)
    base = window.start + low
    for first, last, types in batches:
        if first < base:  # of the first one, what the window still has
            types = types if len(types) == 1 else types[base - first :]
            first = base
        if len(types) == 1:
            types = types * (last - first + 1)
        said[first - base : last + 1 - base] = types
    return _Row(low, high, said, said.translate(_IS_SAID))


def _check(core: Core, number: int, row: _Row, policy: Policy) -> None:
    """Raises ApiError."""
    window, (low, high, said, mask) = core.window, row
    held = both(window.states[low:high].translate(_IS_HELD), window.owners[low:high].translate(only(number)))
    if not number or not covers(held, mask):
        raise ApiError(ErrorCode.invalid_record_state, "the member does not hold all of these records")
    if RENEW in said and not policy.may_renew:
        raise ApiError(ErrorCode.invalid_record_state, "renewing is not enabled for the group")


def _answer(core: Core, row: _Row, policy: Policy, now_ms: int, chance: float) -> bool:
    """Returns whether something has to be written."""
    window, (low, high, said, mask) = core.window, row
    before = window.states[low:high]
    after: Bytes = said.translate(_codes(policy.buries, release_code(policy, 0)))
    if RELEASE in said:
        after = _answer_release(core, row, after, policy, now_ms, chance)
    confirmed = 0
    if HANDED in before:
        is_handed = both(before.translate(only(HANDED)), mask)
        after = blend(after, said.translate(_CONFIRMED), is_handed)
        confirmed = both(said.translate(only(ACCEPT)), is_handed).count(YES)
        if confirmed:
            core.add_totals(confirmed=confirmed)
        _count(core, blend(said, bytes((_NOTHING_SAID,)) * len(said), is_handed), policy)
    else:
        _count(core, said, policy)
    after = blend(before, after, mask)
    window.states[low:high] = after
    is_written = after.translate(_IS_QUEUED) != before.translate(_IS_QUEUED)
    if is_written:
        core.queued.append((window.start + low, window.start + high))
    return is_written or confirmed > 0


_IS_QUEUED: Final = bytes(code & QUEUED for code in range(256))


def _answer_release(core: Core, row: _Row, after: Bytes, policy: Policy, now_ms: int, chance: float) -> Bytes:
    """Those that were delivered as often as they may be do not come back; the others may have to rest."""
    window, (low, high, said, _) = core.window, row
    released = both(said.translate(only(RELEASE)), window.states[low:high].translate(only(ACQUIRED)))
    if policy.is_at_most_once:
        return after
    limited = both(released, window.counts[low:high].translate(at_least(policy.delivery_limit)))
    count = limited.count(YES)
    if count:
        code = release_code(policy, policy.delivery_limit)
        after = blend(after, bytes((code,)) * len(said), limited)
        core.count_given_up(code, count)
    if policy.backoff is not None:
        _rest(core, row, released, policy.backoff, now_ms, chance)
    if core.delays_asked:
        after = _rest_as_asked(core, row, both(released, limited.translate(_NOT)), after, now_ms)
    return after


def is_held(core: Core, offset: int, delivery_count: int) -> bool:
    """Whether somebody has the record from this delivery."""
    window = core.window
    low, high = window.clip(offset, offset + 1)
    return low < high and window.states[low] == ACQUIRED and window.counts[low] == min(delivery_count, 255)


def ask_delay(core: Core, offset: int, delivery_count: int, delay_ms: int) -> bool:
    """For when the record is released from this delivery. False where nobody has it from this delivery."""
    window = core.window
    if not is_held(core, offset, delivery_count):
        return False
    if len(core.delays_asked) > len(window):
        # Those that were asked for deliveries that have ended in another way.
        core.delays_asked = {at: asked for at, asked in core.delays_asked.items() if at >= window.start}
    core.delays_asked[offset] = window.counts[offset - window.start], delay_ms
    return True


def _rest_as_asked(core: Core, row: _Row, released: bytes, after: Bytes, now_ms: int) -> Bytes:
    window, base = core.window, core.window.start + row.low
    states = bytearray(after)
    for offset in [offset for offset in core.delays_asked if 0 <= offset - base < len(states)]:
        place = offset - base
        delivery_count, delay_ms = core.delays_asked[offset]
        if released[place] and window.counts[row.low + place] == delivery_count:
            states[place] = (DELAYED if delay_ms else AVAILABLE) | QUEUED
            window.set_time(row.low + place, row.low + place + 1, now_ms + delay_ms)
            core.delays_kept.add(offset)
        if row.said[place] not in (_NOTHING_SAID, RENEW):
            del core.delays_asked[offset]
    return states


def _rest(core: Core, row: _Row, released: bytes, backoff: Backoff, now_ms: int, chance: float) -> None:
    """By the number of deliveries; one roll of the dice for all that came back together."""
    window = core.window
    delivered = both(window.counts[row.low : row.high], released)
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
def _codes(buries: bool, release: int) -> bytes:
    """From what a member says to the state that its record takes."""
    codes = bytearray(range(256))
    codes[GAP] = ARCHIVED | QUEUED
    codes[ACCEPT] = ACKNOWLEDGED | QUEUED
    codes[RELEASE] = release
    codes[REJECT] = (REJECTED if buries else ARCHIVED) | QUEUED
    codes[RENEW] = ACQUIRED
    return bytes(codes)


def _count(core: Core, said: Bytes, policy: Policy) -> None:
    counters, rejected = core.counters, said.count(REJECT)
    counters.accepted += said.count(ACCEPT)
    counters.released += said.count(RELEASE)
    counters.rejected += rejected
    counters.gaps += said.count(GAP)
    counters.buried += rejected if policy.buries else 0


def _renew(core: Core, row: _Row, until_ms: int) -> None:
    window = core.window
    for run in _RENEWALS.finditer(row.said):
        at, after = row.low + run.start(), row.low + run.end()
        window.set_time(at, after, until_ms)
        core.set_timer(until_ms, window.start + at, window.start + after)
