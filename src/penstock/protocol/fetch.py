"""Fetch (key 1), packed by hand because every record passes here: the broker's side (v4-18), the follower's (v17)
and the consumer's (v4-17).

v7 added sessions, v12 flexible encoding, v13 topic ids; v15 moved the replica into a tagged field. A response is a
list of buffers in which the records are slices of the log as they are on disk. A consumer fetches one partition per
request, without a session. Followers and consumers read a response in place: records stay slices of the frame, and
every length and count is bounded by the bytes that remain before anything is allocated for it.
"""

import struct
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from penstock.protocol.bounds import read_uvarint
from penstock.protocol.compression import BytesLike
from penstock.protocol.errors import MalformedFrame
from penstock.protocol.produce import NodeEndpoint, encode_node_endpoints, encode_uvarint, skip_tags

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


def parse_fetch_request(frame: memoryview, position: int, version: int) -> FetchRequest:
    """Raises MalformedFrame."""
    try:
        return _FetchRequestParser(frame, position, version).request()
    except (struct.error, IndexError):
        raise MalformedFrame("fetch request is cut short") from None


class _FetchRequestParser:
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
    endpoints: Sequence[NodeEndpoint] = (),
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
        small.append(encode_node_endpoints(told))
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


REPLICA_FETCH_VERSION: Final = 17
#: A session begins with a full request under this epoch.
INITIAL_SESSION_EPOCH: Final = 0
NO_SESSION_ID: Final = 0

_REPLICA_LIMITS = struct.Struct(
    ">iiibii"
)  # max wait, min bytes, max bytes, isolation, session id, session epoch
_REPLICA_PARTITION = struct.Struct(">iiqiqiB")  # as FetchPartition, and no tagged fields
_REPLICA_INT32 = struct.Struct(">i")
#: No rack; one tagged field: number 1, of 13 bytes: the replica's id and epoch, and no tagged fields of its own.
_REPLICA_STATE = struct.Struct(">BBBBiqB")
_RESPONSE_HEAD = struct.Struct(">ihi")  # throttle time, error, session id
_REPLICA_RESULT = struct.Struct(
    ">ihqqq"
)  # index, error, high watermark, last stable offset, log start offset
_REPLICA_RESULT_BYTES_MIN: Final = _REPLICA_RESULT.size + 1 + 4 + 1 + 1
_ABORTED_BYTES: Final = 17
_TOPIC_ID_BYTES: Final = 16
_DIVERGING_TAG, _LEADER_TAG, _SNAPSHOT_TAG = range(3)
_DIVERGING_EPOCH = struct.Struct(">iq")
_LEADER = struct.Struct(">ii")
_SNAPSHOT_ID = struct.Struct(">qi")

#: Topic id and what belongs to it.
FetchTopics = Iterable[tuple[bytes, Sequence[FetchPartition]]]
ForgottenTopics = Iterable[tuple[bytes, Sequence[int]]]


class ReplicaPartitionData(NamedTuple):
    topic_id: bytes
    partition: int
    error: int
    high_watermark: int
    log_start_offset: int
    records: memoryview
    diverging_epoch: tuple[int, int] | None = None  # epoch, end offset
    current_leader: tuple[int, int] | None = None  # id, epoch
    snapshot_id: tuple[int, int] | None = None  # end offset, epoch


class ReplicaFetchResponse(NamedTuple):
    throttle_ms: int
    error: int
    session_id: int
    partitions: list[ReplicaPartitionData]


def encode_replica_fetch_request(
    *,
    replica_id: int,
    broker_epoch: int,
    max_wait_ms: int,
    min_bytes: int,
    max_bytes: int,
    session_id: int,
    session_epoch: int,
    topics: FetchTopics,
    forgotten: ForgottenTopics = (),
) -> bytes:
    """The body of the request, to follow its header."""
    asked = [_encode_replica_topic(topic_id, partitions) for topic_id, partitions in topics]
    dropped = [_encode_forgotten_topic(topic_id, indexes) for topic_id, indexes in forgotten]
    return b"".join(
        (
            _REPLICA_LIMITS.pack(max_wait_ms, min_bytes, max_bytes, 0, session_id, session_epoch),
            encode_uvarint(len(asked) + 1),
            *asked,
            encode_uvarint(len(dropped) + 1),
            *dropped,
            _REPLICA_STATE.pack(1, 1, 1, _REPLICA_STATE.size - 4, replica_id, broker_epoch, 0),
        )
    )


def _encode_replica_topic(topic_id: bytes, partitions: Sequence[FetchPartition]) -> bytes:
    packed = [_REPLICA_PARTITION.pack(*asked, 0) for asked in partitions]
    return b"".join((topic_id, encode_uvarint(len(packed) + 1), *packed, b"\x00"))


def _encode_forgotten_topic(topic_id: bytes, indexes: Sequence[int]) -> bytes:
    packed = struct.pack(f">{len(indexes)}i", *indexes)
    return b"".join((topic_id, encode_uvarint(len(indexes) + 1), packed, b"\x00"))


def parse_replica_fetch_response(body: memoryview) -> ReplicaFetchResponse:
    """What follows the answer's header. Raises MalformedFrame."""
    try:
        return _ReplicaResponseParser(body).answer()
    except (struct.error, IndexError):
        raise MalformedFrame("fetch response is cut short") from None


class _ReplicaResponseParser:
    __slots__ = ("body", "end", "position")

    def __init__(self, body: memoryview) -> None:
        self.body = body
        self.position = 0
        self.end = len(body)

    def answer(self) -> ReplicaFetchResponse:
        throttle_ms, error, session_id = _RESPONSE_HEAD.unpack_from(self.body)
        self.position = _RESPONSE_HEAD.size
        partitions: list[ReplicaPartitionData] = []
        for _ in range(self._count(_TOPIC_ID_BYTES + 2)):
            self._topic(partitions)
        self.position = skip_tags(self.body, self.position, self.end)
        return ReplicaFetchResponse(throttle_ms, error, session_id, partitions)

    def _topic(self, partitions: list[ReplicaPartitionData]) -> None:
        topic_id = bytes(self._take(_TOPIC_ID_BYTES))
        partitions += [self._partition(topic_id) for _ in range(self._count(_REPLICA_RESULT_BYTES_MIN))]
        self.position = skip_tags(self.body, self.position, self.end)

    def _partition(self, topic_id: bytes) -> ReplicaPartitionData:
        index, error, high_watermark, _, log_start = _REPLICA_RESULT.unpack_from(self.body, self.position)
        self.position += _REPLICA_RESULT.size
        for _ in range(self._count(_ABORTED_BYTES)):
            self._take(_ABORTED_BYTES - 1)
            self.position = skip_tags(self.body, self.position, self.end)
        self._take(_REPLICA_INT32.size)  # the preferred read replica is for consumers
        size = self._uvarint()
        records = self._take(max(size - 1, 0))
        if self.body[self.position] == 0:  # nearly always: no tagged fields
            self.position += 1
            return ReplicaPartitionData(topic_id, index, error, high_watermark, log_start, records)
        tags = self._tags()
        return ReplicaPartitionData(topic_id, index, error, high_watermark, log_start, records, *tags)

    def _tags(self) -> tuple[tuple[int, int] | None, tuple[int, int] | None, tuple[int, int] | None]:
        diverging = leader = snapshot = None
        for _ in range(self._uvarint()):
            tag, size = self._uvarint(), self._uvarint()
            value = self._take(size)
            if tag == _DIVERGING_TAG:
                diverging = _none_if_default(_DIVERGING_EPOCH.unpack_from(value))
            elif tag == _LEADER_TAG:
                leader = _none_if_default(_LEADER.unpack_from(value))
            elif tag == _SNAPSHOT_TAG:
                snapshot = _none_if_default(_SNAPSHOT_ID.unpack_from(value))
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


def _none_if_default(pair: tuple[int, int]) -> tuple[int, int] | None:
    """A peer may write the default of a tagged field, -1 and -1, or leave it out: it means the same."""
    return None if pair == (-1, -1) else pair


CONSUMER_VERSION_MIN: Final = 4
CONSUMER_VERSION_MAX: Final = 17
_LOG_START_FROM: Final = 5
_LEADER_EPOCH_FROM: Final = 9
_RACK_FROM: Final = 11
_CONSUMER_REPLICA_STATE_FROM: Final = 15

_CONSUMER_INT16 = struct.Struct(">h")
_CONSUMER_INT32 = struct.Struct(">i")
_CONSUMER_LIMITS = struct.Struct(">iiib")  # max wait, min bytes, max bytes, isolation
_CONSUMER_REPLICA_ID = _CONSUMER_INT32.pack(-1)  # no replica
_NO_SESSION = struct.pack(">ii", 0, -1)  # id, epoch
_CONSUMER_PARTITION_V4 = struct.Struct(">iqi")  # index, fetch offset, max bytes
_CONSUMER_PARTITION_V5 = struct.Struct(">iqqi")  # and log start offset
_CONSUMER_PARTITION_V9 = struct.Struct(">iiqqi")  # and current leader epoch
_CONSUMER_PARTITION_V12 = struct.Struct(">iiqiqi")  # and last fetched epoch
_CONSUMER_RESULT_V4 = struct.Struct(">ihqq")  # index, error, high watermark, last stable offset
_LOG_START = struct.Struct(">q")
_CONSUMER_ABORTED = struct.Struct(">qq")  # producer id, first offset
_CONSUMER_LEADER = struct.Struct(">ii")
_CONSUMER_LEADER_TAG: Final = 1


class ConsumerFetchResponse(NamedTuple):
    error: int
    #: Topic (name, or id from v13 on) and what was found.
    partitions: list[tuple[bytes, PartitionData]]


def encode_consumer_fetch_request(
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
    one, none, tags = (
        (b"\x02", b"\x01", b"\x00") if flexible else (_CONSUMER_INT32.pack(1), _CONSUMER_INT32.pack(0), b"")
    )
    parts = [
        _CONSUMER_REPLICA_ID if version < _CONSUMER_REPLICA_STATE_FROM else b"",
        _CONSUMER_LIMITS.pack(wait_ms, bytes_min, bytes_max, isolation),
        _NO_SESSION if version >= SESSIONS_FROM else b"",
        one,
        _encode_consumer_topic(version, topic),
        one,
        _encode_consumer_partition(version, asked),
        tags,
        tags,
    ]
    if version >= SESSIONS_FROM:
        parts.append(none)  # nothing to forget
    if version >= _RACK_FROM:
        parts.append(b"\x01" if flexible else b"\x00\x00")
    parts.append(tags)
    return b"".join(parts)


def _encode_consumer_topic(version: int, topic: bytes) -> bytes:
    if version >= TOPIC_IDS_FROM:
        return topic
    return (
        encode_uvarint(len(topic) + 1) if version >= FLEXIBLE_FROM else _CONSUMER_INT16.pack(len(topic))
    ) + topic


def _encode_consumer_partition(version: int, asked: FetchPartition) -> bytes:
    index, leader_epoch, offset, last_epoch, log_start, max_bytes = asked
    if version >= FLEXIBLE_FROM:
        return _CONSUMER_PARTITION_V12.pack(index, leader_epoch, offset, last_epoch, log_start, max_bytes)
    if version >= _LEADER_EPOCH_FROM:
        return _CONSUMER_PARTITION_V9.pack(index, leader_epoch, offset, log_start, max_bytes)
    if version >= _LOG_START_FROM:
        return _CONSUMER_PARTITION_V5.pack(index, offset, log_start, max_bytes)
    return _CONSUMER_PARTITION_V4.pack(index, offset, max_bytes)


def parse_consumer_fetch_response(body: memoryview, version: int) -> ConsumerFetchResponse:
    """What follows the answer's header. Raises MalformedFrame."""
    try:
        return _ConsumerResponseParser(body, version).answer()
    except (struct.error, IndexError):
        raise MalformedFrame("fetch response is cut short") from None


class _ConsumerResponseParser:
    __slots__ = ("body", "end", "flexible", "position", "version")

    def __init__(self, body: memoryview, version: int) -> None:
        self.body = body
        self.position = 0
        self.end = len(body)
        self.version = version
        self.flexible = version >= FLEXIBLE_FROM

    def answer(self) -> ConsumerFetchResponse:
        self._take(_CONSUMER_INT32.size)  # throttle time: the broker reads no more from us meanwhile
        error = 0
        if self.version >= SESSIONS_FROM:
            (error,) = _CONSUMER_INT16.unpack(self._take(_CONSUMER_INT16.size))
            self._take(_CONSUMER_INT32.size)  # there is no session
        partitions: list[tuple[bytes, PartitionData]] = []
        for _ in range(self._count()):
            topic = self._topic()
            partitions += [(topic, self._partition()) for _ in range(self._count())]
            self._skip_tags()
        self._skip_tags()
        return ConsumerFetchResponse(error, partitions)

    def _topic(self) -> bytes:
        if self.version >= TOPIC_IDS_FROM:
            return bytes(self._take(16))
        if self.flexible:
            return bytes(self._take(max(self._uvarint() - 1, 0)))
        return bytes(self._take(_CONSUMER_INT16.unpack(self._take(_CONSUMER_INT16.size))[0]))

    def _partition(self) -> PartitionData:
        index, error, high_watermark, last_stable = _CONSUMER_RESULT_V4.unpack(
            self._take(_CONSUMER_RESULT_V4.size)
        )
        log_start = -1
        if self.version >= _LOG_START_FROM:
            (log_start,) = _LOG_START.unpack(self._take(_LOG_START.size))
        aborted = self._aborted()
        if self.version >= _RACK_FROM:
            self._take(
                _CONSUMER_INT32.size
            )  # the preferred read replica is for consumers that name their rack
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
            producer_id, first_offset = _CONSUMER_ABORTED.unpack(self._take(_CONSUMER_ABORTED.size))
            self._skip_tags()
            found.append((producer_id, first_offset))
        return tuple(found)

    def _leader(self) -> tuple[int, int] | None:
        leader = None
        for _ in range(self._uvarint()):
            tag, size = self._uvarint(), self._uvarint()
            value = self._take(size)
            if tag == _CONSUMER_LEADER_TAG:
                leader = _CONSUMER_LEADER.unpack_from(value)
        return leader

    def _count(self) -> int:
        """Elements of an array, each of which takes two bytes at the least; null counts as none."""
        count = self._length()
        if count * 2 > self.end - self.position:
            raise MalformedFrame(f"array of {count} elements in {self.end - self.position} bytes")
        return count

    def _length(self) -> int:
        size = (
            self._uvarint() - 1
            if self.flexible
            else _CONSUMER_INT32.unpack(self._take(_CONSUMER_INT32.size))[0]
        )
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
