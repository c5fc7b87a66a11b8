"""The files of a task: every row is in a file of its day, within the bounds of the statistics."""

import json
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.spark.archive.lake import FIRST_DAY, record_batch

from penstock.spark.archive import files
from penstock.spark.archive.files import FileWriter, TableLocation, WrittenFiles


def write(folder, batches, ends=None, partition_by="day"):
    return FileWriter(location=TableLocation.of(str(folder)), partition_by=partition_by, ends=ends).write(
        batches
    )


def offsets(folder, file):
    return pq.read_table(folder / file.path, partitioning=None).column("_offset").to_pylist()


def test_rows_go_to_a_file_for_each_day_in_order(tmp_path):
    days = [FIRST_DAY + day for day in (1, 0, 1, 2, 0)]
    written = write(tmp_path, [record_batch(0, range(5), days)])
    found = {file.value: offsets(tmp_path, file) for file in written.files}
    assert found == {"2024-10-04": [1, 4], "2024-10-05": [0, 2], "2024-10-06": [3]}
    assert all(file.path.startswith(f"day={file.value}/") for file in written.files)
    assert "day" not in pq.read_schema(tmp_path / written.files[0].path).names


def test_rows_without_a_day_are_kept(tmp_path):
    batch = record_batch(0, range(3)).set_column(4, "day", pa.array([None, None, None], pa.date32()))
    (file,) = write(tmp_path, [batch]).files
    assert (file.value, file.rows) == (None, 3)
    assert file.path.startswith("day=__HIVE_DEFAULT_PARTITION__/")


def test_rows_that_the_table_has_are_skipped_and_counted(tmp_path):
    batches = [record_batch(0, range(10)), record_batch(1, range(5, 9)), record_batch(2, range(3))]
    written = write(tmp_path, batches, ends={0: 7, 1: 5, 2: 3})
    assert sorted(offset for file in written.files for offset in offsets(tmp_path, file)) == [
        5,
        6,
        7,
        7,
        8,
        8,
        9,
    ]
    assert written.skipped == 7 + 3
    assert written.ends == {0: 10, 1: 9, 2: 3}


def test_many_rows_make_several_files_and_the_largest_group_is_written_first(tmp_path, monkeypatch):
    one = record_batch(0, range(100))
    monkeypatch.setattr(files, "_BUFFERED_BYTES_MAX", int(one.nbytes * 2.5))
    batches = [record_batch(0, range(start, start + 100)) for start in range(0, 500, 100)]
    written = write(tmp_path, batches)
    assert len(written.files) == 2
    assert sorted(offset for file in written.files for offset in offsets(tmp_path, file)) == list(range(500))


def test_no_rows_make_no_file(tmp_path):
    assert write(tmp_path, [record_batch(0, [])]) == WrittenFiles()


def test_rows_that_are_written_twice_get_different_file_names(tmp_path):
    paths = {write(tmp_path, [record_batch(0, range(3))]).files[0].path for _ in range(2)}
    assert len(paths) == 2


def test_results_of_tasks_are_combined(tmp_path):
    written = [
        write(tmp_path, [record_batch(0, numbers)], ends={0: 2}) for numbers in (range(5), range(5, 7))
    ]
    combined = WrittenFiles.combined(each.to_json() for each in written)
    assert combined.files == (*written[0].files, *written[1].files)
    assert (combined.ends, combined.skipped, combined.rows) == ({0: 7}, 2, 5)


MOMENT = datetime(2024, 10, 4, 12, 0, 0, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("values", "kind", "bounds"),
    [
        ([3, -1, None], pa.int64(), (-1, 3)),
        ([MOMENT.date(), None], pa.date32(), ("2024-10-04", "2024-10-04")),
        # Bounds are widened to whole milliseconds.
        (
            [MOMENT, MOMENT + timedelta(microseconds=999)],
            pa.timestamp("us", "UTC"),
            ("2024-10-04T12:00:00.000Z", "2024-10-04T12:00:00.001Z"),
        ),
        (["b", "a", "é"], pa.string(), ("a", "é")),
        (["b" * 65], pa.string(), None),
        ([1.0, float("nan")], pa.float64(), None),
        ([b"x"], pa.binary(), None),
        ([None], pa.int32(), None),
        ([253402300800_000000], pa.timestamp("us", "UTC"), None),
    ],
    ids=lambda value: str(value)[:20],
)
def test_bounds_of_a_column(tmp_path, values, kind, bounds):
    batch = pa.record_batch({"x": pa.array(values, kind)})
    (file,) = write(tmp_path, [batch], partition_by=None).files
    statistics = json.loads(file.statistics)
    assert statistics["numRecords"] == len(values)
    assert statistics["nullCount"] == {"x": values.count(None)}
    assert (statistics["minValues"].get("x"), statistics["maxValues"].get("x")) == (bounds or (None, None))


def test_nested_columns_have_no_bounds(tmp_path):
    batch = pa.record_batch({"x": pa.array([{"a": 1}]), "y": pa.array([[1, 2]])})
    (file,) = write(tmp_path, [batch], partition_by=None).files
    assert json.loads(file.statistics)["minValues"] == {}
