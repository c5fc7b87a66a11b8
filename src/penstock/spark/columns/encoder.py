"""Encodes Arrow columns to record batches that a producer can stamp and send.

Columns are read as spans of raw memory, the reverse of what the decoder does: only offsets are copied. Rows get the
partition that Java's producer would choose, and are split by partition.
"""

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from penstock.protocol.compression import Codec, compress
from penstock.protocol.record_batch import (
    BATCH_HEADER,
    BATCH_HEADER_BYTES,
    LOG_OVERHEAD_BYTES,
    NO_PRODUCER_ID,
    BatchHeader,
)
from penstock.spark.columns import kernels
from penstock.spark.columns.arrow import address_of, empty_array
from penstock.spark.columns.kernels import Int32s, Int64s

_HEADER_TYPE: Final = pa.struct([("key", pa.large_binary()), ("value", pa.large_binary())])
#: Type of the Arrow offsets, for the layouts that need no conversion.
_OFFSET_DTYPES: Final = {
    pa.binary(): np.int32,
    pa.string(): np.int32,
    pa.large_binary(): np.int64,
    pa.large_string(): np.int64,
}


class Spans(NamedTuple):
    """Addresses and lengths of fields. Addresses are valid while the owners are alive. A length of -1 means null."""

    starts: Int64s
    lengths: Int64s
    owners: tuple[pa.Array, ...]


class HeaderSpans(NamedTuple):
    first: Int64s  # index in `spans` of the first header of each row
    counts: Int64s
    spans: Int64s  # a matrix of the header fields of `kernels`
    owners: tuple[pa.Array, ...]


def column_spans(column: pa.Array, name: str) -> Spans:
    """Return the spans of a binary or string column, in any of Arrow's layouts. Raises ValueError for other types."""
    if column.type not in _OFFSET_DTYPES:
        column = _cast(column, pa.large_binary(), name)
    if not len(column):
        return Spans(np.empty(0, np.int64), np.empty(0, np.int64), ())
    dtype = np.dtype(_OFFSET_DTYPES[column.type])
    _, offsets, data = column.buffers()
    ends = np.frombuffer(offsets, dtype, len(column) + 1, column.offset * dtype.itemsize).astype(np.int64)
    lengths = np.diff(ends)
    if column.null_count:
        lengths[_is_null(column)] = -1
    return Spans(ends[:-1] + (data.address if data else 0), lengths, (column,))


def header_spans(column: pa.Array) -> HeaderSpans:
    """Return the spans of a column of arrays of key and value.

    Raises ValueError for other types, and for a header without a key.
    """
    lists = _cast(column, pa.large_list(_HEADER_TYPE), "headers")
    ends = lists.offsets.to_numpy()
    items = lists.values.slice(ends[0], ends[-1] - ends[0])
    first = ends[:-1] - ends[0]
    counts = np.diff(ends)
    if lists.null_count:
        counts[_is_null(lists)] = 0  # a null list may still cover items, which are not valid
    keys, values = (column_spans(field, "headers") for field in items.flatten())
    _refuse_null_keys(first, counts, keys.lengths)
    spans = np.stack([keys.starts, keys.lengths, values.starts, values.lengths])
    return HeaderSpans(first, counts, spans, keys.owners + values.owners)


def column_timestamps_ms(column: pa.Array, default_ms: int) -> Int64s:
    """Return timestamps in milliseconds, with the default for nulls. Raises ValueError for other types."""
    if not pa.types.is_timestamp(column.type):
        raise ValueError(f"Column timestamp is {column.type}; it must be a timestamp.")
    microseconds = column.cast(pa.timestamp("us", column.type.tz), safe=False).cast(pa.int64())
    milliseconds: Int64s = np.floor_divide(microseconds.fill_null(0).to_numpy(), 1000)
    if column.null_count:
        milliseconds[_is_null(column)] = default_ms
    return milliseconds


def _cast(column: pa.Array, kind: pa.DataType, name: str) -> pa.Array:
    try:
        return column.cast(kind)
    except (pa.ArrowNotImplementedError, pa.ArrowTypeError, pa.ArrowInvalid):
        wanted = "an array of struct<key: string, value: binary>" if name == "headers" else "binary or string"
        raise ValueError(f"Column {name} is {column.type}; it must be {wanted}.") from None


def _is_null(column: pa.Array) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    nulls: np.ndarray[tuple[int], np.dtype[np.bool_]] = column.is_null().to_numpy(zero_copy_only=False)
    return nulls


def _refuse_null_keys(first: Int64s, counts: Int64s, key_lengths: Int64s) -> None:
    rows = np.searchsorted(first, np.flatnonzero(key_lengths < 0), side="right") - 1
    rows = rows[counts[rows] > 0]
    if len(rows):
        raise ValueError(f"Row {rows[0]} has a header without a key.")


def partition_rows(keys: pa.Array, count: int, *, seed: int) -> Int32s:
    """Return the partition of each key, out of `count`, by murmur2.

    All null keys go to one partition, chosen by `seed`. A seed that differs from call to call spreads them over
    partitions without making batches small.
    """
    spans = column_spans(keys, "key")
    partitions = np.empty(len(keys), np.int32)
    kernels.partition(spans.starts, spans.lengths, count, seed % count, partitions)
    return partitions


def split_by_partition(record_batch: pa.RecordBatch, partitions: Int32s) -> dict[int, pa.RecordBatch]:
    """Return the rows of each partition, in their original order."""
    assert len(partitions) == record_batch.num_rows
    if not len(partitions):
        return {}
    # numpy uses radix sort for 16-bit numbers, which is three times as fast. More than 65536 partitions are rare.
    order = np.argsort(
        partitions.astype(np.uint16) if partitions.max() < 1 << 16 else partitions, kind="stable"
    )
    ordered = partitions[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=ordered[0] - 1))
    ends = [*starts[1:].tolist(), len(ordered)]
    rows = record_batch if len(starts) == 1 else record_batch.take(pa.array(order))
    return {
        int(ordered[start]): rows.slice(start, end - start)
        for start, end in zip(starts.tolist(), ends, strict=True)
    }


BATCH_BYTES_MAX: Final = 1 << 20
_BODY_BYTES_LIMIT: Final = (1 << 31) - 1 - BATCH_HEADER_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedBatch:
    """A complete batch except for producer id, epoch, sequence and checksum, which the producer stamps."""

    data: bytearray
    count: int


class _Rows(NamedTuple):
    """Records and headers as matrices of the fields in `kernels`. The owners keep their addresses valid."""

    records: Int64s
    headers: Int64s
    owners: tuple[pa.Array, ...]


def encode(
    record_batch: pa.RecordBatch,
    *,
    timestamp_ms: int,
    codec: Codec = Codec.NONE,
    batch_bytes_max: int = BATCH_BYTES_MAX,
) -> list[EncodedBatch]:
    """Encode all rows, in order, in batches of at most `batch_bytes_max`. A larger record gets a batch of its own.

    Reads the column value and, if present, key, headers and timestamp. `timestamp_ms` replaces a null or missing
    timestamp. A batch that does not get smaller by compression stays uncompressed. Raises ValueError for columns that
    cannot be written.
    """
    if not record_batch.num_rows:
        return []
    rows = _rows_of(record_batch, timestamp_ms)
    batches = empty_array((kernels.BATCH_FIELDS, record_batch.num_rows), np.int64)
    count = kernels.split_batches(rows.records, rows.headers, batch_bytes_max - BATCH_HEADER_BYTES, batches)
    batches = batches[:, :count]
    largest = int(np.argmax(batches[kernels.BODY_BYTES]))
    if batches[kernels.BODY_BYTES, largest] > _BODY_BYTES_LIMIT:
        row = batches[kernels.FIRST_ROW, largest]
        raise ValueError(
            f"Row {row} has {batches[kernels.BODY_BYTES, largest]} bytes, more than a record can hold."
        )
    ends = [*batches[kernels.FIRST_ROW, 1:].tolist(), record_batch.num_rows]
    return [_encode_batch(rows, batches[:, index], end, codec) for index, end in enumerate(ends)]


def _rows_of(record_batch: pa.RecordBatch, timestamp_ms: int) -> _Rows:
    records = empty_array((kernels.RECORD_FIELDS, record_batch.num_rows), np.int64)
    columns = dict(zip(record_batch.schema.names, record_batch.columns, strict=True))
    if "value" not in columns:
        raise ValueError(f"There is no column value among {', '.join(columns) or 'none'}.")
    value = column_spans(columns["value"], "value")
    key = column_spans(columns["key"], "key") if "key" in columns else _NO_KEY
    headers = header_spans(columns["headers"]) if "headers" in columns else _NO_HEADERS
    records[kernels.KEY_AT], records[kernels.KEY_BYTES] = key.starts, key.lengths
    records[kernels.VALUE_AT], records[kernels.VALUE_BYTES] = value.starts, value.lengths
    records[kernels.HEADERS_AT], records[kernels.HEADERS_COUNT] = headers.first, headers.counts
    records[kernels.TIMESTAMP] = (
        column_timestamps_ms(columns["timestamp"], timestamp_ms) if "timestamp" in columns else timestamp_ms
    )
    return _Rows(records, headers.spans, key.owners + value.owners + headers.owners)


# Arrays of length one, which numpy broadcasts to all rows.
_NO_KEY: Final = Spans(np.zeros(1, np.int64), np.full(1, -1, np.int64), ())
_NO_HEADERS: Final = HeaderSpans(
    np.zeros(1, np.int64), np.zeros(1, np.int64), np.empty((kernels.HEADER_FIELDS, 0), np.int64), ()
)


def _encode_batch(rows: _Rows, batch: Int64s, end: int, codec: Codec) -> EncodedBatch:
    first, body_bytes, max_timestamp = batch.tolist()
    data = bytearray(BATCH_HEADER_BYTES + body_bytes)
    start = address_of(data) + BATCH_HEADER_BYTES
    written = kernels.write(rows.records, rows.headers, first, end, start) - start
    assert written == body_bytes
    used = Codec.NONE
    if codec is not Codec.NONE:
        compressed = compress(codec, memoryview(data)[BATCH_HEADER_BYTES:])
        if len(compressed) < body_bytes:
            used = codec
            data[BATCH_HEADER_BYTES:] = compressed
    header = BatchHeader(
        base_offset=0,
        length=len(data) - LOG_OVERHEAD_BYTES,
        leader_epoch=-1,
        magic=2,
        crc=0,
        attributes=used,
        last_offset_delta=end - first - 1,
        base_timestamp=int(rows.records[kernels.TIMESTAMP, first]),
        max_timestamp=max_timestamp,
        producer_id=NO_PRODUCER_ID,
        producer_epoch=-1,
        base_sequence=-1,
        record_count=end - first,
    )
    BATCH_HEADER.pack_into(data, 0, *header)
    return EncodedBatch(data=data, count=end - first)
