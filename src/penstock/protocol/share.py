"""ShareFetch (key 78) and ShareAcknowledge (key 79), v1-2, packed by hand because they are the hot path of share
groups.

v2 added the acquire mode and renewals. The acknowledgement types of a batch stay a row of bytes, as they were sent.
"""

import struct
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from penstock.protocol.bounds import read_uvarint
from penstock.protocol.compression import BytesLike
from penstock.protocol.errors import MalformedFrame
from penstock.protocol.produce import NodeEndpoint, encode_uvarint, skip_tags

RENEW_FROM: Final = 2
_INT16 = struct.Struct(">h")
_INT32 = struct.Struct(">i")
_FETCH_V1 = struct.Struct(">iiiiii")  # epoch, max wait, min bytes, max bytes, max records, batch size
_RANGE = struct.Struct(">qq")
_HEAD = struct.Struct(">ih")  # throttle time, error
_LEADER = struct.Struct(">iix")  # id, epoch, no tagged fields
_ACQUIRED = struct.Struct(">qqhx")

#: (first offset, last offset, a type for each or one for all)
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
    """Raises MalformedFrame. Keeps nothing of the frame."""
    try:
        return _ShareRequestParser(frame, position).fetch(version)
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise _malformed_request(error) from None


def parse_share_acknowledge_request(
    frame: memoryview, position: int, version: int
) -> ShareAcknowledgeRequest:
    """Raises MalformedFrame. Keeps nothing of the frame."""
    try:
        return _ShareRequestParser(frame, position).acknowledge(version)
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise _malformed_request(error) from None


def _malformed_request(error: Exception) -> MalformedFrame:
    if isinstance(error, UnicodeDecodeError):
        return MalformedFrame("share request with a name that is not UTF-8")
    return MalformedFrame("share request is cut short")


class _ShareRequestParser:
    """A cursor over one request."""

    __slots__ = ("end", "frame", "position")

    def __init__(self, frame: memoryview, position: int) -> None:
        self.frame, self.position, self.end = frame, position, len(frame)

    def fetch(self, version: int) -> ShareFetchRequest:
        group, member = self._string(), self._string()
        epoch, wait_ms, min_bytes, max_bytes, max_records, batch_records = _FETCH_V1.unpack_from(
            self.frame, self.position
        )
        self.position += _FETCH_V1.size
        acquire_mode, is_renewal = 0, False
        if version >= RENEW_FROM:
            acquire_mode, is_renewal = self._byte(), bool(self._byte())
        topics = [self._topic() for _ in range(self._count())]
        forgotten = [self._forgotten() for _ in range(self._count())]
        return ShareFetchRequest(
            group,
            member,
            epoch,
            wait_ms,
            min_bytes,
            max_bytes,
            max_records,
            batch_records,
            acquire_mode,
            is_renewal,
            topics,
            forgotten,
        )

    def acknowledge(self, version: int) -> ShareAcknowledgeRequest:
        group, member = self._string(), self._string()
        (epoch,) = _INT32.unpack_from(self.frame, self.position)
        self.position += 4
        is_renewal = bool(self._byte()) if version >= RENEW_FROM else False
        topics = [self._topic() for _ in range(self._count())]
        return ShareAcknowledgeRequest(group, member, epoch, is_renewal, topics)

    def _topic(self) -> ShareTopic:
        topic_id = self._take(16)
        partitions = [self._partition() for _ in range(self._count())]
        self._skip_tags()
        return topic_id, partitions

    def _partition(self) -> tuple[int, list[AcknowledgementRange]]:
        (index,) = _INT32.unpack_from(self.frame, self.position)
        self.position += 4
        batches = self._batches(self._count())
        self._skip_tags()
        return index, batches

    def _batches(self, count: int) -> list[AcknowledgementRange]:
        """There may be one for each record: what is short and plain is read here, and anything else elsewhere."""
        frame, end, batches = self.frame, self.end, []
        for _ in range(count):
            at = self.position
            size = frame[at + 16]
            after = at + size + 16
            if not 0 < size < 0x80 or after >= end or frame[after]:
                batches.append(self._batch())
                continue
            batches.append((*_RANGE.unpack_from(frame, at), bytes(frame[at + 17 : after])))
            self.position = after + 1
        return batches

    def _batch(self) -> AcknowledgementRange:
        first, last = _RANGE.unpack_from(self.frame, self.position)
        self.position += _RANGE.size
        types = self._take(self._count())
        self._skip_tags()
        return first, last, types

    def _forgotten(self) -> tuple[bytes, list[int]]:
        topic_id = self._take(16)
        indexes = struct.unpack(f">{(size := self._count())}i", self._take(4 * size))
        self._skip_tags()
        return topic_id, list(indexes)

    def _string(self) -> str | None:
        size, self.position = read_uvarint(self.frame, self.position, self.end)
        return None if size == 0 else self._take(size - 1).decode()

    def _byte(self) -> int:
        return self._take(1)[0]

    def _take(self, size: int) -> bytes:
        after = self.position + size
        if after > self.end:
            raise MalformedFrame(f"field of {size} bytes where {self.end - self.position} remain")
        value = bytes(self.frame[self.position : after])
        self.position = after
        return value

    def _count(self) -> int:
        """Of an array, none of whose elements takes less than a byte."""
        size, self.position = read_uvarint(self.frame, self.position, self.end)
        count = max(size - 1, 0)
        if count > self.end - self.position:
            raise MalformedFrame(f"array of {count} elements in {self.end - self.position} bytes")
        return count

    def _skip_tags(self) -> None:
        self.position = skip_tags(self.frame, self.position, self.end)


def encode_share_fetch_response(
    correlation_id: int,
    *,
    error: int = 0,
    message: str | None = None,
    lock_ms: int = 0,
    topics: Iterable[tuple[bytes, list[SharePartitionData]]] = (),
    endpoints: Sequence[NodeEndpoint] = (),
) -> list[BytesLike]:
    """The whole frame as buffers, size prefix first."""
    topics = list(topics)
    small: list[bytes] = [_INT32.pack(correlation_id), b"\x00", _HEAD.pack(0, error), _compact(message)]
    small += (_INT32.pack(lock_ms), encode_uvarint(len(topics) + 1))
    buffers: list[BytesLike] = [b""]
    for topic_id, partitions in topics:
        small += (topic_id, encode_uvarint(len(partitions) + 1))
        for data in partitions:
            small.append(_encode_fetched(data))
            if data.records:
                buffers += (b"".join(small), *data.records)
                small = []
            small.append(_encode_acquired(data.acquired))
        small.append(b"\x00")
    small += (_encode_endpoints(endpoints), b"\x00")
    buffers.append(b"".join(small))
    buffers[:2] = [_INT32.pack(sum(map(len, buffers))) + buffers[1]]
    return buffers


def _encode_fetched(data: SharePartitionData) -> bytes:
    size = sum(map(len, data.records))
    return b"".join(
        (
            _INT32.pack(data.partition),
            _INT16.pack(data.error),
            _compact(data.message),
            _INT16.pack(data.acknowledge_error),
            _compact(data.acknowledge_message),
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
) -> bytes:
    topics = list(topics)
    parts = [_INT32.pack(correlation_id), b"\x00", _HEAD.pack(0, error), _compact(message)]
    if version >= RENEW_FROM:
        parts.append(_INT32.pack(lock_ms))
    parts.append(encode_uvarint(len(topics) + 1))
    for topic_id, partitions in topics:
        parts += (topic_id, encode_uvarint(len(partitions) + 1))
        for one in partitions:
            parts += (_INT32.pack(one.partition), _INT16.pack(one.error), _compact(one.message))
            parts += (_encode_leader(one.current_leader), b"\x00")
        parts.append(b"\x00")
    parts += (_encode_endpoints(endpoints), b"\x00")
    body = b"".join(parts)
    return _INT32.pack(len(body)) + body


def _encode_leader(leader: tuple[int, int] | None) -> bytes:
    return _LEADER.pack(*(leader or (-1, -1)))


def _encode_endpoints(endpoints: Sequence[NodeEndpoint]) -> bytes:
    rows = [encode_uvarint(len(endpoints) + 1)]
    for node_id, host, port, rack in endpoints:
        rows += (_INT32.pack(node_id), _compact(host), _INT32.pack(port), _compact(rack), b"\x00")
    return b"".join(rows)


def _compact(text: str | None) -> bytes:
    if text is None:
        return b"\x00"
    raw = text.encode()
    return encode_uvarint(len(raw) + 1) + raw
