"""What compaction keeps of each batch: the rules, without files.

A record stays when it is the newest of its key or lies beyond the map. A tombstone gets a delete horizon on
the first pass that sees it and goes on a later pass, once that time has come; so does the marker of a
transaction that has no data left. A batch that holds a live producer's last sequence or epoch, or the last
offset of the pass, stays even when it is empty. Offsets, sequences, epochs, timestamps and codecs are kept.
Control batches that are no markers hold records back; they go once these are taken over, and until then the batch
after each of them stays, empty if need be, as it says that they count.
"""

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

from penstock.log.keymap import KeyMap
from penstock.log.outcomes import Outcome, TransactionOutcomes, marker_outcome
from penstock.protocol.compression import BytesLike, Codec, compress
from penstock.protocol.records import (
    CODEC_MASK,
    DELETE_HORIZON,
    LOG_APPEND_TIME,
    NO_PRODUCER_ID,
    NO_TIMESTAMP,
    BatchHeader,
    open_batch,
    pack_batch,
    wrap_int64,
)
from penstock.protocol.scan import RecordSpan, retimed, scan_records


class LastRecord(NamedTuple):
    """What the log must still be able to say about a live producer after a restart."""

    data_offset: int | None  # the last offset of its newest data batch; None when only markers are left
    epoch: int


@dataclass(slots=True, kw_only=True)
class CompactionStats:
    bytes_read: int = 0
    bytes_written: int = 0
    records_read: int = 0
    records_written: int = 0
    tombstones_removed: int = 0
    keyless_removed: int = 0
    aborted_removed: int = 0


class _Verdict(Enum):
    KEEP = "keep"
    SUPERSEDED = "superseded"
    EXPIRED = "expired"  # a tombstone whose horizon has passed
    KEYLESS = "keyless"


class _Kept(NamedTuple):
    """Where the kept records lie in the body, neighbours merged: start, end, start, end, ..."""

    ranges: "array[int]"
    records: int
    timestamp_max: int
    tombstone: bool


class BatchFilter:
    """Fed every batch of the pass in order."""

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
        keys: KeyMap,
        outcomes: TransactionOutcomes,
        last_records: Mapping[int, LastRecord],
        upper_offset: int,
        now_ms: int,
        delete_retention_ms: int,
        body_bytes_max: int,
        taken_offset: int = 0,
    ) -> None:
        """Records held back before `taken_offset` have been taken over."""
        self._keys = keys
        self._outcomes = outcomes
        self._last_records = last_records
        self._upper_offset = upper_offset
        self._now_ms = now_ms
        # delete.retention.ms may be as large as a timestamp.
        self._horizon_ms = min(now_ms + delete_retention_ms, _TIMESTAMP_MAX)
        self._body_bytes_max = body_bytes_max
        self._taken_offset = taken_offset
        self._after_held = -1  # the offset of the batch that decides on held records
        self._unended: set[int] = set()  # producers with data seen since their last marker
        self.stats = CompactionStats()

    def apply(self, header: BatchHeader, batch: BytesLike) -> BytesLike | None:
        """What to write in place of this batch; None when nothing of it stays."""
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
        """An earlier pass kept the shell; it stays for as long as it has a reason to."""
        if header.is_transactional and not header.is_control:
            self._unended.add(header.producer_id)
        return batch if self._must_survive(header) else None

    def _control(self, header: BatchHeader, batch: BytesLike) -> BytesLike | None:
        if marker_outcome(header, batch) is None:
            if header.base_offset < self._taken_offset:
                return self._shell(header)
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
        return self._shell(header)

    def _marker_with_horizon(self, header: BatchHeader, batch: BytesLike) -> bytearray:
        """Whole: what looks like a key in a marker is none, and the map has no say."""
        _, body = open_batch(batch, self._body_bytes_max)
        whole = _Kept(array("q"), header.record_count, header.max_timestamp, tombstone=False)
        self.stats.records_written += header.record_count
        return self._with_horizon(header, body, scan_records(header, body), whole)

    def _data(self, header: BatchHeader, batch: BytesLike) -> BytesLike | None:
        if header.is_transactional:
            self._unended.add(header.producer_id)
            match self._outcomes.outcome(header):
                case Outcome.ABORTED:
                    self.stats.aborted_removed += header.record_count
                    return self._shell(header)
                case Outcome.OPEN:
                    return self._unchanged(header, batch)
        if header.base_offset > self._keys.latest_offset:
            return self._unchanged(header, batch)
        return self._by_key(header, batch)

    def _by_key(self, header: BatchHeader, batch: BytesLike) -> BytesLike | None:
        _, body = open_batch(batch, self._body_bytes_max)
        kept = self._kept(header, body)
        self.stats.records_written += kept.records
        if kept.records == 0:
            return self._shell(header)
        if kept.tombstone and header.delete_horizon_ms is None:
            spans = scan_records(header, body)
            survivors = (span for span in spans if self._verdict(header, span) is _Verdict.KEEP)
            return self._with_horizon(header, body, survivors, kept)
        if kept.records == header.record_count:
            return batch
        view = memoryview(body)
        ranges = zip(kept.ranges[::2], kept.ranges[1::2], strict=True)
        return _repacked(header, b"".join(view[start:end] for start, end in ranges), kept)

    def _kept(self, header: BatchHeader, body: bytes | memoryview) -> _Kept:
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
        return _Kept(ranges, count, timestamp_max, tombstone)

    def _verdict(self, header: BatchHeader, span: RecordSpan) -> _Verdict:
        offset = header.base_offset + span.offset_delta
        if offset > self._keys.latest_offset:
            return _Verdict.KEEP
        if span.key is None:
            return _Verdict.KEYLESS
        if offset < self._keys.get(span.key):
            return _Verdict.SUPERSEDED
        horizon_ms = header.delete_horizon_ms
        if span.has_value or horizon_ms is None or self._now_ms < horizon_ms:
            return _Verdict.KEEP
        return _Verdict.EXPIRED

    def _counted(self, verdict: _Verdict) -> bool:
        if verdict is _Verdict.EXPIRED:
            self.stats.tombstones_removed += 1
        elif verdict is _Verdict.KEYLESS:
            self.stats.keyless_removed += 1
        return verdict is _Verdict.KEEP

    @staticmethod
    def _timestamp(header: BatchHeader, span: RecordSpan) -> int:
        if header.attributes & LOG_APPEND_TIME:
            return header.max_timestamp
        return wrap_int64(header.base_timestamp + span.timestamp_delta)

    def _with_horizon(
        self, header: BatchHeader, body: bytes | memoryview, spans: Iterable[RecordSpan], kept: _Kept
    ) -> bytearray:
        """The horizon takes the place of the base timestamp, so every timestamp delta moves."""
        shift_ms = header.base_timestamp - self._horizon_ms
        horizoned = header._replace(
            attributes=header.attributes | DELETE_HORIZON, base_timestamp=self._horizon_ms
        )
        return _repacked(horizoned, b"".join(retimed(body, span, shift_ms) for span in spans), kept)

    def _unchanged(self, header: BatchHeader, batch: BytesLike) -> BytesLike:
        self.stats.records_written += header.record_count
        return batch

    def _shell(self, header: BatchHeader) -> bytearray | None:
        """Nothing of the batch stays but, where someone relies on it, its header."""
        return _empty_batch(header) if self._must_survive(header) else None

    def _must_survive(self, header: BatchHeader) -> bool:
        if header.last_offset + 1 == self._upper_offset:
            return True  # or the log would forget how far it had come
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


def _repacked(header: BatchHeader, body: bytes, kept: _Kept) -> bytearray:
    rewritten = header._replace(max_timestamp=kept.timestamp_max, record_count=kept.records)
    return pack_batch(rewritten, compress(header.codec, body))


_TIMESTAMP_MAX: Final = (1 << 63) - 1
_EMPTY_CLEARS: Final = CODEC_MASK | DELETE_HORIZON


def _empty_batch(header: BatchHeader) -> bytearray:
    attributes = (header.attributes & ~_EMPTY_CLEARS) | Codec.NONE
    return pack_batch(
        header._replace(attributes=attributes, base_timestamp=NO_TIMESTAMP, record_count=0), b""
    )
