"""Columns contain what the per-record codec reads, in the types of Spark's own connector."""

import pickle

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.spark.columns.records import (
    EVERYTHING,
    codecs,
    decoded,
    expected,
    log_of,
    logs,
    rows,
    views,
)

from penstock.protocol.compression import Codec
from penstock.protocol.record_batch import (
    BATCH_HEADER_BYTES,
    LOG_APPEND_TIME,
    EndMarker,
    Record,
    encode_batch,
    encode_end_marker,
    pack_batch,
    read_header,
)
from penstock.spark.columns import COLUMNS, CorruptBatch, arrow_schema


def numbered(count: int, value: bytes = b"v" * 100, first: int = 0) -> list[Record]:
    return [Record(offset, offset, b"%d" % offset, value) for offset in range(first, first + count)]


@given(log=logs(), codec=codecs)
def test_columns_contain_what_was_written(log: list[list[Record]], codec: Codec) -> None:
    assert rows(decoded(log_of(log, codec))) == expected(record for batch in log for record in batch)


@given(log=logs(), data=st.data())
def test_only_wanted_offsets_are_decoded(log: list[list[Record]], data: st.DataObject) -> None:
    records = [record for batch in log for record in batch]
    edges = st.sampled_from([record.offset + step for record in records for step in (-1, 0, 1)])
    start, end = data.draw(edges), data.draw(edges)
    wanted = [record for record in records if start <= record.offset < end]
    assert rows(decoded(log_of(log), (start, end))) == expected(wanted)


@given(log=logs(), rows_max=st.integers(1, 9), bytes_max=st.integers(1, 20_000), codec=codecs)
def test_the_result_does_not_depend_on_the_split(
    log: list[list[Record]], rows_max: int, bytes_max: int, codec: Codec
) -> None:
    records = [record for batch in log for record in batch]
    start, end = records[len(records) // 3].offset, records[-1].offset
    tables = decoded(log_of(log, codec), (start, end), rows_max=rows_max, bytes_max=bytes_max)
    assert rows(tables) == expected(record for record in records if start <= record.offset < end)
    for table in tables:
        assert 1 <= table.num_rows <= rows_max
        assert table.num_rows == 1 or table["value"].nbytes <= bytes_max


def test_one_call_makes_one_arrow_batch_of_many_record_batches() -> None:
    log = log_of([numbered(10, first=first) for first in range(0, 1000, 10)])
    (table,) = decoded(log)
    assert table.num_rows == 1000


def test_a_long_scan_pauses_inside_a_batch() -> None:
    log = log_of([numbered(1000)])
    assert [table.num_rows for table in decoded(log, rows_max=300)] == [300, 300, 300, 100]


@given(log=logs(), columns=st.lists(st.sampled_from(COLUMNS), unique=True, min_size=1))
def test_columns_have_the_requested_order(log: list[list[Record]], columns: list[str]) -> None:
    records = [record for batch in log for record in batch]
    tables = decoded(log_of(log), columns=columns)
    assert tables[0].schema.names == columns
    assert rows(tables) == [{name: row[name] for name in columns} for row in expected(records)]


def test_types_are_those_that_spark_expects() -> None:
    (table,) = decoded(log_of([numbered(1)]))
    assert table.schema == pa.schema(
        [
            ("key", pa.binary()),
            ("value", pa.binary()),
            ("topic", pa.string()),
            ("partition", pa.int32()),
            ("offset", pa.int64()),
            ("timestamp", pa.timestamp("us", tz="UTC")),
            ("timestampType", pa.int32()),
            (
                "headers",
                pa.list_(pa.field("element", pa.struct([("key", pa.string()), ("value", pa.binary())]))),
            ),
        ]
    )


@pytest.mark.parametrize("columns", [["key", "colour"], []])
def test_an_unknown_column_is_refused(columns: list[str]) -> None:
    with pytest.raises(ValueError, match="its columns are key, value"):
        arrow_schema(columns)


def test_log_append_time_is_that_of_the_batch() -> None:
    log = [encode_batch(numbered(3), attributes=LOG_APPEND_TIME, max_timestamp=1_700_000_000_123)]
    (table,) = decoded(log)
    assert table["timestamp"].cast(pa.int64()).to_pylist() == [1_700_000_000_123_000] * 3
    assert table["timestampType"].to_pylist() == [1] * 3


@pytest.mark.parametrize(
    ("timestamp", "microseconds"),
    [
        (-1, -1000),
        (9223372036854775, 9223372036854775000),
        (9223372036854776, 9223372036854775000),
        ((1 << 63) - 1, 9223372036854775000),
        (-(1 << 63), -9223372036854775000),
    ],
)
def test_timestamps_that_do_not_fit_into_microseconds_keep_their_order(
    timestamp: int, microseconds: int
) -> None:
    (table,) = decoded([encode_batch([Record(0, timestamp, None, b"")], base_timestamp=1)])
    assert table["timestamp"].cast(pa.int64()).to_pylist() == [microseconds]


def test_header_keys_that_are_not_utf_8_are_read_as_in_java() -> None:
    record = Record(0, 0, None, b"", (("\udcff\udcfe", b"1"), ("größe", None)))
    (table,) = decoded([encode_batch([record])])
    table.validate(full=True)
    assert table["headers"].to_pylist() == [
        [{"key": "\ufffd\ufffd", "value": b"1"}, {"key": "größe", "value": None}]
    ]


def test_batches_that_compaction_emptied_have_no_rows() -> None:
    emptied = encode_batch([], base_offset=5, last_offset=9)
    assert decoded([emptied]) == []
    assert rows(decoded([emptied, *log_of([numbered(2, first=10)])])) == expected(numbered(2, first=10))


def test_batches_out_of_range_are_not_decompressed() -> None:
    junk = pack_batch(read_header(encode_batch(numbered(2), codec=Codec.ZSTD)), b"no zstd at all")
    log = [
        junk,
        *log_of([numbered(3, first=2)]),
        pack_batch(read_header(junk)._replace(base_offset=5), b"junk"),
    ]
    assert rows(decoded(log, (2, 5))) == expected(numbered(3, first=2))


def test_a_batch_that_decompresses_beyond_the_limit_is_refused() -> None:
    log = [encode_batch(numbered(100, value=bytes(10_000)), codec=Codec.ZSTD)]
    with pytest.raises(CorruptBatch, match="more than 100000 bytes"):
        decoded(log, decoded_bytes_max=100_000)


def test_a_corrupt_batch_is_named() -> None:
    bad = pack_batch(read_header(encode_batch(numbered(1, first=3))), b"\x02\x00" * 10)
    with pytest.raises(CorruptBatch) as caught:
        decoded([*log_of([numbered(3)]), bad])
    assert (caught.value.topic, caught.value.partition, caught.value.offset) == ("orders", 3, 3)
    assert str(caught.value).startswith("the batch at offset 3 of orders[3] is corrupt: ")
    # Spark pickles exceptions.
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"magic": 1}, "format"),
        ({"record_count": -1}, "count"),
        ({"record_count": 1 << 30}, "count"),
        ({"record_count": 2}, "after its last"),
        ({"record_count": 4}, "cut short"),
        ({"last_offset_delta": -1}, "count"),
        ({"last_offset_delta": 1}, "out of order"),
        ({"attributes": 7}, "codec"),
    ],
)
def test_a_header_that_does_not_match_its_records_is_refused(change: dict[str, int], reason: str) -> None:
    batch = encode_batch(numbered(3))
    bad = pack_batch(read_header(batch)._replace(**change), batch[BATCH_HEADER_BYTES:])
    with pytest.raises(CorruptBatch, match=reason):
        decoded([bad], (-10, 1 << 40))


def test_control_batches_are_refused() -> None:
    marker = encode_end_marker(EndMarker(7, 0, 0, True), 0)
    with pytest.raises(AssertionError, match="control"):
        decoded([marker])


def test_columns_outlive_the_data_that_they_were_read_from() -> None:
    data = bytearray(b"".join(log_of([numbered(50)])))
    (table,) = decoded([data])
    again = decoded(log_of([numbered(50, value=b"w" * 100, first=50)]))
    data[:] = bytes(len(data))
    assert rows([table]) == expected(numbered(50))
    assert rows(again) == expected(numbered(50, value=b"w" * 100, first=50))


def test_no_batches_give_no_rows() -> None:
    assert views([]) == []
    assert decoded([]) == []
    assert decoded(log_of([numbered(3)]), (EVERYTHING[1], EVERYTHING[1])) == []
