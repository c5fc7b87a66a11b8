"""Record batches to Arrow columns."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

from penstock.protocol.records import BatchHeader
from penstock.spark.columns import gather, kernels
from penstock.spark.columns.kernels import Int64s
from penstock.spark.columns.memory import empty
from penstock.spark.columns.scan import OpenBatch, Slice, open_batches, scan
from penstock.spark.columns.schema import SCHEMA, arrow_schema

#: Large enough to make little of what each Arrow batch costs, small enough for the processor's cache.
ROWS_MAX: Final = 1 << 15
#: Of records in one Arrow batch, and of opened batches held at a time.
BYTES_MAX: Final = 32 << 20
#: What one compressed batch may unfold to.
DECODED_BYTES_MAX: Final = 512 << 20

Builder = Callable[[Int64s, Slice], pa.Array]


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
    """The records with start_offset <= offset < end_offset, in order, with these columns in this order.

    Takes whole batches as brokers send them, without control batches; those that end before the start or begin
    at the end or later are not opened. Memory is bounded by `bytes_max` and the largest batch, however much the
    batches unfold to. Raises CorruptBatch, maybe before all rows in front of the corrupt batch have been given.
    """
    assert 0 < rows_max <= 1 << 22, "topic names must not reach Arrow's offsets of 32 bits"
    assert max(bytes_max, decoded_bytes_max) < 1 << 31, "nor must what one Arrow batch holds"
    schema = arrow_schema(columns)
    builders = [_BUILDERS[name] for name in columns]
    wanted = Slice(topic, partition, start_offset, end_offset)
    for run in _runs(open_batches(batches, wanted, decoded_bytes_max), bytes_max):
        for records in scan(run, wanted, rows_max=rows_max, bytes_max=bytes_max):
            arrays = [build(records, wanted) for build in builders]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _runs(batches: Iterable[OpenBatch], bytes_max: int) -> Iterator[list[OpenBatch]]:
    """Batches to walk in one call: as many as come to `bytes_max`."""
    run: list[OpenBatch] = []
    held = 0
    for batch in batches:
        run.append(batch)
        held += len(batch.body)
        if held >= bytes_max:
            yield run
            run, held = [], 0
    if run:
        yield run


def _key(records: Int64s, _wanted: Slice) -> pa.Array:
    return gather.binary(records[kernels.KEY_AT], records[kernels.KEY_BYTES], pa.binary())


def _value(records: Int64s, _wanted: Slice) -> pa.Array:
    return gather.binary(records[kernels.VALUE_AT], records[kernels.VALUE_BYTES], pa.binary())


def _topic(records: Int64s, wanted: Slice) -> pa.Array:
    return pa.repeat(pa.scalar(wanted.topic, pa.string()), records.shape[1])


def _partition(records: Int64s, wanted: Slice) -> pa.Array:
    return pa.repeat(pa.scalar(wanted.partition, pa.int32()), records.shape[1])


def _headers(records: Int64s, _wanted: Slice) -> pa.Array:
    return gather.headers(records[kernels.HEADERS_AT], records[kernels.HEADERS_COUNT])


def _numbers(field: int, kind: pa.DataType, width: type[np.signedinteger[Any]]) -> Builder:
    """A field that is a number already; copied, because the next scan overwrites it."""

    def build(records: Int64s, _wanted: Slice) -> pa.Array:
        numbers = empty(records.shape[1], width)
        numbers[:] = records[field]
        return pa.Array.from_buffers(kind, len(numbers), [None, pa.py_buffer(numbers)], 0)

    return build


_BUILDERS: Final[dict[str, Builder]] = {
    "key": _key,
    "value": _value,
    "topic": _topic,
    "partition": _partition,
    "offset": _numbers(kernels.OFFSET, SCHEMA.field("offset").type, np.int64),
    "timestamp": _numbers(kernels.TIMESTAMP, SCHEMA.field("timestamp").type, np.int64),
    "timestampType": _numbers(kernels.TIMESTAMP_TYPE, SCHEMA.field("timestampType").type, np.int32),
    "headers": _headers,
}
