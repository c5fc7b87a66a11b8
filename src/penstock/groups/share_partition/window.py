"""The offsets in flight as flat arrays: a few bytes for each record, moved together and not one by one."""

from array import array
from collections.abc import Iterator, Sequence

from penstock.groups.share_partition.states import FINAL_CODES, RUN

#: first offset and the offset after the last
Range = tuple[int, int]


class Window:
    """Offsets from `start` to `end`, which is the first that was never handed out.

    `times` holds when a lock ends or a delay is over, `owners` the number of the member that has a lock; both mean
    nothing in other states.
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
        """Up to `end`, with records that were never delivered."""
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
        """Places in the arrays of those offsets that are in the window; equal where none is."""
        low = max(first - self.start, 0)
        return low, max(low, min(end - self.start, len(self.states)))

    def set_time(self, low: int, high: int, time_ms: int) -> None:
        self.times[low:high] = array("q", (time_ms,)) * (high - low)

    def count_runs(self, low: int, high: int) -> Iterator[tuple[int, int, int]]:
        """Places and delivery count of records that were delivered equally often."""
        counts = self.counts
        for run in RUN.finditer(counts, low, high):
            yield run.start(), run.end(), counts[run.start()]


def runs_where(matches: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Places of the runs of True."""
    start = -1
    for place, is_match in enumerate(matches):
        if is_match and start < 0:
            start = place
        elif not is_match and start >= 0:
            yield start, place
            start = -1
    if start >= 0:
        yield start, len(matches)


def merged(ranges: list[Range]) -> list[Range]:
    """Sorted, and those that touch as one."""
    result: list[Range] = []
    for first, end in sorted(ranges):
        if result and first <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((first, end))
    return result
