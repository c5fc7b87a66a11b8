"""Records for property tests, and their expected columns."""

import struct
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from penstock.protocol.compression import Codec
from penstock.protocol.record_batch import (
    CRC_OFFSET,
    BatchHeader,
    Record,
    checksum,
    encode_batch,
    iter_batches,
)
from penstock.spark.columns import COLUMNS, decode

TOPIC, PARTITION = "orders", 3
EVERYTHING = (0, 1 << 62)

payloads = (
    st.none() | st.binary(max_size=80) | st.binary(min_size=1, max_size=4).map(lambda part: part * 3000)
)
timestamps = st.integers(-1, 1 << 45)
headers = st.lists(st.tuples(st.text(max_size=12), st.none() | st.binary(max_size=90)), max_size=4).map(tuple)
codecs = st.sampled_from(Codec)
steps = st.integers(1, 3) | st.integers(1, 1 << 20)


@st.composite
def logs(draw: st.DrawFn) -> list[list[Record]]:
    """Batches of records with gaps between and inside them, as compaction leaves them."""
    offset, batches = draw(st.integers(0, 1 << 40)), []
    for count in draw(st.lists(st.integers(1, 12), min_size=1, max_size=5)):
        records = []
        for _ in range(count):
            offset += draw(steps)
            records.append(Record(offset, draw(timestamps), draw(payloads), draw(payloads), draw(headers)))
        batches.append(records)
    return batches


def views(batches: Iterable[bytearray]) -> list[tuple[BatchHeader, memoryview]]:
    return list(iter_batches(b"".join(batches)))


def decoded(
    batches: Iterable[bytearray], wanted: tuple[int, int] = EVERYTHING, **how: Any
) -> list[pa.RecordBatch]:
    how = {"columns": COLUMNS, **how}
    start, end = wanted
    return list(
        decode(views(batches), topic=TOPIC, partition=PARTITION, start_offset=start, end_offset=end, **how)
    )


def rows(tables: Iterable[pa.RecordBatch]) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for table in tables:
        table.validate(full=True)
        position = table.schema.get_field_index("timestamp")
        if position >= 0:  # as a number, because Python's datetime does not cover all timestamps
            table = table.set_column(position, "timestamp", table.column(position).cast(pa.int64()))
        out += table.to_pylist()
    return out


def expected(records: Iterable[Record], timestamp_type: int = 0) -> list[dict[str, Any]]:
    return [
        {
            "key": record.key,
            "value": record.value,
            "topic": TOPIC,
            "partition": PARTITION,
            "offset": record.offset,
            "timestamp": record.timestamp * 1000,
            "timestampType": timestamp_type,
            "headers": [{"key": key, "value": value} for key, value in record.headers] or None,
        }
        for record in records
    ]


def log_of(batches: Sequence[Sequence[Record]], codec: Codec = Codec.NONE) -> list[bytearray]:
    return [encode_batch(records, codec=codec) for records in batches]


def checksummed(batch: bytearray) -> bytearray:
    """Return a batch as a producer without other fields to stamp sends it."""
    struct.pack_into(">I", batch, CRC_OFFSET, checksum(batch))
    return batch
