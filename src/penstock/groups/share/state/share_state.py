"""Ranges of offsets with what is known of them: sorted, without overlap, and never two where one would do.

A range is a tuple (first, last, state, count). Where two meet, the one with more deliveries wins, and of as many
deliveries the higher state, as in Apache Kafka: so it does not matter in which order they are put together, nor how
often.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from operator import lt

Range = tuple[int, int, int, int]


def tidy(ranges: Sequence[Range]) -> Sequence[Range]:
    """Any ranges, as they may come in, put in order. What is in order already is handed back as it is."""
    last_before, state_before, count_before = -2, -1, -1
    for first, last, state, count in ranges:
        if first <= last_before or (
            first == last_before + 1 and state == state_before and count == count_before
        ):
            return _combined(ranges)
        last_before, state_before, count_before = last, state, count
    return ranges


def _combined(ranges: Sequence[Range]) -> list[Range]:
    if len(ranges) < 2:
        return list(ranges)
    middle = len(ranges) // 2
    return overlay(_combined(ranges[:middle]), _combined(ranges[middle:]))


def is_sorted(ranges: Sequence[Range]) -> bool:
    """And without overlap, as tidy ones are."""
    columns = tuple(zip(*ranges, strict=True))
    return not columns or all(map(lt, columns[1], columns[0][1:]))


def merge_into(ranges: list[Range], new: Sequence[Range]) -> None:
    """Both tidy. Touches only what lies where the new ones are."""
    if not ranges:
        ranges.extend(new)
        return
    behind = bisect_left(new, (ranges[-1][1] + 1,))
    if behind:
        _merge_among(ranges, new[:behind] if behind < len(new) else new)
    if behind < len(new):
        # Most of what comes is about offsets that nobody has heard of yet.
        _put(ranges, new[behind])
        ranges.extend(new[behind + 1 :])


def _merge_among(ranges: list[Range], new: Sequence[Range]) -> None:
    # From the last one that begins before, which may reach into the new ones, to the first that begins behind.
    low = max(bisect_left(ranges, (new[0][0],)) - 1, 0)
    high = bisect_left(ranges, (new[-1][1] + 2,))
    ranges[low:high] = overlay(ranges[low:high], new)


def overlay(left: Sequence[Range], right: Sequence[Range]) -> list[Range]:
    """Two tidy lists in one. Of the left one, what lies between those of the right one is not looked at."""
    out: list[Range] = []
    rights = iter(right)
    place, count = 1, len(left)  # of the left one that comes next
    a, b = left[0] if left else None, next(rights, None)
    while a is not None and b is not None:
        if a[1] < b[0]:
            _put(out, a)
            if place < count and left[place][1] < b[0]:
                before, place = place, bisect_left(left, (b[0],), place)
                place -= left[place - 1][1] >= b[0]
                out.extend(left[before:place])
            a, place = left[place] if place < count else None, place + 1
        elif b[1] < a[0]:
            _put(out, b)
            b = next(rights, None)
        elif a[0] < b[0]:
            _put(out, (a[0], b[0] - 1, a[2], a[3]))
            a = (b[0], a[1], a[2], a[3])
        elif b[0] < a[0]:
            _put(out, (b[0], a[0] - 1, b[2], b[3]))
            b = (a[0], b[1], b[2], b[3])
        else:
            last = min(a[1], b[1])
            winner = a if (a[3], a[2]) > (b[3], b[2]) else b
            _put(out, (a[0], last, winner[2], winner[3]))
            if a[1] > last:
                a = (last + 1, a[1], a[2], a[3])
            else:
                a, place = left[place] if place < count else None, place + 1
            b = (last + 1, b[1], b[2], b[3]) if b[1] > last else next(rights, None)
    if a is not None:
        _put(out, a)
        out.extend(left[place:])
    if b is not None:
        _put(out, b)
        out.extend(rights)
    return out


def _put(out: list[Range], new: Range) -> None:
    if out:
        before = out[-1]
        if before[1] + 1 == new[0] and before[2] == new[2] and before[3] == new[3]:
            out[-1] = (before[0], new[1], new[2], new[3])
            return
    out.append(new)


def cut_before(ranges: list[Range], offset: int) -> None:
    """Forget what lies before an offset."""
    if not ranges or ranges[0][0] >= offset:
        return
    behind = bisect_left(ranges, (offset,))
    _, last, state, count = ranges[behind - 1]
    if last >= offset:
        ranges[:behind] = [(offset, last, state, count)]
    else:
        del ranges[:behind]


def subtract(ranges: Iterable[Range], taken: Sequence[tuple[int, ...]]) -> list[Range]:
    """What is left of tidy ranges outside `taken`, which begin with their first and last offset and are sorted."""
    out: list[Range] = []
    place = 0
    for first, last, state, count in ranges:
        while place < len(taken) and taken[place][1] < first:
            place += 1
        ahead = place
        while ahead < len(taken) and taken[ahead][0] <= last:
            if taken[ahead][0] > first:
                out.append((first, taken[ahead][0] - 1, state, count))
            first = max(first, taken[ahead][1] + 1)
            ahead += 1
        if first <= last:
            out.append((first, last, state, count))
    return out


def around(ranges: Sequence[Range], others: Sequence[tuple[int, ...]]) -> tuple[int, int]:
    """Places of those ranges that may reach into others; all of them are sorted."""
    if not others:
        return 0, 0
    low = max(bisect_left(ranges, (others[0][0],)) - 1, 0)
    return low, bisect_left(ranges, (others[-1][1] + 1,))


def size(ranges: Iterable[tuple[int, ...]]) -> int:
    """How many offsets they hold."""
    columns = tuple(zip(*ranges, strict=True))
    return sum(columns[1]) - sum(columns[0]) + len(columns[0]) if columns else 0


def head(ranges: Sequence[Range], offsets_max: int) -> list[Range]:
    """The first so many offsets of them."""
    out: list[Range] = []
    for first, last, state, count in ranges:
        if offsets_max <= 0:
            break
        last = min(last, first + offsets_max - 1)
        out.append((first, last, state, count))
        offsets_max -= last - first + 1
    return out
