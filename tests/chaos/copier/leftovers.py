"""What must not be left at the end: open transactions, readers that are held back, messages that were not copied."""

import contextlib
from collections.abc import Iterable
from typing import Any

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from tests.chaos.readers import CONSUMER
from tests.chaos.view import Observer
from tests.chaos.workload import CLIENT
from tests.compat.raw import schema

COMPLETE = {"Empty", "CompleteCommit", "CompleteAbort", "Dead"}
CALL_S = 10.0
ABANDONED = -1  # a number that no message has


def open_transactions(observer: Observer) -> list[str]:
    """As the coordinators list and describe them."""
    listing = schema("list_transactions", 0, "ListTransactionsRequest")(
        state_filters=(), producer_id_filters=()
    )
    found = [
        (node_id, state.transactional_id, state.transaction_state)
        for node_id, answer in observer.ask_each(listing).items()
        for state in answer.transaction_states
        if state.transaction_state not in COMPLETE
    ]
    return [f"node {node_id}: {name} is {state}" for node_id, name, state in found]


def held_back(servers: str, partitions: Iterable[tuple[str, int]]) -> list[str]:
    """Partitions whose last stable offset is not their high watermark."""
    with (
        _watching(servers, "read_committed") as committed,
        _watching(servers, "read_uncommitted") as all_of_it,
    ):
        return [
            f"{topic}-{partition} is stable up to {stable} of {end}"
            for topic, partition in partitions
            if (stable := _end(committed, topic, partition)) != (end := _end(all_of_it, topic, partition))
        ]


def _end(consumer: Consumer, topic: str, partition: int) -> int:
    try:
        return int(consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=CALL_S)[1])
    except KafkaException as error:
        raise AssertionError(f"no end of {topic}-{partition}: {error}") from error


@contextlib.contextmanager
def _watching(servers: str, isolation: str, group: str = "watching") -> Any:
    settings = {"bootstrap.servers": servers, "group.id": group, "isolation.level": isolation}
    consumer = Consumer({**CONSUMER, **settings})
    try:
        yield consumer
    finally:
        consumer.close()


def behind(servers: str, group: str, topic: str, partitions: int) -> list[str]:
    """Partitions of which the group has not committed the end."""
    places = [TopicPartition(topic, partition) for partition in range(partitions)]
    with _watching(servers, "read_committed", group) as consumer:
        return [
            f"{topic}-{place.partition} is committed up to {place.offset} of {end}"
            for place in consumer.committed(places, timeout=CALL_S)
            if place.offset != (end := _end(consumer, topic, place.partition))
        ]


def abandon(servers: str, topic: str, *, timeout_ms: int) -> None:
    """Leave a transaction open, with a record in it."""
    producer = Producer(
        {
            **CLIENT,
            "bootstrap.servers": servers,
            "transaction.timeout.ms": timeout_ms,
            "transactional.id": "abandoned",
        }
    )
    producer.init_transactions(CALL_S)
    producer.begin_transaction()
    producer.produce(topic, b"%d" % ABANDONED, b"0", 0)
    assert producer.flush(CALL_S) == 0
