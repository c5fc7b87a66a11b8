"""Partitions by name, and as the client library wants them."""

from __future__ import annotations

from typing import Any

__all__ = ["Place", "Spot", "at", "place_of", "spot_of"]

#: A topic and the number of one of its partitions.
Place = tuple[str, int]
#: With the offset of a message.
Spot = tuple[str, int, int]


def at(place: Place, offset: int | None = None, note: str | None = None) -> Any:
    """`note` is kept with a committed position."""
    from confluent_kafka import TopicPartition

    if offset is None:
        return TopicPartition(*place)
    return TopicPartition(*place, offset) if note is None else TopicPartition(*place, offset, note)


def place_of(raw: Any) -> Place:
    """Of a message of the client library."""
    return raw.topic(), raw.partition()


def spot_of(raw: Any) -> Spot:
    return raw.topic(), raw.partition(), raw.offset()
