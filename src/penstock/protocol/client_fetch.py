"""Fetch (key 1), v4-17, from a consumer's side: one partition per request, no session, the answer read in place.

Packed by hand because every message that is read passes here. Records stay a slice of the frame that brought them;
every length and count is bounded by the bytes that remain before anything is allocated for it.
"""

import struct
from typing import Final, NamedTuple

from penstock.protocol.bounds import read_uvarint
from penstock.protocol.errors import MalformedFrame
from penstock.protocol.fetch import (
    FLEXIBLE_FROM,
    SESSIONS_FROM,
    TOPIC_IDS_FROM,
    FetchPartition,
    PartitionData,
)
from penstock.protocol.produce import encode_uvarint, skip_tags

OLDEST: Final = 4
NEWEST: Final = 17
_LOG_START_FROM: Final = 5
_LEADER_EPOCH_FROM: Final = 9
_RACK_FROM: Final = 11
_REPLICA_STATE_FROM: Final = 15

_INT16 = struct.Struct(">h")
_INT32 = struct.Struct(">i")
_LIMITS = struct.Struct(">iiib")  # max wait, min bytes, max bytes, isolation
_CONSUMER = _INT32.pack(-1)  # no replica
_NO_SESSION = struct.pack(">ii", 0, -1)  # id, epoch
_ASKED_V4 = struct.Struct(">iqi")  # index, fetch offset, max bytes
_ASKED_V5 = struct.Struct(">iqqi")  # and log start offset
_ASKED_V9 = struct.Struct(">iiqqi")  # and current leader epoch
_ASKED_V12 = struct.Struct(">iiqiqi")  # and last fetched epoch
_RESULT_V4 = struct.Struct(">ihqq")  # index, error, high watermark, last stable offset
_LOG_START = struct.Struct(">q")
_ABORTED = struct.Struct(">qq")  # producer id, first offset
_LEADER = struct.Struct(">ii")
_LEADER_TAG: Final = 1


class ClientFetchAnswer(NamedTuple):
    error: int
    #: Topic (name, or id from v13 on) and what was found.
    partitions: list[tuple[bytes, PartitionData]]


def encode_client_fetch(
    version: int,
    topic: bytes,
    asked: FetchPartition,
    *,
    wait_ms: int,
    bytes_min: int,
    bytes_max: int,
    isolation: int,
) -> bytes:
    """The body of the request, to follow its header. `topic` is an id from v13 on, a name before."""
    flexible = version >= FLEXIBLE_FROM
    one, none, tags = (b"\x02", b"\x01", b"\x00") if flexible else (_INT32.pack(1), _INT32.pack(0), b"")
    parts = [
        _CONSUMER if version < _REPLICA_STATE_FROM else b"",
        _LIMITS.pack(wait_ms, bytes_min, bytes_max, isolation),
        _NO_SESSION if version >= SESSIONS_FROM else b"",
        one,
        _encode_topic(version, topic),
        one,
        _encode_asked(version, asked),
        tags,
        tags,
    ]
    if version >= SESSIONS_FROM:
        parts.append(none)  # nothing to forget
    if version >= _RACK_FROM:
        parts.append(b"\x01" if flexible else b"\x00\x00")
    parts.append(tags)
    return b"".join(parts)


def _encode_topic(version: int, topic: bytes) -> bytes:
    if version >= TOPIC_IDS_FROM:
        return topic
    return (encode_uvarint(len(topic) + 1) if version >= FLEXIBLE_FROM else _INT16.pack(len(topic))) + topic


def _encode_asked(version: int, asked: FetchPartition) -> bytes:
    index, leader_epoch, offset, last_epoch, log_start, max_bytes = asked
    if version >= FLEXIBLE_FROM:
        return _ASKED_V12.pack(index, leader_epoch, offset, last_epoch, log_start, max_bytes)
    if version >= _LEADER_EPOCH_FROM:
        return _ASKED_V9.pack(index, leader_epoch, offset, log_start, max_bytes)
    if version >= _LOG_START_FROM:
        return _ASKED_V5.pack(index, offset, log_start, max_bytes)
    return _ASKED_V4.pack(index, offset, max_bytes)


def parse_client_fetch(body: memoryview, version: int) -> ClientFetchAnswer:
    """What follows the answer's header. Raises MalformedFrame."""
    try:
        return _Parser(body, version).answer()
    except (struct.error, IndexError):
        raise MalformedFrame("fetch response is cut short") from None


class _Parser:
    __slots__ = ("body", "end", "flexible", "position", "version")

    def __init__(self, body: memoryview, version: int) -> None:
        self.body = body
        self.position = 0
        self.end = len(body)
        self.version = version
        self.flexible = version >= FLEXIBLE_FROM

    def answer(self) -> ClientFetchAnswer:
        self._take(_INT32.size)  # throttle time: the broker reads no more from us meanwhile
        error = 0
        if self.version >= SESSIONS_FROM:
            (error,) = _INT16.unpack(self._take(_INT16.size))
            self._take(_INT32.size)  # there is no session
        partitions: list[tuple[bytes, PartitionData]] = []
        for _ in range(self._count()):
            topic = self._topic()
            partitions += [(topic, self._partition()) for _ in range(self._count())]
            self._skip_tags()
        self._skip_tags()
        return ClientFetchAnswer(error, partitions)

    def _topic(self) -> bytes:
        if self.version >= TOPIC_IDS_FROM:
            return bytes(self._take(16))
        if self.flexible:
            return bytes(self._take(max(self._uvarint() - 1, 0)))
        return bytes(self._take(_INT16.unpack(self._take(_INT16.size))[0]))

    def _partition(self) -> PartitionData:
        index, error, high_watermark, last_stable = _RESULT_V4.unpack(self._take(_RESULT_V4.size))
        log_start = -1
        if self.version >= _LOG_START_FROM:
            (log_start,) = _LOG_START.unpack(self._take(_LOG_START.size))
        aborted = self._aborted()
        if self.version >= _RACK_FROM:
            self._take(_INT32.size)  # the preferred read replica is for consumers that name their rack
        records = self._take(self._length())
        leader = self._leader() if self.flexible else None
        return PartitionData(
            index,
            error,
            high_watermark,
            last_stable,
            log_start,
            records,
            aborted,
            current_leader=leader,
        )

    def _aborted(self) -> tuple[tuple[int, int], ...]:
        found = []
        for _ in range(self._count()):
            producer_id, first_offset = _ABORTED.unpack(self._take(_ABORTED.size))
            self._skip_tags()
            found.append((producer_id, first_offset))
        return tuple(found)

    def _leader(self) -> tuple[int, int] | None:
        leader = None
        for _ in range(self._uvarint()):
            tag, size = self._uvarint(), self._uvarint()
            value = self._take(size)
            if tag == _LEADER_TAG:
                leader = _LEADER.unpack_from(value)
        return leader

    def _count(self) -> int:
        """Elements of an array, each of which takes two bytes at the least; null counts as none."""
        count = self._length()
        if count * 2 > self.end - self.position:
            raise MalformedFrame(f"array of {count} elements in {self.end - self.position} bytes")
        return count

    def _length(self) -> int:
        size = self._uvarint() - 1 if self.flexible else _INT32.unpack(self._take(_INT32.size))[0]
        return max(size, 0)

    def _uvarint(self) -> int:
        value, self.position = read_uvarint(self.body, self.position, self.end)
        return value

    def _skip_tags(self) -> None:
        if self.flexible:
            self.position = skip_tags(self.body, self.position, self.end)

    def _take(self, size: int) -> memoryview:
        start, self.position = self.position, self.position + size
        if size < 0 or self.position > self.end:
            raise MalformedFrame(f"field of {size} bytes where {self.end - start} remain")
        return self.body[start : self.position]
