"""Produce (key 0), v3-13, packed by hand because every record passes here.

v9 is the first flexible version, v13 the first with topic ids. The broker's side leaves topics as raw bytes (UTF-8
name or id) and records as views of the frame: it copies and decodes nothing. A request of many partitions is parsed
and answered in steps. The producer's side sends one batch per request and never copies it.
"""

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from penstock.protocol.compression import BytesLike
from penstock.protocol.errors import MalformedFrame
from penstock.protocol.steps import Steps
from penstock.protocol.wire import (
    INT16,
    INT32,
    encode_compact_string,
    encode_uvarint,
    read_uvarint,
    skip_tags,
)

#: The most topics and partitions of one request.
PARTITIONS_MAX: Final = 20_000
#: A request of more topics and partitions is parsed, handled and answered in steps.
PARTITIONS_AT_ONCE: Final = 100
#: How many partitions are parsed, or results encoded, in one step.
_STEP: Final = 20
FLEXIBLE_FROM: Final = 9
TOPIC_IDS_FROM: Final = 13
_LOG_START_FROM: Final = 5
_RECORD_ERRORS_FROM: Final = 8
_LEADERS_FROM: Final = 10
_TOPIC_ID_BYTES: Final = 16
_CUT_SHORT: Final = "produce request is cut short"

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


class ManyPartitions(Exception):
    """The request has more topics and partitions than PARTITIONS_AT_ONCE, which is known before they are parsed."""

    def __init__(self, acks: int) -> None:
        super().__init__(acks)
        self.acks = acks


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
    """Raises MalformedFrame and ManyPartitions. The record views are valid while the frame's buffer is."""
    try:
        return _parse(frame, position, version)
    except (struct.error, IndexError):
        raise MalformedFrame(_CUT_SHORT) from None


def _parse(frame: memoryview, position: int, version: int) -> ProduceRequest:
    transactional_id, acks, timeout_ms, topic_count, position = _parse_head(frame, position, version)
    left = PARTITIONS_AT_ONCE - topic_count
    if left < 0:
        raise ManyPartitions(acks)
    end, topics = len(frame), []
    for _ in range(topic_count):
        name, partition_count, position = _parse_topic(frame, position, version)
        if partition_count > left:
            raise ManyPartitions(acks)
        if partition_count > 0:
            left -= partition_count
        partitions, position = _parse_partitions(frame, position, version, partition_count)
        topics.append((name, partitions))
        if version >= FLEXIBLE_FROM:
            position = skip_tags(frame, position, end)
    return ProduceRequest(transactional_id, acks, timeout_ms, topics)


def parse_produce_request_in_steps(frame: memoryview, position: int, version: int) -> Steps[ProduceRequest]:
    """A request of many partitions. Raises MalformedFrame."""
    try:
        return (yield from _parse_in_steps(frame, position, version))
    except (struct.error, IndexError):
        raise MalformedFrame(_CUT_SHORT) from None


def _parse_in_steps(frame: memoryview, position: int, version: int) -> Steps[ProduceRequest]:
    transactional_id, acks, timeout_ms, topic_count, position = _parse_head(frame, position, version)
    left = _partitions_left(PARTITIONS_MAX, topic_count)
    end, topics = len(frame), []
    for _ in range(topic_count):
        name, missing, position = _parse_topic(frame, position, version)
        left = _partitions_left(left, missing)
        partitions: list[tuple[int, memoryview | None]] = []
        while missing > 0:
            count = min(missing, _STEP)
            some, position = _parse_partitions(frame, position, version, count)
            partitions += some
            missing -= count
            yield
        topics.append((name, partitions))
        if version >= FLEXIBLE_FROM:
            position = skip_tags(frame, position, end)
        yield
    return ProduceRequest(transactional_id, acks, timeout_ms, topics)


def _parse_head(frame: memoryview, position: int, version: int) -> tuple[str | None, int, int, int, int]:
    """Returns transactional id, acks, timeout, the number of topics and the next position."""
    if version >= FLEXIBLE_FROM:
        size, position = read_uvarint(frame, position, len(frame))
        size -= 1
    else:
        (size,) = INT16.unpack_from(frame, position)
        position += 2
    transactional_id = None
    if size >= 0:
        try:
            transactional_id = str(_take(frame, position, size), "utf-8")
        except UnicodeDecodeError:
            raise MalformedFrame("transactional id is not UTF-8") from None
        position += size
    acks, timeout_ms = _ACKS_TIMEOUT.unpack_from(frame, position)
    if version >= FLEXIBLE_FROM:
        count, position = read_uvarint(frame, position + 6, len(frame))
        return transactional_id, acks, timeout_ms, count - 1, position
    (count,) = INT32.unpack_from(frame, position + 6)
    return transactional_id, acks, timeout_ms, count, position + 10


def _parse_topic(frame: memoryview, position: int, version: int) -> tuple[bytes, int, int]:
    """Returns name or id, the number of partitions and the next position. A null array counts as -1, as on the wire."""
    if version < FLEXIBLE_FROM:
        (size,) = INT16.unpack_from(frame, position)
        name = bytes(_take(frame, position + 2, size))
        position += 2 + size
        return name, INT32.unpack_from(frame, position)[0], position + 4
    size = _TOPIC_ID_BYTES
    if version < TOPIC_IDS_FROM:
        size, position = read_uvarint(frame, position, len(frame))
        size -= 1
    name = bytes(_take(frame, position, size))
    count, position = read_uvarint(frame, position + size, len(frame))
    return name, count - 1, position


def _parse_partitions(
    frame: memoryview, position: int, version: int, count: int
) -> tuple[list[tuple[int, memoryview | None]], int]:
    """Returns indexes and records of so many partitions, and the next position."""
    end = len(frame)
    partitions: list[tuple[int, memoryview | None]] = []
    if version < FLEXIBLE_FROM:
        for _ in range(count):
            index, size = _INDEX_AND_SIZE.unpack_from(frame, position)
            position += 8
            if size < 0:
                partitions.append((index, None))
                continue
            partitions.append((index, _take(frame, position, size)))
            position += size
        return partitions, position
    for _ in range(count):
        (index,) = INT32.unpack_from(frame, position)
        size, position = read_uvarint(frame, position + 4, end)
        if size == 0:
            partitions.append((index, None))
        else:
            partitions.append((index, _take(frame, position, size - 1)))
            position += size - 1
        position = skip_tags(frame, position, end)
    return partitions, position


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
    parts = [INT32.pack(correlation_id), _encode_topic_count(version, len(topics))]
    for name, results in topics:
        parts += _encode_topic_head(version, name, len(results))
        parts += [_encode_result(version, result) for result in results]
        if flexible:
            parts.append(b"\x00")
    return _encode_frame(version, parts, endpoints, throttle_ms)


def encode_produce_response_in_steps(
    version: int,
    correlation_id: int,
    topics: list[tuple[bytes, list[PartitionProduceResponse]]],
    endpoints: Sequence[NodeEndpoint] = (),
    throttle_ms: int = 0,
) -> Steps[bytes]:
    """The same for many partitions."""
    flexible = version >= FLEXIBLE_FROM
    parts = [INT32.pack(correlation_id), _encode_topic_count(version, len(topics))]
    for name, results in topics:
        parts += _encode_topic_head(version, name, len(results))
        for begin in range(0, len(results), _STEP):
            parts += [_encode_result(version, result) for result in results[begin : begin + _STEP]]
            yield
        if flexible:
            parts.append(b"\x00")
        yield
    return _encode_frame(version, parts, endpoints, throttle_ms)


def _encode_topic_count(version: int, count: int) -> bytes:
    return b"\x00" + encode_uvarint(count + 1) if version >= FLEXIBLE_FROM else INT32.pack(count)


def _encode_topic_head(version: int, name: bytes, partition_count: int) -> tuple[bytes, ...]:
    if version >= TOPIC_IDS_FROM:
        return name, encode_uvarint(partition_count + 1)
    if version >= FLEXIBLE_FROM:
        return encode_uvarint(len(name) + 1), name, encode_uvarint(partition_count + 1)
    return INT16.pack(len(name)), name, INT32.pack(partition_count)


def _encode_frame(
    version: int, parts: list[bytes], endpoints: Sequence[NodeEndpoint], throttle_ms: int
) -> bytes:
    parts.append(INT32.pack(throttle_ms))
    if version >= FLEXIBLE_FROM:
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
