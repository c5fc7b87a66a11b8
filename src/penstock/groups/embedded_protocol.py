"""Kafka's ConsumerProtocol: the subscription and the assignment in the opaque fields of the classic protocol.

The subscription is the only part of a classic member's metadata that the broker may read. Clients may put any bytes
there, so every length is checked against the remaining bytes before it is used.
"""

import struct
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple, TypeVar

from penstock.protocol.errors import MalformedFrame
from penstock.protocol.wire import INT16, INT32, WireCursor

CONSUMER_PROTOCOL_TYPE: Final = "consumer"
_VERSION_MAX: Final = 3
_OWNED_FROM_VERSION, _RACK_FROM_VERSION = 1, 3

NamedPartitions = tuple[tuple[str, tuple[int, ...]], ...]
T = TypeVar("T")


class MalformedConsumerProtocol(ValueError):
    """The bytes do not conform to the protocol."""


class EmbeddedSubscription(NamedTuple):
    version: int
    topics: tuple[str, ...]
    owned: NamedPartitions = ()
    rack_id: str | None = None


def subscribed_topics(metadata: bytes) -> frozenset[str] | None:
    """None if the bytes are not a subscription: clients may send any bytes."""
    try:
        _, topics = _parse(metadata, _read_topics)
    except MalformedConsumerProtocol:
        return None
    return frozenset(topics)


def parse_subscription(data: bytes) -> EmbeddedSubscription:
    """Raises MalformedConsumerProtocol. Newer versions only add fields at the end."""
    return _parse(data, _read_subscription)


def parse_assignment(data: bytes) -> NamedPartitions:
    """Raises MalformedConsumerProtocol. A member without partitions may have an empty assignment."""
    return _parse(data, _read_assignment) if data else ()


def _parse(data: bytes, read: Callable[[WireCursor], T]) -> T:
    try:
        return read(WireCursor(memoryview(data), flexible=False))
    except (MalformedFrame, struct.error, UnicodeDecodeError) as error:
        raise MalformedConsumerProtocol(str(error)) from None


def _read_subscription(cursor: WireCursor) -> EmbeddedSubscription:
    version, topics = _read_topics(cursor)
    user_data_size = cursor.length()
    if user_data_size != -1:
        cursor.take(user_data_size)
    owned = _read_topic_partitions(cursor) if version >= _OWNED_FROM_VERSION else ()
    if version < _RACK_FROM_VERSION:
        return EmbeddedSubscription(version, topics, owned)
    cursor.unpack(INT32)  # the generation of `owned`
    rack_id = cursor.nullable_string()
    return EmbeddedSubscription(version, topics, owned, None if rack_id is None else rack_id.decode())


def _read_assignment(cursor: WireCursor) -> NamedPartitions:
    _read_version(cursor)
    return _read_topic_partitions(cursor)


def _read_topics(cursor: WireCursor) -> tuple[int, tuple[str, ...]]:
    """The version and the topics: every version of the subscription starts like this."""
    version = _read_version(cursor)
    return version, tuple(cursor.string().decode() for _ in _read_count(cursor, INT16.size))


def _read_version(cursor: WireCursor) -> int:
    version: int = cursor.unpack(INT16)[0]
    if version < 0:
        raise MalformedConsumerProtocol(f"version {version}")
    return version


def _read_topic_partitions(cursor: WireCursor) -> NamedPartitions:
    return tuple(
        (
            cursor.string().decode(),
            tuple(cursor.unpack(INT32)[0] for _ in _read_count(cursor, INT32.size)),
        )
        for _ in _read_count(cursor, INT16.size + INT32.size)
    )


def _read_count(cursor: WireCursor, element_bytes_min: int) -> range:
    """The arrays of this protocol are never null."""
    count = cursor.length()
    if not 0 <= count * element_bytes_min <= cursor.end - cursor.position:
        raise MalformedConsumerProtocol(f"array of {count} elements")
    return range(count)


def encode_assignment(partitions: Iterable[tuple[str, Iterable[int]]], version: int) -> bytes:
    topics = [(name.encode(), sorted(numbers)) for name, numbers in partitions]
    parts = [INT16.pack(min(version, _VERSION_MAX)), INT32.pack(len(topics))]
    for name, numbers in topics:
        parts += (INT16.pack(len(name)), name, struct.pack(f">i{len(numbers)}i", len(numbers), *numbers))
    parts.append(INT32.pack(-1))  # no user data
    return b"".join(parts)
