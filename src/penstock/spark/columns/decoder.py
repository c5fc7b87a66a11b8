"""Decodes record batches to Arrow columns.

The decoder decompresses batches, and a kernel that can pause locates their records. Then the bytes of each field are
copied once, into one contiguous buffer for each column.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from penstock.client.errors import CorruptRecords
from penstock.protocol.compression import BytesLike, decompress
from penstock.protocol.errors import ApiError
from penstock.protocol.record_batch import BATCH_HEADER_BYTES, CODEC_MASK, CONTROL, BatchHeader
from penstock.spark.columns import kernels
from penstock.spark.columns.arrow import (
    HEADER_TYPE,
    HEADERS_TYPE,
    SCHEMA,
    address_of,
    arrow_schema,
    empty_array,
)
from penstock.spark.columns.kernels import Int64s

_CORRUPTION_REASONS: Final = {
    kernels.BAD_MAGIC: "its format is not the one that brokers write since 0.11 (magic 2)",
    kernels.BAD_COUNT: "its record count or offset delta is impossible",
    kernels.BAD_VARINT: "a number in a record is cut short or too long",
    kernels.BAD_LENGTH: "a record or one of its fields has an impossible length",
    kernels.BAD_HEADERS: "a record has an impossible count of headers, or one without a key",
    kernels.BAD_END: "the length of a record does not match its content",
    kernels.BAD_ORDER: "its records are out of order",
    kernels.BYTES_LEFT: "there are bytes after its last record",
}
#: Makes rows of the matrix not lie a power of two apart, because they would compete for the same cache lines.
_PADDING_ROWS: Final = 24


class CorruptBatch(CorruptRecords):
    """The content of a batch is invalid, although its checksum may be right."""

    def __init__(self, topic: str, partition: int, offset: int, reason: str) -> None:
        super().__init__(f"the batch at offset {offset} of {topic}[{partition}] is corrupt: {reason}")
        self.topic = topic
        self.partition = partition
        self.offset = offset
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.topic, self.partition, self.offset, self.reason)


class OffsetSlice(NamedTuple):
    """The offsets of a partition that are wanted: from `start` to before `end`."""

    topic: str
    partition: int
    start: int
    end: int


class DecompressedBatch(NamedTuple):
    header: BatchHeader
    body: BytesLike


def decompress_batches(
    batches: Iterable[tuple[BatchHeader, memoryview]], wanted: OffsetSlice, decoded_bytes_max: int
) -> Iterator[DecompressedBatch]:
    """Decompress the batches that may contain wanted offsets. The others are skipped unread."""
    for header, data in batches:
        assert not header.attributes & CONTROL, "control batches are the reader's to leave out"
        if header.last_offset >= wanted.start and header.base_offset < wanted.end:
            yield DecompressedBatch(
                header, _decompress_body(header, data[BATCH_HEADER_BYTES:], wanted, decoded_bytes_max)
            )


def _decompress_body(
    header: BatchHeader, body: memoryview, wanted: OffsetSlice, decoded_bytes_max: int
) -> BytesLike:
    if not header.attributes & CODEC_MASK:
        return body
    try:
        return decompress(header.codec, body, decoded_bytes_max)
    except ApiError as refused:
        raise CorruptBatch(wanted.topic, wanted.partition, header.base_offset, str(refused)) from None


def scan_batches(
    batches: list[DecompressedBatch], wanted: OffsetSlice, *, rows_max: int, bytes_max: int
) -> Iterator[Int64s]:
    """Yield the wanted records as matrices of the fields in `kernels`, each with at most `rows_max` rows.

    The records of a matrix have at most `bytes_max` bytes, unless a single record is larger. Each matrix is overwritten
    by the next one, and its addresses are valid while the caller holds `batches`.
    """
    headers = _matrix((batch.header for batch in batches), (len(batches), len(BatchHeader._fields)))
    bodies = _matrix(((address_of(batch.body), len(batch.body)) for batch in batches), (len(batches), 2))
    rows_possible = np.minimum(headers[:, kernels.RECORD_COUNT], bodies[:, 1] // kernels.RECORD_BYTES_MIN)
    rows_held = max(1, min(rows_max, int(rows_possible.clip(0).sum())))
    records = empty_array((kernels.RECORD_FIELDS, rows_held + _PADDING_ROWS), np.int64)
    offsets, limits = (wanted.start, wanted.end), (rows_held, bytes_max)
    cursor = np.zeros(kernels.CURSOR_FIELDS, np.int64)
    ending = kernels.PAUSED
    while ending == kernels.PAUSED:
        ending = kernels.scan(headers, bodies, cursor, records, offsets, limits)
        if ending > kernels.PAUSED:
            at_fault = batches[cursor[kernels.BATCH]].header.base_offset
            raise CorruptBatch(wanted.topic, wanted.partition, at_fault, _CORRUPTION_REASONS[ending])
        if cursor[kernels.ROWS]:
            yield records[:, : cursor[kernels.ROWS]]


def _matrix(rows: Iterable[Sequence[int]], shape: tuple[int, int]) -> Int64s:
    """Build a matrix in half the time of np.array, which matters if batches are small."""
    return np.fromiter(chain.from_iterable(rows), np.int64, shape[0] * shape[1]).reshape(shape)


def gather_binary(starts: Int64s, lengths: Int64s, kind: pa.DataType) -> pa.Array:
    """Return a column of binary or string. A negative length means null."""
    total, nulls = kernels.measure(lengths)
    assert total < 1 << 31, "Arrow's offsets are of 32 bits; a scan pauses well before"
    offsets = empty_array(len(starts) + 1, np.int32)
    data = pa.allocate_buffer(total)
    gathered = kernels.gather(starts, lengths, offsets, data.address)
    assert gathered == total
    validity = _bitmap(lengths >= 0) if nulls else None
    return pa.Array.from_buffers(kind, len(starts), [validity, pa.py_buffer(offsets), data], nulls)


def gather_headers(starts: Int64s, counts: Int64s) -> pa.Array:
    """Return a list of headers for each record; null, as in Spark's own connector, for a record without headers."""
    offsets = empty_array(len(counts) + 1, np.int32)
    offsets[0] = 0
    np.cumsum(counts, out=offsets[1:])
    spans = empty_array((kernels.HEADER_FIELDS, int(offsets[-1])), np.int64)
    noted = kernels.read_headers(starts, counts, spans)
    assert noted == offsets[-1]
    keys = _gather_strings(spans[kernels.KEY_AT], spans[kernels.KEY_BYTES])
    values = gather_binary(spans[kernels.VALUE_AT], spans[kernels.VALUE_BYTES], pa.binary())
    items = pa.StructArray.from_arrays([keys, values], fields=list(HEADER_TYPE))
    nulls = int(np.count_nonzero(counts == 0))
    validity = _bitmap(counts > 0) if nulls else None
    buffers = [validity, pa.py_buffer(offsets)]
    return pa.Array.from_buffers(HEADERS_TYPE, len(counts), buffers, nulls, children=[items])


def _gather_strings(starts: Int64s, lengths: Int64s) -> pa.Array:
    """Return a string column. Bytes that are not UTF-8 become U+FFFD, as in Java.

    Arrow would accept the invalid bytes here and fail later.
    """
    text = gather_binary(starts, lengths, pa.string())
    if not np.frombuffer(text.buffers()[2], np.uint8).max(initial=0) & 0x80:
        return text
    try:
        text.validate(full=True)
    except pa.ArrowInvalid:
        raw = text.view(pa.binary()).to_pylist()
        return pa.array([key.decode(errors="replace") for key in raw], pa.string())
    return text


def _bitmap(valid: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> pa.Buffer:
    return pa.py_buffer(np.packbits(valid, bitorder="little"))


#: Large enough to make the fixed cost of an Arrow batch negligible, small enough for the processor's cache.
ROWS_MAX: Final = 1 << 15
#: Limit for the records in one Arrow batch, and for the decompressed batches in memory at a time.
BYTES_MAX: Final = 32 << 20
#: Maximum size of one batch after decompression.
DECODED_BYTES_MAX: Final = 512 << 20

Builder = Callable[[Int64s, OffsetSlice], pa.Array]


def decode(
    batches: Iterable[tuple[BatchHeader, memoryview]],
    *,
    topic: str,
    partition: int,
    start_offset: int,
    end_offset: int,
    columns: Sequence[str],
    rows_max: int = ROWS_MAX,
    bytes_max: int = BYTES_MAX,
    decoded_bytes_max: int = DECODED_BYTES_MAX,
) -> Iterator[pa.RecordBatch]:
    """Yield the records with start_offset <= offset < end_offset, in order, with these columns in this order.

    Takes whole batches as brokers send them, without control batches. Batches that end before the start, or begin at
    or after the end, are not decompressed. Memory is bounded by `bytes_max` and the largest decompressed batch,
    whatever the total size after decompression. Raises CorruptBatch, possibly before it has yielded all rows that
    precede the corrupt batch.
    """
    assert 0 < rows_max <= 1 << 22, "the topic column of a batch must fit into 32-bit offsets"
    assert max(bytes_max, decoded_bytes_max) < 1 << 31, "a column of a batch must fit into 32-bit offsets"
    schema = arrow_schema(columns)
    builders = [_BUILDERS[name] for name in columns]
    wanted = OffsetSlice(topic, partition, start_offset, end_offset)
    for run in _runs(decompress_batches(batches, wanted, decoded_bytes_max), bytes_max):
        for records in scan_batches(run, wanted, rows_max=rows_max, bytes_max=bytes_max):
            arrays = [build(records, wanted) for build in builders]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _runs(batches: Iterable[DecompressedBatch], bytes_max: int) -> Iterator[list[DecompressedBatch]]:
    """Group batches for one scan: each group has about `bytes_max` bytes."""
    run: list[DecompressedBatch] = []
    held = 0
    for batch in batches:
        run.append(batch)
        held += len(batch.body)
        if held >= bytes_max:
            yield run
            run, held = [], 0
    if run:
        yield run


def _key_column(records: Int64s, _wanted: OffsetSlice) -> pa.Array:
    return gather_binary(records[kernels.KEY_AT], records[kernels.KEY_BYTES], pa.binary())


def _value_column(records: Int64s, _wanted: OffsetSlice) -> pa.Array:
    return gather_binary(records[kernels.VALUE_AT], records[kernels.VALUE_BYTES], pa.binary())


def _topic_column(records: Int64s, wanted: OffsetSlice) -> pa.Array:
    return pa.repeat(pa.scalar(wanted.topic, pa.string()), records.shape[1])


def _partition_column(records: Int64s, wanted: OffsetSlice) -> pa.Array:
    return pa.repeat(pa.scalar(wanted.partition, pa.int32()), records.shape[1])


def _headers_column(records: Int64s, _wanted: OffsetSlice) -> pa.Array:
    return gather_headers(records[kernels.HEADERS_AT], records[kernels.HEADERS_COUNT])


def _number_column(field: int, kind: pa.DataType, width: type[np.signedinteger[Any]]) -> Builder:
    """Return a builder for a numeric field. It copies the field, because the next scan overwrites it."""

    def build(records: Int64s, _wanted: OffsetSlice) -> pa.Array:
        numbers = empty_array(records.shape[1], width)
        numbers[:] = records[field]
        return pa.Array.from_buffers(kind, len(numbers), [None, pa.py_buffer(numbers)], 0)

    return build


_BUILDERS: Final[dict[str, Builder]] = {
    "key": _key_column,
    "value": _value_column,
    "topic": _topic_column,
    "partition": _partition_column,
    "offset": _number_column(kernels.OFFSET, SCHEMA.field("offset").type, np.int64),
    "timestamp": _number_column(kernels.TIMESTAMP, SCHEMA.field("timestamp").type, np.int64),
    "timestampType": _number_column(kernels.TIMESTAMP_TYPE, SCHEMA.field("timestampType").type, np.int32),
    "headers": _headers_column,
}
