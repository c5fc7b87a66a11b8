"""Offset ranges replayed by real Spark, compared record by record."""

import pytest
from tests.compat.message import Message

from penstock.spark.option_reader import OptionError
from penstock.spark.replay import ReplayError

START_MS = 1_700_000_000_000
#: Records of that time would be deleted at once.
FOR_EVER = {"retention.ms": "-1"}


@pytest.fixture
def source(topics, unique):
    """40 numbers, the even ones in partition 0, each a second after the one before."""
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


def test_everything_as_it_was_at_its_pace_and_only_once(desk, source, target):
    settings = {"topic": source, "to": target, "rate": "10", "times": "keep"}
    assert "40 records" in desk.run(**settings)
    assert desk.progress == [(0, 40), (20, 40), (40, 40)]
    assert [moment - desk.moments[0] for moment in desk.moments] == [0, 0, 2]
    found = {row["value"]: row for row in desk.rows(target)}
    assert desk.numbers(target) == list(range(40))
    for number in range(40):
        row = found[b"%d" % number]
        assert row["key"] == b"k%d" % number
        assert row["headers"] == [
            {"key": "n", "value": b"%d" % number},
            {"key": "none", "value": None},
        ]
        assert row["timestamp"].timestamp() * 1000 == START_MS + number * 1000
    told = desk.run(**settings | {"rate": "1000"})
    assert "done already" in told
    assert len(desk.rows(target)) == 40
    with pytest.raises(ReplayError, match="was begun with another where: give this one another id="):
        desk.run(**settings, where="offset > 3", id=desk_id(told))


def desk_id(told: str) -> str:
    return told.split()[1]


def test_stopped_and_gone_on_with(desk, topics, source, target):
    desk.stops_at = 10
    settings = {"topic": source, "to": target, "rate": "5", "where": "cast(value as string) != '7'"}
    assert "run it again" in desk.run(**settings)
    assert desk.progress[-1] == (10, 40)
    first = desk.numbers(target)
    assert len(first) in (9, 10)
    topics.count(source, range(40, 50))
    desk.stops_at = None
    assert "goes on after 1 of 4 pieces" in desk.run(**settings)
    assert desk.progress[0] == (10, 40)
    assert desk.numbers(target) == [number for number in range(40) if number != 7]


def test_by_time_and_by_offset(desk, topics, source, unique):
    by_time, by_offset = (topics.create(unique(name), 1) for name in ("time", "offset"))
    desk.run(
        topic=source,
        to=by_time,
        since=str(START_MS + 10_000),
        until="2023-11-14T22:13:50",
        where="partition = 1",
    )
    assert desk.numbers(by_time) == [11, 13, 15, 17, 19, 21, 23, 25, 27, 29]
    ends = f'{{"{source}": {{"0": 4, "1": -1}}}}'
    starts = f'{{"{source}": {{"0": 1, "1": 18}}}}'
    desk.run(topic=source, to=by_offset, starting=starts, ending=ends)
    assert [int(row["value"]) for row in desk.rows(by_offset) if int(row["value"]) % 2 == 0] == [2, 4, 6]
    assert desk.numbers(by_offset) == [2, 4, 6, 37, 39]


def test_what_cannot_be_done_is_told(desk, source, target, unique):
    with pytest.raises(ReplayError, match="there is no topic"):
        desk.run(topic=source, to=unique("nowhere"))
    with pytest.raises(ReplayError, match="where=colour = 'red'"):
        desk.run(topic=source, to=target, where="colour = 'red'")
    with pytest.raises(OptionError, match="does not exist yet"):
        desk.run(topic=source, to=target, ending=f'{{"{source}": {{"0": 21, "1": 0}}}}')
    assert desk.rows(target) == []


def test_a_recreated_topic_is_another_topic(desk, topics, source, target):
    desk.stops_at = 10
    settings = {"topic": source, "to": target, "rate": "5"}
    desk.run(**settings)
    topics.delete(source)
    topics.create(source, 2)
    desk.stops_at = None
    with pytest.raises(Exception, match="deleted and created anew"):
        desk.run(**settings)
    assert len(desk.rows(target)) == 10
