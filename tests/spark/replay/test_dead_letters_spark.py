"""Dead letters replayed by real Spark: to their original topics, unchanged, and each once."""

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


def dead_letter(topic, number, *, partition=1, error="ValueError", dead_in=0):
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
    """20 dead letters, the even ones in partition 0. Those from 10 on failed for another reason."""
    dead = dead_letter_topic(orders)
    for partition in range(2):
        numbers = range(partition, 20, 2)
        topics.fill(
            dead,
            [
                dead_letter(orders, n, dead_in=partition, error="ValueError" if n < 10 else "KeyError")
                for n in numbers
            ],
        )
    return dead


def test_records_are_replayed_unchanged_and_once_under_any_id(replays, topics, orders, dead, unique):
    assert "10 records" in replays.run(from_=dead, where="error_class = 'KeyError'", id="first")
    assert replays.numbers(orders) == list(range(10, 20))
    for row in replays.rows(orders):
        number = int(row["value"])
        assert row["partition"] == 1
        assert row["key"] == b"k%d" % number
        assert row["headers"] == [{"key": name, "value": value} for name, value in OWN]
    # Entries in the list of replayed dead letters have the key that clients expect.
    listed = {row["key"]: json.loads(row["value"]) for row in replays.rows(replayed_topic(dead))}
    assert listed.keys() == {replayed_key(number % 2, number // 2) for number in range(10, 20)}
    assert {(each["replay"], each["to"]) for each in listed.values()} == {("first", orders)}
    # Another replay takes the remaining ones. A third one finds nothing, whatever its id and target.
    elsewhere = topics.create(unique("elsewhere"), 1)
    assert "10 records" in replays.run(letters=dead, to=elsewhere, id="second")
    assert "0 records" in replays.run(letters=dead, id="third")
    assert replays.numbers(elsewhere) == list(range(10))
    assert replays.numbers(orders) == list(range(10, 20))
    topics.fill(dead, [dead_letter(orders, 77)])
    assert "1 records" in replays.run(letters=dead, id="third")
    assert replays.numbers(orders) == [*range(10, 20), 77]


def test_records_go_only_to_the_group_that_failed(replays, topics, orders, dead):
    with pytest.raises(ReplayError, match=r"do not exist: .*\.retry\.1"):
        replays.run(letters=dead, to="group")
    retries = topics.create(retry_topic(orders, 1), 2)
    topics.fill(dead, [Message(value=None)])
    notes = replays.run(letters=dead, to="group")
    assert "20 records" in notes
    assert "skips 1 dead letters that do not contain their record" in notes
    assert replays.numbers(retries) == list(range(20))
    for row in replays.rows(retries):
        headers = [(each["key"], each["value"]) for each in row["headers"]]
        origin = read_origin(headers, topic=retries, partition=0, offset=0, timestamp_ms=0)
        assert (origin.topic, origin.partition, origin.offset) == (orders, 1, int(row["value"]))
        assert (origin.attempts, origin.group) == (0, "billing")
        assert row["partition"] == 1
        assert original_headers(headers) == list(OWN)
        # The retry is due at once.
        assert abs(row["timestamp"].timestamp() - time.time()) < 600
    assert replays.rows(orders) == []


def test_a_stopped_replay_continues(replays, orders, dead):
    replays.stops_at = 5
    replays.run(letters=dead, rate="3")
    assert len(replays.rows(orders)) == 5
    replays.stops_at = None
    assert "15 records" in replays.run(letters=dead)
    assert replays.numbers(orders) == list(range(20))


def test_dead_letters_without_a_record_or_an_origin_are_skipped(replays, topics, orders, dead):
    bare = dead_letter(orders, 0)
    topics.fill(
        dead,
        [
            Message(value=b"by hand"),
            bare._replace(value=None, headers=(*bare.headers, (WITHOUT_RECORD_HEADER, b"gone"))),
            dead_letter(orders, 5, partition=17),
        ],
    )
    notes = replays.run(letters=dead, where="offset >= 10")
    assert "skips 1 dead letters that do not contain their record" in notes
    assert "skips 1 records whose original topic is unknown" in notes
    (row,) = replays.rows(orders)
    assert (row["value"], row["headers"][0]["key"]) == (b"5", "trace")
    topics.fill(dead, [dead_letter("never-made", 6)])
    with pytest.raises(ReplayError, match="go to topics that do not exist: never-made"):
        replays.run(letters=dead)
    assert len(replays.rows(orders)) == 1


def test_dead_letters_of_a_recreated_topic_are_replayed(replays, topics, orders, dead):
    replays.run(letters=dead)
    topics.delete(dead)
    topics.create(dead, 2)
    topics.fill(dead, [dead_letter(orders, 30)])
    assert "1 records" in replays.run(letters=dead)
    assert replays.numbers(orders) == [*range(20), 30]


def test_a_second_replay_fences_the_first(replays, topics, orders, dead):
    """The second replay starts while the first one runs: the first one stops, and nothing is written twice."""
    context = replays.context()
    with context.run.cluster() as cluster:
        first = DeadLetterReplay(cluster, parse_request(letters=dead, rate="6", id="first"), context)
        first.write(0, first.plan.piece(0))
        second = DeadLetterReplay(cluster, parse_request(letters=dead, id="second"), context)
        with pytest.raises(SinkError, match="another replay of the same dead letters has acquired the lock"):
            first.write(1, first.plan.piece(1))
        assert second.write(0, second.plan.piece(0)) == 10
    assert replays.numbers(orders) == list(range(20))


def test_each_lock_holder_has_higher_batch_numbers(topics, unique):
    query = unique("dead-letters")
    with topics.cluster() as cluster:
        numbers = [lock.acquire_lock(cluster, query) for _ in range(3)]
    assert numbers == sorted(set(numbers))
    assert numbers[2] - numbers[1] >= 1 << 30


def test_the_kind_of_source_is_derived_from_its_name():
    kinds = {
        "orders": SourceKind.TOPIC,
        "orders.dlq": SourceKind.DEAD_LETTERS,
        "orders.retry.1": SourceKind.TOPIC,
        "orders.dlq.replayed": SourceKind.TOPIC,
        "lake/orders": SourceKind.ARCHIVE,
        "s3://lake/orders": SourceKind.ARCHIVE,
    }
    assert {name: parse_request(from_=name, to="t").kind for name in kinds} == kinds
