"""Which partition a row goes to, as Java's producer would choose it, and rows apart by partition."""

import numpy as np
import pyarrow as pa

from penstock.spark.columns import kernels
from penstock.spark.columns.kernels import Int32s
from penstock.spark.columns.spans import spans_of


def partition_rows(keys: pa.Array, count: int, *, seed: int) -> Int32s:
    """The partition, of `count`, of each key: murmur2. Nulls stay together, where `seed` says: one that differs
    from call to call spreads them, without cutting batches small."""
    spans = spans_of(keys, "key")
    partitions = np.empty(len(keys), np.int32)
    kernels.partition(spans.starts, spans.lengths, count, seed % count, partitions)
    return partitions


def split_by_partition(record_batch: pa.RecordBatch, partitions: Int32s) -> dict[int, pa.RecordBatch]:
    """The rows of each partition, in the order they had."""
    assert len(partitions) == record_batch.num_rows
    if not len(partitions):
        return {}
    # numpy sorts numbers of 16 bits by radix, three times as fast; more partitions than those hold are rare.
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
