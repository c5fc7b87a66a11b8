"""Archives written and read with real Spark, compared with what clients wrote."""

import json
import shutil
import uuid
from datetime import UTC, date, datetime

import pytest
from deltalake import DeltaTable, TableFeatures
from pyspark.errors import StreamingQueryException
from tests.compat.message import Message
from tests.spark.archive.lake import Frame, record_batch, rows_in

from penstock.client.errors import TopicChanged
from penstock.spark.archive import DeltaSink, history, latest, table
from penstock.spark.archive import archive as declare
from penstock.spark.archive.delta_table import ArchiveError, ArchiveTable, GapError
from penstock.spark.archive.files import TableLocation
from penstock.spark.archive.rows import archived_rows, parsed_rows, value_format
from penstock.spark.exactly_once.decisions import MicroBatch
from penstock.spark.pipelines.assembly import start
from penstock.spark.pipelines.declaration import RunSettings

MORNING = int(datetime(2024, 10, 4, 1, tzinfo=UTC).timestamp() * 1000)
DAY_MS = 86_400_000


class Archive:
    """A topic, a table, and a query between them that reads what is available and ends."""

    def __init__(self, spark, topics, folder, partitions=2):
        self.spark, self.topics = spark, topics
        # Brokers must not delete records of years ago before they are read.
        settings = {"retention.ms": "-1"}
        self.topic = topics.create(f"archived-{uuid.uuid4().hex}", partitions, **settings)
        self.table, self.checkpoint = folder / "table", folder / "checkpoint"

    def sink(self, reading=None):
        sink = DeltaSink(str(self.table), topic=self.topic, reading=reading)
        sink.prepare(self.spark, RunSettings(bootstrap=self.topics.bootstrap, checkpoint=""))
        return sink

    def has(self, offsets):
        """Return the table, which must exist."""
        self.sink().write(Frame([[record_batch(0, offsets)]]), MicroBatch("before", 0))

    def run(self, rows=archived_rows, reading=None, **options):
        """Archive as users of plain foreachBatch do."""
        sink = DeltaSink(str(self.table), topic=self.topic, reading=reading)
        sink.prepare(
            self.spark, RunSettings(bootstrap=self.topics.bootstrap, checkpoint=str(self.checkpoint))
        )
        given = self.topics.given(
            subscribe=self.topic, includeHeaders="true", startingOffsets="earliest", **options
        )
        source = self.spark.readStream.format("penstock").options(**given).load()

        def write(frame, number):
            metadata = json.loads((self.checkpoint / "metadata").read_text())
            sink.write(rows(frame), MicroBatch(metadata["id"], number))

        (
            source.writeStream.option("checkpointLocation", str(self.checkpoint))
            .trigger(availableNow=True)
            .foreachBatch(write)
            .start()
            .awaitTermination()
        )

    def read(self):
        return table(self.spark, self.topic, str(self.table), bootstrap=self.topics.bootstrap)

    def latest(self):
        return latest(self.spark, self.topic, str(self.table), bootstrap=self.topics.bootstrap)

    def fill(self, *messages):
        self.topics.fill(self.topic, messages)


@pytest.fixture
def archive(spark, topics, tmp_path):
    return Archive(spark, topics, tmp_path)


def values(frame):
    return sorted(row["value"] for row in frame.select("value").collect())


def test_records_are_archived_unchanged_and_newer_ones_are_read_from_the_topic(archive):
    first = Message(b"1", key=b"k", headers=(("h", b"x"),), timestamp_ms=MORNING)
    archive.fill(first, Message(b"2", timestamp_ms=MORNING + DAY_MS, partition=1))
    archive.run()
    archive.fill(Message(b"3", timestamp_ms=MORNING + DAY_MS))
    whole = archive.read()
    # Later records are neither in the table nor in the pinned range.
    archive.fill(Message(b"4"))
    archive.run()

    assert values(whole) == [b"1", b"2", b"3"]
    row = whole.where("value = '1'").collect()[0].asDict(recursive=True)
    assert row == {
        "value": bytearray(b"1"),
        "_key": bytearray(b"k"),
        "_headers": [{"key": "h", "value": bytearray(b"x")}],
        "_timestamp": datetime(2024, 10, 4, 1),
        "_partition": 0,
        "_offset": 0,
        "_tombstone": False,
        "day": date(2024, 10, 4),
    }
    assert values(archive.read()) == [b"1", b"2", b"3", b"4"]
    assert rows_in(archive.table) == [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert {row["day"] for row in whole.where("value = '3'").collect()} == {date(2024, 10, 5)}


def test_a_filter_on_the_day_reads_only_the_files_of_that_day(archive, spark):
    archive.fill(Message(b"1", timestamp_ms=MORNING), Message(b"2", timestamp_ms=MORNING + DAY_MS))
    archive.run()
    rows = history(spark, str(archive.table))
    shutil.rmtree(archive.table / "day=2024-10-04")
    assert values(rows.where("day = '2024-10-05'")) == [b"2"]


def test_a_query_that_starts_over_archives_nothing_twice(archive):
    archive.topics.count(archive.topic, range(20))
    archive.run(maxOffsetsPerTrigger="15")
    shutil.rmtree(archive.checkpoint)
    archive.topics.count(archive.topic, range(20, 30), partition=1)
    archive.run(minPartitions="5")
    assert rows_in(archive.table) == [(0, n) for n in range(20)] + [(1, n) for n in range(10)]


def dies(real):
    def dying(*args, **kwargs):
        real(*args, **kwargs)
        raise RuntimeError("the driver dies")

    return dying


@pytest.mark.parametrize(("owner", "step"), [(DeltaSink, "_write_files"), (ArchiveTable, "append")])
def test_a_batch_that_other_tasks_repeat_is_archived_once(archive, monkeypatch, owner, step):
    archive.topics.count(archive.topic, range(20))
    with monkeypatch.context() as patched:
        patched.setattr(owner, step, dies(getattr(owner, step)))
        with pytest.raises(StreamingQueryException, match="the driver dies"):
            archive.run(minPartitions="2")
    assert list(archive.table.rglob("*.parquet")), "the first run has written files before it died"
    archive.run(minPartitions="5")
    assert rows_in(archive.table) == [(0, n) for n in range(20)]


def test_a_pipeline_archives_valid_values_and_sends_others_to_the_dead_letter_topic(archive, tmp_path):
    schema = tmp_path / "order.ddl"
    schema.write_text("id STRING NOT NULL, total DOUBLE")
    archive.fill(Message(b'{"id": "a", "total": 1.5}'), Message(None, key=b"a"), Message(b"poison"))
    declared = declare(archive.topic, str(archive.table), schema=str(schema), compact_mb="16")
    run = RunSettings(bootstrap=archive.topics.bootstrap, checkpoint=str(archive.checkpoint), once=True)
    for query in start(archive.spark, declared, run):
        query.awaitTermination()
    rows = archive.read().orderBy("_offset").collect()
    assert [(row["_offset"], row["id"], row["total"]) for row in rows] == [(0, "a", 1.5), (1, None, None)]
    table = ArchiveTable.open(TableLocation.of(str(archive.table)))
    assert table.ends(archive.topic).of(0) == 3, "the end offset is after the dead letter"
    dead_letters = archive.spark.read.format("penstock").options(
        **archive.topics.given(subscribe=f"{archive.topic}.dlq")
    )
    assert values(dead_letters.load()) == [b"poison"]


def test_a_gap_after_retention_is_an_error(archive):
    archive.topics.count(archive.topic, range(9))
    archive.has(range(5))
    archive.topics.trim(archive.topic, before=7)
    with pytest.raises(GapError, match=rf"{archive.topic}\[0\] offsets 5 to 6"):
        archive.read()


def test_archived_records_that_the_topic_has_lost_are_an_error(archive):
    archive.topics.count(archive.topic, range(3))
    archive.has(range(5))
    with pytest.raises(TopicChanged, match=r"up to offset 4, and the log ends at 3"):
        archive.read()


def test_a_recreated_topic_is_not_the_one_in_the_table(archive):
    archive.topics.count(archive.topic, range(5))
    archive.has(range(5))
    archive.topics.delete(archive.topic)
    archive.topics.create(archive.topic, 2)
    with pytest.raises(TopicChanged, match=r"created (anew|again)"):
        archive.read()
    with pytest.raises(ArchiveError, match="created again"):
        archive.sink()


@pytest.mark.parametrize("feature", [TableFeatures.DeletionVectors, TableFeatures.ColumnMapping])
def test_tables_with_unsupported_features_are_refused(archive, feature):
    archive.has(range(5))
    DeltaTable(str(archive.table)).alter.add_feature(feature, allow_protocol_versions_increase=True)
    with pytest.raises(ArchiveError, match=r"deletionVectors|columnMapping"):
        archive.read()


def test_invalid_values_are_in_neither_part_and_tombstones_are_in_both(archive):
    how = value_format("id STRING NOT NULL, total DOUBLE", "json")
    good, bad = json.dumps({"id": "a", "total": 1.5}).encode(), b'{"total": 1.5}'
    messages = [Message(good, key=b"a"), Message(None, key=b"a"), Message(bad, key=b"b")]
    archive.fill(*messages)
    archive.run(lambda frame: archived_rows(parsed_rows(frame, how)), reading=how.to_json())
    archive.fill(*messages)
    rows = archive.read().orderBy("_offset").collect()
    assert [(row["_offset"], row["id"], row["total"], row["_tombstone"]) for row in rows] == [
        (0, "a", 1.5, False),
        (1, None, None, True),
        (3, "a", 1.5, False),
        (4, None, None, True),
    ]
    assert archive.latest().collect() == []


def test_latest_is_the_newest_by_offset_then_by_time_without_deleted_keys(archive):
    late, early = MORNING + 5000, MORNING
    archive.fill(
        Message(b"old", key=b"k", timestamp_ms=late),
        Message(b"new", key=b"k", timestamp_ms=early),
        Message(b"here", key=b"moved", timestamp_ms=early),
        Message(b"there", key=b"moved", timestamp_ms=late, partition=1),
        Message(b"x", key=b"gone", timestamp_ms=early),
        Message(b"no key", timestamp_ms=early),
    )
    archive.run()
    archive.fill(Message(None, key=b"gone", timestamp_ms=late), Message(b"fresh", key=b"f"))
    found = {bytes(row["_key"]): bytes(row["value"]) for row in archive.latest().collect()}
    assert found == {b"k": b"new", b"moved": b"there", b"f": b"fresh"}
