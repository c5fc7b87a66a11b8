"""Streaming reads with Spark: every record once, through restarts, new partitions, fail-over and data loss."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from tests.brokers import ClusterProcesses
from tests.compat.message import Message
from tests.spark.source.topics import Topics
from tests.topics import create_topics
from tests.waiting import eventually

from penstock.client.wire.offsets import LATEST, commit_offsets, committed_offsets, list_offsets

WITHIN_S = 600.0


class Query:
    """A query that writes what it reads to a folder, and can be restarted on the same checkpoint."""

    def __init__(self, spark: Any, folder: Path, options: dict[str, str]) -> None:
        self.spark, self.folder, self.options = spark, folder, options
        self.running: Any = None

    def start(self, **trigger: Any) -> "Query":
        frame = self.spark.readStream.format("penstock").schema("value binary, partition int, offset bigint")
        writer = frame.options(**self.options).load().writeStream.format("parquet")
        writer = writer.option("checkpointLocation", str(self.folder / "checkpoint"))
        trigger = trigger or {"processingTime": "100 milliseconds"}
        self.running = writer.trigger(**trigger).start(str(self.folder / "out"))
        return self

    def run(self) -> "Query":
        """Read everything that is available now."""
        self.start(availableNow=True)
        assert self.running.awaitTermination(WITHIN_S)
        return self

    def stop(self) -> None:
        if self.running is not None:
            self.running.stop()

    def numbers(self) -> list[int]:
        """Read the files that finished batches list. Other files may be incomplete."""
        names = []
        for log in (self.folder / "out" / "_spark_metadata").glob("[0-9]*"):
            names += [json.loads(line)["path"] for line in log.read_text().splitlines()[1:]]
        if not names:
            return []
        return sorted(int(row.value) for row in self.spark.read.parquet(*sorted(set(names))).collect())

    def await_numbers(self, wanted: Any) -> None:
        def has_all() -> bool:
            assert self.running.exception() is None, self.running.exception()
            return self.numbers() == list(wanted)

        eventually(has_all, within_s=WITHIN_S, what="all rows")

    def failure(self) -> str:
        with pytest.raises(StreamingQueryException) as raised:
            self.running.awaitTermination(WITHIN_S)
        return str(raised.value)

    def batch_rows(self) -> list[int]:
        return [each.numInputRows for each in self.running.recentProgress if each.numInputRows]


@pytest.fixture
def query(spark: Any, topics: Topics, tmp_path: Path) -> Iterator[Callable[..., Query]]:
    made = []

    def make(bootstrap: str | None = None, **options: str) -> Query:
        given = topics.given(**({"startingOffsets": "earliest"} | options))
        given |= {"kafka.bootstrap.servers": bootstrap} if bootstrap else {}
        made.append(Query(spark, tmp_path / f"query-{len(made)}", given))
        return made[-1]

    yield make
    for each in made:
        each.stop()


def test_available_records_in_limited_batches_and_then_newer_ones(topics, query, unique):
    topic = topics.create(unique("t"), 2)
    topics.count(topic, range(50))
    topics.count(topic, range(50, 60), partition=1)
    reading = query(subscribe=topic, maxOffsetsPerTrigger="25", minPartitions="3").run()
    assert reading.numbers() == list(range(60))
    assert reading.batch_rows() == [25, 25, 10]
    topics.count(topic, range(60, 70))
    assert reading.run().numbers() == list(range(70))
    assert reading.batch_rows() == [10]
    [source] = reading.running.lastProgress.sources
    assert json.loads(source.latestOffset)["topics"][topic]["offsets"] == {"0": 60, "1": 10}
    assert reading.run().batch_rows() == []


def test_new_partitions_while_it_runs(topics, query, unique):
    topic = topics.create(unique("t"))
    topics.count(topic, range(5))
    reading = query(subscribe=topic).start()
    reading.await_numbers(range(5))
    topics.grow(topic, 3)
    topics.count(topic, range(5, 15), partition=2)
    reading.await_numbers(range(15))


def lag(topics: Topics, group: str, topic: str) -> int | None:
    with topics.cluster() as cluster:
        [end] = list_offsets(cluster, {(topic, 0): LATEST}).values()
        found = committed_offsets(cluster, group).get((topic, 0))
    return None if found is None or end is None else end.offset - found.offset


def test_an_idle_query_has_no_lag_and_the_checkpoint_overrides_the_group(topics, query, unique, group):
    topic = topics.create(unique("t"))
    topics.count(topic, range(10))
    reading = query(subscribe=topic, **{"kafka.group.id": group}).start()
    reading.await_numbers(range(10))
    eventually(lambda: lag(topics, group, topic) == 0, what="no lag")
    reading.stop()
    topics.count(topic, range(10, 12))
    assert lag(topics, group, topic) == 2
    with topics.cluster() as cluster:
        commit_offsets(cluster, group, {(topic, 0): 0})
    assert reading.run().numbers() == list(range(12)), (
        "moving the group's offsets does not change what is read"
    )
    assert lag(topics, group, topic) == 0, "the last batch of a bounded run is committed too"


def test_a_recreated_topic_stops_the_query_and_is_named(topics, query, unique):
    topic = topics.create(unique("t"))
    topics.count(topic, range(5))
    reading = query(subscribe=topic).run()
    topics.delete(topic)
    topics.create(topic)
    topics.count(topic, range(100, 103))
    message = reading.start().failure()
    assert f"{topic}[0] from offset 5 on (the topic was deleted and created again" in message
    assert "Traceback" not in message
    reading.options["failOnDataLoss"] = "false"
    assert reading.run().numbers() == [*range(5), *range(100, 103)]


def test_lost_offsets_stop_the_query_and_are_named(topics, query, unique):
    topic = topics.create(unique("t"))
    topics.count(topic, range(5))
    reading = query(subscribe=topic).run()
    topics.count(topic, range(5, 10))
    topics.trim(topic, 8)
    assert f"{topic}[0] offsets 5 to 7 (the log begins at 8)" in reading.start().failure()
    reading.options["failOnDataLoss"] = "false"
    assert reading.run().numbers() == [0, 1, 2, 3, 4, 8, 9]


def test_only_committed_records(topics, query, unique):
    topic = topics.create(unique("t"))
    producer = topics.commit_abort_commit(topic, unique("x"))
    reading = query(subscribe=topic).start()
    reading.await_numbers([0, 2])
    producer.begin_transaction()
    producer.produce(topic, value=b"3")
    producer.flush(60)
    producer.commit_transaction(20)
    reading.await_numbers([0, 2, 3])


def test_the_query_follows_the_leader(spark, query, unique, tmp_path):
    """A node dies while the query runs. All acknowledged records are read once."""
    cluster = ClusterProcesses(tmp_path / "cluster").start()
    try:
        topics = Topics(cluster.bootstrap_servers)
        topic = unique("t")
        create_topics(topics.admin, _replicated(topic))
        reading = query(bootstrap=cluster.bootstrap_servers, subscribe=topic).start()
        publish(topics, topic, range(20))
        reading.await_numbers(range(20))
        cluster.nodes[leader(topics, topic)].kill()
        publish(topics, topic, range(20, 40))
        reading.await_numbers(range(40))
        reading.stop()
    finally:
        cluster.kill()


def _replicated(topic: str) -> Any:
    from confluent_kafka.admin import NewTopic

    return NewTopic(topic, num_partitions=1, replication_factor=3)


def leader(topics: Topics, topic: str) -> int:
    return topics.admin.list_topics(topic, timeout=20).topics[topic].partitions[0].leader


def publish(topics: Topics, topic: str, values: Any) -> None:
    from tests.compat import confluent

    messages = [Message(value=b"%d" % number) for number in values]
    confluent.publish(topics.bootstrap, topic, messages, acks="all", enable_idempotence=True)
