"""Windows of metrics, compared with what was produced. Topic and table have the same rows."""

import json
import time
from collections import Counter

import pytest
from tests.compat.message import Message

from penstock.client.deadletters.headers import Failure, Origin, failure_headers, original_topic, retry_level
from penstock.client.wire.offsets import commit_offsets
from penstock.spark.analytics import metrics
from penstock.spark.analytics.metrics import _original_topic, _topic_role
from penstock.spark.archive import history
from penstock.spark.pipelines.declaration import PipelineError

WINDOW_MS = 10_000


def letters_of(topic, group, count, timestamp_ms):
    origin = Origin(topic=topic, partition=0, offset=0, timestamp_ms=timestamp_ms)
    failure = Failure(error_class="ValueError", message="no")
    headers = tuple(failure_headers((), origin, failure, group=group, attempts=1))
    return [Message(value=b"v", headers=headers, timestamp_ms=timestamp_ms) for _ in range(count)]


def rows_in(spark, topics, topic):
    given = topics.given(subscribe=topic, **{"kafka.isolation.level": "read_committed"})
    found = spark.read.format("penstock").options(**given).load().collect()
    return [json.loads(row["value"]) for row in found]


def test_windows_equal_what_was_produced(spark, topics, run_once, unique, group, tmp_path):
    orders, to = topics.create(unique("orders"), 2), topics.create(unique("metrics"))
    table = tmp_path / "metrics"
    retry, dead = topics.create(f"{orders}.retry.1"), topics.create(f"{orders}.dlq")
    start_ms = int(time.time() * 1000) // WINDOW_MS * WINDOW_MS - 60 * WINDOW_MS
    numbers = range(30)
    timestamps_ms = [start_ms + number % 3 * WINDOW_MS + number for number in numbers]
    topics.fill(
        orders,
        [
            Message(value=b"v" * (n + 1), key=b"k", timestamp_ms=timestamps_ms[n], partition=n % 2)
            for n in numbers
        ],
    )
    sizes = [sum(n + 2 for n in numbers if n % 3 == window) for window in range(3)]
    topics.fill(retry, letters_of(orders, "billing", 4, start_ms + 5))
    topics.fill(
        dead, letters_of(orders, "billing", 2, start_ms + 6) + letters_of(orders, "audit", 1, start_ms)
    )
    # Current records complete the windows before them.
    topics.fill(orders, [Message(value=b"now", partition=0)])
    with topics.cluster() as cluster:
        commit_offsets(cluster, group, {(orders, 0): 12, (orders, 1): 15})
    before_s = time.time()
    run_once(metrics(topics=orders, to=to, table=str(table), starting="earliest"))
    after_s = time.time()

    found = rows_in(spark, topics, to)
    traffic = sorted((row for row in found if row["kind"] == "traffic"), key=lambda row: row["window_start"])
    assert [row["records"] for row in traffic] == [10, 10, 10]
    assert [row["bytes"] for row in traffic] == sizes
    assert [row["records_per_s"] for row in traffic] == [1.0, 1.0, 1.0]
    assert [row["size_max"] for row in traffic] == [29, 30, 31]
    assert [row["size_mean"] for row in traffic] == [size / 10 for size in sizes]
    failures = {row["group"]: (row["retries"], row["dead"]) for row in found if row["kind"] == "failures"}
    assert failures == {"billing": (4, 2), "audit": (0, 1)}
    assert {row["topic"] for row in found} == {orders}
    samples = [row for row in found if row["kind"] == "group" and row["group"] == group]
    assert samples
    for row in samples:
        assert row["lag"] == 4
        # The first unread record is the 12th of partition 0.
        assert before_s <= row["latency_s"] + timestamps_ms[24] / 1000 <= after_s
    kept = history(spark, str(table)).collect()
    columns = ("kind", "topic", "group", "records", "bytes", "retries", "dead", "lag", "latency_s")
    written = [tuple(row.get(name) for name in columns) for row in found]
    assert Counter(tuple(row[name] for name in columns) for row in kept) == Counter(written)


def test_topic_names_have_the_same_meaning_as_for_clients(spark):
    names = [
        "orders",
        "orders.retry.1",
        "a.retry.20",
        "a.retry.0",
        "a.retry.01",
        "orders.dlq",
        "x.dlq.replayed",
    ]
    rows = spark.createDataFrame([(name,) for name in names], "topic string")
    found = rows.selectExpr("topic", f"{_original_topic()} as original", f"{_topic_role()} as role").collect()
    assert {row["topic"]: row["original"] for row in found if row["role"] is not None} == {
        name: original_topic(name) for name in names[:-1]
    }
    assert [row["topic"] for row in found if row["role"] == "retry"] == [
        name for name in names if retry_level(name) is not None
    ]


def test_wrong_settings():
    with pytest.raises(PipelineError, match="set to= or table="):
        metrics(topics="x")
    with pytest.raises(PipelineError, match="window='long'"):
        metrics(to="x", window="long")
