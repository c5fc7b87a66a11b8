"""What consumers of the classic protocol put into its opaque fields: their subscription, and an assignment for them.

Clients may put anything there, so every length is held against what is left before it is used.
"""

import struct
from collections.abc import Iterable
from typing import Final, NamedTuple

_INT16: Final = struct.Struct(">h")
_INT32: Final = struct.Struct(">i")
_VERSION_MAX: Final = 3
_OWNED_FROM, _RACK_FROM = 1, 3

TopicPartitions = tuple[tuple[str, tuple[int, ...]], ...]


class Malformed(ValueError):
    """No bytes of this protocol."""


class EmbeddedSubscription(NamedTuple):
    version: int
    topics: tuple[str, ...]
    owned: TopicPartitions = ()
    rack_id: str | None = None


class _Reader:
    __slots__ = ("_data", "_position")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    def int16(self) -> int:
        return int(_INT16.unpack(self._take(_INT16.size))[0])

    def int32(self) -> int:
        return int(_INT32.unpack(self._take(_INT32.size))[0])

    def count(self, bytes_each: int) -> range:
        number = self.int32()
        if not 0 <= number <= (len(self._data) - self._position) // bytes_each:
            raise Malformed(f"{number} items do not fit")
        return range(number)

    def string(self) -> str:
        text = self.nullable_string()
        if text is None:
            raise Malformed("a name is missing")
        return text

    def nullable_string(self) -> str | None:
        length = self.int16()
        try:
            return None if length == -1 else self._take(length).decode()
        except UnicodeDecodeError:
            raise Malformed("no text") from None

    def skip_bytes(self) -> None:
        length = self.int32()
        if length != -1:
            self._take(length)

    def topic_partitions(self) -> TopicPartitions:
        return tuple(
            (self.string(), tuple(self.int32() for _ in self.count(_INT32.size)))
            for _ in self.count(_INT16.size + _INT32.size)
        )

    def _take(self, length: int) -> bytes:
        end = self._position + length
        if length < 0 or end > len(self._data):
            raise Malformed("too short")
        piece = self._data[self._position : end]
        self._position = end
        return piece


def parse_subscription(data: bytes) -> EmbeddedSubscription:
    """Raises Malformed. Newer versions only add to the end."""
    reader = _Reader(data)
    version = reader.int16()
    if version < 0:
        raise Malformed(f"version {version}")
    topics = tuple(reader.string() for _ in reader.count(_INT16.size))
    reader.skip_bytes()
    owned = reader.topic_partitions() if version >= _OWNED_FROM else ()
    if version < _RACK_FROM:
        return EmbeddedSubscription(version, topics, owned)
    reader.int32()  # the generation in which it owned them
    return EmbeddedSubscription(version, topics, owned, reader.nullable_string())


def parse_assignment(data: bytes) -> TopicPartitions:
    """Raises Malformed. A member that was given nothing may have no bytes at all."""
    if not data:
        return ()
    reader = _Reader(data)
    if reader.int16() < 0:
        raise Malformed("version")
    return reader.topic_partitions()


def assignment_bytes(partitions: Iterable[tuple[str, Iterable[int]]], version: int) -> bytes:
    topics = [(name.encode(), sorted(numbers)) for name, numbers in partitions]
    parts = [_INT16.pack(min(version, _VERSION_MAX)), _INT32.pack(len(topics))]
    for name, numbers in topics:
        parts += (_INT16.pack(len(name)), name, struct.pack(f">i{len(numbers)}i", len(numbers), *numbers))
    parts.append(_INT32.pack(-1))  # no user data
    return b"".join(parts)
