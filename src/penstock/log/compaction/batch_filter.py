"""What compaction retains of each batch: the rules, without files.

A record is retained when it is the latest of its key or lies beyond the offset map. The first pass that sees a
tombstone gives its batch a delete horizon; a later pass removes the tombstone once that time has passed. The marker
of a transaction that has no data left is removed in the same way. A batch that holds the last sequence or epoch of
a live producer, or the last offset of the pass, is retained even when it is empty. Offsets, sequences, epochs,
timestamps and codecs do not change. Control batches that are not markers contain held records (see
`penstock.scheduling`). They are removed once the schedule log has taken those records over. Until then the batch after
each of them is retained, even if empty, because held records are valid only if it follows them.

`OffsetMap` holds the latest offset of every key in the dirty part of a log in a bounded amount of memory. It does
not keep keys: an entry is a 16-byte hash and an offset in flat arrays, 24 bytes in all. The map grows with the
number of keys and refuses the key that would take it past its bound.

`TransactionLookahead` finds how each transaction ended. A data batch comes before the marker that decides it, so
the lookahead reads ahead to the marker. In a log without transactions it reads nothing.
"""

import struct
from array import array
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b
from typing import Final, NamedTuple

from penstock.protocol.compression import BytesLike, compress
from penstock.protocol.record_batch import (
    CODEC_MASK,
    DELETE_HORIZON,
    LOG_APPEND_TIME,
    NO_PRODUCER_ID,
    NO_TIMESTAMP,
    BatchHeader,
    RecordSpan,
    open_batch,
    pack_batch,
    parse_end_marker,
    scan_records,
    shift_timestamp,
    wrap_int64,
)

OFFSET_MAP_ENTRY_BYTES: Final = 24
#: Open addressing slows down sharply above this load.
OFFSET_MAP_LOAD_MAX: Final = 0.75

_HASH_HALVES: Final = struct.Struct("<QQ")
_INITIAL_SLOTS: Final = 64
_EMPTY_SLOT: Final = 0  # offsets are stored plus one, so that a fresh table is all zeros


class OffsetMap:
    __slots__ = (
        "_entries_max",
        "_highs",
        "_lows",
        "_offsets",
        "_slots",
        "_slots_max",
        "entries",
        "latest_offset",
    )

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes` bounds the table, also while its entries move to a larger one."""
        self._slots_max = max_bytes // OFFSET_MAP_ENTRY_BYTES
        if self._slots_max < 2:
            raise ValueError(f"{max_bytes} bytes cannot hold a single key")
        self.entries = 0
        #: The map covers every offset up to this one.
        self.latest_offset = -1
        self._allocate(min(_INITIAL_SLOTS, self._slots_max))

    def put(self, key: bytes, offset: int) -> bool:
        """Replaces an earlier offset of the key. Returns False, with nothing changed, if the key does not fit."""
        assert offset > self.latest_offset, "offsets come in order"
        high, low = _HASH_HALVES.unpack(blake2b(key, digest_size=16).digest())
        slot = self._slot(high, low)
        if self._offsets[slot] == _EMPTY_SLOT:
            if self.entries >= self._entries_max:
                if not self._grow():
                    return False
                slot = self._slot(high, low)
            self._highs[slot], self._lows[slot] = high, low
            self.entries += 1
        self._offsets[slot] = offset + 1
        self.latest_offset = offset
        return True

    def get(self, key: bytes) -> int:
        """Returns the newest offset of the key, or -1."""
        high, low = _HASH_HALVES.unpack(blake2b(key, digest_size=16).digest())
        return self._offsets[self._slot(high, low)] - 1

    def cover(self, offset: int) -> None:
        """Marks every offset up to this one as covered, with or without keys."""
        self.latest_offset = max(self.latest_offset, offset)

    @property
    def size_bytes(self) -> int:
        return self._slots * OFFSET_MAP_ENTRY_BYTES

    def _slot(self, high: int, low: int) -> int:
        """Returns the slot of this hash, or the empty slot where it belongs."""
        offsets, lows, highs, slots = self._offsets, self._lows, self._highs, self._slots
        slot = low % slots
        while offsets[slot] != _EMPTY_SLOT and (lows[slot] != low or highs[slot] != high):
            slot = slot + 1 if slot + 1 < slots else 0
        return slot

    def _allocate(self, slots: int) -> None:
        self._slots = slots
        self._entries_max = min(
            int(slots * OFFSET_MAP_LOAD_MAX), slots - 1
        )  # one empty slot ends every search
        self._highs, self._lows = (array("Q", (0,)) * slots for _ in range(2))
        self._offsets = array("q", (_EMPTY_SLOT,)) * slots

    def _grow(self) -> bool:
        """Moves to a table of at most twice the size; both must fit the bound while the entries move."""
        slots = min(2 * self._slots, self._slots_max - self._slots)
        if slots <= self._slots:
            return False
        entries = zip(self._highs, self._lows, self._offsets, strict=True)
        self._allocate(slots)
        for high, low, stored in entries:
            if stored != _EMPTY_SLOT:
                slot = self._slot(high, low)
                self._highs[slot], self._lows[slot], self._offsets[slot] = high, low, stored
        return True


#: Reads the control batches from an offset on, in order.
ReadControlBatches = Callable[[int], Generator[tuple[BatchHeader, bytes], None, None]]


class TransactionOutcome(Enum):
    COMMITTED = "committed"
    ABORTED = "aborted"
    OPEN = "open"


class _MarkerOutcome(NamedTuple):
    marker_offset: int
    outcome: TransactionOutcome


class TransactionLookahead:
    """Must be queried in the order of the log; call `close` at the end."""

    __slots__ = ("_ahead", "_ended", "_read_from")

    def __init__(self, read_from: ReadControlBatches) -> None:
        self._read_from = read_from
        self._ahead: Generator[tuple[BatchHeader, bytes], None, None] | None = None
        self._ended: dict[int, deque[_MarkerOutcome]] = {}

    def outcome(self, header: BatchHeader) -> TransactionOutcome:
        """Returns the outcome of the transaction that this data batch belongs to."""
        assert header.is_transactional
        assert not header.is_control
        self._forget(header.producer_id, header.base_offset)
        while not (ended := self._ended.get(header.producer_id)):
            if not self._read_on(header.base_offset):
                return TransactionOutcome.OPEN
            self._forget(header.producer_id, header.base_offset)  # a transaction that wrote nothing here
        return ended[0].outcome

    def passed(self, marker: BatchHeader) -> None:
        """The caller has read this marker, and will not query anything before it again."""
        self._forget(marker.producer_id, marker.base_offset + 1)

    def close(self) -> None:
        """Releases the files that are being read ahead."""
        if self._ahead is not None:
            self._ahead.close()

    def _forget(self, producer_id: int, before_offset: int) -> None:
        ended = self._ended.get(producer_id)
        while ended and ended[0].marker_offset < before_offset:
            ended.popleft()
        if ended is not None and not ended:
            del self._ended[producer_id]

    def _read_on(self, start_offset: int) -> bool:
        """Reads one control batch further; returns False at the end."""
        if self._ahead is None:
            self._ahead = self._read_from(start_offset)
        for header, batch in self._ahead:
            if (outcome := marker_outcome(header, batch)) is not None:
                ended = self._ended.setdefault(header.producer_id, deque())
                ended.append(_MarkerOutcome(header.base_offset, outcome))
            return True
        return False


def marker_outcome(header: BatchHeader, batch: BytesLike) -> TransactionOutcome | None:
    """Returns the outcome of its producer's transaction if this batch is a marker, otherwise None."""
    marker = parse_end_marker(batch) if header.is_control else None
    if marker is None:
        return None
    return TransactionOutcome.COMMITTED if marker.committed else TransactionOutcome.ABORTED


class LastRecord(NamedTuple):
    """What the log must retain of a live producer to restore its state after a restart."""

    data_offset: int | None  # the last offset of its newest data batch; None if only markers are left
    epoch: int


@dataclass(slots=True, kw_only=True)
class CleanerStats:
    bytes_read: int = 0
    bytes_written: int = 0
    records_read: int = 0
    records_written: int = 0
    tombstones_removed: int = 0
    keyless_removed: int = 0
    aborted_removed: int = 0


class _RecordDecision(Enum):
    KEEP = "keep"
    SUPERSEDED = "superseded"
    EXPIRED = "expired"  # a tombstone whose delete horizon has passed
    KEYLESS = "keyless"


class _RetainedRecords(NamedTuple):
    """The byte ranges of the retained records in the body, adjacent ones merged: start, end, start, end, ..."""

    ranges: "array[int]"
    records: int
    timestamp_max: int
    tombstone: bool


class BatchFilter:
    """Must be given every batch of the pass, in order."""

    __slots__ = (
        "_after_held",
        "_body_bytes_max",
        "_horizon_ms",
        "_keys",
        "_last_records",
        "_now_ms",
        "_outcomes",
        "_taken_offset",
        "_unended",
        "_upper_offset",
        "stats",
    )

    def __init__(
        self,
        *,
        keys: OffsetMap,
        outcomes: TransactionLookahead,
        last_records: Mapping[int, LastRecord],
        upper_offset: int,
        now_ms: int,
        delete_retention_ms: int,
        body_bytes_max: int,
        taken_offset: int = 0,
    ) -> None:
        """Held records before `taken_offset` have been taken over."""
        self._keys = keys
        self._outcomes = outcomes
        self._last_records = last_records
        self._upper_offset = upper_offset
        self._now_ms = now_ms
        # The sum may overflow: delete.retention.ms may be as large as any timestamp.
        self._horizon_ms = min(now_ms + delete_retention_ms, _TIMESTAMP_MAX)
        self._body_bytes_max = body_bytes_max
        self._taken_offset = taken_offset
        self._after_held = -1  # the offset of the batch after held records
        self._unended: set[int] = set()  # producers with data seen since their last marker
        self.stats = CleanerStats()

    def apply(self, header: BatchHeader, batch: BytesLike) -> BytesLike | None:
        """Returns the batch to write in place of this one; None to remove it."""
        output: BytesLike | None
        if header.record_count == 0:
            output = self._emptied(header, batch)
        elif header.is_control:
            output = self._control(header, batch)
        else:
            output = self._data(header, batch)
        self.stats.bytes_read += len(batch)
        self.stats.records_read += header.record_count
        self.stats.bytes_written += 0 if output is None else len(output)
        return output

    def _emptied(self, header: BatchHeader, batch: BytesLike) -> BytesLike | None:
        """Keeps a batch that an earlier pass emptied, as long as it is needed."""
        if header.is_transactional and not header.is_control:
            self._unended.add(header.producer_id)
        return batch if self._must_survive(header) else None

    def _control(self, header: BatchHeader, batch: BytesLike) -> BytesLike | None:
        if marker_outcome(header, batch) is None:
            if header.base_offset < self._taken_offset:
                return self._without_records(header)
            self._after_held = header.last_offset + 1
            return self._unchanged(header, batch)
        self._outcomes.passed(header)
        if header.producer_id in self._unended:
            self._unended.remove(header.producer_id)
            return self._unchanged(header, batch)
        if header.delete_horizon_ms is None:
            return self._marker_with_horizon(header, batch)
        if self._now_ms < header.delete_horizon_ms:
            return self._unchanged(header, batch)
        return self._without_records(header)

    def _marker_with_horizon(self, header: BatchHeader, batch: BytesLike) -> bytearray:
        """Retains the whole marker: its keys are not record keys, so the offset map does not apply to them."""
        _, body = open_batch(batch, self._body_bytes_max)
        whole = _RetainedRecords(array("q"), header.record_count, header.max_timestamp, tombstone=False)
        self.stats.records_written += header.record_count
        return self._with_horizon(header, body, scan_records(header, body), whole)

    def _data(self, header: BatchHeader, batch: BytesLike) -> BytesLike | None:
        if header.is_transactional:
            self._unended.add(header.producer_id)
            match self._outcomes.outcome(header):
                case TransactionOutcome.ABORTED:
                    self.stats.aborted_removed += header.record_count
                    return self._without_records(header)
                case TransactionOutcome.OPEN:
                    return self._unchanged(header, batch)
        if header.base_offset > self._keys.latest_offset:
            return self._unchanged(header, batch)
        return self._by_key(header, batch)

    def _by_key(self, header: BatchHeader, batch: BytesLike) -> BytesLike | None:
        _, body = open_batch(batch, self._body_bytes_max)
        kept = self._kept(header, body)
        self.stats.records_written += kept.records
        if kept.records == 0:
            return self._without_records(header)
        if kept.tombstone and header.delete_horizon_ms is None:
            spans = scan_records(header, body)
            survivors = (span for span in spans if self._verdict(header, span) is _RecordDecision.KEEP)
            return self._with_horizon(header, body, survivors, kept)
        if kept.records == header.record_count:
            return batch
        view = memoryview(body)
        ranges = zip(kept.ranges[::2], kept.ranges[1::2], strict=True)
        return _repack_batch(header, b"".join(view[start:end] for start, end in ranges), kept)

    def _kept(self, header: BatchHeader, body: bytes | memoryview) -> _RetainedRecords:
        ranges, count, tombstone = array("q"), 0, False
        timestamp_max = header.max_timestamp if header.attributes & LOG_APPEND_TIME else NO_TIMESTAMP
        for span in scan_records(header, body):
            if not self._counted(self._verdict(header, span)):
                continue
            count += 1
            tombstone = tombstone or not span.has_value
            timestamp_max = max(timestamp_max, self._timestamp(header, span))
            if ranges and ranges[-1] == span.start:
                ranges[-1] = span.end
            else:
                ranges.extend((span.start, span.end))
        return _RetainedRecords(ranges, count, timestamp_max, tombstone)

    def _verdict(self, header: BatchHeader, span: RecordSpan) -> _RecordDecision:
        offset = header.base_offset + span.offset_delta
        if offset > self._keys.latest_offset:
            return _RecordDecision.KEEP
        if span.key is None:
            return _RecordDecision.KEYLESS
        if offset < self._keys.get(span.key):
            return _RecordDecision.SUPERSEDED
        horizon_ms = header.delete_horizon_ms
        if span.has_value or horizon_ms is None or self._now_ms < horizon_ms:
            return _RecordDecision.KEEP
        return _RecordDecision.EXPIRED

    def _counted(self, verdict: _RecordDecision) -> bool:
        if verdict is _RecordDecision.EXPIRED:
            self.stats.tombstones_removed += 1
        elif verdict is _RecordDecision.KEYLESS:
            self.stats.keyless_removed += 1
        return verdict is _RecordDecision.KEEP

    @staticmethod
    def _timestamp(header: BatchHeader, span: RecordSpan) -> int:
        if header.attributes & LOG_APPEND_TIME:
            return header.max_timestamp
        return wrap_int64(header.base_timestamp + span.timestamp_delta)

    def _with_horizon(
        self,
        header: BatchHeader,
        body: bytes | memoryview,
        spans: Iterable[RecordSpan],
        kept: _RetainedRecords,
    ) -> bytearray:
        """The delete horizon replaces the base timestamp, so every timestamp delta is shifted."""
        shift_ms = header.base_timestamp - self._horizon_ms
        horizoned = header._replace(
            attributes=header.attributes | DELETE_HORIZON, base_timestamp=self._horizon_ms
        )
        return _repack_batch(
            horizoned, b"".join(shift_timestamp(body, span, shift_ms) for span in spans), kept
        )

    def _unchanged(self, header: BatchHeader, batch: BytesLike) -> BytesLike:
        self.stats.records_written += header.record_count
        return batch

    def _without_records(self, header: BatchHeader) -> bytearray | None:
        """Returns the batch without its records if its header is still needed, otherwise None."""
        if not self._must_survive(header):
            return None
        empty = header._replace(
            attributes=header.attributes & ~_EMPTY_BATCH_CLEARS, base_timestamp=NO_TIMESTAMP, record_count=0
        )
        return pack_batch(empty, b"")

    def _must_survive(self, header: BatchHeader) -> bool:
        if header.last_offset + 1 == self._upper_offset:
            return True  # otherwise the log would lose the last offset of the pass
        if header.base_offset == self._after_held:
            return True
        if header.producer_id == NO_PRODUCER_ID:
            return False
        last = self._last_records.get(header.producer_id)
        if last is None:
            return False
        if last.data_offset is None:
            return header.is_control and header.producer_epoch == last.epoch
        return header.last_offset == last.data_offset


def _repack_batch(header: BatchHeader, body: bytes, kept: _RetainedRecords) -> bytearray:
    rewritten = header._replace(max_timestamp=kept.timestamp_max, record_count=kept.records)
    return pack_batch(rewritten, compress(header.codec, body))


_TIMESTAMP_MAX: Final = (1 << 63) - 1
_EMPTY_BATCH_CLEARS: Final = CODEC_MASK | DELETE_HORIZON
