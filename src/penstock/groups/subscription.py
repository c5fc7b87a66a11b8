"""The topics in a consumer's subscription: the one part of a member's metadata that the broker may read."""

import struct
from typing import Final

CONSUMER_PROTOCOL_TYPE: Final = "consumer"
#: Version, then the count of topics: every version of the format starts like this.
_START: Final = struct.Struct(">hi")
_LENGTH: Final = struct.Struct(">h")


def subscribed_topics(metadata: bytes) -> frozenset[str] | None:
    """None when these bytes are no subscription: clients may put anything into them."""
    if len(metadata) < _START.size:
        return None
    version, count = _START.unpack_from(metadata)
    if version < 0 or not 0 <= count <= (len(metadata) - _START.size) // _LENGTH.size:
        return None
    topics, position = set(), _START.size
    for _ in range(count):
        topic, position = _read_string(metadata, position)
        if topic is None:
            return None
        topics.add(topic)
    return frozenset(topics)


def _read_string(data: bytes, position: int) -> tuple[str | None, int]:
    if position + _LENGTH.size > len(data):
        return None, position
    (length,) = _LENGTH.unpack_from(data, position)
    start, end = position + _LENGTH.size, position + _LENGTH.size + length
    if length < 0 or end > len(data):
        return None, position
    try:
        return data[start:end].decode(), end
    except UnicodeDecodeError:
        return None, position
