"""Rows as records: columns, types, topics and partitions."""

from types import SimpleNamespace

import pyarrow as pa
import pytest

from penstock.spark.columns import partition_rows
from penstock.spark.option_reader import OptionError
from penstock.spark.sink.records import SinkColumns, WrongRow, combine_batches, records_by_partition

COUNTS = {"a": 4, "b": 2}.__getitem__


def columns(text: str, topic: str | None = None, timestamp: str | None = None) -> SinkColumns:
    """Return the columns for a schema written as `name type, name type`."""
    fields = []
    for name, kind in (each.split(" ") for each in text.split(", ")):
        fields.append(
            SimpleNamespace(name=name, dataType=SimpleNamespace(simpleString=lambda kind=kind: kind))
        )
    return SinkColumns.of(SimpleNamespace(fields=fields), topic, timestamp)


def placed(rows: pa.RecordBatch, found: SinkColumns, seed: int = 0) -> dict:
    return {tp: records.to_pylist() for tp, records in records_by_partition(rows, found, COUNTS, seed=seed)}


def test_other_columns_are_ignored():
    found = columns("offset bigint, VALUE string, timestamp timestamp, Key binary", "a")
    rows = pa.record_batch(
        [[7], ["v"], pa.array([0], pa.timestamp("us")), [b"k"]], names=["o", "v", "t", "k"]
    )
    assert list(placed(rows, found).values()) == [[{"key": b"k", "value": "v"}]]


@pytest.mark.parametrize(
    ("ddl", "topic", "words"),
    [
        ("key string", "a", "there is no column value"),
        ("value int", "a", "column value is int; it must be string or binary to be written"),
        ("value string, key array<string>", "a", "column key is array<string>; it must be string or binary"),
        ("value string, topic binary", None, "column topic is binary; it must be string"),
        ("value string, partition bigint", "a", "column partition is bigint; it must be int"),
        (
            "value string, headers map<string,string>",
            "a",
            "it must be array<struct<key:string,value:binary>>",
        ),
        ("value string", None, "set the option topic, or add a column topic"),
    ],
)
def test_columns_that_cannot_be_written(ddl, topic, words):
    with pytest.raises(OptionError) as raised:
        columns(ddl, topic)
    assert words in str(raised.value)


def test_the_timestamp_column():
    found = columns("value string, timestamp timestamp, due timestamp", "a", "DUE")
    times = [pa.array([number], pa.timestamp("us", "UTC")) for number in (1, 2)]
    rows = pa.record_batch([["v"], *times], names=["value", "timestamp", "due"])
    [[record]] = placed(rows, found).values()
    assert record == {"value": "v", "timestamp": times[1][0].as_py()}
    with pytest.raises(OptionError, match="column due is bigint; timestampColumn must name a timestamp"):
        columns("value string, due bigint", "a", "due")
    with pytest.raises(OptionError, match="option timestampColumn=due: there is no such column"):
        columns("value string", "a", "due")


def test_the_topic_option_overrides_the_column():
    rows = pa.record_batch(
        [["1", "2", "3"], ["a", "b", "a"], pa.array([0, 1, 0], pa.int32())], names=list("vtp")
    )
    by_column = columns("value string, topic string, partition int")
    assert placed(rows, by_column) == {
        ("a", 0): [{"value": "1"}, {"value": "3"}],
        ("b", 1): [{"value": "2"}],
    }
    by_option = columns("value string, topic string, partition int", "b")
    assert set(placed(rows, by_option)) == {("b", 0), ("b", 1)}


def test_a_row_without_a_topic():
    rows = pa.record_batch([["1", "2"], ["a", None]], names=["value", "topic"])
    with pytest.raises(WrongRow, match="a row has no topic"):
        placed(rows, columns("value string, topic string"))


@pytest.mark.parametrize("number", [4, -1])
def test_a_partition_that_does_not_exist(number):
    rows = pa.record_batch([["1", "2"], pa.array([None, number], pa.int32())], names=["value", "partition"])
    with pytest.raises(WrongRow, match=f"a row is for partition {number} of a, which has 4 partitions"):
        placed(rows, columns("value string, partition int", "a"))


def test_the_partition_column_then_the_key_then_a_random_partition():
    keys = ["k1", "k2", None, "k3"]
    rows = pa.record_batch(
        [[str(n) for n in range(4)], keys, pa.array([3, None, None, None], pa.int32())],
        names=["value", "key", "partition"],
    )
    found = columns("value string, key string, partition int", "a")
    partitions = {
        record["value"]: partition
        for (_, partition), records in placed(rows, found, seed=6).items()
        for record in records
    }
    by_key = partition_rows(pa.array(keys), 4, seed=0)
    assert partitions == {"0": 3, "1": by_key[1], "2": 2, "3": by_key[3]}


def test_rows_without_keys_go_to_one_partition_for_each_seed():
    rows = pa.record_batch([["1", "2"]], names=["value"])
    found = columns("value string", "a")
    assert [set(placed(rows, found, seed=seed)) for seed in (1, 6)] == [{("a", 1)}, {("a", 2)}]


def test_small_batches_are_combined_and_empty_ones_dropped():
    small = [pa.record_batch([pa.array([f"{n}"])], names=["value"]) for n in range(5)]
    empty = small[0].slice(0, 0)
    [joined] = combine_batches([empty, *small, empty])
    assert joined.column(0).to_pylist() == list("01234")
    assert list(combine_batches([empty])) == []
    large = pa.record_batch([pa.array(["x" * 1000] * 9000)], names=["value"])
    assert [each.num_rows for each in combine_batches([large, large, *small])] == [9000, 9000, 5]
