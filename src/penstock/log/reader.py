"""Reading slices of whole batches in constant work: an index search or a remembered place, a short walk."""

import logging
from errno import ENOENT
from functools import partial
from typing import Final

from penstock.log.aborted import Aborted, AbortedIndex
from penstock.log.files import FilePool
from penstock.log.index import DamagedIndex
from penstock.log.lookup import aborted_index, offset_index, reindex
from penstock.log.positions import LogPosition, Slice
from penstock.log.replay import reindex_aborted
from penstock.log.segment import Segment
from penstock.log.segments import SegmentList
from penstock.log.walk import NEAR_BYTES, past_holes, walk
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.records import HEADER, HEADER_BYTES, LENGTH_OVERHEAD_BYTES

#: Positions remembered for sequential readers; one more and they all start over with an index search.
HINTS_MAX: Final = 64

_logger = logging.getLogger("penstock.log")

Hints = dict[int, tuple[Segment, int]]
Place = tuple[Segment, int]


class _WrongIndex(Exception):
    """The batch is not where the index says."""


class Reader:
    """Searches a log's segments. Safe in any thread: what it holds on to never changes, only grows."""

    __slots__ = ("_hints", "files", "segments")

    def __init__(self, segments: SegmentList, files: FilePool) -> None:
        self.files = files
        self.segments = segments
        self._hints: Hints = {}

    def use(self, segments: SegmentList) -> None:
        """The files have changed: forget what was remembered. A read under way keeps its own view."""
        self.segments = segments
        self._hints = {}

    def read(self, offset: int, max_bytes: int, upto: LogPosition, at_least_one: bool, nowait: bool) -> Slice:
        hints = self._hints
        hint = hints.get(offset)
        if hint is not None and hint[1] < hint[0].size and not hint[0].holes:
            segment, position = hint
        else:
            place = self.find(offset, upto, nowait)
            if place is None:
                return Slice(b"", offset)
            segment, position = place
        limit, next_offset = self._limit(segment, upto, nowait)
        if segment.holes:
            limit, next_offset = _before_hole(segment, position, limit, next_offset)
        if limit <= position:
            return Slice(b"", offset)
        file = self.files.pin(segment)
        try:
            if limit - position <= max_bytes:
                data = self.files.read(file.fd, limit - position, position, nowait)
            else:
                data, next_offset = self._cut(segment, file.fd, position, max_bytes, at_least_one, nowait)
        finally:
            self.files.unpin(file)
        if data:
            _remember(hints, next_offset, (segment, position + len(data)))
        return Slice(data, next_offset if data else offset)

    def find(self, offset: int, upto: LogPosition, nowait: bool = False) -> Place | None:
        """The first batch that ends at or after an offset; None when there is none below `upto`."""
        segments = self.segments
        for slot in range(segments.slot_of(offset), len(segments)):
            segment = segments.items[slot]
            if segment.base_offset >= upto.offset and segment.base_offset > upto.segment_base:
                return None
            position = self._find_in(segment, offset, nowait)
            if position is not None:
                return segment, position
        return None

    def aborted_in(
        self, start_offset: int, upto_offset: int, nowait: bool, log_start_offset: int
    ) -> tuple[Aborted, ...]:
        """Aborted transactions with data between two offsets: a marker may lie segments away from its data."""
        segments = self.segments
        found: list[Aborted] = []
        for segment in segments.items[segments.slot_of(start_offset) :]:
            if not segment.has_aborted:
                continue
            if nowait and segment.aborted is None:
                raise BlockingIOError
            if self.aborted_index(segment, log_start_offset).collect(start_offset, upto_offset, found):
                break
        return tuple(found)

    def aborted_index(self, segment: Segment, log_start_offset: int) -> AbortedIndex:
        """Made anew from the log when the file does not hold."""
        try:
            return aborted_index(segment, self.files)
        except DamagedIndex as error:
            if segment.retired or segment.is_deleted:
                raise FileNotFoundError(ENOENT, "the segment has left its log", str(segment.path)) from None
            _logger.warning("index rebuilt", extra={"file": str(segment.path), "reason": str(error)})
        return reindex_aborted(self.segments, [segment], self.files, log_start_offset)[0]

    def _find_in(self, segment: Segment, offset: int, nowait: bool) -> int | None:
        if offset <= segment.base_offset and not segment.holes:
            return 0 if segment.size else None
        if nowait and segment.offsets is None:
            raise BlockingIOError
        try:
            return self._walk_to(segment, offset, nowait)
        except _WrongIndex:
            if nowait:
                raise BlockingIOError from None
        reindex(segment, self.files)
        return self._walk_to(segment, offset, nowait)

    def _walk_to(self, segment: Segment, offset: int, nowait: bool) -> int | None:
        """Raises when the batches do not reach to the end: passing over damage would pass over records too."""
        end, base_offset = segment.size, segment.base_offset
        indexed, reached = offset_index(segment, self.files).entry_at_or_below(offset - base_offset)
        file = self.files.pin(segment)
        try:
            read_at = partial(self.files.read, nowait=nowait)
            for position, header in walk(
                file.fd, reached, end, chunk_bytes=NEAR_BYTES, read_at=read_at, holes=segment.holes
            ):
                if indexed not in (-1, header.last_offset - base_offset):
                    break
                if header.last_offset >= offset:
                    return position
                indexed, reached = -1, position + header.size
        finally:
            self.files.unpin(file)
        if indexed >= 0 and segment.next_base is not None:
            raise _WrongIndex
        if past_holes(reached, segment.holes) < end:
            raise damaged(segment, reached)
        return None

    def _limit(self, segment: Segment, upto: LogPosition, nowait: bool) -> tuple[int, int]:
        """How far a segment may be read, and the offset that is there."""
        following = segment.next_base
        if following is not None and following <= upto.offset:
            return segment.size, following
        if segment.base_offset == upto.segment_base and not segment.cleaned:
            return upto.position, upto.offset
        # The segment was compacted after `upto` was taken, so its position says nothing any more.
        position = self._find_in(segment, upto.offset, nowait)
        return (segment.size if position is None else position), upto.offset

    def _cut(
        self, segment: Segment, fd: int, position: int, max_bytes: int, at_least_one: bool, nowait: bool
    ) -> tuple[bytes | bytearray, int]:
        """No more than `max_bytes`, ending at the end of a batch; the first batch whole if asked for."""
        if nowait and segment.offsets is None:
            raise BlockingIOError
        data = self.files.read(fd, max(max_bytes, HEADER_BYTES), position, nowait)
        base_offset, length, _, _, _, _, delta, *_ = HEADER.unpack_from(data)
        first_bytes = length + LENGTH_OVERHEAD_BYTES
        if first_bytes < HEADER_BYTES:
            raise damaged(segment, position)
        if first_bytes > max_bytes:
            if not at_least_one:
                return b"", -1
            return self._whole(segment, fd, position, first_bytes, nowait), base_offset + delta + 1
        boundary = offset_index(segment, self.files).boundary_at_or_below(position + max_bytes - HEADER_BYTES)
        end, next_offset = _last_whole(data, max(boundary - position, 0), max_bytes)
        if end == 0:
            raise damaged(segment, position)
        if isinstance(data, bytearray):
            del data[end:]
            return data, next_offset
        return data[:end], next_offset

    def _whole(self, segment: Segment, fd: int, position: int, size: int, nowait: bool) -> bytes | bytearray:
        if position + size > segment.size:
            raise damaged(segment, position)
        return self.files.read(fd, size, position, nowait)


def _last_whole(data: bytes | bytearray, at: int, max_bytes: int) -> tuple[int, int]:
    """From a batch boundary on, the end of the last whole batch and the offset after it; 0 for damage."""
    next_offset = -1
    while at + HEADER_BYTES <= max_bytes:
        base_offset, length, _, _, _, _, delta, *_ = HEADER.unpack_from(data, at)
        if length + LENGTH_OVERHEAD_BYTES < HEADER_BYTES:
            return 0, -1
        if at + length + LENGTH_OVERHEAD_BYTES > max_bytes:
            return at, base_offset
        at += length + LENGTH_OVERHEAD_BYTES
        next_offset = base_offset + delta + 1
    return at, next_offset


def _before_hole(segment: Segment, position: int, limit: int, next_offset: int) -> tuple[int, int]:
    """A slice ends where damage begins."""
    for hole in segment.holes:
        if position < hole.position < limit:
            return hole.position, hole.offset
    return limit, next_offset


def _remember(hints: Hints, offset: int, place: Place) -> None:
    if len(hints) >= HINTS_MAX:
        hints.clear()
    hints[offset] = place


class DamagedRead(ApiError):
    """Bytes that are no batch, in the segment that begins at `segment_base`."""

    def __init__(self, segment: Segment, position: int) -> None:
        super().__init__(ErrorCode.corrupt_message, f"{segment.path} is damaged at position {position}")
        self.segment_base = segment.base_offset


def damaged(segment: Segment, position: int) -> ApiError:
    return DamagedRead(segment, position)
