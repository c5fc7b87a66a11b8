"""Record batches (magic 2): the header for the hot path, and codecs for callers that need the records.

`decode_records` returns whole records. `scan_records` only says where each record lies, its key, and whether it has
a value; compaction and the checks of compacted topics use it. It copies nothing but the key, and retained records
can be written again byte for byte.

crc32c comes from the compiled module inside the `crc32c` package. The package's own `__init__` looks up its version
through importlib.metadata and imports argparse, which would add 25 ms to every start.
"""

import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec
from typing import Final, NamedTuple, cast

from penstock.protocol.compression import BytesLike, Codec, compress, decompress
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.steps import Steps
from penstock.protocol.wire import encode_varint, read_varint, read_varlong

_CRC32C_MODULE = "crc32c._crc32c"


def _load_crc32c() -> Callable[..., int]:
    package = find_spec("crc32c")
    spec = PathFinder.find_spec(_CRC32C_MODULE, package.submodule_search_locations) if package else None
    if spec is None or spec.loader is None:
        from crc32c import crc32c as function

        return cast(Callable[..., int], function)
    module = sys.modules.get(_CRC32C_MODULE)
    if module is None:
        module = sys.modules[_CRC32C_MODULE] = module_from_spec(spec)
        spec.loader.exec_module(module)
    return cast(Callable[..., int], module.crc32c)


crc32c = _load_crc32c()


#: base offset, length, leader epoch, magic, crc, attributes, last offset delta, base timestamp,
#: max timestamp, producer id, producer epoch, base sequence, record count
BATCH_HEADER: Final = struct.Struct(">qiibIhiqqqhii")
BATCH_HEADER_BYTES: Final = BATCH_HEADER.size
#: At least one byte each: length, attributes, timestamp and offset deltas, lengths of key and value, number of headers.
RECORD_BYTES_MIN: Final = 7
#: The length field does not count the base offset and itself.
LOG_OVERHEAD_BYTES: Final = 12
CRC_OFFSET: Final = 17
#: The checksum covers everything from the attributes on, so that a broker can set offset and leader epoch.
ATTRIBUTES_OFFSET: Final = 21
_CRC: Final = struct.Struct(">I")

_ATTRIBUTES: Final = struct.Struct(">h")
_PRODUCER: Final = struct.Struct(">qhi")  # id, epoch, base sequence
_PRODUCER_AT: Final = 43

CODEC_MASK: Final = 0x07
LOG_APPEND_TIME: Final = 0x08
TRANSACTIONAL: Final = 0x10
CONTROL: Final = 0x20
DELETE_HORIZON: Final = 0x40

NO_PRODUCER_ID: Final = -1
NO_TIMESTAMP: Final = -1

#: The key of a control record: version, type.
_CONTROL_KEY: Final = struct.Struct(">hh")
#: The value of a transaction's end marker: version, epoch of its coordinator.
_END_MARKER: Final = struct.Struct(">hi")
_ABORT_TYPE: Final = 0
_COMMIT_TYPE: Final = 1
_END_MARKER_BYTES_MAX: Final = 256
#: What one step of a search for keys looks at: records of the usual shape, or other records and headers.
_PLAIN_RECORDS_STEP: Final = 500
_PLAIN_RECORDS_BYTES: Final = 16 * 1024
_PLAIN_HEADERS_MAX: Final = 8
_OTHER_RECORDS_STEP: Final = 100
_WRONG_LENGTH: Final = "record length does not match its content"


class BatchHeader(NamedTuple):
    base_offset: int
    length: int
    leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    record_count: int

    @property
    def size(self) -> int:
        return self.length + LOG_OVERHEAD_BYTES

    @property
    def last_offset(self) -> int:
        return self.base_offset + self.last_offset_delta

    @property
    def codec(self) -> Codec:
        try:
            return Codec(self.attributes & CODEC_MASK)
        except ValueError:
            raise _corrupt("unknown compression codec") from None

    @property
    def is_control(self) -> bool:
        return bool(self.attributes & CONTROL)

    @property
    def is_transactional(self) -> bool:
        return bool(self.attributes & TRANSACTIONAL)

    @property
    def delete_horizon_ms(self) -> int | None:
        """Set by the first compaction pass that saw a tombstone; the base timestamp then holds it."""
        return self.base_timestamp if self.attributes & DELETE_HORIZON else None


class Record(NamedTuple):
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()


class EndMarker(NamedTuple):
    """How a producer's transaction ended in a partition."""

    producer_id: int
    producer_epoch: int
    coordinator_epoch: int
    committed: bool


def wrap_int64(value: int) -> int:
    """Timestamps and their deltas overflow as in the 64-bit arithmetic of clients, so that both sides agree."""
    return ((value + (1 << 63)) & ((1 << 64) - 1)) - (1 << 63)


def read_header(data: BytesLike, position: int = 0) -> BatchHeader:
    return BatchHeader._make(BATCH_HEADER.unpack_from(data, position))


def checksum(batch: BytesLike) -> int:
    """The checksum that the header of this one batch should have."""
    return int(crc32c(memoryview(batch)[ATTRIBUTES_OFFSET:]))


def encode_batch(
    records: Sequence[Record],
    *,
    base_offset: int | None = None,
    last_offset: int | None = None,
    base_timestamp: int | None = None,
    leader_epoch: int = -1,
    codec: Codec = Codec.NONE,
    attributes: int = 0,
    producer_id: int = NO_PRODUCER_ID,
    producer_epoch: int = -1,
    base_sequence: int = -1,
    max_timestamp: int | None = None,
) -> bytearray:
    """One batch of these records. Offsets may have gaps, as compaction leaves them.

    `base_offset` and `last_offset` default to the offsets of the first and last record; a batch without records, which
    compaction retains for its producer's epoch, needs both.
    """
    first = records[0].offset if base_offset is None else base_offset
    last = records[-1].offset if last_offset is None else last_offset
    base_time = (
        (records[0].timestamp if records else NO_TIMESTAMP) if base_timestamp is None else base_timestamp
    )
    if max_timestamp is None:
        max_timestamp = max((r.timestamp for r in records), default=NO_TIMESTAMP)
    body = compress(codec, b"".join(encode_record(r, first, base_time) for r in records))
    header = BatchHeader(
        base_offset=first,
        length=0,
        leader_epoch=leader_epoch,
        magic=2,
        crc=0,
        attributes=(attributes & ~CODEC_MASK) | codec,
        last_offset_delta=last - first,
        base_timestamp=base_time,
        max_timestamp=max_timestamp,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
        record_count=len(records),
    )
    return pack_batch(header, body)


def encode_coordinator_batch(
    entries: Sequence[tuple[bytes, bytes | None]],
    timestamp_ms: int,
    *,
    attributes: int = 0,
    producer_id: int = NO_PRODUCER_ID,
    producer_epoch: int = -1,
) -> bytearray:
    """One batch of keys and values with the same timestamp, as coordinators write it."""
    parts: list[bytes] = []
    for index, (key, value) in enumerate(entries):
        content = b"".join(
            (
                b"\x00\x00",
                encode_varint(index),
                *_encode_nullable_bytes(key),
                *_encode_nullable_bytes(value),
                b"\x00",
            )
        )
        parts += (encode_varint(len(content)), content)
    return pack_new_batch(
        b"".join(parts),
        len(entries),
        timestamp_ms,
        attributes=attributes,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
    )


def pack_new_batch(
    body: BytesLike,
    record_count: int,
    timestamp_ms: int,
    *,
    attributes: int = 0,
    producer_id: int = NO_PRODUCER_ID,
    producer_epoch: int = -1,
    base_sequence: int = -1,
) -> bytearray:
    """A new batch, not yet in a log, from its encoded (and compressed) records, which all have the same timestamp."""
    header = BatchHeader(
        base_offset=0,
        length=0,
        leader_epoch=-1,
        magic=2,
        crc=0,
        attributes=attributes,
        last_offset_delta=record_count - 1,
        base_timestamp=timestamp_ms,
        max_timestamp=timestamp_ms,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
        record_count=record_count,
    )
    return pack_batch(header, body)


def pack_batch(header: BatchHeader, body: BytesLike) -> bytearray:
    """The header followed by the encoded (and compressed) records. Sets length and checksum."""
    batch = bytearray(BATCH_HEADER_BYTES + len(body))
    BATCH_HEADER.pack_into(batch, 0, header.base_offset, len(batch) - LOG_OVERHEAD_BYTES, *header[2:])
    batch[BATCH_HEADER_BYTES:] = body
    _CRC.pack_into(batch, CRC_OFFSET, checksum(batch))
    return batch


def set_max_timestamp(batch: bytearray | memoryview, *, attributes: int, max_timestamp: int) -> None:
    """Rewrites these header fields (for LogAppendTime) and the checksum."""
    struct.pack_into(">h", batch, 21, attributes)
    struct.pack_into(">q", batch, 35, max_timestamp)
    _CRC.pack_into(batch, CRC_OFFSET, checksum(batch))


def set_producer_state(
    batch: bytearray | memoryview,
    *,
    producer_id: int,
    producer_epoch: int,
    base_sequence: int,
    is_transactional: bool,
) -> None:
    """Rewrites the producer fields of an encoded batch and the checksum."""
    (attributes,) = _ATTRIBUTES.unpack_from(batch, ATTRIBUTES_OFFSET)
    attributes = attributes | TRANSACTIONAL if is_transactional else attributes & ~TRANSACTIONAL
    _ATTRIBUTES.pack_into(batch, ATTRIBUTES_OFFSET, attributes)
    _PRODUCER.pack_into(batch, _PRODUCER_AT, producer_id, producer_epoch, base_sequence)
    _CRC.pack_into(batch, CRC_OFFSET, checksum(batch))


def open_batch(batch: BytesLike, max_bytes: int) -> tuple[BatchHeader, bytes | memoryview]:
    """The header of one batch, and its records decompressed to at most `max_bytes`. Raises CORRUPT_MESSAGE."""
    view = memoryview(batch)
    if len(view) < BATCH_HEADER_BYTES or (header := read_header(view)).size != len(view):
        raise _corrupt(f"{len(view)} bytes are not one whole batch")
    if header.record_count < 0 or header.last_offset_delta < 0:
        raise _corrupt("batch with a negative record count or offset delta")
    return header, decompress(header.codec, view[BATCH_HEADER_BYTES:], max_bytes)


def decode_records(batch: BytesLike, max_bytes: int) -> list[Record]:
    """All records of one whole batch, which may decompress to `max_bytes`. Raises CORRUPT_MESSAGE."""
    return list(iter_records(batch, max_bytes))


def iter_records(batch: BytesLike, max_bytes: int) -> Iterator[Record]:
    """Decode the records one by one, as `decode_records` does; the batch counts as damaged also if the last one is."""
    header, body = open_batch(batch, max_bytes)
    append_time = header.max_timestamp if header.attributes & LOG_APPEND_TIME else None
    position, offset = 0, header.base_offset - 1
    for _ in range(header.record_count):
        record, position = _decode_record(body, position, header, append_time)
        if not offset < record.offset <= header.last_offset:
            raise _corrupt(f"record out of order at offset {record.offset}")
        offset = record.offset
        yield record
    if position != len(body):
        raise _corrupt(f"{len(body) - position} bytes after the last record")


def iter_batches(data: BytesLike) -> Iterator[tuple[BatchHeader, memoryview]]:
    """Whole batches in a slice of a log; skips a partial batch at the end."""
    view, position = memoryview(data), 0
    while position + BATCH_HEADER_BYTES <= len(view):
        header = read_header(view, position)
        end = position + header.size
        if header.size < BATCH_HEADER_BYTES or end > len(view):
            return
        yield header, view[position:end]
        position = end


class BatchOffsets:
    """Checks that batches which are read from a log follow each other: no checksum covers their base offsets.

    Where they contradict each other, one of two is wrong, and more likely the one behind a gap, which compaction may
    have left.
    """

    __slots__ = ("_after", "_has_gap", "_is_first", "is_last_doubtful")

    def __init__(self, offset: int) -> None:
        """The first batch contains the offset, or comes after it."""
        self._after = offset
        self._is_first = True
        self._has_gap = False
        self.is_last_doubtful = False

    def follow(self, base_offset: int, last_offset: int) -> bool:
        """Return whether a batch may come next; if not, `is_last_doubtful` tells which of the two is damaged."""
        if (last_offset if self._is_first else base_offset) < self._after:
            self.is_last_doubtful = self._has_gap
            return False
        self._has_gap = base_offset > self._after
        self._after, self._is_first = last_offset + 1, False
        return True


def encode_record(record: Record, base_offset: int, base_timestamp: int) -> bytes:
    """Encode a record for a batch that begins at these."""
    parts = [
        b"\x00",
        encode_varint(wrap_int64(record.timestamp - base_timestamp)),
        encode_varint(record.offset - base_offset),
        *_encode_nullable_bytes(record.key),
        *_encode_nullable_bytes(record.value),
        encode_varint(len(record.headers)),
    ]
    for key, value in record.headers:
        parts += (
            *_encode_nullable_bytes(key.encode(errors="surrogateescape")),
            *_encode_nullable_bytes(value),
        )
    body = b"".join(parts)
    return encode_varint(len(body)) + body


def _encode_nullable_bytes(value: bytes | None) -> Iterable[bytes]:
    return (b"\x01",) if value is None else (encode_varint(len(value)), value)


def _decode_record(
    data: bytes | memoryview, position: int, header: BatchHeader, append_time: int | None
) -> tuple[Record, int]:
    length, position = read_varint(data, position)
    end = position + length
    if length < 0 or end > len(data):
        raise _corrupt(f"record of impossible length {length}")
    timestamp_delta, position = read_varlong(data, position + 1)
    offset_delta, position = read_varint(data, position)
    key, position = _read_nullable_bytes(data, position, end)
    value, position = _read_nullable_bytes(data, position, end)
    headers, position = _read_headers(data, position, end)
    if position != end:
        raise _corrupt("record length does not match its content")
    timestamp = header.base_timestamp + timestamp_delta if append_time is None else append_time
    return Record(header.base_offset + offset_delta, wrap_int64(timestamp), key, value, headers), end


def _read_headers(
    data: bytes | memoryview, position: int, end: int
) -> tuple[tuple[tuple[str, bytes | None], ...], int]:
    count, position = read_varint(data, position)
    # A header takes at least two bytes, so the remaining bytes bound the count.
    if count < 0 or count > (end - position) // 2:
        raise _corrupt(f"record with an impossible count of {count} headers")
    headers = []
    for _ in range(count):
        key, position = _read_nullable_bytes(data, position, end)
        value, position = _read_nullable_bytes(data, position, end)
        if key is None:
            raise _corrupt("record header without a key")
        headers.append((key.decode(errors="surrogateescape"), value))
    return tuple(headers), position


def _read_nullable_bytes(data: bytes | memoryview, position: int, end: int) -> tuple[bytes | None, int]:
    length, position = read_varint(data, position)
    if length == -1:
        return None, position
    if length < 0 or position + length > end:
        raise _corrupt(f"record field of impossible length {length}")
    return bytes(data[position : position + length]), position + length


# -- end markers of transactions -------------------------------------------------------------------------


def _end_marker_template(kind: int) -> bytes:
    record = Record(0, 0, key=_CONTROL_KEY.pack(0, kind), value=_END_MARKER.pack(0, 0))
    return bytes(encode_batch([record], attributes=TRANSACTIONAL | CONTROL))


#: End markers to fill in, by whether they commit. Templates, because a transaction writes one to each partition.
_END_MARKER_TEMPLATES: Final = {
    True: _end_marker_template(_COMMIT_TYPE),
    False: _end_marker_template(_ABORT_TYPE),
}
_END_MARKER_TEMPLATE_BYTES: Final = len(_END_MARKER_TEMPLATES[True])
#: Base and largest timestamp, producer id and epoch.
_TIMESTAMPS_AND_PRODUCER: Final = struct.Struct(">qqqh")
_TIMESTAMPS_AND_PRODUCER_AT: Final = 27
#: The last field of the value; only the number of headers follows it.
_COORDINATOR_EPOCH: Final = struct.Struct(">i")
_COORDINATOR_EPOCH_AT: Final = _END_MARKER_TEMPLATE_BYTES - _COORDINATOR_EPOCH.size - 1
_COMMITTED_BY_TEMPLATE: Final = {
    form[BATCH_HEADER_BYTES:_COORDINATOR_EPOCH_AT]: committed
    for committed, form in _END_MARKER_TEMPLATES.items()
}


def encode_end_marker(marker: EndMarker, timestamp_ms: int) -> bytearray:
    """The control batch that ends a transaction; the log sets its offset."""
    batch = bytearray(_END_MARKER_TEMPLATES[marker.committed])
    _TIMESTAMPS_AND_PRODUCER.pack_into(
        batch,
        _TIMESTAMPS_AND_PRODUCER_AT,
        timestamp_ms,
        timestamp_ms,
        marker.producer_id,
        marker.producer_epoch,
    )
    _COORDINATOR_EPOCH.pack_into(batch, _COORDINATOR_EPOCH_AT, marker.coordinator_epoch)
    _CRC.pack_into(batch, CRC_OFFSET, checksum(batch))
    return batch


def parse_end_marker(batch: BytesLike) -> EndMarker | None:
    """The end marker in this batch; None if it is another kind of batch."""
    header = read_header(batch)
    is_candidate = header.is_control and header.is_transactional and header.record_count == 1
    # Other control batches may be large; an end marker is small and never compressed.
    is_small = header.size == len(batch) <= _END_MARKER_BYTES_MAX
    if not (is_candidate and is_small) or header.attributes & CODEC_MASK:
        return None
    end = _end_from_template(batch) or _end_from_record(batch)
    return None if end is None else EndMarker(header.producer_id, header.producer_epoch, *end)


def _end_from_template(batch: BytesLike) -> tuple[int, bool] | None:
    """The coordinator epoch and the outcome; None if this broker would have written other bytes."""
    committed = _COMMITTED_BY_TEMPLATE.get(bytes(batch[BATCH_HEADER_BYTES:_COORDINATOR_EPOCH_AT]))
    if committed is None or len(batch) != _END_MARKER_TEMPLATE_BYTES or batch[-1]:
        return None
    return _COORDINATOR_EPOCH.unpack_from(batch, _COORDINATOR_EPOCH_AT)[0], committed


def _end_from_record(batch: BytesLike) -> tuple[int, bool] | None:
    """The same for markers of other brokers; newer versions of key and value only add fields at the end."""
    try:
        record = decode_records(batch, _END_MARKER_BYTES_MAX)[0]
    except ApiError:
        return None
    if len(record.key or b"") < _CONTROL_KEY.size or len(record.value or b"") < _END_MARKER.size:
        return None
    kind = _CONTROL_KEY.unpack_from(record.key or b"")[1]
    if kind not in (_ABORT_TYPE, _COMMIT_TYPE):
        return None
    return _END_MARKER.unpack_from(record.value or b"")[1], kind == _COMMIT_TYPE


class RecordSpan(NamedTuple):
    start: int
    time_start: int  # where the timestamp delta begins; the byte before it holds the attributes
    time_end: int
    end: int
    timestamp_delta: int
    offset_delta: int
    key: bytes | None
    has_value: bool


def scan_records(header: BatchHeader, body: bytes | memoryview) -> Iterator[RecordSpan]:
    """The spans of the records in order; checks every length and count. Raises CORRUPT_MESSAGE."""
    position, offset_delta = 0, -1
    for _ in range(header.record_count):
        span = _scan_record(body, position)
        if not offset_delta < span.offset_delta <= header.last_offset_delta:
            raise _corrupt(f"record out of order at offset delta {span.offset_delta}")
        position, offset_delta = span.end, span.offset_delta
        yield span
    if position != len(body):
        raise _corrupt(f"{len(body) - position} bytes after the last record")


def keyless_records(header: BatchHeader, body: bytes | memoryview, count_max: int) -> Steps[tuple[int, ...]]:
    """The indexes of the records without a key, at most so many. Raises CORRUPT_MESSAGE where `scan_records` does.

    A step looks at a bounded number of records and headers: a batch of 64 MB can have millions of either.
    """
    count, last_offset_delta = header.record_count, header.last_offset_delta
    position, offset_delta, index = 0, -1, 0
    keyless: list[int] = []
    while index < count:
        # A copy, because bytes are read faster than memory views; not of all, because that could take long.
        window = bytes(body[position : position + _PLAIN_RECORDS_BYTES])
        skipped, window_end, offset_delta = _skip_plain_records(
            window, offset_delta, last_offset_delta, min(count - index, _PLAIN_RECORDS_STEP)
        )
        index += skipped
        position += window_end
        left = 0 if skipped else _OTHER_RECORDS_STEP
        while index < count and left > 0:
            left -= 1
            span, headers_at = _scan_fields(body, position)
            if not offset_delta < span.offset_delta <= last_offset_delta:
                raise _corrupt(f"record out of order at offset delta {span.offset_delta}")
            header_count, position = _read_header_count(body, headers_at, span.end)
            while header_count:
                some = min(header_count, max(left, 1))
                position = _skip_headers(body, position, span.end, some)
                header_count -= some
                left -= some
                if left <= 0:
                    yield
                    left = _OTHER_RECORDS_STEP
            if position != span.end:
                raise _corrupt(_WRONG_LENGTH)
            if span.key is None and len(keyless) < count_max:
                keyless.append(index)
            offset_delta = span.offset_delta
            index += 1
        yield
    if position != len(body):
        raise _corrupt(f"{len(body) - position} bytes after the last record")
    return tuple(keyless)


def _skip_plain_records(
    data: bytes, offset_delta: int, last_offset_delta: int, count: int
) -> tuple[int, int, int]:
    """Skip valid records until one is not plain: it has no key, many headers, or a field that is long, cut or damaged.

    Returns how many were skipped, the next position and the last offset delta. A batch may have millions of records,
    so this calls nothing for each of them.
    """
    position = 0
    try:
        for number in range(count):
            length = data[position]
            end = position + 1 + (length >> 1)
            at = position + 2  # after the attributes
            if length & 0x81 or end > len(data):
                return number, position, offset_delta
            # The timestamp delta takes one to three bytes, as does the offset delta.
            if data[at] >= 0x80:
                at += 1
                if data[at] >= 0x80:
                    at += 1
            delta = data[at + 1]
            if data[at] >= 0x80 or delta & 0x01:
                return number, position, offset_delta
            at += 2
            if delta >= 0x80:
                delta = (delta & 0x7F) | data[at] << 7
                at += 1
                if delta >= 0x4000:
                    delta = (delta & 0x3FFF) | data[at] << 14
                    at += 1
                    if delta >= 0x200000:
                        return number, position, offset_delta
            delta >>= 1
            key = data[at]
            if key & 0x81 or not offset_delta < delta <= last_offset_delta:
                return number, position, offset_delta
            at += 1 + (key >> 1)
            value = data[at]
            if value & 0x80 or (value & 0x01 and value != 0x01):
                return number, position, offset_delta
            at += 1 + (value >> 1 if value != 0x01 else 0)
            at = _skip_plain_headers(data, at) if data[at] else at + 1
            if at != end:
                return number, position, offset_delta
            position, offset_delta = end, delta
    except IndexError:
        return number, position, offset_delta
    return count, position, offset_delta


def _skip_plain_headers(data: bytes, position: int) -> int:
    """Return the next position; 0 for headers that are long, damaged or more than a few."""
    count = data[position]
    position += 1
    if count & 0x81 or count > _PLAIN_HEADERS_MAX << 1:
        return 0
    for _ in range(count >> 1):
        name = data[position]
        position += 1 + (name >> 1)
        value = data[position]
        if name & 0x81 or value & 0x80 or (value & 0x01 and value != 0x01):
            return 0
        position += 1 + (value >> 1 if value != 0x01 else 0)
    return position


def shift_timestamp(body: bytes | memoryview, span: RecordSpan, shift_ms: int) -> bytes:
    """The record with `shift_ms` added to its timestamp delta, for a batch whose base timestamp is that much lower."""
    content = b"".join(
        (
            body[span.time_start - 1 : span.time_start],
            encode_varint(wrap_int64(span.timestamp_delta + shift_ms)),
            body[span.time_end : span.end],
        )
    )
    return encode_varint(len(content)) + content


def _scan_record(data: bytes | memoryview, start: int) -> RecordSpan:
    span, position = _scan_fields(data, start)
    count, position = _read_header_count(data, position, span.end)
    if count:
        position = _skip_headers(data, position, span.end, count)
    if position != span.end:
        raise _corrupt(_WRONG_LENGTH)
    return span


def _scan_fields(data: bytes | memoryview, start: int) -> tuple[RecordSpan, int]:
    """The span of a record, and where its headers begin."""
    length, position = read_varint(data, start)
    end = position + length
    if length < 0 or end > len(data):
        raise _corrupt(f"record of impossible length {length}")
    time_start = position + 1
    timestamp_delta, time_end = read_varlong(data, time_start)
    offset_delta, position = read_varint(data, time_end)
    key_start, position = _skip_nullable_bytes(data, position, end)
    key = None if key_start is None else bytes(data[key_start:position])
    value_start, position = _skip_nullable_bytes(data, position, end)
    span = RecordSpan(
        start, time_start, time_end, end, timestamp_delta, offset_delta, key, value_start is not None
    )
    return span, position


def _skip_nullable_bytes(data: bytes | memoryview, position: int, end: int) -> tuple[int | None, int]:
    """The start (None for a null field) and the end of the field's bytes."""
    length, position = read_varint(data, position)
    if length == -1:
        return None, position
    if length < 0 or position + length > end:
        raise _corrupt(f"record field of impossible length {length}")
    return position, position + length


def _read_header_count(data: bytes | memoryview, position: int, end: int) -> tuple[int, int]:
    count, position = read_varint(data, position)
    if count < 0 or count > (end - position) // 2:
        raise _corrupt(f"record with an impossible count of {count} headers")
    return count, position


def _skip_headers(data: bytes | memoryview, position: int, end: int, count: int) -> int:
    for _ in range(count):
        key_start, position = _skip_nullable_bytes(data, position, end)
        if key_start is None:
            raise _corrupt("record header without a key")
        _, position = _skip_nullable_bytes(data, position, end)
    return position


def _corrupt(message: str) -> ApiError:
    return ApiError(ErrorCode.corrupt_message, message)
