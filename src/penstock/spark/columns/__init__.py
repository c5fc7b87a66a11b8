"""Record batches to Arrow columns and back, at memory speed: numba kernels over raw bytes, no row objects.

Kernels are compiled on first use, which takes some seconds, and cached. `preload` compiles them ahead of time, so that
no query waits.
"""

import pyarrow as pa

from penstock.protocol.record_batch import iter_batches
from penstock.spark.columns.arrow import COLUMNS, COLUMNS_WITHOUT_HEADERS, arrow_schema
from penstock.spark.columns.decoder import CorruptBatch, decode
from penstock.spark.columns.encoder import EncodedBatch, encode, partition_rows, split_by_partition

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
