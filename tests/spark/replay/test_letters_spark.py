"""Dead letters replayed by real Spark to their topic, unchanged, each once."""

import json
import time

import pytest
from tests.compat.message import Message

from penstock.client.deadletters.headers import (
    Failure,
    Origin,
    dead_letter_topic,
    failure_headers,
    original_headers,
    read_origin,
    replayed_key,
    replayed_topic,
    retry_topic,
)
from penstock.protocol.dead_letter_headers import WITHOUT_RECORD_HEADER
from penstock.spark.exactly_once.decisions import SinkError
from penstock.spark.replay import ReplayError, lock
from penstock.spark.replay.request import SourceKind, parse_request
from penstock.spark.replay.runs import DeadLetterReplay

OWN = (("trace", b"abc"), ("none", None))


def letter(topic, number, *, partition=1, error="ValueError", dead_in=0):
    origin = Origin(topic=topic, partition=partition, offset=number, timestamp_ms=1_700_000_000_000 + number)
    failure = Failure(error_class=error, message="no such colour", stack="...")
    headers = failure_headers(OWN, origin, failure, group="billing", attempts=5)
    return Message(value=b"%d" % number, key=b"k%d" % number, headers=tuple(headers), partition=dead_in)


@pytest.fixture
def orders(topics, unique):
    topic = topics.create(unique("orders"), 3)
    topics.create(dead_letter_topic(topic), 2)
    return topic


@pytest.fixture
def dead(topics, orders):
    """20 letters, the even ones in partition 0; those from 10 on failed for another reason."""
    dead = dead_letter_topic(orders)
    for partition in range(2):
        numbers = range(partition, 20, 2)
        topics.fill(
            dead,
            [
                letter(orders, n, dead_in=partition, error="ValueError" if n < 10 else "KeyError")
                for n in numbers
            ],
        )
    return dead


def test_back_as_they_were_and_once_under_whatever_id(desk, topics, orders, dead, unique):
    assert "10 records" in desk.run(from_=dead, where="error_class = 'KeyError'", id="first")
    assert desk.numbers(orders) == list(range(10, 20))
    for row in desk.rows(orders):
        number = int(row["value"])
        assert row["partition"] == 1
        assert row["key"] == b"k%d" % number
        assert row["headers"] == [{"key": name, "value": value} for name, value in OWN]
    # What is in the list is there under the key that others look for.
    listed = {row["key"]: json.loads(row["value"]) for row in desk.rows(replayed_topic(dead))}
    assert listed.keys() == {replayed_key(number % 2, number // 2) for number in range(10, 20)}
    assert {(each["replay"], each["to"]) for each in listed.values()} == {("first", orders)}
    # Another replay takes the rest, and a third one finds nothing, whatever it is called and wherever it goes.
    elsewhere = topics.create(unique("elsewhere"), 1)
    assert "10 records" in desk.run(letters=dead, to=elsewhere, id="second")
    assert "0 records" in desk.run(letters=dead, id="third")
    assert desk.numbers(elsewhere) == list(range(10))
    assert desk.numbers(orders) == list(range(10, 20))
    topics.fill(dead, [letter(orders, 77)])
    assert "1 records" in desk.run(letters=dead, id="third")
    assert desk.numbers(orders) == [*range(10, 20), 77]


def test_replay_to_the_group_that_failed_reaches_no_other_group(desk, topics, orders, dead):
    with pytest.raises(ReplayError, match=r"\.retry\.1 does not exist"):
        desk.run(letters=dead, to="group")
    retries = topics.create(retry_topic(orders, 1), 2)
    topics.fill(dead, [Message(value=None)])
    told = desk.run(letters=dead, to="group")
    assert "20 records" in told
    assert "1 letters have no record in them" in told
    assert desk.numbers(retries) == list(range(20))
    for row in desk.rows(retries):
        headers = [(each["key"], each["value"]) for each in row["headers"]]
        origin = read_origin(headers, topic=retries, partition=0, offset=0, timestamp_ms=0)
        assert (origin.topic, origin.partition, origin.offset) == (orders, 1, int(row["value"]))
        assert (origin.attempts, origin.group) == (0, "billing")
        assert row["partition"] == 1
        assert original_headers(headers) == list(OWN)
        # It is due at once, and not when it was published.
        assert abs(row["timestamp"].timestamp() - time.time()) < 600
    assert desk.rows(orders) == []


def test_stopped_and_run_again(desk, orders, dead):
    desk.stops_at = 5
    desk.run(letters=dead, rate="3")
    assert len(desk.rows(orders)) == 5
    desk.stops_at = None
    assert "15 records" in desk.run(letters=dead)
    assert desk.numbers(orders) == list(range(20))


def test_what_is_no_letter_is_left_out_and_told(desk, topics, orders, dead):
    bare = letter(orders, 0)
    topics.fill(
        dead,
        [
            Message(value=b"by hand"),
            bare._replace(value=None, headers=(*bare.headers, (WITHOUT_RECORD_HEADER, b"gone"))),
            letter(orders, 5, partition=17),
        ],
    )
    told = desk.run(letters=dead, where="offset >= 10")
    assert "1 letters have no record in them" in told
    assert "1 records do not tell where they are from" in told
    (row,) = desk.rows(orders)
    assert (row["value"], row["headers"][0]["key"]) == (b"5", "trace")
    topics.fill(dead, [letter("never-made", 6)])
    with pytest.raises(ReplayError, match="from topics that do not exist: never-made"):
        desk.run(letters=dead)
    assert len(desk.rows(orders)) == 1


def test_dead_letters_of_a_recreated_topic_are_different(desk, topics, orders, dead):
    desk.run(letters=dead)
    topics.delete(dead)
    topics.create(dead, 2)
    topics.fill(dead, [letter(orders, 30)])
    assert "1 records" in desk.run(letters=dead)
    assert desk.numbers(orders) == [*range(20), 30]


def test_who_begins_takes_the_turn_from_who_was_before(desk, topics, orders, dead):
    """The first of two is in the middle when the second begins: it stops, and nothing is written twice."""
    context = desk.context()
    with context.run.cluster() as cluster:
        first = DeadLetterReplay(cluster, parse_request(letters=dead, rate="6", id="first"), context)
        first.write(0, first.plan.piece(0))
        second = DeadLetterReplay(cluster, parse_request(letters=dead, id="second"), context)
        with pytest.raises(SinkError, match="another replay of the same dead letters has begun since"):
            first.write(1, first.plan.piece(1))
        assert second.write(0, second.plan.piece(0)) == 10
    assert desk.numbers(orders) == list(range(20))


def test_turns_go_up(topics, unique):
    query = unique("letters")
    with topics.cluster() as cluster:
        numbers = [lock.acquire_lock(cluster, query) for _ in range(3)]
    assert numbers == sorted(set(numbers))
    assert numbers[2] - numbers[1] >= 1 << 30


def test_what_is_meant_by_from():
    kinds = {
        "orders": SourceKind.TOPIC,
        "orders.dlq": SourceKind.LETTERS,
        "orders.retry.1": SourceKind.TOPIC,
        "orders.dlq.replayed": SourceKind.TOPIC,
        "lake/orders": SourceKind.ARCHIVE,
        "s3://lake/orders": SourceKind.ARCHIVE,
    }
    assert {name: parse_request(from_=name, to="t").kind for name in kinds} == kinds
