"""The messages that all contenders read: JSON documents of a size, with keys, with or without our headers."""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from benchmarks.wire.payloads import value_pool

#: As many different ones as there are values.
_POOL = 1_000
_POLL_EVERY = 1_000
_FLUSH_S = 60.0
_QUEUE_MESSAGES = 500_000


@dataclass(frozen=True, slots=True)
class Order:
    """What the values are, for handlers that want to know."""

    id: int
    customer: str
    amount: float
    note: str


class Kind(NamedTuple):
    """Of the messages in a topic."""

    value_bytes: int
    has_headers: bool

    @property
    def name(self) -> str:
        size = "1KB" if self.value_bytes == 1024 else f"{self.value_bytes}B"
        return f"{size}-headers" if self.has_headers else size

    @property
    def title(self) -> str:
        size = "1 KB" if self.value_bytes == 1024 else f"{self.value_bytes} B"
        return f"{size}, with headers" if self.has_headers else size


def values(value_bytes: int) -> list[bytes]:
    """Every one exactly that long."""
    return [
        _document(number, text.decode(), value_bytes)
        for number, text in enumerate(value_pool(value_bytes, _POOL))
    ]


def _document(number: int, text: str, value_bytes: int) -> bytes:
    fields = {"id": number, "customer": f"customer-{number:04}", "amount": number / 4, "note": ""}
    room = value_bytes - len(json.dumps(fields))
    assert room >= 0, f"a document does not fit into {value_bytes} bytes"
    return json.dumps({**fields, "note": text[:room]}).encode()


def keys() -> list[bytes]:
    return [f"customer-{number:04}".encode() for number in range(_POOL)]


def fill(bootstrap: str, topic: str, count: int, kind: Kind, partitions: int) -> None:
    """One after the other to each partition, so that all have as many (or one less)."""
    from confluent_kafka import Producer

    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "enable.idempotence": True,
            "linger.ms": 20,
            "queue.buffering.max.messages": _QUEUE_MESSAGES,
        }
    )
    pool, names = values(kind.value_bytes), keys()
    more = headers() if kind.has_headers else None
    for number in range(count):
        told = {"headers": next(more)} if more is not None else {}
        _produce(producer, topic, pool[number % _POOL], names[number % _POOL], number % partitions, told)
        if number % _POLL_EVERY == 0:
            producer.poll(0)
    left = producer.flush(_FLUSH_S)
    assert not left, f"{left} messages of {topic} were not taken"


def _produce(
    producer: Any, topic: str, value: bytes, key: bytes, partition: int, told: dict[str, Any]
) -> None:
    while True:
        try:
            producer.produce(topic, value, key, partition, **told)
            return
        except BufferError:
            producer.poll(0.05)


def headers() -> Iterator[Sequence[tuple[str, bytes]]]:
    """What our publisher gives every message: an id that no other has, and a trace."""
    prefix = os.urandom(10).hex()
    number = 0
    while True:
        number += 1
        yield [
            ("message-id", f"{prefix}-{number:x}".encode()),
            ("traceparent", f"00-{number:032x}-{number:016x}-01".encode()),
        ]
