"""ShareFetch (key 78) and ShareAcknowledge (key 79), v1-2, packed by hand because they are the hot path of share
groups.

v2 added the acquire mode and renewals. The acknowledgement types of a batch stay bytes, as they were sent.
"""

import struct
from collections.abc import Generator, Iterable, Sequence
from typing import Final, NamedTuple, TypeVar

from penstock.protocol.bounds import Found
from penstock.protocol.compression import BytesLike
from penstock.protocol.errors import MalformedFrame
from penstock.protocol.produce import NodeEndpoint, encode_node_endpoints
from penstock.protocol.wire import INT16, INT32, WireCursor, encode_compact_string, encode_uvarint

RENEW_FROM: Final = 2
_TOPIC_ID_BYTES: Final = 16
_FETCH_V1 = struct.Struct(">iiiiii")  # epoch, max wait, min bytes, max bytes, max records, batch size
_ACQUIRE_MODE = struct.Struct(">b?")  # acquire mode, whether the request only renews locks
_RANGE = struct.Struct(">qq")  # first and last offset
_HEAD = struct.Struct(">ih")  # throttle time, error
_LEADER = struct.Struct(">iix")  # id, epoch, no tagged fields
_ACQUIRED = struct.Struct(">qqhx")

T = TypeVar("T")
#: As `schemas.Steps`, without loading kio's schemas.
_Steps = Generator[None, None, T]
#: Acknowledged batches of a partition that are read in one step.
_BATCHES_AT_ONCE: Final = 200

#: (first offset, last offset, one type per offset or one for all)
AcknowledgementRange = tuple[int, int, bytes]
#: (topic id, [(partition, batches)])
ShareTopic = tuple[bytes, list[tuple[int, list[AcknowledgementRange]]]]


class ShareFetchRequest(NamedTuple):
    group: str | None
    member: str | None
    session_epoch: int
    max_wait_ms: int
    min_bytes: int
    max_bytes: int
    max_records: int
    batch_records: int
    acquire_mode: int
    is_renewal: bool
    topics: list[ShareTopic]
    forgotten: list[tuple[bytes, list[int]]]


class ShareAcknowledgeRequest(NamedTuple):
    group: str | None
    member: str | None
    session_epoch: int
    is_renewal: bool
    topics: list[ShareTopic]


class SharePartitionData(NamedTuple):
    partition: int
    error: int = 0
    message: str | None = None
    acknowledge_error: int = 0
    acknowledge_message: str | None = None
    current_leader: tuple[int, int] | None = None
    records: Sequence[BytesLike] = ()
    acquired: Sequence[tuple[int, int, int]] = ()


class AcknowledgedPartition(NamedTuple):
    partition: int
    error: int = 0
    message: str | None = None
    current_leader: tuple[int, int] | None = None


def parse_share_fetch_request(frame: memoryview, position: int, version: int) -> ShareFetchRequest:
    """Raises MalformedFrame. The result holds no views of the frame."""
    try:
        return _read_fetch(WireCursor(frame, position), version)
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise _malformed_request(error) from None


def parse_share_acknowledge_request(
    frame: memoryview, position: int, version: int
) -> ShareAcknowledgeRequest:
    """Raises MalformedFrame. The result holds no views of the frame."""
    try:
        return _read_acknowledge(WireCursor(frame, position), version)
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise _malformed_request(error) from None


def parse_share_fetch_request_in_steps(
    frame: memoryview, position: int, version: int, elements_max: int
) -> _Steps[ShareFetchRequest]:
    """Like `parse_share_fetch_request`; raises TooManyElements for more topics and partitions than that."""
    cursor, found = WireCursor(frame, position), Found(elements_max)
    try:
        head = _read_fetch_head(cursor, version)
        topics = yield from _read_topics_in_steps(cursor, found)
        forgotten = []
        for _ in range(_counted(cursor, found)):
            forgotten.append(_read_forgotten_topic(cursor))
            found.count(len(forgotten[-1][1]))
            yield
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise _malformed_request(error) from None
    return ShareFetchRequest(*head, topics, forgotten)


def parse_share_acknowledge_request_in_steps(
    frame: memoryview, position: int, version: int, elements_max: int
) -> _Steps[ShareAcknowledgeRequest]:
    """Like `parse_share_acknowledge_request`; raises TooManyElements for more topics and partitions than that."""
    cursor, found = WireCursor(frame, position), Found(elements_max)
    try:
        head = _read_acknowledge_head(cursor, version)
        topics = yield from _read_topics_in_steps(cursor, found)
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise _malformed_request(error) from None
    return ShareAcknowledgeRequest(*head, topics)


def _counted(cursor: WireCursor, found: Found) -> int:
    count = cursor.count()
    found.count(count)
    return count


def _read_topics_in_steps(cursor: WireCursor, found: Found) -> _Steps[list[ShareTopic]]:
    topics: list[ShareTopic] = []
    for _ in range(_counted(cursor, found)):
        topic_id = bytes(cursor.take(_TOPIC_ID_BYTES))
        partitions = []
        for _ in range(_counted(cursor, found)):
            (index,) = cursor.unpack(INT32)
            batches: list[AcknowledgementRange] = []
            left = cursor.count()
            while left > 0:
                batches += _read_batches(cursor, min(left, _BATCHES_AT_ONCE))
                left -= _BATCHES_AT_ONCE
                yield
            cursor.skip_tags()
            partitions.append((index, batches))
            yield
        cursor.skip_tags()
        topics.append((topic_id, partitions))
        yield
    return topics


def _malformed_request(error: Exception) -> MalformedFrame:
    if isinstance(error, UnicodeDecodeError):
        return MalformedFrame("a name in the share request is not UTF-8")
    return MalformedFrame("share request is cut short")


def _read_fetch(cursor: WireCursor, version: int) -> ShareFetchRequest:
    head = _read_fetch_head(cursor, version)
    topics = [_read_topic(cursor) for _ in range(cursor.count())]
    forgotten = [_read_forgotten_topic(cursor) for _ in range(cursor.count())]
    return ShareFetchRequest(*head, topics, forgotten)


def _read_fetch_head(
    cursor: WireCursor, version: int
) -> tuple[str | None, str | None, int, int, int, int, int, int, int, bool]:
    """Return the fields of a ShareFetchRequest before its topics."""
    group, member = _read_text(cursor), _read_text(cursor)
    epoch, wait_ms, min_bytes, max_bytes, max_records, batch_records = cursor.unpack(_FETCH_V1)
    acquire_mode, is_renewal = cursor.unpack(_ACQUIRE_MODE) if version >= RENEW_FROM else (0, False)
    limits = wait_ms, min_bytes, max_bytes, max_records, batch_records
    return group, member, epoch, *limits, acquire_mode, is_renewal


def _read_acknowledge(cursor: WireCursor, version: int) -> ShareAcknowledgeRequest:
    head = _read_acknowledge_head(cursor, version)
    return ShareAcknowledgeRequest(*head, [_read_topic(cursor) for _ in range(cursor.count())])


def _read_acknowledge_head(cursor: WireCursor, version: int) -> tuple[str | None, str | None, int, bool]:
    """Return the fields of a ShareAcknowledgeRequest before its topics."""
    group, member = _read_text(cursor), _read_text(cursor)
    (epoch,) = cursor.unpack(INT32)
    is_renewal = bool(cursor.take(1)[0]) if version >= RENEW_FROM else False
    return group, member, epoch, is_renewal


def _read_text(cursor: WireCursor) -> str | None:
    text = cursor.nullable_string()
    return None if text is None else text.decode()


def _read_topic(cursor: WireCursor) -> ShareTopic:
    topic_id = bytes(cursor.take(_TOPIC_ID_BYTES))
    partitions = [_read_partition(cursor) for _ in range(cursor.count())]
    cursor.skip_tags()
    return topic_id, partitions


def _read_partition(cursor: WireCursor) -> tuple[int, list[AcknowledgementRange]]:
    (index,) = cursor.unpack(INT32)
    batches = _read_batches(cursor, cursor.count())
    cursor.skip_tags()
    return index, batches


def _read_batches(cursor: WireCursor, count: int) -> list[AcknowledgementRange]:
    """There may be one batch per record, so batches with few types and no tagged fields are read without calls."""
    frame, end, batches = cursor.frame, cursor.end, []
    for _ in range(count):
        at = cursor.position
        size = frame[at + 16]
        after = at + size + 16
        if not 0 < size < 0x80 or after >= end or frame[after]:
            first, last = cursor.unpack(_RANGE)
            batches.append((first, last, bytes(cursor.take(cursor.count()))))
            cursor.skip_tags()
            continue
        batches.append((*_RANGE.unpack_from(frame, at), bytes(frame[at + 17 : after])))
        cursor.position = after + 1
    return batches


def _read_forgotten_topic(cursor: WireCursor) -> tuple[bytes, list[int]]:
    topic_id, indexes = bytes(cursor.take(_TOPIC_ID_BYTES)), cursor.int32s()
    cursor.skip_tags()
    return topic_id, indexes


def encode_share_fetch_response(
    correlation_id: int,
    *,
    error: int = 0,
    message: str | None = None,
    lock_ms: int = 0,
    topics: Iterable[tuple[bytes, list[SharePartitionData]]] = (),
    endpoints: Sequence[NodeEndpoint] = (),
    throttle_ms: int = 0,
) -> _Steps[list[BytesLike]]:
    """The whole frame as buffers, size prefix first. Each partition is a step."""
    topics = list(topics)
    small: list[bytes] = [
        INT32.pack(correlation_id),
        b"\x00",
        _HEAD.pack(throttle_ms, error),
        encode_compact_string(message),
    ]
    small += (INT32.pack(lock_ms), encode_uvarint(len(topics) + 1))
    buffers: list[BytesLike] = [b""]
    for topic_id, partitions in topics:
        small += (topic_id, encode_uvarint(len(partitions) + 1))
        for data in partitions:
            small.append(_encode_fetched(data))
            if data.records:
                buffers += (b"".join(small), *data.records)
                small = []
            small.append(_encode_acquired(data.acquired))
            yield
        small.append(b"\x00")
    small += (encode_node_endpoints(endpoints), b"\x00")
    buffers.append(b"".join(small))
    buffers[:2] = [INT32.pack(sum(map(len, buffers))) + buffers[1]]
    return buffers


def _encode_fetched(data: SharePartitionData) -> bytes:
    size = sum(map(len, data.records))
    return b"".join(
        (
            INT32.pack(data.partition),
            INT16.pack(data.error),
            encode_compact_string(data.message),
            INT16.pack(data.acknowledge_error),
            encode_compact_string(data.acknowledge_message),
            _encode_leader(data.current_leader),
            encode_uvarint(size + 1),
        )
    )


def _encode_acquired(acquired: Sequence[tuple[int, int, int]]) -> bytes:
    pack = _ACQUIRED.pack
    return encode_uvarint(len(acquired) + 1) + b"".join([pack(*one) for one in acquired]) + b"\x00"


def encode_share_acknowledge_response(
    version: int,
    correlation_id: int,
    *,
    error: int = 0,
    message: str | None = None,
    lock_ms: int = 0,
    topics: Iterable[tuple[bytes, list[AcknowledgedPartition]]] = (),
    endpoints: Sequence[NodeEndpoint] = (),
) -> _Steps[bytes]:
    """The whole frame. Each partition is a step."""
    topics = list(topics)
    parts = [INT32.pack(correlation_id), b"\x00", _HEAD.pack(0, error), encode_compact_string(message)]
    if version >= RENEW_FROM:
        parts.append(INT32.pack(lock_ms))
    parts.append(encode_uvarint(len(topics) + 1))
    for topic_id, partitions in topics:
        parts += (topic_id, encode_uvarint(len(partitions) + 1))
        for one in partitions:
            parts += (INT32.pack(one.partition), INT16.pack(one.error), encode_compact_string(one.message))
            parts += (_encode_leader(one.current_leader), b"\x00")
            yield
        parts.append(b"\x00")
    parts += (encode_node_endpoints(endpoints), b"\x00")
    body = b"".join(parts)
    return INT32.pack(len(body)) + body


def _encode_leader(leader: tuple[int, int] | None) -> bytes:
    return _LEADER.pack(*(leader or (-1, -1)))
