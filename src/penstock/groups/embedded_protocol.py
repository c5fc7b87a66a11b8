"""Kafka's ConsumerProtocol: the subscription and the assignment in the opaque fields of the classic protocol.

The subscription is the only part of a classic member's metadata that the broker may read. Clients may put any bytes
there, so every length is checked against the remaining bytes before it is used.
"""

import struct
from collections.abc import Iterable
from typing import Final, NamedTuple

CONSUMER_PROTOCOL_TYPE: Final = "consumer"
#: Version, then the count of topics: every version of the format starts like this.
_SUBSCRIPTION_HEAD: Final = struct.Struct(">hi")
_STRING_LENGTH: Final = struct.Struct(">h")


def subscribed_topics(metadata: bytes) -> frozenset[str] | None:
    """None if the bytes are not a subscription: clients may send any bytes."""
    if len(metadata) < _SUBSCRIPTION_HEAD.size:
        return None
    version, count = _SUBSCRIPTION_HEAD.unpack_from(metadata)
    if version < 0 or not 0 <= count <= (len(metadata) - _SUBSCRIPTION_HEAD.size) // _STRING_LENGTH.size:
        return None
    topics, position = set(), _SUBSCRIPTION_HEAD.size
    for _ in range(count):
        topic, position = _read_string(metadata, position)
        if topic is None:
            return None
        topics.add(topic)
    return frozenset(topics)


def _read_string(data: bytes, position: int) -> tuple[str | None, int]:
    if position + _STRING_LENGTH.size > len(data):
        return None, position
    (length,) = _STRING_LENGTH.unpack_from(data, position)
    start, end = position + _STRING_LENGTH.size, position + _STRING_LENGTH.size + length
    if length < 0 or end > len(data):
        return None, position
    try:
        return data[start:end].decode(), end
    except UnicodeDecodeError:
        return None, position


_INT16: Final = struct.Struct(">h")
_INT32: Final = struct.Struct(">i")
_VERSION_MAX: Final = 3
_OWNED_FROM_VERSION, _RACK_FROM_VERSION = 1, 3

NamedPartitions = tuple[tuple[str, tuple[int, ...]], ...]


class MalformedConsumerProtocol(ValueError):
    """The bytes do not conform to the protocol."""


class EmbeddedSubscription(NamedTuple):
    version: int
    topics: tuple[str, ...]
    owned: NamedPartitions = ()
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
            raise MalformedConsumerProtocol(f"{number} items do not fit")
        return range(number)

    def string(self) -> str:
        text = self.nullable_string()
        if text is None:
            raise MalformedConsumerProtocol("a name is missing")
        return text

    def nullable_string(self) -> str | None:
        length = self.int16()
        try:
            return None if length == -1 else self._take(length).decode()
        except UnicodeDecodeError:
            raise MalformedConsumerProtocol("no text") from None

    def skip_bytes(self) -> None:
        length = self.int32()
        if length != -1:
            self._take(length)

    def topic_partitions(self) -> NamedPartitions:
        return tuple(
            (self.string(), tuple(self.int32() for _ in self.count(_INT32.size)))
            for _ in self.count(_INT16.size + _INT32.size)
        )

    def _take(self, length: int) -> bytes:
        end = self._position + length
        if length < 0 or end > len(self._data):
            raise MalformedConsumerProtocol("too short")
        piece = self._data[self._position : end]
        self._position = end
        return piece


def parse_subscription(data: bytes) -> EmbeddedSubscription:
    """Raises MalformedConsumerProtocol. Newer versions only add fields at the end."""
    reader = _Reader(data)
    version = reader.int16()
    if version < 0:
        raise MalformedConsumerProtocol(f"version {version}")
    topics = tuple(reader.string() for _ in reader.count(_INT16.size))
    reader.skip_bytes()
    owned = reader.topic_partitions() if version >= _OWNED_FROM_VERSION else ()
    if version < _RACK_FROM_VERSION:
        return EmbeddedSubscription(version, topics, owned)
    reader.int32()  # the generation of `owned`
    return EmbeddedSubscription(version, topics, owned, reader.nullable_string())


def parse_assignment(data: bytes) -> NamedPartitions:
    """Raises MalformedConsumerProtocol. A member without partitions may have an empty assignment."""
    if not data:
        return ()
    reader = _Reader(data)
    if reader.int16() < 0:
        raise MalformedConsumerProtocol("version")
    return reader.topic_partitions()


def encode_assignment(partitions: Iterable[tuple[str, Iterable[int]]], version: int) -> bytes:
    topics = [(name.encode(), sorted(numbers)) for name, numbers in partitions]
    parts = [_INT16.pack(min(version, _VERSION_MAX)), _INT32.pack(len(topics))]
    for name, numbers in topics:
        parts += (_INT16.pack(len(name)), name, struct.pack(f">i{len(numbers)}i", len(numbers), *numbers))
    parts.append(_INT32.pack(-1))  # no user data
    return b"".join(parts)
