"""Commits: each batch once, end offsets that survive log cleanup, schemas, compaction and vacuum."""

import json
import os

import pytest
from deltalake import DeltaTable
from pyspark import cloudpickle
from pyspark.sql.types import DoubleType, IntegerType, StringType, StructField, StructType
from tests.spark.archive.lake import FIRST_DAY, SCHEMA, Frame, note_offsets, record_batch, rows_in

from penstock.spark.archive.delta_table import (
    ArchiveError,
    ArchiveTable,
    CommitConflict,
    EndOffsets,
    GapError,
    SchemaChanged,
)
from penstock.spark.archive.files import TableLocation
from penstock.spark.archive.maintenance import (
    Compaction,
    SizedFile,
    compact_files,
    next_compaction,
    vacuum_files,
)
from penstock.spark.archive.rows import ValueFormat, value_format
from penstock.spark.archive.sink import DeltaSink
from penstock.spark.exactly_once.decisions import MicroBatch
from penstock.spark.offsets import Position
from penstock.spark.pipelines.declaration import PipelineError, RunSettings

MB = 1 << 20


@pytest.fixture
def lake(tmp_path):
    return tmp_path / "lake with space"


def sink_of(lake, **settings):
    return DeltaSink(str(lake), **{"topic": "orders", **settings})


def archive(sink, number, *batches, query="q", schema=SCHEMA):
    sink.write(Frame([list(batches)], schema), MicroBatch(query, number))


def opened(lake):
    return ArchiveTable.open(TableLocation.of(str(lake)))


# Each batch once


def test_a_batch_that_the_table_has_is_not_written_again(lake):
    sink = sink_of(lake, topic=None)
    archive(sink, 0, record_batch(0, range(5)))
    archive(sink_of(lake, topic=None), 0, record_batch(0, range(5)))
    assert rows_in(lake) == [(0, offset) for offset in range(5)]


def test_another_query_continues_at_the_end_of_the_table(lake):
    archive(sink_of(lake), 0, record_batch(0, range(5)), query="a")
    archive(sink_of(lake), 0, record_batch(0, range(8)), query="b")
    assert rows_in(lake) == [(0, offset) for offset in range(8)]
    assert opened(lake).ends("orders") == EndOffsets({0: 8})


def test_only_the_version_after_the_one_that_was_read_is_committed(lake):
    archive(sink_of(lake), 0, record_batch(0, range(5)))
    table, other = opened(lake), opened(lake)
    other.append([], MicroBatch("elsewhere", 0), {}, {})
    with pytest.raises(CommitConflict):
        table.append([], MicroBatch("q", 1), {}, {})
    table.refresh()
    table.append([], MicroBatch("q", 1), {}, {})
    assert table.has(MicroBatch("q", 1))


def test_end_offsets_survive_the_cleanup_of_commits(lake):
    sink = sink_of(lake)
    archive(sink, 0, record_batch(0, range(5)), record_batch(2, range(3)))
    archive(sink, 1, record_batch(0, range(5, 6)))
    opened(lake).handle.create_checkpoint()
    for file in (lake / "_delta_log").glob("*.json"):
        file.unlink()
    table = opened(lake)
    assert table.ends("orders") == EndOffsets({0: 6, 2: 3})
    assert table.has(MicroBatch("q", 1))
    assert not table.has(MicroBatch("q", 2))
    assert table.properties["penstock.topic"] == "orders"


def test_a_commit_shows_its_end_offsets_to_users(lake):
    sink = sink_of(lake)
    archive(sink, 0, record_batch(0, range(5)), record_batch(1, range(2)))
    (info, *_) = DeltaTable(str(lake)).history(1)
    info = info["penstock"] if isinstance(info["penstock"], dict) else json.loads(info["penstock"])
    assert info["ends"] == {"0": 5, "1": 2}
    assert (info["topic"], info["query"], info["batch"]) == ("orders", "q", 0)


# End offsets


def test_end_offsets_are_those_of_the_batch_and_not_of_its_last_row(lake, tmp_path):
    sink = with_checkpoint(sink_of(lake), tmp_path, {0: 9, 1: 0})
    archive(sink, 0, record_batch(0, range(5)))
    assert opened(lake).ends("orders") == EndOffsets({0: 9, 1: 0})


def test_a_batch_without_rows_moves_the_end_offsets(lake, tmp_path):
    archive(sink_of(lake), 0, record_batch(0, range(5)))
    archive(with_checkpoint(sink_of(lake), tmp_path, {0: 7}), 0, query="b")
    assert opened(lake).ends("orders") == EndOffsets({0: 7})


def test_a_query_that_would_leave_a_gap_is_refused(lake, tmp_path):
    archive(sink_of(lake), 0, record_batch(0, range(5)))
    sink = with_checkpoint(sink_of(lake), tmp_path, {0: 9}, since={0: 7})
    with pytest.raises(GapError, match=r"ends at offset 5 of orders\[0\].* starts at 7"):
        archive(sink, 0, record_batch(0, range(7, 9)), query="b")
    assert len(rows_in(lake)) == 5


def test_a_new_table_may_start_at_any_offset(lake, tmp_path):
    sink = with_checkpoint(sink_of(lake), tmp_path, {0: 9}, since={0: 7})
    archive(sink, 0, record_batch(0, range(7, 9)))
    assert rows_in(lake) == [(0, 7), (0, 8)]


def with_checkpoint(sink, folder, ends, since=None):
    position = Position.of({("orders", each): end for each, end in ends.items()}, {"orders": None})
    if since is not None:
        first = Position.of({("orders", each): end for each, end in since.items()}, {"orders": None})
        position = first.as_initial().next_position(position.topics)
    note_offsets(folder / "checkpoint", 0, position)
    sink._run = RunSettings(bootstrap="unused", checkpoint=str(folder / "checkpoint"))
    return sink


def test_a_table_of_another_topic_is_refused(lake):
    archive(sink_of(lake), 0, record_batch(0, range(5)))
    with pytest.raises(ArchiveError, match="an archive of topic orders"):
        archive(sink_of(lake, topic="payments"), 0, record_batch(0, range(5)))


def test_a_recreated_topic_is_refused(lake):
    first, second = sink_of(lake), sink_of(lake)
    first._topic_id, second._topic_id = "one", "two"
    archive(first, 0, record_batch(0, range(5)))
    with pytest.raises(ArchiveError, match="deleted and created again"):
        archive(second, 0, record_batch(0, range(5)))


def test_rows_without_partition_and_offset_are_refused(lake):
    schema = StructType([StructField("value", StringType())])
    with pytest.raises(ArchiveError, match="need a column _partition of type int"):
        archive(sink_of(lake), 0, schema=schema)


# Columns


def with_column(batch, name, values):
    import pyarrow as pa

    return batch.append_column(name, pa.array(values))


def test_new_columns_are_added_to_the_table(lake):
    sink = sink_of(lake)
    archive(sink, 0, record_batch(0, range(2)))
    wider = StructType([*SCHEMA.fields, StructField("price", DoubleType(), False)])
    archive(sink, 1, with_column(record_batch(0, range(2, 4)), "price", [1.5, 2.5]), schema=wider)
    # A writer with the old schema can continue.
    archive(sink_of(lake), 2, record_batch(0, range(4, 5)))
    rows = opened(lake).handle.to_pyarrow_table().sort_by("_offset")
    assert rows.column("price").to_pylist() == [None, None, 1.5, 2.5, None]


@pytest.mark.parametrize(
    ("field", "sentence"),
    [
        (
            StructField("value", IntegerType()),
            "column value of table .* is string, but new rows have integer",
        ),
        (StructField("Value", StringType()), "a column value, and new rows have Value"),
    ],
)
def test_incompatible_columns_are_refused(lake, field, sentence):
    sink = sink_of(lake)
    archive(sink, 0, record_batch(0, range(2)))
    schema = StructType([field, *SCHEMA.fields[1:]])
    with pytest.raises(SchemaChanged, match=sentence):
        archive(sink, 1, schema=schema)


# Maintenance


def test_files_of_a_growing_day_are_compacted_by_size():
    small = [SizedFile("today", 100_000)] * 8
    assert next_compaction(small[:7], 128 * MB, ["today"]) is None
    assert next_compaction(small, 128 * MB, ["today"]) == Compaction(value="today", target_bytes=2 * MB)
    middle = [SizedFile("today", 2 * MB)] * 8
    assert next_compaction(middle, 128 * MB, ["today"]) == Compaction(value="today", target_bytes=16 * MB)
    assert next_compaction([SizedFile("today", 70 * MB)] * 20, 128 * MB, ["today"]) is None


def test_files_of_a_finished_day_are_compacted_once():
    files = [SizedFile("then", 10 * MB), SizedFile("then", 30 * MB), SizedFile("today", 1)]
    assert next_compaction(files, 128 * MB, ["today"]) == Compaction(value="then", target_bytes=128 * MB)
    assert next_compaction(files[1:], 128 * MB, ["today"]) is None


def test_compaction_keeps_rows_and_end_offsets(lake):
    sink = sink_of(lake)
    for number in range(5):
        days = [FIRST_DAY, FIRST_DAY + 1]
        archive(sink, number, record_batch(0, range(2 * number, 2 * number + 2), days))
    table = opened(lake)
    assert compact_files(table, Compaction(value="2024-10-04", target_bytes=128 * MB)) == 4
    assert [each.startswith("day=2024-10-04") for each in table.paths()].count(True) == 1
    assert rows_in(lake) == [(0, offset) for offset in range(10)]
    assert table.ends("orders") == EndOffsets({0: 10})
    # A writer that read the table before the compaction can continue.
    archive(sink, 5, record_batch(0, range(10, 11)))
    assert len(rows_in(lake)) == 11


def test_old_unused_files_are_vacuumed(lake):
    sink = sink_of(lake)
    archive(sink, 0, record_batch(0, range(5)))
    old, new = (lake / "day=2024-10-04" / name for name in ("old.parquet", "new.parquet"))
    for path in (old, new):
        path.write_bytes(b"an attempt that came to nothing")
    os.utime(old, (1, 1))
    table = opened(lake)
    assert vacuum_files(table, keep_hours=24) == 1
    assert (old.exists(), new.exists()) == (False, True)
    archive(sink, 1, record_batch(0, range(5, 6)))
    assert len(rows_in(lake)) == 6


def test_failed_maintenance_does_not_fail_the_batch(lake, monkeypatch, caplog):
    sink = sink_of(lake)
    monkeypatch.setattr(DeltaTable, "vacuum", lambda *_, **__: (_ for _ in ()).throw(OSError("disk on fire")))
    archive(sink, 0, record_batch(0, range(5)))
    assert "disk on fire" in caplog.text
    assert len(rows_in(lake)) == 5


# Other processes and stores


def test_a_pickled_sink_continues(lake):
    sink = sink_of(lake)
    archive(sink, 0, record_batch(0, range(5)))
    archive(cloudpickle.loads(cloudpickle.dumps(sink)), 1, record_batch(0, range(8)))
    assert len(rows_in(lake)) == 8


def test_a_table_may_be_named_by_a_uri(lake):
    archive(sink_of(lake.parent.as_uri() + "/lake"), 0, record_batch(0, range(5)))
    assert len(rows_in(lake.parent / "lake")) == 5


@pytest.mark.parametrize(
    ("uri", "of_spark"),
    [
        ("s3://bucket/lake", "s3a://bucket/lake/day=2024-10-04/x.parquet"),
        ("gs://bucket/lake/", "gs://bucket/lake/day=2024-10-04/x.parquet"),
        ("/lake [1]", "file:///lake \\[1\\]/day=2024-10-04/x.parquet"),
        ("file:///lake%201", "file:///lake 1/day=2024-10-04/x.parquet"),
    ],
)
def test_paths_for_spark(uri, of_spark):
    assert TableLocation.of(uri).for_spark("day=2024-10-04/x.parquet") == of_spark


def test_the_table_stores_how_values_are_parsed(lake):
    old, new = (value_format(f"id STRING, {name} DOUBLE", "json").to_json() for name in ("total", "amount"))
    archive(sink_of(lake, reading=old), 0, record_batch(0, range(2)))
    archive(sink_of(lake, reading=new), 1, record_batch(0, range(2, 4)))
    found = ValueFormat.from_json(opened(lake).properties["penstock.reading"])
    assert found.schema == "id STRING, amount DOUBLE"


def test_the_table_stores_the_avro_schema(tmp_path):
    schema = tmp_path / "order.avsc"
    schema.write_text(
        json.dumps({"type": "record", "name": "Order", "fields": [{"name": "id", "type": "string"}]})
    )
    how = value_format(str(schema), "avro")
    assert ValueFormat.from_json(how.to_json()) == how
    with pytest.raises(PipelineError, match="format='xml' must be json"):
        value_format(str(schema), "xml")
