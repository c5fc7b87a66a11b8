"""The rows that all contenders read and write: seeded, all different, about as compressible as real events."""

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from benchmarks.wire.payloads import value_pool
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.fetch import PartitionReader, checked_batches, visible_batches
from penstock.client.wire.metadata import IsolationLevel
from penstock.client.wire.producer import RawProducer
from penstock.protocol.compression import Codec
from penstock.spark.columns import encode

#: Before compression, as in the other benchmarks: what a producer that lingers a little sends.
BATCH_BYTES_MAX = 64 * 1024
KEY_BYTES = 16
_ROWS_AT_ONCE = 1 << 15
#: Of different values: more than what codecs look back to, so that no format gains by the repetition.
_POOL_BYTES = 4 << 20
#: Scatters numbers that follow each other over all keys.
_STRIDE = 2_654_435_761
_KEYS = 1_000_000
_STAMP_DIGITS = 12

Bytes = NDArray[np.uint8]


def chunks(rows: int, value_bytes: int) -> Iterator[pa.RecordBatch]:
    """Columns key and value. A value begins with its row's number, so that no two are alike."""
    pool = _pool(value_bytes)
    for first in range(0, rows, _ROWS_AT_ONCE):
        numbers = np.arange(first, min(first + _ROWS_AT_ONCE, rows), dtype=np.int64)
        values = pool[numbers % len(pool)]
        values[:, :_STAMP_DIGITS] = _digits(numbers, _STAMP_DIGITS)
        columns = {"key": _binary(_keys(numbers)), "value": _binary(values)}
        yield pa.RecordBatch.from_pydict(columns)


def fill(cluster: Cluster, topic: str, rows: int, value_bytes: int, codec: Codec) -> None:
    """All rows, spread evenly over the partitions."""
    partitions = len(cluster.await_topic(topic).partitions)
    with RawProducer(cluster) as producer:
        producer.init()
        for chunk in chunks(rows, value_bytes):
            for partition in range(partitions):
                first, end = (chunk.num_rows * each // partitions for each in (partition, partition + 1))
                _send(producer, topic, partition, chunk.slice(first, end - first), codec)
        producer.flush()


def _send(producer: RawProducer, topic: str, partition: int, rows: pa.RecordBatch, codec: Codec) -> None:
    now_ms = int(time.time() * 1000)
    for batch in encode(rows, timestamp_ms=now_ms, codec=codec, batch_bytes_max=BATCH_BYTES_MAX):
        producer.send(topic, partition, batch.data)


def count_committed(cluster: Cluster, topic: str) -> int:
    """Records that a reader of committed ones is given, by what the headers of batches say."""
    found = cluster.await_topic(topic)
    return sum(_count(cluster, topic, partition) for partition in range(len(found.partitions)))


def _count(cluster: Cluster, topic: str, partition: int) -> int:
    reader = PartitionReader(cluster, topic, None, partition, isolation=IsolationLevel.READ_COMMITTED)
    count = position = 0
    while (fetched := reader.fetch(position, wait_ms=0)).next_offset > position:
        seen = visible_batches(checked_batches(fetched.data), fetched.aborted)
        count += sum(view.header.record_count for view in seen)
        position = fetched.next_offset
    return count


def _pool(value_bytes: int) -> Bytes:
    values = value_pool(value_bytes, count=max(_POOL_BYTES // value_bytes, 1))
    return np.frombuffer(b"".join(values), np.uint8).reshape(len(values), value_bytes)


def _keys(numbers: NDArray[np.int64]) -> Bytes:
    keys = np.empty((len(numbers), KEY_BYTES), np.uint8)
    name = b"customer-"
    keys[:, : len(name)] = np.frombuffer(name, np.uint8)
    keys[:, len(name) :] = _digits(numbers * _STRIDE % _KEYS, KEY_BYTES - len(name))
    return keys


def _digits(numbers: NDArray[np.int64], count: int) -> Bytes:
    powers = 10 ** np.arange(count - 1, -1, -1, dtype=np.int64)
    digits: Bytes = (numbers[:, None] // powers % 10 + ord("0")).astype(np.uint8)
    return digits


def _binary(values: Bytes) -> Any:
    rows, width = values.shape
    offsets = np.arange(rows + 1, dtype=np.int32) * width
    data = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(pa.binary(), rows, [None, pa.py_buffer(offsets.astype(np.int32)), data])
