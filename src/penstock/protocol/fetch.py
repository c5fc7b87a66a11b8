"""Fetch (key 1), v4-18, packed by hand because every message passes here too.

v7 brought sessions, v12 flexible encoding, v13 topic ids, v15 moved the replica into a tagged field. The response
is a list of buffers in which the records are slices of the log as they are on disk.
"""

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from penstock.protocol.bounds import read_uvarint
from penstock.protocol.compression import BytesLike
from penstock.protocol.errors import MalformedFrame
from penstock.protocol.produce import Endpoint, encode_endpoints, encode_uvarint, skip_tags

SESSIONS_FROM: Final = 7
RACKS_FROM: Final = 11
FLEXIBLE_FROM: Final = 12
TOPIC_IDS_FROM: Final = 13
_REPLICA_STATE_FROM: Final = 15
_ENDPOINTS_FROM: Final = 16
_REPLICA_STATE_TAG: Final = 1
_NO_REPLICA: Final = b"\xff\xff\xff\xff"

_INT16 = struct.Struct(">h")
_INT32 = struct.Struct(">i")
_LIMITS = struct.Struct(">iiib")  # max wait, min bytes, max bytes, isolation
_SESSION = struct.Struct(">ii")
_REPLICA = struct.Struct(">iq")
_PARTITION_V4 = struct.Struct(">iqi")  # index, fetch offset, max bytes
_PARTITION_V5 = struct.Struct(">iqqi")  # and log start offset
_PARTITION_V9 = struct.Struct(">iiqqi")  # and current leader epoch
_PARTITION_V12 = struct.Struct(">iiqiqi")  # and last fetched epoch
_RESULT_V4 = struct.Struct(">ihqq")  # index, error, high watermark, last stable offset
_RESULT_V5 = struct.Struct(">ihqqq")  # and log start offset
_ABORTED = struct.Struct(">qq")


class FetchPartition(NamedTuple):
    partition: int
    leader_epoch: int
    offset: int
    last_fetched_epoch: int
    log_start_offset: int
    max_bytes: int


class FetchRequest(NamedTuple):
    replica_id: int
    max_wait_ms: int
    min_bytes: int
    max_bytes: int
    isolation_level: int
    session_id: int
    session_epoch: int
    topics: list[tuple[bytes, list[FetchPartition]]]
    forgotten: list[tuple[bytes, list[int]]]
    replica_epoch: int = -1  # of the broker that follows, from v15 on
    rack: bytes = b""  # of the consumer, from v11 on


class PartitionData(NamedTuple):
    partition: int
    error: int
    high_watermark: int = -1
    last_stable_offset: int = -1
    log_start_offset: int = -1
    records: BytesLike = b""
    aborted: tuple[tuple[int, int], ...] | None = None
    diverging_epoch: tuple[int, int] | None = None
    current_leader: tuple[int, int] | None = None  # id and epoch, for who asked the wrong broker
    preferred_read_replica: int = -1  # the follower that the consumer is to read from, from v11 on


def parse_fetch(frame: memoryview, position: int, version: int) -> FetchRequest:
    """Raises MalformedFrame."""
    try:
        return _Parser(frame, position, version).request()
    except (struct.error, IndexError):
        raise MalformedFrame("fetch request is cut short") from None


class _Parser:
    """A cursor over one request; steady-state requests carry no topics, so its methods are rarely many."""

    __slots__ = ("end", "flexible", "frame", "position", "version")

    def __init__(self, frame: memoryview, position: int, version: int) -> None:
        self.frame = frame
        self.position = position
        self.end = len(frame)
        self.version = version
        self.flexible = version >= FLEXIBLE_FROM

    def request(self) -> FetchRequest:
        replica_id = replica_epoch = -1
        if self.version < _REPLICA_STATE_FROM:
            (replica_id,) = _INT32.unpack_from(self.frame, self.position)
            self.position += 4
        max_wait_ms, min_bytes, max_bytes, isolation = _LIMITS.unpack_from(self.frame, self.position)
        self.position += _LIMITS.size
        session_id, session_epoch = 0, -1
        if self.version >= SESSIONS_FROM:
            session_id, session_epoch = _SESSION.unpack_from(self.frame, self.position)
            self.position += _SESSION.size
        topics = [self._topic() for _ in range(self._count())]
        forgotten: list[tuple[bytes, list[int]]] = []
        if self.version >= SESSIONS_FROM:
            forgotten = [self._forgotten() for _ in range(self._count())]
        rack = self._string() if self.version >= RACKS_FROM else b""
        if self.flexible:
            replica_id, replica_epoch = self._replica(replica_id)
        return FetchRequest(
            replica_id,
            max_wait_ms,
            min_bytes,
            max_bytes,
            isolation,
            session_id,
            session_epoch,
            topics,
            forgotten,
            replica_epoch,
            rack,
        )

    def _topic(self) -> tuple[bytes, list[FetchPartition]]:
        name = self._topic_key()
        partitions = [self._partition() for _ in range(self._count())]
        self._skip_tags()
        return name, partitions

    def _partition(self) -> FetchPartition:
        frame, position = self.frame, self.position
        epoch = last_epoch = log_start = -1
        if self.version >= FLEXIBLE_FROM:
            index, epoch, offset, last_epoch, log_start, size = _PARTITION_V12.unpack_from(frame, position)
            self.position += _PARTITION_V12.size
            self._skip_tags()
        elif self.version >= 9:
            index, epoch, offset, log_start, size = _PARTITION_V9.unpack_from(frame, position)
            self.position += _PARTITION_V9.size
        elif self.version >= 5:
            index, offset, log_start, size = _PARTITION_V5.unpack_from(frame, position)
            self.position += _PARTITION_V5.size
        else:
            index, offset, size = _PARTITION_V4.unpack_from(frame, position)
            self.position += _PARTITION_V4.size
        return FetchPartition(index, epoch, offset, last_epoch, log_start, size)

    def _forgotten(self) -> tuple[bytes, list[int]]:
        name = self._topic_key()
        count = self._count()
        if count * 4 > self.end - self.position:
            raise MalformedFrame(f"array of {count} elements in {self.end - self.position} bytes")
        indexes = list(struct.unpack_from(f">{count}i", self.frame, self.position))
        self.position += 4 * count
        self._skip_tags()
        return name, indexes

    def _topic_key(self) -> bytes:
        if self.version >= TOPIC_IDS_FROM:
            return self._take(16)
        return self._string()

    def _string(self) -> bytes:
        if self.flexible:
            size, self.position = read_uvarint(self.frame, self.position, self.end)
            return self._take(size - 1)
        (size,) = _INT16.unpack_from(self.frame, self.position)
        self.position += 2
        return self._take(size)

    def _take(self, size: int) -> bytes:
        after = self.position + size
        if size < 0 or after > self.end:
            raise MalformedFrame(f"field of {size} bytes where {self.end - self.position} remain")
        value = bytes(self.frame[self.position : after])
        self.position = after
        return value

    def _count(self) -> int:
        if self.flexible:
            count, self.position = read_uvarint(self.frame, self.position, self.end)
            return count - 1
        (count,) = _INT32.unpack_from(self.frame, self.position)
        self.position += 4
        return int(count)

    def _skip_tags(self) -> None:
        if self.flexible:
            self.position = skip_tags(self.frame, self.position, self.end)

    def _replica(self, replica_id: int) -> tuple[int, int]:
        """The tagged fields at the end of the request: cluster id, and the replica's state when it is one.

        In versions with a field for the replica the tag means nothing, and must not overrule that field.
        """
        replica_epoch = -1
        count, position = read_uvarint(self.frame, self.position, self.end)
        for _ in range(count):
            tag, position = read_uvarint(self.frame, position, self.end)
            size, position = read_uvarint(self.frame, position, self.end)
            if tag == _REPLICA_STATE_TAG and self.version >= _REPLICA_STATE_FROM:
                replica_id, replica_epoch = _REPLICA.unpack_from(self.frame, position)
            position += size
            if position > self.end:
                raise MalformedFrame("tagged field is cut short")
        return replica_id, replica_epoch


def encode_fetch_response(
    version: int,
    correlation_id: int,
    *,
    error: int,
    session_id: int,
    topics: list[tuple[bytes, list[PartitionData]]],
    endpoints: Sequence[Endpoint] = (),
) -> list[BytesLike]:
    """The whole frame as buffers, size prefix first. `endpoints` is told from v16 on."""
    flexible = version >= FLEXIBLE_FROM
    small = [_INT32.pack(correlation_id), b"\x00" if flexible else b"", b"\x00\x00\x00\x00"]
    if version >= SESSIONS_FROM:
        small += (_INT16.pack(error), _INT32.pack(session_id))
    small.append(_encode_count(len(topics), flexible))
    buffers: list[BytesLike] = [b""]
    for name, partitions in topics:
        if version < TOPIC_IDS_FROM:
            small.append(encode_uvarint(len(name) + 1) if flexible else _INT16.pack(len(name)))
        small += (name, _encode_count(len(partitions), flexible))
        for data in partitions:
            small.append(_encode_partition(version, flexible, data))
            if data.records:
                # Only records stay buffers of their own; everything between them is sent as one.
                buffers += (b"".join(small), data.records)
                small = []
            if flexible:
                small.append(_encode_partition_tags(data.diverging_epoch, data.current_leader))
        if flexible:
            small.append(b"\x00")
    if flexible:
        told = endpoints if version >= _ENDPOINTS_FROM else ()
        small.append(encode_endpoints(told))
    buffers.append(b"".join(small))
    size = _INT32.pack(sum(map(len, buffers)))
    buffers[:2] = [size + buffers[1]]
    return buffers


def _encode_partition(version: int, flexible: bool, data: PartitionData) -> bytes:
    if version >= 5:
        head = _RESULT_V5.pack(
            data.partition, data.error, data.high_watermark, data.last_stable_offset, data.log_start_offset
        )
    else:
        head = _RESULT_V4.pack(data.partition, data.error, data.high_watermark, data.last_stable_offset)
    head += _encode_aborted(data.aborted, flexible)
    if version >= RACKS_FROM:
        preferred = data.preferred_read_replica
        head += _NO_REPLICA if preferred < 0 else _INT32.pack(preferred)
    size = len(data.records)
    return head + (encode_uvarint(size + 1) if flexible else _INT32.pack(size))


def _encode_aborted(aborted: tuple[tuple[int, int], ...] | None, flexible: bool) -> bytes:
    if aborted is None:
        return b"\x00" if flexible else b"\xff\xff\xff\xff"
    tail = b"\x00" if flexible else b""
    return _encode_count(len(aborted), flexible) + b"".join(_ABORTED.pack(*pair) + tail for pair in aborted)


def _encode_partition_tags(
    diverging_epoch: tuple[int, int] | None, current_leader: tuple[int, int] | None
) -> bytes:
    if diverging_epoch is None and current_leader is None:
        return b"\x00"
    tags = []
    if diverging_epoch is not None:
        tags.append(b"\x00\x0d" + struct.pack(">iq", *diverging_epoch) + b"\x00")
    if current_leader is not None:
        tags.append(b"\x01\x09" + struct.pack(">ii", *current_leader) + b"\x00")
    return bytes((len(tags),)) + b"".join(tags)


def _encode_count(count: int, flexible: bool) -> bytes:
    return encode_uvarint(count + 1) if flexible else _INT32.pack(count)
