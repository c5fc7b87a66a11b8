"""Retries and dead letters name their topics and say where they are from, whatever their headers hold."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.client import letters
from penstock.client.letters import Failure, Origin, headers_for, is_for, origin_of, restored
from penstock.protocol.letters import DELIVERY_COUNT, GROUP, OFFSET, PARTITION, TIMESTAMP, TOPIC

ORIGIN = Origin(topic="orders", partition=2, offset=17, timestamp_ms=1_700_000_000_000)
FAILURE = Failure(error_class="ValueError", message="no such product", stack="Traceback ...")
HERE = {"topic": "orders.retry.1", "partition": 0, "offset": 5, "timestamp_ms": 99}


@pytest.mark.parametrize("topic", ["orders", "a.b", "orders.retry", "orders.retry.0", ".dlq", "x.retry.1x"])
def test_a_topic_is_its_own_original(topic):
    assert letters.original_topic(topic) == topic
    assert letters.retry_level(topic) is None


def test_names_of_topics_lead_back_to_the_source():
    for level in (1, 4, 12):
        name = letters.retry_topic("orders", level)
        assert (letters.original_topic(name), letters.retry_level(name)) == ("orders", level)
    assert letters.retry_topic("orders", 1) == "orders.retry.1"
    dead = letters.dead_letter_topic("orders")
    assert (dead, letters.original_topic(dead)) == ("orders.dlq", "orders")
    for name in ("orders.retry.3", dead, letters.replayed_topic(dead)):
        assert letters.is_letter_topic(name)
    assert not letters.is_letter_topic("orders.replayed")
    assert letters.replayed_key(3, 1 << 40) == b"3:1099511627776"


def test_a_letter_tells_all_and_keeps_the_records_own_headers():
    own = [("trace", b"\xff\x00"), ("none", None), ("trace", b"2")]
    told = headers_for(own, ORIGIN, FAILURE, group="g", attempts=1)
    assert restored(told) == own
    assert origin_of(told, **HERE) == Origin(
        topic="orders", partition=2, offset=17, timestamp_ms=1_700_000_000_000, attempts=1, group="g"
    )
    assert letters.failure_in(told) == FAILURE
    again = headers_for(told, ORIGIN, FAILURE, group="g", attempts=2)
    assert len(again) == len(told)
    assert origin_of(again, **HERE).attempts == 2


def test_a_record_without_headers_is_from_where_it_is():
    for headers in (None, [], [("own", b"1")], [(TOPIC, b"orders"), (PARTITION, b"1")]):
        assert origin_of(headers, **HERE) == Origin(**HERE)


def test_retries_are_for_the_group_that_they_name():
    assert is_for([(GROUP, b"g")], "g")
    assert not is_for([(GROUP, b"other")], "g")
    assert is_for(None, "g")


def test_long_stacks_and_messages_are_cut():
    failure = Failure(error_class="E", message="ä" * 10_000, stack="s" * 100_000)
    told = letters.failure_in(headers_for(None, ORIGIN, failure, group="g", attempts=1))
    assert len(told.stack.encode()) == letters.STACK_BYTES_MAX
    assert len(told.message.encode()) <= letters.MESSAGE_BYTES_MAX
    assert told.message.startswith("ää")


_names = st.sampled_from([TOPIC, PARTITION, OFFSET, GROUP, DELIVERY_COUNT, TIMESTAMP, "own"])
_numbers = st.sampled_from([-1, 0, 1, (1 << 31) - 1, 1 << 31, (1 << 63) - 1, 1 << 63, 10**30])
_values = st.none() | st.binary(max_size=12) | _numbers.map(lambda number: b"%d" % number)


@given(st.lists(st.tuples(_names, _values)))
def test_whatever_headers_say_an_origin_can_be_written_down(headers):
    found = origin_of(headers, **HERE)
    assert 0 <= found.partition < 1 << 31
    assert 0 <= found.offset < 1 << 63
    assert 0 <= found.timestamp_ms * 1000 < 1 << 63
    assert 0 <= found.attempts + 1 < 1 << 31
    told = headers_for(headers, found, FAILURE, group="g", attempts=found.attempts + 1)
    assert origin_of(told, **HERE).attempts == found.attempts + 1
