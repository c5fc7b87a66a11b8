"""A copy without duplicates, by message id, with any timestamps and through restarts."""

import time
from collections import Counter

import pytest
from tests.compat import confluent
from tests.compat.message import Message

from penstock.client.deadletters.headers import MESSAGE_ID
from penstock.spark.analytics import dedupe
from penstock.spark.pipelines.declaration import PipelineError

HOUR_MS = 3_600_000
FOR_EVER = {"retention.ms": "-1"}


def message(value, message_id=None, *, after_ms=0, partition=0):
    headers = () if message_id is None else ((MESSAGE_ID, message_id), ("other", b"x"))
    now_ms = int(time.time() * 1000)
    return Message(
        value=value, key=b"k", headers=headers, timestamp_ms=now_ms + after_ms, partition=partition
    )


def values(topics, topic, count):
    found = confluent.read(topics.bootstrap, topic, count, isolation_level="read_committed")
    return Counter(each.message.value for each in found)


def test_duplicates_are_dropped_and_all_other_records_kept(topics, run_once, unique):
    source, sink = topics.create(unique("in"), 2, **FOR_EVER), topics.create(unique("out"), 1)
    topics.fill(
        source,
        [
            message(b"a1", b"a"),
            message(b"a2", b"a", partition=1),
            message(b"b", b"b"),
            # A clock that is ahead must not make other records late.
            message(b"future", b"f", after_ms=HOUR_MS // 2),
            *[message(b"no id") for _ in range(3)],
        ],
    )
    pipeline = dedupe(source, sink)
    run_once(pipeline)
    first = values(topics, sink, 6)
    assert first[b"a1"] + first[b"a2"] == 1
    assert first[b"b"] == first[b"future"] == 1
    assert first[b"no id"] == 3
    topics.fill(
        source,
        [
            message(b"a3", b"a"),
            message(b"b2", b"b", after_ms=-48 * HOUR_MS),
            message(b"old", b"o", after_ms=-48 * HOUR_MS),
            message(b"old and no id", after_ms=-48 * HOUR_MS),
            message(b"c", b"c"),
        ],
    )
    run_once(pipeline)
    second = values(topics, sink, 9) - first
    assert second == Counter([b"old", b"old and no id", b"c"])
    last = confluent.read(topics.bootstrap, sink, 9)[-1].message
    assert last.key == b"k"


def test_by_any_expression(spark, topics, run_once, unique):
    source, sink = topics.create(unique("in")), topics.create(unique("out"))
    rows = [b'{"id": 1, "n": 1}', b'{"id": 1, "n": 2}', b'{"id": 2, "n": 3}', b"no json", b"no json either"]
    topics.fill(source, [Message(value=row) for row in rows])
    run_once(dedupe(source, sink, by="get_json_object(cast(value as string), '$.id')"))
    found = values(topics, sink, 4)
    assert found == Counter([rows[0], *rows[2:]])


def test_an_invalid_watermark():
    with pytest.raises(PipelineError, match="must be a time such as 10 minutes"):
        dedupe("a", "b", watermark="soon")
