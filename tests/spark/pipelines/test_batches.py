"""Batches of pipelines on real Spark: every input record becomes a row, a retry or a dead letter, once."""

import os
from dataclasses import replace

import pytest
from pyspark.errors import StreamingQueryException
from tests.compat.message import Message
from tests.spark.pipelines import functions
from tests.waiting import eventually

from penstock.client.deadletters.headers import original_headers, read_origin
from penstock.client.wire.topics import alter_topic_settings
from penstock.protocol.dead_letter_headers import (
    ERROR_CLASS_HEADER,
    ERROR_MESSAGE_HEADER,
    ERROR_STACK_HEADER,
    GROUP_HEADER,
    REASON_HEADER,
)
from penstock.spark.internal_topics import DocumentStore
from penstock.spark.pipelines import batch as batch_module
from penstock.spark.pipelines.assembly import start
from penstock.spark.pipelines.declaration import (
    Backoff,
    BatchError,
    Errors,
    Pipeline,
    PipelineError,
    Source,
    TopicSink,
)
from penstock.spark.pipelines.parsers import json_rows
from penstock.spark.pipelines.queries import error_info, failed_range, is_permanent
from penstock.spark.pipelines.status import RowCounts
from penstock.spark.sink.options import Contract

ORDERS = json_rows("id STRING NOT NULL, amount DOUBLE")
SLOWLY = Errors(attempts=3, backoff=Backoff(base_ms=60_000, cap_ms=60_000))
AT_ONCE = Errors(attempts=3, backoff=Backoff(base_ms=1, cap_ms=1))


@pytest.fixture
def declare(topics, unique):
    """Return a pipeline from `orders` to `clean`, two new topics of two partitions."""

    def declared(**given):
        names = [topics.create(unique(prefix), 2) for prefix in ("orders", "clean")]
        common = {
            "name": unique("p"),
            "source": Source(topics=(names[0],)),
            "sink": TopicSink(topic=names[1]),
            "delivery": Contract.EXACTLY_ONCE,
            "parse": ORDERS,
        }
        return Pipeline(**common | given), *names

    return declared


def headers_of(message):
    return {name: (value or b"").decode() for name, value in message.headers}


def origin(message):
    found = read_origin(message.headers, topic="?", partition=-1, offset=-1, timestamp_ms=-1)
    return found.topic, found.partition, found.offset


def orders(count):
    return [{"id": str(number), "amount": float(number)} for number in range(count)]


def counted(line, name):
    with line.topics.cluster() as cluster:
        found = DocumentStore(cluster).read()[f"{name}/rows"]
    return RowCounts.from_json(found["totals"])


def test_no_failure_record_is_lost_without_observed_counts(line, declare, monkeypatch):
    """As with Spark Connect, or if Spark reports the observation too late."""
    monkeypatch.setattr(batch_module.RowCounter, "found", lambda self: {})
    declared, source, sink = declare()
    line.put(source, {"id": "a", "amount": 1.5}, b"{")
    line.run(declared)
    assert [row["id"] for row in line.rows(sink)] == ["a"]
    assert [each.value for each in line.messages(f"{source}.dlq")] == [b"{"]


def test_good_and_bad_rows_of_one_evaluation(line, declare):
    declared, source, sink = declare(
        rows=(functions.price,), transform=lambda rows: rows.where("total > 0"), errors=SLOWLY
    )
    line.put(source, {"id": "a", "amount": 1.5}, b"{", {"id": "broken", "amount": 1}, {"amount": 3})
    line.put(source, {"id": "hopeless"}, {"id": "unwanted"}, {"id": "misfit"}, None, partition=1)
    line.put(source, {"id": "b", "amount": 2}, {"id": "minus", "amount": -2}, partition=1)
    line.run(declared)
    assert sorted((row["id"], row["total"]) for row in line.rows(sink)) == [("a", 3.0), ("b", 4.0)]
    assert {each.headers for each in line.messages(sink)} == {(("own", b"header"),)}
    (retry,) = line.messages(f"{source}.retry.1")
    retry_headers = headers_of(retry)
    assert (origin(retry), retry.key, retry.value) == ((source, 0, 2), b"2", b'{"id": "broken", "amount": 1}')
    assert (retry_headers["own"], retry_headers[ERROR_CLASS_HEADER], retry_headers[ERROR_MESSAGE_HEADER]) == (
        "header",
        "ValueError",
        "no price for it",
    )
    assert 'raise ValueError("no price for it")' in retry_headers[ERROR_STACK_HEADER]
    first_ms = int(retry_headers["penstock.dlq.timestamp"])
    assert first_ms + 60_000 <= retry.timestamp_ms
    dead = {origin(each)[1:]: headers_of(each) for each in line.messages(f"{source}.dlq")}
    assert {tp: each[ERROR_MESSAGE_HEADER].split(":")[0] for tp, each in dead.items()} == {
        (0, 1): "the value is not valid JSON",
        (0, 3): "id is missing",
        (1, 0): "never",
        (1, 2): "price returned a row that does not fit its columns",
        (1, 3): "there is no value",
    }
    assert {each[REASON_HEADER] for each in dead.values()} == {"refused"}
    assert counted(line, declared.name) == RowCounts(rows_in=10, rows_out=2, retried=1, dead=5)
    held = line.spark.sparkContext._jsc.getPersistentRDDs()
    assert len(held) == 0, "nothing is held after the batch"


def test_a_missing_module_is_not_the_fault_of_a_row(line, declare):
    """Neither in a row function nor in a transform: no row is retried or becomes a dead letter."""

    def transform(rows):
        def lacking(batches):
            import no_such_module_of_anybody  # noqa: F401

            yield from batches

        return rows.select("id").mapInArrow(lacking, "id STRING")

    for given in ({"rows": (functions.lacks_module,)}, {"transform": transform}):
        declared, source, sink = declare(**given)
        line.put(source, {"id": "a"}, {"id": "b"})
        with pytest.raises(StreamingQueryException) as raised:
            line.run(declared)
        trouble = error_info(raised.value)
        assert (trouble.kind, is_permanent(trouble)) == ("ModuleNotFoundError", True)
        assert line.messages(sink) + line.messages(f"{source}.dlq") + line.messages(f"{source}.retry.1") == []


def test_retries_are_read_when_due(line, declare, tmp_path):
    """One row succeeds at the second attempt, one never does. A retry of another group is ignored."""
    mended = tmp_path / "mended"
    declared, source, sink = declare(rows=(functions.until_there(str(mended)),), errors=AT_ONCE, every_ms=100)
    line.put(source, {"id": "late"}, {"id": "never"}, {"id": "good"}, partition=1)
    retries = line.topics.create(f"{source}.retry.1", 2)
    foreign = Message(value=b'{"id": "foreign"}', headers=((GROUP_HEADER, b"another"),))
    line.topics.fill(retries, [foreign])
    running = start(line.spark, declared, line.settings(declared, once=False))
    try:
        eventually(lambda: line.messages(f"{source}.dlq"), within_s=600, what="a dead letter")
        mended.touch()
        line.put(source, {"id": "late"}, partition=1)
        eventually(lambda: len(line.rows(sink)) >= 2, within_s=600, what="what was tried again")
    finally:
        for query in running:
            query.stop()
    assert [query.exception() for query in running] == [None]
    assert {row["id"] for row in line.rows(sink)} == {"good", "late"}
    dead = line.messages(f"{source}.dlq")
    failure_record = next(each for each in dead if origin(each) == (source, 1, 1))
    assert read_origin(failure_record.headers, topic="", partition=0, offset=0, timestamp_ms=0).attempts == 3
    assert (headers_of(failure_record)[REASON_HEADER], failure_record.partition) == ("given up", 1)
    assert original_headers(failure_record.headers) == [("own", b"header")]
    for level in (1, 2):
        tried = [each for each in line.messages(f"{source}.retry.{level}") if origin(each) == (source, 1, 1)]
        assert [each.partition for each in tried] == [1]


def test_poison_in_a_transform_is_found_in_few_runs(line, declare, monkeypatch):
    declared, source, sink = declare(
        transform=lambda rows: rows.selectExpr("if(id = '7123', raise_error('poison'), id) as value")
    )
    line.put(source, *orders(10_000))
    tries = []
    real = batch_module._BatchRun._try
    monkeypatch.setattr(
        batch_module._BatchRun, "_try", lambda self, rows: tries.append(1) or real(self, rows)
    )
    line.run(declared)
    found = sorted(int(each.value) for each in line.messages(sink))
    assert found == [number for number in range(10_000) if number != 7123]
    (dead,) = line.messages(f"{source}.dlq")
    assert (origin(dead), dead.key) == ((source, 0, 7123), b"7123")
    assert "poison" in headers_of(dead)[ERROR_MESSAGE_HEADER]
    assert len(tries) <= 30
    assert counted(line, declared.name) == RowCounts(rows_in=10_000, rows_out=9_999, dead=1)


def test_records_that_only_the_sink_refuses_become_dead_letters(line, declare, topics, unique):
    """One is too large, one has a wrong partition, one fails in the transform. All others are written."""
    source = topics.create(unique("large"), **{"max.message.bytes": "40000"})
    sink = topics.create(unique("small"), 2, **{"max.message.bytes": "10000"})
    declared, _, _ = declare(
        source=Source(topics=(source,)),
        sink=TopicSink(topic=None),
        parse=None,
        transform=lambda rows: rows.selectExpr(
            f"if(key = '3', raise_error('poison'), '{sink}') as topic",
            "if(key = '4', 9, 1) as partition",
            "value",
        ),
    )
    values = [os.urandom(6_000) for _ in range(5)]
    values[2] = os.urandom(39_850)
    for number, value in enumerate(values):
        topics.fill(source, [Message(key=b"%d" % number, value=value)])
    line.run(declared)
    assert [each.value for each in line.messages(sink)] == values[:2]
    dead = {origin(each)[2]: (headers_of(each), each.value) for each in line.messages(f"{source}.dlq")}
    assert [dead[offset][1] for offset in sorted(dead)] == values[2:]
    errors = {
        offset: (headers[ERROR_CLASS_HEADER], headers[ERROR_MESSAGE_HEADER])
        for offset, (headers, _) in dead.items()
    }
    kind, words = errors[2]
    assert kind == "penstock.spark.sink.records.RecordTooLarge"
    assert words.endswith(
        f"bytes is too large for topic {sink}, which accepts at most max.message.bytes=10000"
    )
    assert "poison" in errors[3][1]
    assert errors[4][1] == f"a row is for partition 9 of {sink}, which has 2 partitions"
    assert counted(line, declared.name) == RowCounts(rows_in=5, rows_out=2, dead=3)


def test_at_most_once_finds_refused_records_before_it_writes(line, declare, topics, unique):
    sink = topics.create(unique("small"), 1, **{"max.message.bytes": "10000"})
    declared, source, _ = declare(sink=TopicSink(topic=sink), delivery=Contract.AT_MOST_ONCE, parse=None)
    values = [b"first", os.urandom(20_000), b"last"]
    line.put(source, *values)
    line.run(declared)
    assert [each.value for each in line.messages(sink)] == [b"first", b"last"]
    assert [each.value for each in line.messages(f"{source}.dlq")] == [values[1]]


def test_a_failure_record_that_is_too_large_for_an_existing_topic(line, declare, topics):
    declared, source, sink = declare()
    dead = topics.create(f"{source}.dlq", 2, **{"max.message.bytes": "1000"})
    failure_record = os.urandom(2_000)
    line.put(source, {"id": "a", "amount": 1.0}, failure_record)
    with pytest.raises(StreamingQueryException) as raised:
        line.run(declared)
    trouble = error_info(raised.value)
    assert trouble.kind == "RecordTooLarge"
    assert f"too large for topic {dead}, which accepts at most max.message.bytes=1000" in trouble.message
    assert line.messages(sink) == line.messages(dead) == []
    with topics.cluster() as cluster:
        alter_topic_settings(cluster, dead, {"max.message.bytes": "100000"})
    line.run(declared)
    assert [row["id"] for row in line.rows(sink)] == ["a"]
    assert [each.value for each in line.messages(dead)] == [failure_record]


def test_errors_that_no_row_causes_make_no_dead_letters(line, declare):
    """The brokers of the sink, which is in another cluster, are down."""
    away = {"kafka.bootstrap.servers": "127.0.0.1:1", "kafka.default.api.timeout.ms": "1000"}
    declared, source, sink = declare(parse=None)
    declared = replace(declared, sink=TopicSink(topic=sink, options=away))
    line.put(source, *orders(3))
    with pytest.raises(StreamingQueryException) as raised:
        line.run(declared)
    assert error_info(raised.value).kind == "Unavailable"
    assert line.messages(f"{source}.dlq") == []


def test_too_many_poison_records_fail_the_batch(line, declare):
    declared, source, sink = declare(
        transform=lambda rows: rows.selectExpr("if(amount >= 0, raise_error('all'), id) as value"),
        errors=Errors(isolated_max=2),
    )
    line.put(source, *orders(8))
    with pytest.raises(StreamingQueryException) as raised:
        line.run(declared)
    assert BatchError.__name__ in str(raised.value)
    assert f"more than 2 records of {source}[0] 0 to 7 make batch 0 of query" in str(raised.value)
    assert failed_range(raised.value) == f"{source}[0] 0 to 7"
    assert line.messages(sink) == line.messages(f"{source}.dlq") == []


class Crash(Exception):
    pass


def crashing(monkeypatch, owner, name):
    """The first call is followed by the death of everything."""
    real = getattr(owner, name)
    calls = []

    def crash(*args, **kwargs):
        result = real(*args, **kwargs)
        calls.append(name)
        if len(calls) == 1:
            raise Crash
        return result

    monkeypatch.setattr(owner, name, crash)
    return calls


def test_each_row_once_if_a_written_batch_is_repeated(line, declare, monkeypatch):
    """Row functions give other results every time, and still each row is in one topic, once."""
    declared, source, sink = declare(rows=(functions.by_chance,), errors=SLOWLY)
    line.put(source, *orders(60))
    calls = crashing(monkeypatch, batch_module, "report_counts")
    with pytest.raises(StreamingQueryException, match="Crash"):
        line.run(declared)
    line.run(declared)
    assert len(calls) == 2
    rows = [int(row["id"]) for row in line.rows(sink)]
    retries = [origin(each)[2] for each in line.messages(f"{source}.retry.1")]
    assert rows
    assert retries
    assert sorted(rows + retries) == list(range(60))


def test_each_row_once_with_a_custom_sink(line, declare, monkeypatch, tmp_path):
    """The sink is written and the failure records are not yet: the saved evaluation is used."""
    sink = functions.Files(tmp_path / "sink")
    declared, source, _ = declare(rows=(functions.by_chance,), errors=SLOWLY, sink=sink)
    line.put(source, *orders(60))
    calls = crashing(monkeypatch, functions.Files, "write")
    with pytest.raises(StreamingQueryException, match="Crash"):
        line.run(declared)
    assert line.messages(f"{source}.retry.1") == []
    line.run(declared)
    assert len(calls) == 2
    retries = [origin(each)[2] for each in line.messages(f"{source}.retry.1")]
    assert retries
    assert sorted([int(row["id"]) for row in sink.rows()] + retries) == list(range(60))


def test_a_stateful_pipeline_gets_only_good_rows(line, declare):
    declared, source, sink = declare(
        stateful=True, transform=lambda rows: rows.dropDuplicates(["id"]).select("id", "amount", "_record")
    )
    line.put(source, {"id": "a", "amount": 0.1}, b"garbage", {"id": "a", "amount": 2.0}, {"id": "b"})
    line.run(declared)
    line.run(declared)
    found = {row["id"]: row.get("amount") for row in line.rows(sink)}
    assert len(line.rows(sink)) == 2
    assert found in ({"a": 0.1, "b": None}, {"a": 2.0, "b": None})
    assert {each.headers for each in line.messages(sink)} == {(("own", b"header"),)}
    (dead,) = line.messages(f"{source}.dlq")
    assert origin(dead) == (source, 0, 1)


WRONG = [
    ({"transform": lambda rows: rows.where("totl > 0")}, "`totl` cannot be resolved"),
    ({"transform": lambda rows: 1 / 0}, "its function fails on an empty DataFrame: ZeroDivisionError"),
    ({"transform": lambda rows: None}, "its function returned None, not a DataFrame"),
    (
        {"transform": lambda rows: rows.selectExpr("1 as value")},
        "column value is int; it must be string or binary",
    ),
    ({"parse": json_rows("id NOTHING")}, "is not a valid schema"),
    ({"parse": json_rows("_record STRING")}, "cannot be named _record"),
    ({"source": Source(topics=("no-such-topic",))}, "there is no topic no-such-topic"),
    ({"source": Source(topics=("no-such-topic",), starting="never")}, "there is no topic"),
]


def test_a_wrong_pipeline_is_an_error_and_no_query_runs(line, declare):
    _, source, sink = declare()
    for given, words in WRONG:
        common = {"name": "wrong", "source": Source(topics=(source,)), "sink": TopicSink(topic=sink)}
        with pytest.raises(PipelineError) as raised:
            line.run(Pipeline(**common | {"parse": ORDERS} | given))
        assert words in str(raised.value)
        assert "\n" not in str(raised.value)
    assert line.spark.streams.active == []
    with line.topics.cluster() as cluster:
        assert f"{source}.dlq" not in cluster.topics()


def test_at_most_once_delivers_nothing_again(line, declare, monkeypatch):
    """Rows that were delivered before a crash are not delivered again, written or not."""
    declared, source, sink = declare(rows=(functions.price,), errors=SLOWLY, delivery=Contract.AT_MOST_ONCE)
    line.put(source, {"id": "a", "amount": 1.0}, {"id": "broken"}, b"{")
    crashing(monkeypatch, batch_module, "report_counts")
    with pytest.raises(StreamingQueryException, match="Crash"):
        line.run(declared)
    line.put(source, {"id": "b", "amount": 1.0})
    line.run(declared)
    assert sorted(row["id"] for row in line.rows(sink)) == ["a", "b"]
    assert len(line.messages(f"{source}.retry.1")) == len(line.messages(f"{source}.dlq")) == 1
