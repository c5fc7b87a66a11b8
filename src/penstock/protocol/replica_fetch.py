"""Fetch (key 1), v17, from the follower's side: the request as a replica sends it, the answer read in place.

Packed by hand because every replicated batch passes here. Records stay slices of the frame that brought them; every
length and count is bounded by the bytes that remain before anything is allocated for it.
"""

import struct
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from penstock.protocol.bounds import read_uvarint
from penstock.protocol.errors import MalformedFrame
from penstock.protocol.fetch import FetchPartition
from penstock.protocol.produce import encode_uvarint, skip_tags

VERSION: Final = 17
#: A session begins with a full request under this epoch.
SESSION_BEGINS: Final = 0
NO_SESSION: Final = 0

_LIMITS = struct.Struct(">iiibii")  # max wait, min bytes, max bytes, isolation, session id, session epoch
_ASKED = struct.Struct(">iiqiqiB")  # as FetchPartition, and no tagged fields
_INT32 = struct.Struct(">i")
#: No rack; one tagged field: number 1, of 13 bytes: the replica's id and epoch, and no tagged fields of its own.
_REPLICA_STATE = struct.Struct(">BBBBiqB")
_HEAD = struct.Struct(">ihi")  # throttle time, error, session id
_RESULT = struct.Struct(">ihqqq")  # index, error, high watermark, last stable offset, log start offset
_RESULT_BYTES_MIN: Final = _RESULT.size + 1 + 4 + 1 + 1
_ABORTED_BYTES: Final = 17
_TOPIC_ID_BYTES: Final = 16
_DIVERGING_TAG, _LEADER_TAG, _SNAPSHOT_TAG = range(3)
_EPOCH_END = struct.Struct(">iq")
_LEADER = struct.Struct(">ii")
_SNAPSHOT = struct.Struct(">qi")

#: Topic id and what belongs to it.
Asked = Iterable[tuple[bytes, Sequence[FetchPartition]]]
Forgotten = Iterable[tuple[bytes, Sequence[int]]]


class FetchedPartition(NamedTuple):
    topic_id: bytes
    partition: int
    error: int
    high_watermark: int
    log_start_offset: int
    records: memoryview
    diverging_epoch: tuple[int, int] | None = None  # epoch, end offset
    current_leader: tuple[int, int] | None = None  # id, epoch
    snapshot_id: tuple[int, int] | None = None  # end offset, epoch


class FetchedAnswer(NamedTuple):
    throttle_ms: int
    error: int
    session_id: int
    partitions: list[FetchedPartition]


def encode_replica_fetch(
    *,
    replica_id: int,
    broker_epoch: int,
    max_wait_ms: int,
    min_bytes: int,
    max_bytes: int,
    session_id: int,
    session_epoch: int,
    topics: Asked,
    forgotten: Forgotten = (),
) -> bytes:
    """The body of the request, to follow its header."""
    asked = [_encode_asked(topic_id, partitions) for topic_id, partitions in topics]
    dropped = [_encode_forgotten(topic_id, indexes) for topic_id, indexes in forgotten]
    return b"".join(
        (
            _LIMITS.pack(max_wait_ms, min_bytes, max_bytes, 0, session_id, session_epoch),
            encode_uvarint(len(asked) + 1),
            *asked,
            encode_uvarint(len(dropped) + 1),
            *dropped,
            _REPLICA_STATE.pack(1, 1, 1, _REPLICA_STATE.size - 4, replica_id, broker_epoch, 0),
        )
    )


def _encode_asked(topic_id: bytes, partitions: Sequence[FetchPartition]) -> bytes:
    packed = [_ASKED.pack(*asked, 0) for asked in partitions]
    return b"".join((topic_id, encode_uvarint(len(packed) + 1), *packed, b"\x00"))


def _encode_forgotten(topic_id: bytes, indexes: Sequence[int]) -> bytes:
    packed = struct.pack(f">{len(indexes)}i", *indexes)
    return b"".join((topic_id, encode_uvarint(len(indexes) + 1), packed, b"\x00"))


def parse_fetch_response(body: memoryview) -> FetchedAnswer:
    """What follows the answer's header. Raises MalformedFrame."""
    try:
        return _Parser(body).answer()
    except (struct.error, IndexError):
        raise MalformedFrame("fetch response is cut short") from None


class _Parser:
    __slots__ = ("body", "end", "position")

    def __init__(self, body: memoryview) -> None:
        self.body = body
        self.position = 0
        self.end = len(body)

    def answer(self) -> FetchedAnswer:
        throttle_ms, error, session_id = _HEAD.unpack_from(self.body)
        self.position = _HEAD.size
        partitions: list[FetchedPartition] = []
        for _ in range(self._count(_TOPIC_ID_BYTES + 2)):
            self._topic(partitions)
        self.position = skip_tags(self.body, self.position, self.end)
        return FetchedAnswer(throttle_ms, error, session_id, partitions)

    def _topic(self, partitions: list[FetchedPartition]) -> None:
        topic_id = bytes(self._take(_TOPIC_ID_BYTES))
        partitions += [self._partition(topic_id) for _ in range(self._count(_RESULT_BYTES_MIN))]
        self.position = skip_tags(self.body, self.position, self.end)

    def _partition(self, topic_id: bytes) -> FetchedPartition:
        index, error, high_watermark, _, log_start = _RESULT.unpack_from(self.body, self.position)
        self.position += _RESULT.size
        for _ in range(self._count(_ABORTED_BYTES)):
            self._take(_ABORTED_BYTES - 1)
            self.position = skip_tags(self.body, self.position, self.end)
        self._take(_INT32.size)  # the preferred read replica is for consumers
        size = self._uvarint()
        records = self._take(max(size - 1, 0))
        if self.body[self.position] == 0:  # nearly always: no tagged fields
            self.position += 1
            return FetchedPartition(topic_id, index, error, high_watermark, log_start, records)
        tags = self._tags()
        return FetchedPartition(topic_id, index, error, high_watermark, log_start, records, *tags)

    def _tags(self) -> tuple[tuple[int, int] | None, tuple[int, int] | None, tuple[int, int] | None]:
        diverging = leader = snapshot = None
        for _ in range(self._uvarint()):
            tag, size = self._uvarint(), self._uvarint()
            value = self._take(size)
            if tag == _DIVERGING_TAG:
                diverging = _known(_EPOCH_END.unpack_from(value))
            elif tag == _LEADER_TAG:
                leader = _known(_LEADER.unpack_from(value))
            elif tag == _SNAPSHOT_TAG:
                snapshot = _known(_SNAPSHOT.unpack_from(value))
        return diverging, leader, snapshot

    def _uvarint(self) -> int:
        value, self.position = read_uvarint(self.body, self.position, self.end)
        return value

    def _count(self, element_bytes_min: int) -> int:
        """Elements of a compact array; null counts as none."""
        count = max(self._uvarint() - 1, 0)
        if count * element_bytes_min > self.end - self.position:
            raise MalformedFrame(f"array of {count} elements in {self.end - self.position} bytes")
        return count

    def _take(self, size: int) -> memoryview:
        start, self.position = self.position, self.position + size
        if self.position > self.end:
            raise MalformedFrame(f"field of {size} bytes where {self.end - start} remain")
        return self.body[start : self.position]


def _known(pair: tuple[int, int]) -> tuple[int, int] | None:
    """A peer may write the default of a tagged field, -1 and -1, or leave it out: it means the same."""
    return None if pair == (-1, -1) else pair
