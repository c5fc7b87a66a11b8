"""Names of retry and dead letter topics, and the headers that tell the origin of a message."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.client.deadletters import headers
from penstock.client.deadletters.headers import (
    Failure,
    Origin,
    failure_headers,
    is_for_group,
    original_headers,
    read_origin,
)
from penstock.protocol.dead_letter_headers import (
    DELIVERY_COUNT_HEADER,
    GROUP_HEADER,
    OFFSET_HEADER,
    PARTITION_HEADER,
    TIMESTAMP_HEADER,
    TOPIC_HEADER,
)

ORIGIN = Origin(topic="orders", partition=2, offset=17, timestamp_ms=1_700_000_000_000)
FAILURE = Failure(error_class="ValueError", message="no such product", stack="Traceback ...")
HERE = {"topic": "orders.retry.1", "partition": 0, "offset": 5, "timestamp_ms": 99}


@pytest.mark.parametrize("topic", ["orders", "a.b", "orders.retry", "orders.retry.0", ".dlq", "x.retry.1x"])
def test_a_topic_is_its_own_original(topic):
    assert headers.original_topic(topic) == topic
    assert headers.retry_level(topic) is None


def test_names_of_topics_lead_back_to_the_source():
    for level in (1, 4, 12):
        name = headers.retry_topic("orders", level)
        assert (headers.original_topic(name), headers.retry_level(name)) == ("orders", level)
    assert headers.retry_topic("orders", 1) == "orders.retry.1"
    dead = headers.dead_letter_topic("orders")
    assert (dead, headers.original_topic(dead)) == ("orders.dlq", "orders")
    for name in ("orders.retry.3", dead, headers.replayed_topic(dead)):
        assert headers.is_failure_topic(name)
    assert not headers.is_failure_topic("orders.replayed")
    assert headers.replayed_key(3, 1 << 40) == b"3:1099511627776"


def test_a_letter_tells_all_and_keeps_the_records_own_headers():
    own = [("trace", b"\xff\x00"), ("none", None), ("trace", b"2")]
    told = failure_headers(own, ORIGIN, FAILURE, group="g", attempts=1)
    assert original_headers(told) == own
    assert read_origin(told, **HERE) == Origin(
        topic="orders", partition=2, offset=17, timestamp_ms=1_700_000_000_000, attempts=1, group="g"
    )
    assert headers.read_failure(told) == FAILURE
    again = failure_headers(told, ORIGIN, FAILURE, group="g", attempts=2)
    assert len(again) == len(told)
    assert read_origin(again, **HERE).attempts == 2


def test_a_record_without_headers_is_from_where_it_is():
    for given_headers in (None, [], [("own", b"1")], [(TOPIC_HEADER, b"orders"), (PARTITION_HEADER, b"1")]):
        assert read_origin(given_headers, **HERE) == Origin(**HERE)


def test_retries_are_for_the_group_that_they_name():
    assert is_for_group([(GROUP_HEADER, b"g")], "g")
    assert not is_for_group([(GROUP_HEADER, b"other")], "g")
    assert is_for_group(None, "g")


def test_long_stacks_and_messages_are_cut():
    failure = Failure(error_class="E", message="ä" * 10_000, stack="s" * 100_000)
    told = headers.read_failure(failure_headers(None, ORIGIN, failure, group="g", attempts=1))
    assert len(told.stack.encode()) == headers.ERROR_STACK_BYTES_MAX
    assert len(told.message.encode()) <= headers.ERROR_MESSAGE_BYTES_MAX
    assert told.message.startswith("ää")


_names = st.sampled_from(
    [
        TOPIC_HEADER,
        PARTITION_HEADER,
        OFFSET_HEADER,
        GROUP_HEADER,
        DELIVERY_COUNT_HEADER,
        TIMESTAMP_HEADER,
        "own",
    ]
)
_numbers = st.sampled_from([-1, 0, 1, (1 << 31) - 1, 1 << 31, (1 << 63) - 1, 1 << 63, 10**30])
_values = st.none() | st.binary(max_size=12) | _numbers.map(lambda number: b"%d" % number)


@given(st.lists(st.tuples(_names, _values)))
def test_whatever_headers_say_an_origin_can_be_written_down(headers):
    found = read_origin(headers, **HERE)
    assert 0 <= found.partition < 1 << 31
    assert 0 <= found.offset < 1 << 63
    assert 0 <= found.timestamp_ms * 1000 < 1 << 63
    assert 0 <= found.attempts + 1 < 1 << 31
    told = failure_headers(headers, found, FAILURE, group="g", attempts=found.attempts + 1)
    assert read_origin(told, **HERE).attempts == found.attempts + 1
