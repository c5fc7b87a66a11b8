"""What waits in retry topics, read once when partitions are assigned."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from penstock.client.app.places import Place, place_of
from penstock.client.app.settings import Settings
from penstock.client.errors import Unavailable
from penstock.client.letters import is_for

__all__ = ["waiting"]

_CONSUME_S: Final = 1.0
_IDLE_ROUNDS_MAX: Final = 30


def waiting(settings: Settings, group: str, from_offsets: Mapping[Place, int]) -> Iterator[Any]:
    """Every record of the group from there to the end. Raises Unavailable."""
    from confluent_kafka import Consumer, TopicPartition

    if not from_offsets:
        return
    reader = Consumer({**settings, "group.id": f"{group}.order", "enable.partition.eof": True})
    try:
        reader.assign([TopicPartition(*place, offset) for place, offset in from_offsets.items()])
        yield from _to_the_end(reader.consume, set(from_offsets), group)
    finally:
        reader.close()


def _to_the_end(consume: Callable[..., list[Any]], left: set[Place], group: str) -> Iterator[Any]:
    from confluent_kafka import KafkaError

    idle = 0
    while left:
        taken = consume(1_000, _CONSUME_S)
        idle = 0 if taken else idle + 1
        if idle > _IDLE_ROUNDS_MAX:
            raise Unavailable("retries cannot be read, so it is not known which keys have failed")
        for raw in taken:
            error = raw.error()
            if error is None:
                if is_for(raw.headers(), group):
                    yield raw
            elif error.code() == KafkaError._PARTITION_EOF:
                left.discard(place_of(raw))
