"""Partitions by topic, as nearly every request wants them."""

from collections.abc import Iterable
from typing import TypeVar

from penstock.client.metadata import Place

Value = TypeVar("Value")


def by_topic(items: Iterable[tuple[Place, Value]]) -> dict[str, list[tuple[int, Value]]]:
    grouped: dict[str, list[tuple[int, Value]]] = {}
    for (topic, partition), value in items:
        grouped.setdefault(topic, []).append((partition, value))
    return grouped
