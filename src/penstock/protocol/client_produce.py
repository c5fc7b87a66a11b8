"""Produce (key 0), v3-13, from a producer's side: one batch per request, never copied."""

import struct
from typing import Final

from penstock.protocol.compression import BytesLike
from penstock.protocol.produce import FLEXIBLE_FROM, TOPIC_IDS_FROM, encode_uvarint

OLDEST: Final = 3
NEWEST: Final = 13

_INT16 = struct.Struct(">h")
_INT32 = struct.Struct(">i")
_ACKS_TIMEOUT = struct.Struct(">hi")


def encode_client_produce(
    version: int,
    topic: bytes,
    partition: int,
    batch: BytesLike,
    *,
    transactional_id: str | None,
    acks: int,
    timeout_ms: int,
) -> list[BytesLike]:
    """The body of the request as buffers, to follow its header. `topic` is an id from v13 on, a name before."""
    flexible = version >= FLEXIBLE_FROM
    one = b"\x02" if flexible else _INT32.pack(1)
    size = encode_uvarint(len(batch) + 1) if flexible else _INT32.pack(len(batch))
    head = b"".join(
        (
            _encode_id(transactional_id, flexible),
            _ACKS_TIMEOUT.pack(acks, timeout_ms),
            one,
            _encode_topic(version, topic),
            one,
            _INT32.pack(partition),
            size,
        )
    )
    # No tagged fields of the partition, the topic and the request.
    return [head, batch, b"\x00\x00\x00"] if flexible else [head, batch]


def _encode_id(transactional_id: str | None, flexible: bool) -> bytes:
    if transactional_id is None:
        return b"\x00" if flexible else b"\xff\xff"
    encoded = transactional_id.encode()
    return (encode_uvarint(len(encoded) + 1) if flexible else _INT16.pack(len(encoded))) + encoded


def _encode_topic(version: int, topic: bytes) -> bytes:
    if version >= TOPIC_IDS_FROM:
        return topic
    return (encode_uvarint(len(topic) + 1) if version >= FLEXIBLE_FROM else _INT16.pack(len(topic))) + topic
