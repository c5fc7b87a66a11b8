"""Produce (key 0), v3-13, packed by hand because every record passes here.

v9 is the first flexible version, v13 the first with topic ids. The broker's side leaves topics as raw bytes (UTF-8
name or id) and records as views of the frame: it copies and decodes nothing. The producer's side sends one batch
per request and never copies it.
"""

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from penstock.protocol.compression import BytesLike
from penstock.protocol.errors import MalformedFrame
from penstock.protocol.wire import (
    INT16,
    INT32,
    encode_compact_string,
    encode_uvarint,
    read_uvarint,
    skip_tags,
)

#: The most topics and partitions of one request, which the broker handles in one piece.
PARTITIONS_MAX: Final = 20_000
FLEXIBLE_FROM: Final = 9
TOPIC_IDS_FROM: Final = 13
_LOG_START_FROM: Final = 5
_RECORD_ERRORS_FROM: Final = 8
_LEADERS_FROM: Final = 10

_ACKS_TIMEOUT = struct.Struct(">hi")
_INDEX_AND_SIZE = struct.Struct(">ii")
_RESULT = struct.Struct(">ihqq")  # index, error, base offset, append time
_RESULT_V5 = struct.Struct(">ihqqq")  # and log start offset

ProduceTopic = tuple[bytes, list[tuple[int, memoryview | None]]]


class ProduceRequest(NamedTuple):
    transactional_id: str | None
    acks: int
    timeout_ms: int
    topics: list[ProduceTopic]


class PartitionProduceResponse(NamedTuple):
    partition: int
    error: int
    base_offset: int = -1
    append_time_ms: int = -1
    log_start_offset: int = -1
    message: str | None = None
    record_errors: tuple[int, ...] = ()  # indexes in the batch; the message is the same for all
    current_leader: tuple[int, int] | None = None  # id and epoch, if this broker is not the leader


class NodeEndpoint(NamedTuple):
    """The address of a broker that the response names as leader."""

    node_id: int
    host: str
    port: int
    rack: str | None


def parse_produce_request(frame: memoryview, position: int, version: int) -> ProduceRequest:
    """Raises MalformedFrame. The record views are valid while the frame's buffer is."""
    try:
        if version >= FLEXIBLE_FROM:
            return _parse_flexible(frame, position, version)
        return _parse_legacy(frame, position)
    except (struct.error, IndexError):
        raise MalformedFrame("produce request is cut short") from None
    except UnicodeDecodeError:
        raise MalformedFrame("transactional id is not UTF-8") from None


def _parse_legacy(frame: memoryview, position: int) -> ProduceRequest:
    (size,) = INT16.unpack_from(frame, position)
    position += 2
    transactional_id = None
    if size >= 0:
        transactional_id = str(_take(frame, position, size), "utf-8")
        position += size
    acks, timeout_ms = _ACKS_TIMEOUT.unpack_from(frame, position)
    (topic_count,) = INT32.unpack_from(frame, position + 6)
    position += 10
    topics: list[ProduceTopic] = []
    left = _partitions_left(PARTITIONS_MAX, topic_count)
    for _ in range(topic_count):
        (size,) = INT16.unpack_from(frame, position)
        name = bytes(_take(frame, position + 2, size))
        position += 2 + size
        (partition_count,) = INT32.unpack_from(frame, position)
        left = _partitions_left(left, partition_count)
        position += 4
        partitions: list[tuple[int, memoryview | None]] = []
        for _ in range(partition_count):
            index, size = _INDEX_AND_SIZE.unpack_from(frame, position)
            position += 8
            if size < 0:
                partitions.append((index, None))
                continue
            partitions.append((index, _take(frame, position, size)))
            position += size
        topics.append((name, partitions))
    return ProduceRequest(transactional_id, acks, timeout_ms, topics)


def _parse_flexible(frame: memoryview, position: int, version: int) -> ProduceRequest:
    end = len(frame)
    size, position = read_uvarint(frame, position, end)
    transactional_id = None
    if size:
        transactional_id = str(_take(frame, position, size - 1), "utf-8")
        position += size - 1
    acks, timeout_ms = _ACKS_TIMEOUT.unpack_from(frame, position)
    topic_count, position = read_uvarint(frame, position + 6, end)
    topics: list[ProduceTopic] = []
    left = _partitions_left(PARTITIONS_MAX, topic_count)
    for _ in range(topic_count - 1):
        if version >= TOPIC_IDS_FROM:
            name_size = 16
        else:
            size, position = read_uvarint(frame, position, end)
            name_size = size - 1
        name = bytes(_take(frame, position, name_size))
        partition_count, position = read_uvarint(frame, position + name_size, end)
        left = _partitions_left(left, partition_count)
        partitions: list[tuple[int, memoryview | None]] = []
        for _ in range(partition_count - 1):
            (index,) = INT32.unpack_from(frame, position)
            size, position = read_uvarint(frame, position + 4, end)
            if size == 0:
                partitions.append((index, None))
            else:
                partitions.append((index, _take(frame, position, size - 1)))
                position += size - 1
            position = skip_tags(frame, position, end)
        topics.append((name, partitions))
        position = skip_tags(frame, position, end)
    return ProduceRequest(transactional_id, acks, timeout_ms, topics)


def _partitions_left(allowed: int, count: int) -> int:
    """How many more topics and partitions the request may contain."""
    if count > allowed:
        raise MalformedFrame(f"more than {PARTITIONS_MAX} topics and partitions in one produce request")
    return allowed - max(count, 0)


def _take(frame: memoryview, position: int, size: int) -> memoryview:
    if size < 0 or position + size > len(frame):
        raise MalformedFrame(f"field of {size} bytes where {len(frame) - position} remain")
    return frame[position : position + size]


def encode_produce_response(
    version: int,
    correlation_id: int,
    topics: list[tuple[bytes, list[PartitionProduceResponse]]],
    endpoints: Sequence[NodeEndpoint] = (),
    throttle_ms: int = 0,
) -> bytes:
    """The whole frame, size prefix included. `endpoints` are sent from v10 on."""
    flexible = version >= FLEXIBLE_FROM
    parts = [INT32.pack(correlation_id)]
    parts.append(b"\x00" + encode_uvarint(len(topics) + 1) if flexible else INT32.pack(len(topics)))
    for name, results in topics:
        if version >= TOPIC_IDS_FROM:
            parts += (name, encode_uvarint(len(results) + 1))
        elif flexible:
            parts += (encode_uvarint(len(name) + 1), name, encode_uvarint(len(results) + 1))
        else:
            parts += (INT16.pack(len(name)), name, INT32.pack(len(results)))
        parts += [_encode_result(version, result) for result in results]
        if flexible:
            parts.append(b"\x00")
    parts.append(INT32.pack(throttle_ms))
    if flexible:
        parts.append(encode_leader_endpoints(endpoints if version >= _LEADERS_FROM else ()))
    body = b"".join(parts)
    return INT32.pack(len(body)) + body


def _encode_result(version: int, result: PartitionProduceResponse) -> bytes:
    index, error, base_offset, append_time_ms, log_start_offset, message, indexes, leader = result
    if version < _LOG_START_FROM:
        return _RESULT.pack(index, error, base_offset, append_time_ms)
    packed = _RESULT_V5.pack(index, error, base_offset, append_time_ms, log_start_offset)
    if version < _RECORD_ERRORS_FROM:
        return packed
    if version >= FLEXIBLE_FROM and message is None and leader is None:
        return packed + b"\x01\x00\x00"  # no record errors, no message, no tags
    if version >= FLEXIBLE_FROM:
        return (
            packed
            + _flexible_errors(message, indexes)
            + _leader_tag(leader if version >= _LEADERS_FROM else None)
        )
    return packed + _legacy_errors(message, indexes)


def _flexible_errors(message: str | None, indexes: tuple[int, ...]) -> bytes:
    text = encode_compact_string(message)
    each = b"".join(INT32.pack(index) + text + b"\x00" for index in indexes)
    return encode_uvarint(len(indexes) + 1) + each + text


def _leader_tag(leader: tuple[int, int] | None) -> bytes:
    return b"\x00" if leader is None else b"\x01\x00\x09" + struct.pack(">ii", *leader) + b"\x00"


def encode_leader_endpoints(endpoints: Sequence[NodeEndpoint]) -> bytes:
    """The tagged fields at the end of a Produce or Fetch response: the endpoints of the leaders named in it."""
    if not endpoints:
        return b"\x00"
    field = encode_node_endpoints(endpoints)
    return b"\x01\x00" + encode_uvarint(len(field)) + field


def encode_node_endpoints(endpoints: Sequence[NodeEndpoint]) -> bytes:
    rows = [encode_uvarint(len(endpoints) + 1)]
    for node_id, host, port, rack in endpoints:
        rows += (
            INT32.pack(node_id),
            encode_compact_string(host),
            INT32.pack(port),
            encode_compact_string(rack),
            b"\x00",
        )
    return b"".join(rows)


def _legacy_errors(message: str | None, indexes: tuple[int, ...]) -> bytes:
    text = b"\xff\xff" if message is None else INT16.pack(len(message.encode())) + message.encode()
    return INT32.pack(len(indexes)) + b"".join(INT32.pack(index) + text for index in indexes) + text


PRODUCER_VERSION_MIN: Final = 3
PRODUCER_VERSION_MAX: Final = 13


def encode_produce_request(
    version: int,
    topic: bytes,
    partition: int,
    batch: BytesLike,
    *,
    transactional_id: str | None,
    acks: int,
    timeout_ms: int,
) -> list[BytesLike]:
    """The body of the request as buffers, without its header. `topic` is an id from v13 on, a name before."""
    flexible = version >= FLEXIBLE_FROM
    one = b"\x02" if flexible else INT32.pack(1)
    size = encode_uvarint(len(batch) + 1) if flexible else INT32.pack(len(batch))
    head = b"".join(
        (
            _encode_transactional_id(transactional_id, flexible),
            _ACKS_TIMEOUT.pack(acks, timeout_ms),
            one,
            _encode_topic(version, topic),
            one,
            INT32.pack(partition),
            size,
        )
    )
    # No tagged fields of the partition, the topic and the request.
    return [head, batch, b"\x00\x00\x00"] if flexible else [head, batch]


def _encode_transactional_id(transactional_id: str | None, flexible: bool) -> bytes:
    if transactional_id is None:
        return b"\x00" if flexible else b"\xff\xff"
    encoded = transactional_id.encode()
    return (encode_uvarint(len(encoded) + 1) if flexible else INT16.pack(len(encoded))) + encoded


def _encode_topic(version: int, topic: bytes) -> bytes:
    if version >= TOPIC_IDS_FROM:
        return topic
    return (encode_uvarint(len(topic) + 1) if version >= FLEXIBLE_FROM else INT16.pack(len(topic))) + topic
