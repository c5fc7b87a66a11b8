"""Archives replayed into topics: the original records, or JSON of the columns."""

import json
import time

import pytest
from tests.compat.message import Message

from penstock.spark.archive import archive
from penstock.spark.archive.delta_table import ArchiveError
from penstock.spark.pipelines import assembly
from penstock.spark.pipelines.declaration import RunSettings
from penstock.spark.replay import ReplayError

WITHIN_S = 600.0


@pytest.fixture
def archived(spark, topics, tmp_path):
    """Archive everything in a topic."""

    def started(declared):
        run = RunSettings(bootstrap=topics.bootstrap, checkpoint=str(tmp_path / "checkpoint"), once=True)
        (query,) = assembly.start(spark, declared, run)
        try:
            assert query.awaitTermination(WITHIN_S)
        finally:
            query.stop()

    return started


def test_the_original_records(replays, topics, archived, tmp_path, unique):
    source, target = topics.create(unique("in"), 2), topics.create(unique("out"), 1)
    table, now_ms = str(tmp_path / "lake" / "t"), int(time.time() * 1000)
    messages = [
        Message(
            value=None if number == 5 else b"%d" % number,
            key=b"k%d" % number,
            headers=(("n", b"%d" % number),),
            timestamp_ms=now_ms - 100_000 + number,
            partition=number % 2,
        )
        for number in range(20)
    ]
    topics.fill(source, messages)
    archived(archive(source, table, every=None))
    replays.stops_at = 5
    settings = {
        "archive": table,
        "to": target,
        "where": "_offset < 8",
        "since": str(now_ms - 99_999),
        "rate": "4",
        "times": "keep",
    }
    replays.run(**settings)
    # Newer records are not part of the replay, and files may have been compacted by now.
    topics.fill(source, [Message(value=b"later", timestamp_ms=now_ms)])
    archived(archive(source, table, every=None))
    replays.stops_at = None
    replays.run(**settings)
    rows = replays.rows(target)
    wanted = [messages[number] for number in range(1, 16)]
    assert sorted(bytes(row["key"]) for row in rows) == sorted(each.key for each in wanted)
    for row in rows:
        message = messages[int(row["key"][1:])]
        assert row["value"] == message.value
        assert row["headers"] == [{"key": "n", "value": message.headers[0][1]}]
        assert round(row["timestamp"].timestamp() * 1000) == message.timestamp_ms
    for partition in range(2):
        keys = [int(row["key"][1:]) for row in rows if int(row["key"][1:]) % 2 == partition]
        assert keys == sorted(keys)


def test_columns_become_json(replays, topics, archived, tmp_path, unique):
    source, target = topics.create(unique("in")), topics.create(unique("out"))
    table, schema = str(tmp_path / "lake" / "t"), tmp_path / "orders.ddl"
    schema.write_text("id BIGINT, colour STRING")
    topics.fill(source, [Message(value=b'{"colour": "red", "id": %d}' % number) for number in range(4)])
    archived(archive(source, table, schema=str(schema), every=None))
    assert "as JSON" in replays.run(from_=table, to=target, where="id > 1")
    found = [json.loads(row["value"]) for row in replays.rows(target)]
    assert sorted(found, key=lambda row: row["id"]) == [{"id": n, "colour": "red"} for n in (2, 3)]


def test_tables_that_are_not_archives(replays, topics, tmp_path, unique):
    target = topics.create(unique("out"))
    with pytest.raises(ArchiveError, match="there is no table"):
        replays.run(archive=str(tmp_path / "nothing"), to=target)
    with pytest.raises(ReplayError, match="give the range of an archive by time"):
        replays.run(archive=str(tmp_path / "nothing"), to=target, starting='{"t": {"0": 4}}')
