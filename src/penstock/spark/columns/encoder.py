"""Arrow columns to record batches, ready to be stamped and sent by a producer."""

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from penstock.protocol.compression import Codec, compress
from penstock.protocol.records import (
    HEADER,
    HEADER_BYTES,
    LENGTH_OVERHEAD_BYTES,
    NO_PRODUCER_ID,
    BatchHeader,
)
from penstock.spark.columns import kernels
from penstock.spark.columns.kernels import Int64s
from penstock.spark.columns.memory import address_of, empty
from penstock.spark.columns.spans import Headers, Spans, headers_of, spans_of, timestamps_of

BATCH_BYTES_MAX: Final = 1 << 20
_BODY_BYTES_LIMIT: Final = (1 << 31) - 1 - HEADER_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedBatch:
    """A whole batch but for producer id, epoch, sequence and checksum, which are the producer's to stamp."""

    data: bytearray
    count: int


class _Rows(NamedTuple):
    """Records and headers as matrices of the fields in `kernels`, and what must be held for their addresses."""

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
    """All rows, in order, in batches of at most so many bytes each; a record larger than that gets its own.

    Takes the columns value and, where they are there, key, headers and timestamp (`timestamp_ms` where it is
    null or missing). A batch that a codec would not make smaller goes uncompressed. Raises ValueError for columns
    that cannot be written.
    """
    if not record_batch.num_rows:
        return []
    rows = _rows_of(record_batch, timestamp_ms)
    cuts = empty((kernels.CUT_FIELDS, record_batch.num_rows), np.int64)
    count = kernels.cut(rows.records, rows.headers, batch_bytes_max - HEADER_BYTES, cuts)
    cuts = cuts[:, :count]
    largest = int(np.argmax(cuts[kernels.BODY_BYTES]))
    if cuts[kernels.BODY_BYTES, largest] > _BODY_BYTES_LIMIT:
        row = cuts[kernels.FIRST_ROW, largest]
        raise ValueError(
            f"Row {row} has {cuts[kernels.BODY_BYTES, largest]} bytes, more than a record can hold."
        )
    ends = [*cuts[kernels.FIRST_ROW, 1:].tolist(), record_batch.num_rows]
    return [_encode_batch(rows, cuts[:, place], end, codec) for place, end in enumerate(ends)]


def _rows_of(record_batch: pa.RecordBatch, timestamp_ms: int) -> _Rows:
    records = empty((kernels.RECORD_FIELDS, record_batch.num_rows), np.int64)
    columns = dict(zip(record_batch.schema.names, record_batch.columns, strict=True))
    if "value" not in columns:
        raise ValueError(f"There is no column value among {', '.join(columns) or 'none'}.")
    value = spans_of(columns["value"], "value")
    key = spans_of(columns["key"], "key") if "key" in columns else _NO_KEY
    headers = headers_of(columns["headers"]) if "headers" in columns else _NO_HEADERS
    records[kernels.KEY_AT], records[kernels.KEY_BYTES] = key.starts, key.lengths
    records[kernels.VALUE_AT], records[kernels.VALUE_BYTES] = value.starts, value.lengths
    records[kernels.HEADERS_AT], records[kernels.HEADERS_COUNT] = headers.first, headers.counts
    records[kernels.TIMESTAMP] = (
        timestamps_of(columns["timestamp"], timestamp_ms) if "timestamp" in columns else timestamp_ms
    )
    return _Rows(records, headers.spans, key.owners + value.owners + headers.owners)


# Each is spread over all rows.
_NO_KEY: Final = Spans(np.zeros(1, np.int64), np.full(1, -1, np.int64), ())
_NO_HEADERS: Final = Headers(
    np.zeros(1, np.int64), np.zeros(1, np.int64), np.empty((kernels.HEADER_FIELDS, 0), np.int64), ()
)


def _encode_batch(rows: _Rows, cut: Int64s, end: int, codec: Codec) -> EncodedBatch:
    first, body_bytes, max_timestamp = cut.tolist()
    data = bytearray(HEADER_BYTES + body_bytes)
    start = address_of(data) + HEADER_BYTES
    written = kernels.write(rows.records, rows.headers, first, end, start) - start
    assert written == body_bytes
    used = Codec.NONE
    if codec is not Codec.NONE:
        compressed = compress(codec, memoryview(data)[HEADER_BYTES:])
        if len(compressed) < body_bytes:
            used = codec
            data[HEADER_BYTES:] = compressed
    header = BatchHeader(
        base_offset=0,
        length=len(data) - LENGTH_OVERHEAD_BYTES,
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
    HEADER.pack_into(data, 0, *header)
    return EncodedBatch(data=data, count=end - first)
