"""One segment: a log file named by its base offset, and what is known of it without reading it."""

from pathlib import Path
from typing import Final

from penstock.log.aborted import AbortedIndex
from penstock.log.config import INT32_MAX, LogConfig
from penstock.log.index import OFFSET_ENTRY_BYTES, TIME_ENTRY_BYTES, OffsetIndex, TimeIndex
from penstock.log.names import DELETED, INDEX, LOG, TIME_INDEX, TRANSACTION_INDEX, offset_file
from penstock.log.transactions import Ended
from penstock.log.walk import Hole

#: "Not looked up yet", as -1 says that no batch has a timestamp.
UNKNOWN: Final = -2


class Segment:
    """Light on purpose: opening a log makes one for each file and reads none of them.

    `offsets` and `times` are None until somebody looks something up; the one being written always has them. So is
    `aborted`, of a segment that `has_aborted` transactions, which few have.
    `next_base` is the base offset of the segment that follows, None for the last one. A `retired` one has left
    its log; who reads it still may finish.
    """

    __slots__ = (
        "aborted",
        "base_offset",
        "bytes_since_entry",
        "cleaned",
        "created_ms",
        "directory",
        "first_timestamp",
        "has_aborted",
        "holes",
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
        self.first_timestamp = UNKNOWN
        self.max_timestamp = UNKNOWN
        self.max_timestamp_offset = base_offset
        self.offsets: OffsetIndex | None = None
        self.times: TimeIndex | None = None
        self.aborted: AbortedIndex | None = None
        self.has_aborted = False
        #: Damaged bytes, which stay in the file and are passed over.
        self.holes: tuple[Hole, ...] = ()
        self.bytes_since_entry = 0
        self.index_full = False

    def __repr__(self) -> str:
        return f"<Segment {self.path.name} {self.size} bytes>"

    @property
    def path(self) -> Path:
        return self.file(LOG)

    @property
    def is_deleted(self) -> bool:
        return self.suffix == DELETED

    def file(self, kind: str, suffix: str | None = None) -> Path:
        return self.directory / offset_file(self.base_offset, kind, self.suffix if suffix is None else suffix)

    @property
    def index_files(self) -> tuple[Path, Path]:
        return self.file(INDEX), self.file(TIME_INDEX)

    @property
    def transaction_index_file(self) -> Path:
        return self.file(TRANSACTION_INDEX)

    @property
    def loaded_indexes(self) -> tuple[OffsetIndex, TimeIndex]:
        assert self.offsets is not None
        assert self.times is not None
        return self.offsets, self.times

    def start_indexing(self) -> None:
        """Forget what was known of the content; `note` then learns it batch by batch."""
        self.size = 0
        self.first_timestamp = UNKNOWN
        self.max_timestamp = -1
        self.max_timestamp_offset = self.base_offset
        self.offsets, self.times = OffsetIndex(), TimeIndex()
        self.aborted, self.has_aborted = None, False
        self.bytes_since_entry = 0
        self.index_full = False

    def note(self, last_offset: int, max_timestamp: int, size: int, config: LogConfig) -> None:
        """A batch now ends this segment; make an index entry when one is due."""
        position = self.size
        if position == 0:
            self.first_timestamp = max_timestamp
        if max_timestamp > self.max_timestamp:
            self.max_timestamp, self.max_timestamp_offset = max_timestamp, last_offset
        if self.bytes_since_entry > config.index_interval_bytes:
            self._add_entry(last_offset, position, config.segment_index_bytes)
        self.bytes_since_entry += size
        self.size = position + size

    def note_ended(self, ended: Ended) -> None:
        """The marker of a transaction is in this segment."""
        if self.aborted is None:
            assert not self.has_aborted, "the index must be loaded before it grows"
            self.aborted = AbortedIndex()
        self.aborted.note(ended)
        self.has_aborted = len(self.aborted) > 0

    def finish_indexing(self) -> None:
        """The time index of a closed segment ends with its largest timestamp."""
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
        # The last slot of the time index is kept for the entry that closing the segment adds.
        self.index_full = (
            len(self.offsets) >= index_bytes_max // OFFSET_ENTRY_BYTES
            or len(self.times) >= index_bytes_max // TIME_ENTRY_BYTES - 1
        )
