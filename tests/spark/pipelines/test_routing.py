"""Which topic a failed row goes to, by its attempts and its topic."""

import random

from penstock.client.deadletters.headers import Failure, Origin, read_origin
from penstock.protocol.backoff import ExponentialBackoff
from penstock.spark.pipelines.failure_topics import FailureRouting

FAILURE = Failure(error_class="E", message="m")
NOW_MS = 1_000_000
ROUTING = FailureRouting(
    group="g",
    attempts_max=3,
    backoff=ExponentialBackoff(base_ms=1000, cap_ms=1500),
    retries={"orders.retry.1": "orders", "orders.retry.2": "orders", "orders.retry.7": "orders"},
    partitions={"orders.retry.1": 4, "orders.retry.2": 4, "orders.dlq": 2},
)


def failure_record(attempts, *, is_retriable=True, topic="orders", partition=3):
    origin = Origin(topic=topic, partition=partition, offset=9, timestamp_ms=5, attempts=attempts)
    return ROUTING.failure_record(
        origin,
        topic,
        [("own", b"1")],
        FAILURE,
        is_retriable=is_retriable,
        now_ms=NOW_MS,
        chance=random.Random(1),
    )


def record(topic, headers=None):
    return {"topic": topic, "partition": 0, "offset": 1, "timestamp_ms": 2, "headers": headers}


def test_each_retry_level_and_then_the_dead_letter_topic():
    first, second, last = failure_record(0), failure_record(1), failure_record(2)
    assert (first.topic, first.partition) == ("orders.retry.1", 3)
    assert NOW_MS + 1000 <= first.timestamp_ms <= NOW_MS + 2000
    assert NOW_MS + 1500 <= second.timestamp_ms <= NOW_MS + 2500
    assert second.topic == "orders.retry.2"
    assert (last.topic, last.timestamp_ms, last.is_retry) == ("orders.dlq", None, False)
    assert last.partition == 1, "the dead-letter topic has fewer partitions"
    origin = read_origin(last.headers, topic="orders.dlq", partition=0, offset=0, timestamp_ms=0)
    assert (origin.attempts, origin.offset, origin.group) == (3, 9, "g")


def test_rows_that_are_not_retried():
    assert failure_record(0, is_retriable=False).topic == "orders.dlq"
    assert failure_record(0, topic="new").topic == "new.dlq", "its retry topic is not read"


def test_origin_headers_are_used_only_in_retry_topics():
    headers = failure_record(0).headers
    assert ROUTING.read_origin(record("orders.retry.1", headers)).attempts == 1
    assert ROUTING.read_origin(record("orders.retry.1", headers)).partition == 3
    assert ROUTING.read_origin(record("orders", headers)).attempts == 0
    assert ROUTING.own_headers("orders", headers) == headers
    assert ROUTING.own_headers("orders.retry.1", headers) == [("own", b"1")]
    forged = failure_record(0, topic="elsewhere").headers
    assert ROUTING.read_origin(record("orders.retry.1", forged)).topic == "orders.retry.1"
    assert ROUTING.source_of("orders.retry.1") == "orders"
