"""TopicDrops (key 30003), v0: how many records of topics a node has dropped.

This API is our own. `penstock topic describe` adds up what all nodes answer, because each node counts what it dropped
while it led a partition. Coordinators ask leaders with it how far drop-oldest has come, to count what groups have lost.
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from typing import Final, NamedTuple

from penstock.protocol.errors import MalformedFrame

__all__ = [
    "TOPIC_DROPS",
    "PartitionDrops",
    "decode_drops",
    "encode_drops",
    "encode_drops_request",
    "parse_drops_request",
]

TOPIC_DROPS: Final = 30_003
#: More than a cluster may have.
_TOPICS_MAX: Final = 200_000
_ROWS_MAX: Final = 2_000_000
_COUNT: Final = struct.Struct(">I")
_LENGTH: Final = struct.Struct(">H")
_ROW: Final = struct.Struct(">iqB")  # partition, dropped before, number of counts
_DROPPED: Final = struct.Struct(">q")


class PartitionDrops(NamedTuple):
    """Of one node."""

    topic: str
    partition: int
    #: Where drop-oldest has moved the log start to; -1 if it has not, or if the node does not lead the partition.
    dropped_before: int
    #: Policy, reason and number of records.
    counts: tuple[tuple[str, str, int], ...]


def encode_drops_request(topics: Collection[str]) -> bytes:
    return b"".join((_COUNT.pack(len(topics)), *map(_text, topics)))


def parse_drops_request(frame: memoryview, position: int = 0) -> list[str]:
    """Return the topics. Raises MalformedFrame."""
    reader = _Reader(frame, position)
    return [reader.text() for _ in range(reader.count(_TOPICS_MAX))]


def encode_drops(rows: Collection[PartitionDrops]) -> bytes:
    parts = [_COUNT.pack(len(rows))]
    for topic, partition, dropped_before, counts in rows:
        parts += (_text(topic), _ROW.pack(partition, dropped_before, len(counts)))
        for policy, reason, count in counts:
            parts += (_text(policy), _text(reason), _DROPPED.pack(count))
    return b"".join(parts)


def decode_drops(frame: memoryview, position: int = 0) -> list[PartitionDrops]:
    """Raises MalformedFrame."""
    reader = _Reader(frame, position)
    return [_read_row(reader) for _ in range(reader.count(_ROWS_MAX))]


def _read_row(reader: _Reader) -> PartitionDrops:
    topic = reader.text()
    partition, dropped_before, number = reader.take(_ROW)
    counts = tuple((reader.text(), reader.text(), reader.take(_DROPPED)[0]) for _ in range(number))
    return PartitionDrops(topic, partition, dropped_before, counts)


def _text(text: str) -> bytes:
    raw = text.encode()
    return _LENGTH.pack(len(raw)) + raw


class _Reader:
    def __init__(self, frame: memoryview, position: int) -> None:
        self._frame, self._position = frame, position

    def take(self, fields: struct.Struct) -> tuple[int, ...]:
        try:
            found = fields.unpack_from(self._frame, self._position)
        except struct.error as error:
            raise MalformedFrame(f"topic drops: {error}") from None
        self._position += fields.size
        return found

    def count(self, count_max: int) -> int:
        (count,) = self.take(_COUNT)
        # Every item has at least the length of its text.
        if count > min(count_max, (len(self._frame) - self._position) // _LENGTH.size):
            raise MalformedFrame(f"topic drops: {count} items")
        return count

    def text(self) -> str:
        (size,) = self.take(_LENGTH)
        end = self._position + size
        if end > len(self._frame):
            raise MalformedFrame("topic drops: cut short")
        try:
            text = str(self._frame[self._position : end], "utf-8")
        except UnicodeDecodeError as error:
            raise MalformedFrame(f"topic drops: {error}") from None
        self._position = end
        return text
