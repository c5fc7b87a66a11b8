"""Ranges of topics replayed by real Spark, compared record by record with the source."""

import pytest
from tests.compat.message import Message

from penstock.spark.option_reader import OptionError
from penstock.spark.replay import ReplayError

START_MS = 1_700_000_000_000
#: Brokers would delete records of that time at once.
FOR_EVER = {"retention.ms": "-1"}


@pytest.fixture
def source(topics, unique):
    """40 numbers, the even ones in partition 0, one second apart."""
    topic = topics.create(unique("in"), 2, **FOR_EVER)
    for partition in range(2):
        topics.fill(
            topic,
            [
                Message(
                    value=b"%d" % number,
                    key=b"k%d" % number,
                    headers=(("n", b"%d" % number), ("none", None)),
                    timestamp_ms=START_MS + number * 1000,
                    partition=partition,
                )
                for number in range(partition, 40, 2)
            ],
        )
    return topic


@pytest.fixture
def target(topics, unique):
    return topics.create(unique("out"), 3, **FOR_EVER)


def test_all_records_unchanged_at_the_rate_and_only_once(replays, source, target):
    settings = {"topic": source, "to": target, "rate": "10", "times": "keep"}
    assert "40 records" in replays.run(**settings)
    assert replays.progress == [(0, 40), (20, 40), (40, 40)]
    assert [time_s - replays.progress_times_s[0] for time_s in replays.progress_times_s] == [0, 0, 2]
    found = {row["value"]: row for row in replays.rows(target)}
    assert replays.numbers(target) == list(range(40))
    for number in range(40):
        row = found[b"%d" % number]
        assert row["key"] == b"k%d" % number
        assert row["headers"] == [
            {"key": "n", "value": b"%d" % number},
            {"key": "none", "value": None},
        ]
        assert row["timestamp"].timestamp() * 1000 == START_MS + number * 1000
    notes = replays.run(**settings | {"rate": "1000"})
    assert "already done" in notes
    assert len(replays.rows(target)) == 40
    with pytest.raises(ReplayError, match="was started with another where: use another id= for this one"):
        replays.run(**settings, where="offset > 3", id=replay_id(notes))


def replay_id(notes: str) -> str:
    return notes.split()[1]


def test_a_stopped_replay_continues(replays, topics, source, target):
    replays.stops_at = 10
    settings = {"topic": source, "to": target, "rate": "5", "where": "cast(value as string) != '7'"}
    assert "run it again" in replays.run(**settings)
    assert replays.progress[-1] == (10, 40)
    first = replays.numbers(target)
    assert len(first) in (9, 10)
    topics.count(source, range(40, 50))
    replays.stops_at = None
    assert "continues after 1 of 4 pieces" in replays.run(**settings)
    assert replays.progress[0] == (10, 40)
    assert replays.numbers(target) == [number for number in range(40) if number != 7]


def test_by_time_and_by_offset(replays, topics, source, unique):
    by_time, by_offset = (topics.create(unique(name), 1) for name in ("time", "offset"))
    replays.run(
        topic=source,
        to=by_time,
        since=str(START_MS + 10_000),
        until="2023-11-14T22:13:50",
        where="partition = 1",
    )
    assert replays.numbers(by_time) == [11, 13, 15, 17, 19, 21, 23, 25, 27, 29]
    ends = f'{{"{source}": {{"0": 4, "1": -1}}}}'
    starts = f'{{"{source}": {{"0": 1, "1": 18}}}}'
    replays.run(topic=source, to=by_offset, starting=starts, ending=ends)
    assert [int(row["value"]) for row in replays.rows(by_offset) if int(row["value"]) % 2 == 0] == [2, 4, 6]
    assert replays.numbers(by_offset) == [2, 4, 6, 37, 39]


def test_errors(replays, source, target, unique):
    with pytest.raises(ReplayError, match="there is no topic"):
        replays.run(topic=source, to=unique("nowhere"))
    with pytest.raises(ReplayError, match="where=colour = 'red'"):
        replays.run(topic=source, to=target, where="colour = 'red'")
    with pytest.raises(OptionError, match="does not exist yet"):
        replays.run(topic=source, to=target, ending=f'{{"{source}": {{"0": 21, "1": 0}}}}')
    assert replays.rows(target) == []


def test_a_recreated_topic_is_refused(replays, topics, source, target):
    replays.stops_at = 10
    settings = {"topic": source, "to": target, "rate": "5"}
    replays.run(**settings)
    topics.delete(source)
    topics.create(source, 2)
    replays.stops_at = None
    with pytest.raises(Exception, match=r"deleted and created (anew|again)"):
        replays.run(**settings)
    assert len(replays.rows(target)) == 10
