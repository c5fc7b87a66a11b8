"""Writes with Spark, read back by another client."""

import json
import shutil
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException, StreamingQueryException
from tests.compat import confluent
from tests.spark.sink.ambushed import AFTER_COMMIT, NAME, AmbushedDataSource
from tests.spark.sink.readers import await_rest, committed_numbers
from tests.spark.source.topics import Topics

from penstock.spark.exactly_once.decisions import MicroBatch
from penstock.spark.sink.options import SinkOptions
from penstock.spark.sink.records import SinkColumns
from penstock.spark.sink.writers import AttemptIds, write_exactly_once

WITHIN_S = 600.0
#: More than 10,000 bytes, even compressed.
LARGE = "array_join(transform(sequence(1, 500), n -> sha2(string(n), 256)), '')"
HEADERS = "array(named_struct('key', 'h', 'value', binary('x')), named_struct('key', 'n', 'value', null))"


@pytest.fixture
def topics(broker: Any) -> Topics:
    return Topics(broker.bootstrap_servers)


@pytest.fixture
def write(topics: Topics) -> Callable[..., None]:
    def written(frame: Any, mode: str = "append", **options: str) -> None:
        frame.write.format("penstock").mode(mode).options(**topics.given(**options)).save()

    return written


class Copy:
    """A query from one topic to another that can be restarted on its checkpoint, with other tasks each time."""

    def __init__(self, spark: Any, topics: Topics, folder: Path, source: str, target: str) -> None:
        self.spark, self.topics = spark, topics
        self.source, self.target = source, target
        self.checkpoint = folder / "checkpoint"
        self.runs = 0

    def run(self, name: str = "penstock", **sink: str) -> Any:
        """Run until everything is written, or the query fails."""
        self.runs += 1
        given = self.topics.given(
            subscribe=self.source,
            startingOffsets="earliest",
            maxOffsetsPerTrigger="20",
            minPartitions=str(1 + self.runs % 3),
        )
        frame = self.spark.readStream.format("penstock").options(**given).load().select("key", "value")
        writer = frame.writeStream.format(name).options(**self.topics.given(topic=self.target, **sink))
        writer = writer.option("checkpointLocation", str(self.checkpoint))
        running = writer.trigger(availableNow=True).start()
        try:
            assert running.awaitTermination(WITHIN_S)
        finally:
            running.stop()
        return running

    def numbers(self) -> list[int]:
        """Return what read_committed consumers see, after all transactions have ended."""
        with self.topics.cluster() as cluster:
            partitions = [(self.target, part.index) for part in cluster.topic(self.target).partitions]
            await_rest(cluster, partitions)
            return committed_numbers(self.topics, cluster, partitions)


@pytest.fixture
def copy(spark: Any, topics: Topics, unique: Any, tmp_path: Path) -> Copy:
    source, target = topics.create(unique("in"), 2), topics.create(unique("out"), 2)
    for partition in range(2):
        topics.count(source, range(partition, 40, 2), partition=partition)
    return Copy(spark, topics, tmp_path, source, target)


# Batch


def test_every_column(spark, topics, write, unique):
    topic = topics.create(unique("t"), 3)
    rows = spark.range(6).selectExpr(
        "cast(id as string) as key",
        "if(id = 3, null, cast(concat('v', id) as binary)) as value",
        "cast(id % 3 as int) as partition",
        f"if(id = 1, {HEADERS}, null) as headers",
        "id as offset",
    )
    write(rows, topic=topic, **{"kafka.compression.type": "zstd"})
    found = confluent.read(topics.bootstrap, topic, 6, partitions=3)
    assert sorted((each.message.key, each.message.value, each.message.partition) for each in found) == [
        (b"%d" % n, None if n == 3 else b"v%d" % n, n % 3) for n in range(6)
    ]
    assert [each.message.headers for each in found if each.message.key == b"1"] == [
        (("h", b"x"), ("n", None))
    ]


def test_topics_by_column_and_partitions_by_key(spark, topics, write, unique):
    names = [topics.create(unique(prefix), 4) for prefix in ("a", "b")]
    rows = spark.range(40).selectExpr(
        f"if(id % 2 = 0, '{names[0]}', '{names[1]}') as topic",
        "cast(id as string) as key",
        "cast(id as string) as value",
    )
    write(rows)
    theirs = topics.create(unique("c"), 4)
    producer = confluent.producer(topics.bootstrap, partitioner="murmur2_random")
    for number in range(40):
        producer.produce(theirs, key=str(number), value=str(number))
    producer.flush(60)
    expected = {
        each.message.key: each.message.partition
        for each in confluent.read(topics.bootstrap, theirs, 40, partitions=4)
    }
    for index, name in enumerate(names):
        found = confluent.read(topics.bootstrap, name, 20, partitions=4)
        assert {each.message.key: each.message.partition for each in found} == {
            key: partition for key, partition in expected.items() if int(key) % 2 == index
        }


def test_errors_say_why_a_row_cannot_be_written(spark, topics, write, unique):
    topic = topics.create(unique("t"), 2)
    small = topics.create(unique("small"), **{"max.message.bytes": "10000"})
    cases = [
        (
            spark.range(1).selectExpr("id as value"),
            {"topic": topic},
            "column value is bigint; it must be string",
        ),
        (spark.range(1).selectExpr("'v' as value"), {}, "set the option topic, or add a column topic"),
        (
            spark.range(1).selectExpr("'v' as value", "7 as partition"),
            {"topic": topic},
            f"a row is for partition 7 of {topic}, which has 2 partitions",
        ),
        (
            spark.range(1).selectExpr("'v' as value"),
            {"topic": "no such topic"},
            "'no such topic' is not a valid topic name: it must have 1 to 249 characters",
        ),
        (
            spark.range(1).selectExpr(f"{LARGE} as value"),
            {"topic": small},
            f"bytes is too large for topic {small}, which accepts at most max.message.bytes=10000",
        ),
    ]
    for rows, options, words in cases:
        with pytest.raises(PySparkException) as raised:
            write(rows, **options)
        assert words in str(raised.value)
        assert "Traceback" not in str(raised.value)
    with pytest.raises(PySparkException, match="a topic cannot be overwritten"):
        write(cases[1][0], mode="overwrite", topic=topic)


def test_a_dry_run_writes_nothing(spark, topics, write, unique):
    topic = topics.create(unique("t"), 2)
    rows = spark.range(0, 30, 1, 3).selectExpr("cast(id as string) as value")
    write(rows, topic=topic, dryRun="true", txnAppId=unique("app"), txnVersion="0")
    with pytest.raises(PySparkException, match="a row is for partition 7"):
        write(rows.selectExpr("value", "7 as partition"), topic=topic, dryRun="true")
    with topics.cluster() as cluster:
        assert committed_numbers(topics, cluster, [(topic, 0), (topic, 1)]) == []


def test_a_write_creates_the_topic(spark, topics, write, unique):
    topic = unique("new")
    write(spark.range(5).selectExpr("cast(id as string) as value"), topic=topic)
    with topics.cluster() as cluster:
        partitions = [(topic, part.index) for part in cluster.topic(topic).partitions]
        assert committed_numbers(topics, cluster, partitions) == list(range(5))


def test_a_batch_write_is_all_or_nothing(spark, topics, write, unique):
    topic = topics.create(unique("t"), 2)
    rows = spark.range(0, 30, 1, 3).selectExpr("cast(id as string) as value")
    write(rows, topic=topic, contract="exactly-once")
    broken = spark.range(0, 30, 1, 3).selectExpr(
        "if(id = 25, raise_error('poison'), cast(id as string)) as value"
    )
    with pytest.raises(PySparkException, match="poison"):
        write(broken, topic=topic, contract="exactly-once")
    partitions = [(topic, 0), (topic, 1)]
    with topics.cluster() as cluster:
        await_rest(cluster, partitions)
        assert committed_numbers(topics, cluster, partitions) == list(range(30))


def test_a_repeated_write_is_done_once(spark, topics, write, unique):
    """As in foreachBatch: the same batch again with other tasks, after a failure or after it was written."""
    topic, app = topics.create(unique("t"), 2), unique("app")

    def numbered(start: int, version: int, tasks: int, *, broken: bool = False) -> None:
        value = (
            "if(id % 10 = 9, raise_error('poison'), cast(id as string))" if broken else "cast(id as string)"
        )
        rows = spark.range(start, start + 10, 1, tasks).selectExpr(f"{value} as value")
        write(rows, topic=topic, txnAppId=app, txnVersion=str(version))

    with pytest.raises(PySparkException, match="poison"):
        numbered(0, 0, 2, broken=True)
    numbered(0, 0, 3)
    numbered(0, 0, 2)
    numbered(10, 2, 2)
    numbered(0, 1, 2)  # older than the last batch
    partitions = [(topic, 0), (topic, 1)]
    with topics.cluster() as cluster:
        await_rest(cluster, partitions)
        assert committed_numbers(topics, cluster, partitions) == list(range(20))


def test_timestamps_from_a_column(spark, topics, write, unique):
    topic = topics.create(unique("t"))
    before = int(time.time() * 1000)
    rows = spark.range(0, 2, 1, 1).selectExpr(
        "cast(id as string) as value", "if(id = 0, timestamp_millis(1234567890123), null) as due"
    )
    write(rows, topic=topic, timestampColumn="due")
    first, second = confluent.read(topics.bootstrap, topic, 2)
    assert first.message.timestamp_ms == 1234567890123
    assert before <= second.message.timestamp_ms <= time.time() * 1000


# Streaming


def test_a_copy_at_least_once(copy):
    copy.run()
    assert copy.numbers() == list(range(40))


@pytest.mark.usefixtures("ambushed")
def test_each_row_once_if_processes_die(copy, topics, tmp_path):
    """If a commit dies, the query fails and is restarted with other tasks. Spark itself retries dead tasks."""
    points = ["in the decision:1", "after the decision:1", "between two commits:1", f"{AFTER_COMMIT}:1"]
    for number, point in enumerate([*points, "task prepared:2"]):
        count = tmp_path / f"count-{number}"
        ambush = {"ambush": point, "ambushFile": str(count)}
        is_fatal = not point.startswith("task")
        with pytest.raises(StreamingQueryException) if is_fatal else nullcontext():
            copy.run(name=NAME, contract="exactly-once", **ambush)
        assert count.with_name(f"{count.name}.sprung").exists(), point
    assert copy.numbers() == list(range(40))


def test_a_query_without_its_checkpoint_writes_again_and_leaves_no_open_transactions(copy, topics):
    """A new query has a new id, so its rows are new. The prepared transactions of the old query must not stay open."""
    copy.run(contract="exactly-once")
    topics.count(copy.source, range(40, 50))
    options = SinkOptions.parse(topics.given(topic=copy.target, contract="exactly-once"), streaming=True)
    rows = pa.record_batch([pa.array([b"left"], pa.binary())], names=["value"])
    columns = SinkColumns(positions={"value": 0}, topic=copy.target)
    with topics.cluster() as cluster:
        batch = MicroBatch(json.loads((copy.checkpoint / "metadata").read_text())["id"], 2)
        write_exactly_once(
            cluster, options, columns, batch, [rows], transactional_id=AttemptIds().take(batch)
        )
    shutil.rmtree(copy.checkpoint)
    copy.run(contract="exactly-once")
    assert copy.numbers() == sorted([*range(40), *range(50)])


@pytest.fixture
def ambushed(spark: Any) -> None:
    spark.dataSource.register(AmbushedDataSource)
