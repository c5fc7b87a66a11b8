"""Encoded batches contain the columns, for our codec and for two other clients."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka.record.default_records import DefaultRecordBatch
from tests.spark.columns.records import (
    checksummed,
    codecs,
    decoded,
    headers,
    payloads,
    timestamps,
)

from penstock.protocol.compression import Codec
from penstock.protocol.record_batch import (
    BATCH_HEADER_BYTES,
    NO_PRODUCER_ID,
    Record,
    decode_records,
    encode_batch,
    read_header,
)
from penstock.spark.columns import COLUMNS, EncodedBatch, encode

BOUND = 1 << 26
NOW_MS = 1_700_000_000_000
HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))

some_records = st.lists(
    st.builds(Record, st.just(0), st.integers(0, 1 << 45), payloads, payloads, headers),
    min_size=1,
    max_size=30,
)


def table_of(records: list[Record]) -> pa.RecordBatch:
    microseconds = [record.timestamp * 1000 for record in records]
    return pa.record_batch(
        {
            "key": pa.array([record.key for record in records], pa.binary()),
            "value": pa.array([record.value for record in records], pa.binary()),
            "headers": pa.array(
                [[{"key": key, "value": value} for key, value in record.headers] for record in records],
                HEADERS,
            ),
            "timestamp": pa.array(microseconds, pa.timestamp("us", tz="UTC")),
        }
    )


def read_back(batches: list[EncodedBatch]) -> list[Record]:
    """Return all records, with offsets as a broker would stamp them."""
    records: list[Record] = []
    for batch in batches:
        read = decode_records(batch.data, BOUND)
        assert len(read) == batch.count
        records += [record._replace(offset=len(records) + record.offset) for record in read]
    return records


def numbered(records: list[Record]) -> list[Record]:
    return [record._replace(offset=tp) for tp, record in enumerate(records)]


@given(records=some_records, codec=codecs, batch_bytes_max=st.integers(0, 20_000))
def test_rows_come_back_as_records_in_order(
    records: list[Record], codec: Codec, batch_bytes_max: int
) -> None:
    batches = encode(table_of(records), timestamp_ms=NOW_MS, codec=codec, batch_bytes_max=batch_bytes_max)
    assert read_back(batches) == numbered(records)
    for batch in batches:
        assert len(batch.data) <= batch_bytes_max or batch.count == 1


@given(records=some_records)
def test_a_batch_has_the_same_bytes_as_that_of_the_codec(records: list[Record]) -> None:
    (batch,) = encode(table_of(records), timestamp_ms=NOW_MS, batch_bytes_max=BOUND)
    assert checksummed(batch.data) == encode_batch(numbered(records))


@given(records=some_records, codec=codecs)
def test_another_client_reads_it(records: list[Record], codec: Codec) -> None:
    (batch,) = encode(table_of(records), timestamp_ms=NOW_MS, codec=codec, batch_bytes_max=BOUND)
    reader: Any = DefaultRecordBatch(bytes(checksummed(batch.data)))
    assert reader.validate_crc()
    read = [Record(r.offset, r.timestamp, r.key, r.value, tuple(tuple(h) for h in r.headers)) for r in reader]
    assert read == numbered(records)


@given(records=some_records, data=st.data())
def test_a_slice_is_encoded_like_a_copy_of_it(records: list[Record], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(records)))
    end = data.draw(st.integers(start, len(records)))
    batches = encode(table_of(records).slice(start, end - start), timestamp_ms=NOW_MS)
    assert read_back(batches) == numbered(records[start:end])


@given(records=some_records)
def test_columns_survive_a_round_trip(records: list[Record]) -> None:
    table = table_of(records)
    batches = [batch.data for batch in encode(table, timestamp_ms=NOW_MS, batch_bytes_max=BOUND)]
    (again,) = decoded(batches, columns=table.schema.names)
    for name in ("key", "value", "timestamp"):
        assert again[name].equals(table[name])
    assert again["headers"].to_pylist() == [items or None for items in table["headers"].to_pylist()]


@pytest.mark.parametrize(
    "kind",
    [pa.string(), pa.large_string(), pa.large_binary(), pa.binary(2), pa.binary_view(), pa.string_view()],
)
def test_every_layout_of_text_and_bytes_is_accepted(kind: pa.DataType) -> None:
    values = ["ab", "cd", None, "ef"]
    raw = pa.array([value and value.encode() for value in values], pa.binary())
    column = raw.cast(kind) if not pa.types.is_fixed_size_binary(kind) else pa.array(raw.to_pylist(), kind)
    table = pa.record_batch({"key": column, "value": column})
    want = [value and value.encode() for value in values[1:]]
    records = read_back(encode(table.slice(1), timestamp_ms=NOW_MS))
    assert [(record.key, record.value) for record in records] == list(zip(want, want, strict=True))


def test_headers_of_a_slice_in_the_layout_that_needs_no_conversion() -> None:
    wide = pa.large_list(pa.struct([("key", pa.large_binary()), ("value", pa.large_binary())]))
    lists = pa.array([[(b"a", b"1")], [(b"b", b"2"), (b"c", None)], [], [(b"d", b"")]], wide)
    table = pa.record_batch({"value": [b""] * 4, "headers": lists}).slice(1)
    records = read_back(encode(table, timestamp_ms=0))
    assert [record.headers for record in records] == [(("b", b"2"), ("c", None)), (), (("d", b""),)]


def test_the_largest_timestamp_delta() -> None:
    table = pa.record_batch({"value": [b""] * 2, "timestamp": pa.array([1000, None], pa.timestamp("us"))})
    records = read_back(encode(table, timestamp_ms=-(1 << 63) + 1))
    assert [record.timestamp for record in records] == [1, -(1 << 63) + 1]


def test_a_missing_key_is_null_and_a_missing_timestamp_is_now() -> None:
    (record,) = read_back(encode(pa.record_batch({"value": [b"v"]}), timestamp_ms=NOW_MS))
    assert record == Record(0, NOW_MS, None, b"v")


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_timestamps_of_every_unit_are_rounded_down_to_milliseconds(unit: str) -> None:
    per_second = {"s": 1, "ms": 1000, "us": 10**6, "ns": 10**9}[unit]
    ticks = [2 * per_second, None, 3 * per_second]
    table = pa.record_batch({"value": [b"v"] * 3, "timestamp": pa.array(ticks, pa.timestamp(unit))})
    records = read_back(encode(table, timestamp_ms=NOW_MS))
    assert [record.timestamp for record in records] == [2000, NOW_MS, 3000]
    just_before = pa.array([-1], pa.timestamp("us"))
    (record,) = read_back(
        encode(pa.record_batch({"value": [b"v"], "timestamp": just_before}), timestamp_ms=0)
    )
    assert record.timestamp == -1


def test_the_header_describes_the_batch_without_the_producer_fields() -> None:
    table = pa.record_batch(
        {"value": [b"v"] * 3, "timestamp": pa.array([5000, 9000, 7000], pa.timestamp("us"))}
    )
    (batch,) = encode(table, timestamp_ms=NOW_MS)
    header = read_header(batch.data)
    assert (header.record_count, header.last_offset_delta, header.size) == (3, 2, len(batch.data))
    assert (header.base_timestamp, header.max_timestamp) == (5, 9)
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (NO_PRODUCER_ID, -1, -1)


@pytest.mark.parametrize("codec", [codec for codec in Codec if codec is not Codec.NONE])
def test_compression_never_makes_a_batch_larger(codec: Codec) -> None:
    noise = np.random.default_rng(1).bytes(9_000)
    (batch,) = encode(pa.record_batch({"value": [noise]}), timestamp_ms=0, codec=codec)
    assert read_header(batch.data).codec is Codec.NONE
    (batch,) = encode(pa.record_batch({"value": [bytes(9_000)]}), timestamp_ms=0, codec=codec)
    assert read_header(batch.data).codec is codec
    assert len(batch.data) < BATCH_HEADER_BYTES + 1000


def test_no_rows_make_no_batch() -> None:
    assert encode(pa.record_batch({"value": pa.array([], pa.binary())}), timestamp_ms=0) == []


def test_null_lists_have_no_headers() -> None:
    items = pa.StructArray.from_arrays(
        [pa.array(["a", None, "c"]), pa.array([b"1", b"2", b"3"])], names=["key", "value"]
    )
    offsets = pa.array([0, 1, 2, 2, 3], pa.int32())
    lists = pa.ListArray.from_arrays(offsets, items, mask=pa.array([False, True, False, False]))
    records = read_back(encode(pa.record_batch({"value": [b""] * 4, "headers": lists}), timestamp_ms=0))
    assert [record.headers for record in records] == [(("a", b"1"),), (), (), (("c", b"3"),)]


def _headers(*rows: Any) -> pa.Array:
    return pa.array(rows, HEADERS)


@pytest.mark.parametrize(
    ("columns", "complaint"),
    [
        ({"key": [b"k"]}, "no column value among key"),
        ({"value": [1]}, "Column value is int64; it must be binary or string"),
        ({"value": [b"v"], "key": [1.5]}, "Column key is double"),
        ({"value": [b"v"], "timestamp": [1]}, "Column timestamp is int64"),
        ({"value": [b"v"], "headers": [b"h"]}, "Column headers is binary; it must be an array of struct"),
        (
            {"value": [b"v"] * 2, "headers": _headers([], [{"key": None, "value": b"v"}])},
            "Row 1 has a header without a key",
        ),
        ({"value": [b"v"] * 2, "headers": _headers([], [None])}, "Row 1 has a header without a key"),
    ],
)
def test_columns_that_cannot_be_written_are_named(columns: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        encode(pa.record_batch(columns), timestamp_ms=0)


@given(st.lists(timestamps, min_size=2, max_size=5))
def test_timestamps_may_decrease(times: list[int]) -> None:
    records = [Record(0, time, None, b"v") for time in times]
    assert read_back(encode(table_of(records), timestamp_ms=NOW_MS)) == numbered(records)


def test_all_columns_of_a_topic_can_be_written_back() -> None:
    (table,) = decoded([encode_batch([Record(0, 1, b"k", b"v", (("h", b"x"),))])], columns=COLUMNS)
    assert read_back(encode(table, timestamp_ms=NOW_MS)) == [Record(0, 1, b"k", b"v", (("h", b"x"),))]
