"""Batch reads with Spark, compared row by row with what a client wrote."""

import time
from typing import Any

import pytest
from pyspark.errors import PySparkException
from tests.compat.message import CODECS, Message
from tests.spark.source.topics import Topics, numbers
from tests.waiting import eventually

COLUMNS = ["key", "value", "topic", "partition", "offset", "timestamp", "timestampType"]
NOBODY = {"kafka.bootstrap.servers": "localhost:1", "kafka.default.api.timeout.ms": "100"}
PUSH_DOWN = "spark.sql.python.filterPushdown.enabled"


@pytest.fixture
def load(spark: Any, topics: Topics):
    """Read with the shared session."""

    def loaded(schema: str | None = None, **options: str) -> Any:
        reader = spark.read.format("penstock").options(**topics.given(**options))
        return (reader.schema(schema) if schema else reader).load()

    return loaded


def messages(count: int, partition: int, now_ms: int) -> list[Message]:
    """Records of every kind: with and without key, value and headers."""
    return [
        Message(
            value=None if number % 7 == 3 else b"value %d " % number * (number % 5),
            key=None if number % 3 == 1 else b"key %d" % number,
            headers=() if number % 4 else (("h", b"%d" % number), ("none", None)),
            timestamp_ms=now_ms + number,
            partition=partition,
        )
        for number in range(count)
    ]


def row_of(topic: str, offset: int, message: Message) -> tuple[Any, ...]:
    headers = [tuple(header) for header in message.headers] or None
    return (
        message.key, message.value, topic, message.partition, offset, message.timestamp_ms, 0, headers,
    )  # fmt: skip


def as_tuple(row: Any) -> tuple[Any, ...]:
    key, value, topic, partition, offset, ms, kind, headers = row
    as_bytes = (None if part is None else bytes(part) for part in (key, value))
    pairs = headers and [(name, None if body is None else bytes(body)) for name, body in headers]
    return (*as_bytes, topic, partition, offset, ms, kind, pairs)


def test_every_row_and_every_column_as_written(spark, topics, load, unique):
    """One read covers all codecs: each is a topic with two partitions."""
    prefix, now_ms = unique("t"), int(time.time() * 1000)
    expected = []
    for codec in CODECS:
        topic = topics.create(f"{prefix}-{codec}", 2)
        for partition in (0, 1):
            written = messages(60, partition, now_ms)
            topics.fill(topic, written, codec)
            expected += [row_of(topic, offset, message) for offset, message in enumerate(written)]
    frame = load(subscribePattern=f"{prefix}-.*", includeHeaders="true")
    assert frame.columns == [*COLUMNS, "headers"]
    frame = frame.selectExpr(
        "key", "value", "topic", "partition", "offset", "unix_millis(timestamp)", "timestampType", "headers"
    )
    assert sorted(map(as_tuple, frame.collect()), key=lambda row: row[2:5]) == sorted(
        expected, key=lambda row: row[2:5]
    )


def test_headers_only_if_requested(topics, load, unique):
    frame = load(subscribe=topics.create(unique("t")))
    assert frame.columns == COLUMNS
    assert frame.count() == 0


def test_a_schema_selects_columns_in_any_order(topics, load, unique):
    topic = topics.create(unique("t"))
    topics.fill(topic, [Message(value=b"v", headers=(("h", b"x"),))])
    schema = "HEADERS array<struct<key:string,value:binary>>, offset bigint NOT NULL, value binary"
    frame = load(schema, subscribe=topic)
    [row] = frame.collect()
    assert (frame.columns, row.offset, bytes(row.value)) == (["HEADERS", "offset", "value"], 0, b"v")
    assert [(name, bytes(body)) for name, body in row.HEADERS] == [("h", b"x")]


def test_only_committed_records_up_to_the_first_open_transaction(topics, load, unique):
    topic = topics.create(unique("t"))
    producer = topics.commit_abort_commit(topic, unique("x"))
    producer.begin_transaction()
    producer.produce(topic, value=b"3")
    producer.flush(60)
    topics.count(topic, [4])

    def committed() -> list[int]:
        return numbers(load(subscribe=topic).collect())

    assert committed() == [0, 2]
    everything = load(subscribe=topic, **{"kafka.isolation.level": "read_uncommitted"})
    assert numbers(everything.collect()) == [0, 1, 2, 3, 4]
    producer.abort_transaction(20)
    eventually(lambda: committed() == [0, 2, 4], what="the end of the transaction")


def test_large_partitions_are_split_over_tasks(topics, load, unique):
    topic = topics.create(unique("t"), 2)
    topics.count(topic, range(90))
    topics.count(topic, range(90, 100), partition=1)
    for option, tasks in [({"minPartitions": "5"}, 5), ({"maxRecordsPerPartition": "30"}, 4), ({}, 2)]:
        frame = load(subscribe=topic, **option)
        rows = frame.selectExpr("value", "spark_partition_id() AS task").collect()
        assert numbers(rows) == list(range(100))
        assert len({row.task for row in rows}) == tasks


def test_offsets_as_bounds(topics, load, unique):
    topic = topics.create(unique("t"), 2)
    topics.count(topic, range(10))
    topics.count(topic, range(10, 20), partition=1)
    frame = load(
        subscribe=topic,
        startingOffsets=f'{{"{topic}": {{"0": 4, "1": -2}}}}',
        endingOffsets=f'{{"{topic}": {{"0": 6, "1": -1}}}}',
    )
    assert numbers(frame.collect()) == [4, 5, *range(10, 20)]


def test_timestamps_as_bounds(topics, load, unique):
    topic, now_ms = topics.create(unique("t")), int(time.time() * 1000)
    topics.fill(topic, [Message(value=b"%d" % n, timestamp_ms=now_ms + 1000 * n) for n in range(10)])
    frame = load(subscribe=topic, startingTimestamp=str(now_ms + 2500), endingTimestamp=str(now_ms + 6000))
    assert numbers(frame.collect()) == [3, 4, 5]
    assert numbers(load(subscribe=topic, endingTimestamp=str(now_ms + 99_000)).collect()) == list(range(10))


@pytest.fixture(params=["true", "false"])
def push_down(spark, request):
    before = spark.conf.get(PUSH_DOWN)
    spark.conf.set(PUSH_DOWN, request.param)
    yield request.param == "true"
    spark.conf.set(PUSH_DOWN, before)


def test_filters_find_the_same_rows_and_read_less(topics, load, unique, push_down):
    topic, now_ms = topics.create(unique("t"), 3), int(time.time() * 1000)
    for partition in range(3):
        ages = [0, 9, 1, 2, 3, 4, 5, 6, 7, 8]  # not in order, because the clocks of clients differ
        topics.fill(
            topic,
            [
                Message(
                    value=b"%d" % (10 * partition + n), timestamp_ms=now_ms + 1000 * n, partition=partition
                )
                for n in ages
            ],
        )
    frame = load(subscribe=topic, minPartitions="30")
    timestamp = f"timestamp_millis({now_ms + 5000})"
    cases = [
        ("partition = 1", set(range(10, 20)), 10),
        ("partition IN (0, 2) AND offset < 2", {0, 9, 20, 29}, 4),
        ("offset >= 8 AND offset <= 8 AND partition <> 1", {7, 27}, 3),
        ("offset = 3 AND value = '2'", {2}, 3),
        (f"timestamp >= {timestamp} AND partition = 0", {5, 6, 7, 8, 9}, 9),
        (f"timestamp < {timestamp} AND partition = 0", {0, 1, 2, 3, 4}, 10),
    ]
    for condition, wanted, tasks in cases if push_down else cases[:2]:
        found = frame.where(condition)
        assert numbers(found.collect()) == sorted(wanted), condition
        assert found.rdd.getNumPartitions() == (tasks if push_down else 30), condition


def test_lost_offsets_are_reported_or_skipped(topics, load, unique):
    topic = topics.create(unique("t"))
    topics.count(topic, range(10))
    topics.trim(topic, 4)
    options = {"subscribe": topic, "startingOffsets": f'{{"{topic}": {{"0": 1}}}}'}
    assert f"{topic}[0] offsets 1 to 3 (the log begins at 4)" in failure(load(**options))
    assert numbers(load(**options, failOnDataLoss="false").collect()) == list(range(4, 10))


def failure(frame: Any) -> str:
    with pytest.raises(PySparkException) as raised:
        frame.collect()
    return str(raised.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"subscribe": "no-such-topic"}, "topics or partitions do not exist: no-such-topic"),
        ({"subscribe": "t", "startingOfsets": "earliest"}, "did you mean startingOffsets?"),
        ({"subscribe": "t", **NOBODY}, "localhost:1"),
        ({}, "exactly one of the options subscribe"),
    ],
)
def test_error_messages(load, options, words):
    message = failure(load(**options))
    assert words in message
    assert "Traceback" not in message


def test_a_schema_with_unknown_columns_is_refused(load):
    assert "column value is binary, not string" in failure(load("value string", subscribe="t"))
    assert "no column payload" in failure(load("payload binary", subscribe="t"))


def test_spark_discovers_the_source_and_register_works(spark, topics, unique):
    from penstock.spark import register

    topic = topics.create(unique("t"))
    topics.count(topic, range(3))
    options = topics.given(subscribe=topic)
    assert spark.newSession().read.format("penstock").options(**options).load().count() == 3
    register(spark)
    assert spark.read.format("penstock").options(**options).load().count() == 3
