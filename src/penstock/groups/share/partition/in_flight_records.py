"""The in-flight records of a share partition as flat arrays, and tables that change many records at once.

Each record has one byte of state, a delivery count, a lock holder and a time. Lock holders are small numbers that fit
into the arrays. A record whose new state is not stored yet is neither acquired nor available: it has the code of its
new state with QUEUED, and with WRITING too once a write that contains it is in progress. Masks and byte strings are
combined as large integers, which replaces a loop over records by operations at memory speed.
"""

import re
from array import array
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Final

from penstock.groups.share.state import share_state

Bytes = bytes | bytearray

#: The bytes of a mask.
YES: Final = 0xFF
NO: Final = 0x00


def mask_table(*codes: int) -> bytes:
    """A table that maps these bytes to YES and all others to NO."""
    return bytes(YES if code in codes else NO for code in range(256))


@cache
def equals_table(code: int) -> bytes:
    return mask_table(code)


@cache
def at_least(code: int) -> bytes:
    return bytes(YES if each >= code else NO for each in range(256))


def as_integer(data: Bytes) -> int:
    return int.from_bytes(data, "little")


def bitwise_and(one: Bytes, other: Bytes) -> bytes:
    return (as_integer(one) & as_integer(other)).to_bytes(len(one), "little")


def select_bytes(old: Bytes, new: Bytes, mask: Bytes) -> bytes:
    """The new bytes where the mask is YES, the old ones elsewhere."""
    before = as_integer(old)
    return (before ^ ((before ^ as_integer(new)) & as_integer(mask))).to_bytes(len(old), "little")


def is_subset_mask(whole: Bytes, part: Bytes) -> bool:
    """Whether every YES of `part` is a YES of `whole`."""
    wanted = as_integer(part)
    return wanted & as_integer(whole) == wanted


AVAILABLE: Final = 0
ACQUIRED: Final = 1
ACKNOWLEDGED: Final = 2
#: Acquired and already final: it is never delivered again, whatever the member does.
ACQUIRED_FINAL: Final = 3
ARCHIVED: Final = 4
#: Available after its time.
DELAYED: Final = 5
#: Already final, and not acquired yet: may be acquired once, without another write.
RESERVED: Final = 6

QUEUED: Final = 0x10
WRITING: Final = 0x40
#: Like ARCHIVED, with a dead letter to be written.
DELIVERY_LIMIT_REACHED: Final = share_state.DEAD_LETTER_LIMIT
REJECTED: Final = share_state.DEAD_LETTER_REJECTED
LOCK_EXPIRED: Final = share_state.DEAD_LETTER_LOCK_EXPIRED

_TARGETS: Final = (
    AVAILABLE,
    ACKNOWLEDGED,
    ARCHIVED,
    DELAYED,
    RESERVED,
    DELIVERY_LIMIT_REACHED,
    REJECTED,
    LOCK_EXPIRED,
)
_STORED_AS: Final = {DELAYED: AVAILABLE, RESERVED: ACKNOWLEDGED}
_STATE_AFTER_WRITE: Final = {DELIVERY_LIMIT_REACHED: ARCHIVED, REJECTED: ARCHIVED, LOCK_EXPIRED: ARCHIVED}
#: In a row of stored states: nothing to write for this record.
NOT_STORED: Final = 255


def code_table(changes: dict[int, int], default: int | None = None) -> bytes:
    """A table that maps some codes; the others stay as they are, or become `default`."""
    return bytes(changes.get(code, code if default is None else default) for code in range(256))


_WRITE_PENDING_TARGETS = {target | bits: target for target in _TARGETS for bits in (QUEUED, QUEUED | WRITING)}
#: Applied when a write begins.
BEGIN_WRITE: Final = code_table({target | QUEUED: target | QUEUED | WRITING for target in _TARGETS})
#: Applied when a write is stored.
FINISH_WRITE: Final = code_table(
    {target | QUEUED | WRITING: _STATE_AFTER_WRITE.get(target, target) for target in _TARGETS}
)
#: The states in a write; a row of stored states has indexes into this tuple.
STORED_STATES: Final = (AVAILABLE, ACKNOWLEDGED, ARCHIVED, DELIVERY_LIMIT_REACHED, REJECTED, LOCK_EXPIRED)
STORED_STATE_INDEX: Final = code_table(
    {
        code: STORED_STATES.index(_STORED_AS.get(target, target))
        for code, target in _WRITE_PENDING_TARGETS.items()
    },
    default=NOT_STORED,
)
#: Applied to offsets at which the log has no record for members, or no longer has one.
ARCHIVE_GAP: Final = code_table({AVAILABLE: ARCHIVED, DELAYED: ARCHIVED, RESERVED: ARCHIVED})
ONE_MORE_DELIVERY: Final = bytes(min(count + 1, 255) for count in range(256))


def _one_of(*codes: int) -> bytes:
    return b"[" + b"".join(b"\\x%02x" % code for code in codes) + b"]"


#: A run of equal bytes.
RUN: Final = re.compile(rb"(.)\1*", re.DOTALL)
#: The same, for `findall`: whole runs, and the byte of each.
RUNS: Final = re.compile(rb"((.)\2*)", re.DOTALL)
_STORED_FINAL = (ACKNOWLEDGED, ARCHIVED)
#: The prefix that the window need not keep.
FINAL_PREFIX: Final = re.compile(_one_of(*_STORED_FINAL) + b"*")
#: The prefix that the stored state need not keep once all queued records are written.
FINAL_PREFIX_ONCE_WRITTEN: Final = re.compile(
    _one_of(
        *_STORED_FINAL,
        ACQUIRED_FINAL,
        RESERVED,
        *(
            code
            for code, target in _WRITE_PENDING_TARGETS.items()
            if target in (ACKNOWLEDGED, ARCHIVED, RESERVED)
        ),
    )
    + b"*"
)
WRITE_PENDING: Final = re.compile(_one_of(*_WRITE_PENDING_TARGETS))
LOCKED: Final = re.compile(_one_of(ACQUIRED, ACQUIRED_FINAL) + b"+")
WITH_DEADLINE: Final = re.compile(_one_of(ACQUIRED, ACQUIRED_FINAL, DELAYED) + b"+")
#: The time of the record has a meaning, or will have one once the state is stored.
HAS_DEADLINE: Final = re.compile(
    _one_of(
        ACQUIRED,
        ACQUIRED_FINAL,
        DELAYED,
        *(code for code, target in _WRITE_PENDING_TARGETS.items() if target == DELAYED),
    )
)
#: Records that would be lost if the share partition were dropped and loaded again.
BUSY: Final = re.compile(_one_of(ACQUIRED, ACQUIRED_FINAL, RESERVED, *_WRITE_PENDING_TARGETS))
#: States that do not count as a lock.
FINAL_CODES: Final = bytes(_STORED_FINAL)
#: States that are final once all queued records are written.
FINAL_ONCE_WRITTEN: Final = bytes(
    (
        *_STORED_FINAL,
        ACQUIRED_FINAL,
        RESERVED,
        *(code for code, target in _WRITE_PENDING_TARGETS.items() if target not in (AVAILABLE, DELAYED)),
    )
)


#: first offset and the offset after the last
OffsetSpan = tuple[int, int]


class InFlightWindow:
    """The offsets from `start` up to `end`, the first offset that was never acquired.

    `times` holds when a lock or a delay ends, `owners` the number of the lock holder; both are meaningless in other
    states.
    """

    __slots__ = ("counts", "owners", "start", "states", "times")

    def __init__(self, start: int) -> None:
        self.start = start
        self.states = bytearray()
        self.counts = bytearray()
        self.owners = bytearray()
        self.times = array("q")

    def __len__(self) -> int:
        return len(self.states)

    @property
    def end(self) -> int:
        return self.start + len(self.states)

    @property
    def open_count(self) -> int:
        """Records that are not final."""
        return len(self.states.translate(None, FINAL_CODES))

    def extend(self, end: int, state: int) -> None:
        """Grow up to `end`, with records that were never delivered."""
        count = end - self.end
        assert count >= 0, "the window never shrinks at its end"
        self.states += bytes((state,)) * count
        self.counts += bytes(count)
        self.owners += bytes(count)
        self.times.extend(array("q", bytes(8 * count)))

    def drop_below(self, offset: int) -> None:
        count = offset - self.start
        if count <= 0:
            return
        del self.states[:count], self.counts[:count], self.owners[:count], self.times[:count]
        self.start = offset

    def clip(self, first: int, end: int) -> tuple[int, int]:
        """Array indexes of those offsets that are in the window; equal if there are none."""
        low = max(first - self.start, 0)
        return low, max(low, min(end - self.start, len(self.states)))

    def set_time(self, low: int, high: int, time_ms: int) -> None:
        self.times[low:high] = array("q", (time_ms,)) * (high - low)

    def count_runs(self, low: int, high: int) -> Iterator[tuple[int, int, int]]:
        """Indexes and delivery count of runs of records with the same delivery count."""
        counts = self.counts
        for run in RUN.finditer(counts, low, high):
            yield run.start(), run.end(), counts[run.start()]


def runs_where(matches: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Indexes of the runs of True."""
    start = -1
    for index, is_match in enumerate(matches):
        if is_match and start < 0:
            start = index
        elif not is_match and start >= 0:
            yield start, index
            start = -1
    if start >= 0:
        yield start, len(matches)


def merge_spans(ranges: list[OffsetSpan]) -> list[OffsetSpan]:
    """Sort, and merge spans that touch."""
    result: list[OffsetSpan] = []
    for first, end in sorted(ranges):
        if result and first <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((first, end))
    return result


NO_HOLDER: Final = 0
#: A number takes one byte. Another member gets no records until one of the holders holds nothing.
HOLDERS_MAX: Final = 255


class LockHolders:
    """A member has a number while it holds records."""

    __slots__ = ("_free", "_held", "_names", "_numbers")

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._names: list[str] = [""]
        self._held: list[int] = [0]
        self._free: list[int] = []

    def number_of(self, member: str) -> int:
        """NO_HOLDER for a member that holds nothing."""
        return self._numbers.get(member, NO_HOLDER)

    def name_of(self, number: int) -> str:
        """Return the member that holds something under this number."""
        return self._names[number]

    def has_room_for(self, member: str) -> bool:
        return member in self._numbers or len(self._numbers) < HOLDERS_MAX

    def take(self, member: str, count: int) -> int:
        """Add `count` to the records that the member holds. Return its number."""
        number = self._numbers.get(member)
        if number is None:
            number = self._numbers[member] = self._new_number(member)
        self._held[number] += count
        return number

    def give_back(self, number: int, count: int) -> None:
        self._held[number] -= count
        assert self._held[number] >= 0, "more given back than was held"
        if count and self._held[number] == 0:
            del self._numbers[self._names[number]]
            self._free.append(number)

    def _new_number(self, member: str) -> int:
        if self._free:
            number = self._free.pop()
            self._names[number] = member
            return number
        self._names.append(member)
        self._held.append(0)
        assert len(self._names) <= HOLDERS_MAX + 1, "a number takes one byte"
        return len(self._names) - 1
