"""Partitions by name, and as the client library wants them."""

from __future__ import annotations

from typing import Any

__all__ = ["Place", "Spot", "at", "place_of", "spot_of"]

#: A topic and the number of one of its partitions.
Place = tuple[str, int]
#: With the offset of a message.
Spot = tuple[str, int, int]


def at(place: Place, offset: int | None = None) -> Any:
    from confluent_kafka import TopicPartition

    return TopicPartition(*place) if offset is None else TopicPartition(*place, offset)


def place_of(raw: Any) -> Place:
    """Of a message of the client library."""
    return raw.topic(), raw.partition()


def spot_of(raw: Any) -> Spot:
    return raw.topic(), raw.partition(), raw.offset()
