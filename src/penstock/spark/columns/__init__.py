"""Record batches to Arrow columns and back, at the speed of memory: numba kernels over raw bytes, no row objects.

Kernels are compiled on first use (some seconds) and cached; `preload` does it ahead, so that no query waits.
"""

import pyarrow as pa

from penstock.protocol.records import iter_batches
from penstock.spark.columns.decode import decode
from penstock.spark.columns.encode import EncodedBatch, encode
from penstock.spark.columns.partitioning import partition_rows, split_by_partition
from penstock.spark.columns.scan import CorruptBatch
from penstock.spark.columns.schema import COLUMNS, COLUMNS_WITHOUT_HEADERS, arrow_schema

__all__ = (
    "COLUMNS",
    "COLUMNS_WITHOUT_HEADERS",
    "CorruptBatch",
    "EncodedBatch",
    "arrow_schema",
    "decode",
    "encode",
    "partition_rows",
    "preload",
    "split_by_partition",
)


def preload() -> None:
    """Compile every kernel, or load it from the cache; processes forked afterwards have them ready."""
    headers = pa.array([[{"key": "k", "value": b"v"}]], arrow_schema(["headers"]).field(0).type)
    rows = pa.record_batch({"key": [b"k"], "value": [b"v"], "headers": headers})
    partition_rows(rows["key"], 1, seed=0)
    encoded = encode(rows, timestamp_ms=0)
    batches = iter_batches(encoded[0].data)
    for _ in decode(batches, topic="", partition=0, start_offset=0, end_offset=1, columns=COLUMNS):
        pass
