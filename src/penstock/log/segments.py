"""The segments of one log in order, safe to search in a thread while the event loop appends to them."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

from penstock.log.segment import Segment


class SegmentList:
    """Grows in place; anything else makes a new list, so that a reader's list never changes under it."""

    __slots__ = ("bases", "items")

    def __init__(self, segments: Iterable[Segment]) -> None:
        self.items = list(segments)
        self.bases = [segment.base_offset for segment in self.items]
        for segment, following in zip(self.items, self.items[1:], strict=False):
            assert segment.base_offset < following.base_offset, (segment, following)
            segment.next_base = following.base_offset
        if self.items:
            self.items[-1].next_base = None

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Segment]:
        return iter(self.items)

    @property
    def first(self) -> Segment:
        return self.items[0]

    @property
    def last(self) -> Segment:
        return self.items[-1]

    @property
    def size_bytes(self) -> int:
        return sum(segment.size for segment in self.items)

    def add(self, segment: Segment) -> None:
        # Readers find a segment by its base, so the base must come last.
        self.items[-1].next_base = segment.base_offset
        self.items.append(segment)
        self.bases.append(segment.base_offset)

    def slot_of(self, offset: int) -> int:
        """The slot of the segment that holds an offset, or held it before the log was compacted."""
        return max(bisect_right(self.bases, offset) - 1, 0)

    def holding(self, offset: int) -> Segment:
        return self.items[self.slot_of(offset)]

    def without(self, gone: Sequence[Segment]) -> "SegmentList":
        leaving = set(gone)
        return SegmentList(segment for segment in self.items if segment not in leaving)

    def replaced(self, old: Sequence[Segment], new: Sequence[Segment]) -> "SegmentList":
        leaving = set(old)
        kept = [segment for segment in self.items if segment not in leaving]
        return SegmentList(sorted([*kept, *new], key=lambda segment: segment.base_offset))
