"""A segment: a log file named by its base offset, what is known about it without reading it, and the batches in it.

`iter_batch_headers` reads a segment file header by header and never holds more than one chunk of it. `LogSegments`
is the ordered list of a log's segments; a thread may search it while the event loop appends. `LogOffsetMetadata`,
`LogAppendInfo`, `LogSlice` and `TimestampAndOffset` are the values that appends and reads return.
"""

import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from penstock.log.config import INT32_MAX, LogConfig
from penstock.log.data_directory import (
    DELETED_SUFFIX,
    LOG_SUFFIX,
    OFFSET_INDEX_SUFFIX,
    TIME_INDEX_SUFFIX,
    TRANSACTION_INDEX_SUFFIX,
    offset_file_name,
)
from penstock.log.indexes import (
    OFFSET_ENTRY_BYTES,
    TIME_ENTRY_BYTES,
    OffsetIndex,
    TimeIndex,
    TransactionIndex,
)
from penstock.log.producer_state import CompletedTransaction
from penstock.protocol.record_batch import (
    ATTRIBUTES_OFFSET,
    BATCH_HEADER_BYTES,
    BatchHeader,
    crc32c,
    read_header,
)


class LogOffsetMetadata(NamedTuple):
    """An offset and the file position where the batch at that offset starts, or will start."""

    offset: int
    segment_base: int
    position: int


class LogAppendInfo(NamedTuple):
    base_offset: int
    last_offset: int
    append_time_ms: int  # -1 unless the topic uses LogAppendTime
    duplicate: bool
    end: LogOffsetMetadata  # of the log after this append


class LogSlice(NamedTuple):
    """The raw bytes of whole batches, and the offset to read from next."""

    data: bytes | bytearray
    next_offset: int


class TimestampAndOffset(NamedTuple):
    timestamp: int
    offset: int
    leader_epoch: int


READ_CHUNK_BYTES: Final = 1 << 20
#: Usually enough for the batches between two index entries.
INDEX_INTERVAL_READ_BYTES: Final = 8192

ReadAt = Callable[[int, int, int], bytes | bytearray]


class DamagedRange(NamedTuple):
    """Damaged bytes of a segment, and the offsets that were in them."""

    position: int
    end: int
    offset: int
    end_offset: int


def pread_at(fd: int, size: int, position: int) -> bytes:
    return os.pread(fd, size, position)


def skip_damaged_ranges(position: int, damaged_ranges: Sequence[DamagedRange]) -> int:
    """Returns the position itself, or the end of the damaged ranges that contain it."""
    for damaged_range in damaged_ranges:
        if damaged_range.position <= position < damaged_range.end:
            position = damaged_range.end
    return position


def iter_batch_headers(
    fd: int,
    position: int,
    end: int,
    *,
    chunk_bytes: int = READ_CHUNK_BYTES,
    read_at: ReadAt = pread_at,
    damaged_ranges: Sequence[DamagedRange] = (),
) -> Iterator[tuple[int, BatchHeader]]:
    """Yields position and header of each whole batch up to `end`. Stops early at bytes that are not a batch.

    Skips `damaged_ranges`, which must be in ascending order.
    """
    chunk: bytes | bytearray = b""
    chunk_start = position
    while True:
        if damaged_ranges:
            position = skip_damaged_ranges(position, damaged_ranges)
        if position + BATCH_HEADER_BYTES > end:
            return
        if position + BATCH_HEADER_BYTES > chunk_start + len(chunk):
            chunk, chunk_start = read_at(fd, min(chunk_bytes, end - position), position), position
            if len(chunk) < BATCH_HEADER_BYTES:
                return
        header = read_header(chunk, position - chunk_start)
        if header.magic != 2 or header.size < BATCH_HEADER_BYTES or position + header.size > end:
            return
        yield position, header
        position += header.size


def checksum_holds(fd: int, position: int, header: BatchHeader) -> bool:
    """Whether the checksum of a batch matches. Reads it in chunks, because a damaged length may be huge."""
    crc, at, end = 0, position + ATTRIBUTES_OFFSET, position + header.size
    while at < end:
        piece = os.pread(fd, min(READ_CHUNK_BYTES, end - at), at)
        if not piece:
            return False
        crc = crc32c(piece, crc)
        at += len(piece)
    return crc == header.crc


def read_batch(fd: int, position: int, header: BatchHeader) -> bytes:
    """Returns the whole batch. Raises OSError if the file is shorter than the header says."""
    data = os.pread(fd, header.size, position)
    if len(data) != header.size:
        raise OSError(f"batch at {position} is cut short: {len(data)} of {header.size} bytes")
    return data


#: Not looked up yet; -1 means that no batch has a timestamp.
UNKNOWN_TIMESTAMP: Final = -2


class LogSegment:
    """Small on purpose: opening a log creates one for each file without reading the file.

    `offsets` and `times` are None until a lookup needs them; the active segment always has them. `aborted` is loaded in
    the same way, but only for a segment that `has_aborted` transactions, which is rare. `next_base` is the base offset
    of the next segment, None for the last one. A `retired` segment has left its log; reads in progress may finish.
    """

    __slots__ = (
        "aborted",
        "base_offset",
        "bytes_since_entry",
        "cleaned",
        "created_ms",
        "damaged_ranges",
        "directory",
        "first_timestamp",
        "has_aborted",
        "index_full",
        "max_timestamp",
        "max_timestamp_offset",
        "next_base",
        "offsets",
        "retired",
        "size",
        "suffix",
        "times",
    )  # fmt: skip

    def __init__(
        self, directory: Path, base_offset: int, *, size: int = 0, suffix: str = "", created_ms: int = 0
    ):
        self.directory = directory
        self.base_offset = base_offset
        self.suffix = suffix
        self.size = size
        self.next_base: int | None = None
        self.cleaned = False
        self.retired = False
        self.created_ms = created_ms
        self.first_timestamp = UNKNOWN_TIMESTAMP
        self.max_timestamp = UNKNOWN_TIMESTAMP
        self.max_timestamp_offset = base_offset
        self.offsets: OffsetIndex | None = None
        self.times: TimeIndex | None = None
        self.aborted: TransactionIndex | None = None
        self.has_aborted = False
        #: Damaged bytes, which stay in the file and are skipped.
        self.damaged_ranges: tuple[DamagedRange, ...] = ()
        self.bytes_since_entry = 0
        self.index_full = False

    def __repr__(self) -> str:
        return f"<Segment {self.path.name} {self.size} bytes>"

    @property
    def path(self) -> Path:
        return self.file(LOG_SUFFIX)

    @property
    def is_deleted(self) -> bool:
        return self.suffix == DELETED_SUFFIX

    def file(self, kind: str, suffix: str | None = None) -> Path:
        return self.directory / offset_file_name(
            self.base_offset, kind, self.suffix if suffix is None else suffix
        )

    @property
    def index_files(self) -> tuple[Path, Path]:
        return self.file(OFFSET_INDEX_SUFFIX), self.file(TIME_INDEX_SUFFIX)

    @property
    def transaction_index_file(self) -> Path:
        return self.file(TRANSACTION_INDEX_SUFFIX)

    @property
    def loaded_indexes(self) -> tuple[OffsetIndex, TimeIndex]:
        assert self.offsets is not None
        assert self.times is not None
        return self.offsets, self.times

    def start_indexing(self) -> None:
        """Resets what is known about the content; `note` then adds batch by batch."""
        self.size = 0
        self.first_timestamp = UNKNOWN_TIMESTAMP
        self.max_timestamp = -1
        self.max_timestamp_offset = self.base_offset
        self.offsets, self.times = OffsetIndex(), TimeIndex()
        self.aborted, self.has_aborted = None, False
        self.bytes_since_entry = 0
        self.index_full = False

    def note(self, last_offset: int, max_timestamp: int, size: int, config: LogConfig) -> None:
        """Adds a batch at the end of this segment, and an index entry if one is due."""
        position = self.size
        if position == 0:
            self.first_timestamp = max_timestamp
        if max_timestamp > self.max_timestamp:
            self.max_timestamp, self.max_timestamp_offset = max_timestamp, last_offset
        if self.bytes_since_entry > config.index_interval_bytes:
            self._add_entry(last_offset, position, config.segment_index_bytes)
        self.bytes_since_entry += size
        self.size = position + size

    def note_ended(self, ended: CompletedTransaction) -> None:
        """Adds a transaction whose marker is in this segment."""
        if self.aborted is None:
            assert not self.has_aborted, "the index must be loaded before it grows"
            self.aborted = TransactionIndex()
        self.aborted.note(ended)
        self.has_aborted = len(self.aborted) > 0

    def finish_indexing(self) -> None:
        """Ends the time index of a closed segment with its largest timestamp."""
        assert self.times is not None
        self.times.append(self.max_timestamp, self.max_timestamp_offset - self.base_offset)

    def can_hold(self, last_offset: int) -> bool:
        return last_offset - self.base_offset <= INT32_MAX

    def _add_entry(self, last_offset: int, position: int, index_bytes_max: int) -> None:
        assert self.offsets is not None
        assert self.times is not None
        self.offsets.append(last_offset - self.base_offset, position)
        self.times.append(self.max_timestamp, self.max_timestamp_offset - self.base_offset)
        self.bytes_since_entry = 0
        # The last slot of the time index is reserved for the entry that closing the segment adds.
        self.index_full = (
            len(self.offsets) >= index_bytes_max // OFFSET_ENTRY_BYTES
            or len(self.times) >= index_bytes_max // TIME_ENTRY_BYTES - 1
        )


class LogSegments:
    """Grows in place; any other change creates a new list, so that readers can keep using theirs."""

    __slots__ = ("bases", "items")

    def __init__(self, segments: Iterable[LogSegment]) -> None:
        self.items = list(segments)
        self.bases = [segment.base_offset for segment in self.items]
        for segment, following in zip(self.items, self.items[1:], strict=False):
            assert segment.base_offset < following.base_offset, (segment, following)
            segment.next_base = following.base_offset
        if self.items:
            self.items[-1].next_base = None

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[LogSegment]:
        return iter(self.items)

    @property
    def first(self) -> LogSegment:
        return self.items[0]

    @property
    def last(self) -> LogSegment:
        return self.items[-1]

    @property
    def size_bytes(self) -> int:
        return sum(segment.size for segment in self.items)

    def add(self, segment: LogSegment) -> None:
        # Readers find a segment by its base offset, so that must be added last.
        self.items[-1].next_base = segment.base_offset
        self.items.append(segment)
        self.bases.append(segment.base_offset)

    def slot_of(self, offset: int) -> int:
        """Returns the slot of the segment that contains an offset, or contained it before the log was compacted."""
        return max(bisect_right(self.bases, offset) - 1, 0)

    def holding(self, offset: int) -> LogSegment:
        return self.items[self.slot_of(offset)]

    def without(self, gone: Sequence[LogSegment]) -> "LogSegments":
        leaving = set(gone)
        return LogSegments(segment for segment in self.items if segment not in leaving)

    def replaced(self, old: Sequence[LogSegment], new: Sequence[LogSegment]) -> "LogSegments":
        leaving = set(old)
        kept = [segment for segment in self.items if segment not in leaving]
        return LogSegments(sorted([*kept, *new], key=lambda segment: segment.base_offset))
