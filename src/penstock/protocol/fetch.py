"""Fetch (key 1), packed by hand because every record passes here: the broker's side (v4-18), the follower's (v17)
and the consumer's (v4-17).

v7 added sessions, v12 flexible encoding, v13 topic ids; v15 moved the replica into a tagged field. A response is a
list of buffers in which the records are slices of the log as they are on disk. A consumer fetches one partition per
request, without a session. Followers and consumers do not copy the records out of the response: they stay slices of the
frame.
"""

import struct
from collections.abc import Generator, Iterable, Sequence
from typing import Final, NamedTuple, TypeVar

from penstock.protocol.compression import BytesLike
from penstock.protocol.errors import MalformedFrame
from penstock.protocol.produce import NodeEndpoint, encode_leader_endpoints
from penstock.protocol.wire import INT16, INT32, WireCursor, encode_uvarint

#: In Kafka the replica id of a debugging consumer. Ours get only records whose checksum the leader has verified.
DEBUGGING_REPLICA_ID: Final = -2
SESSIONS_FROM: Final = 7
RACKS_FROM: Final = 11
FLEXIBLE_FROM: Final = 12
TOPIC_IDS_FROM: Final = 13
_LOG_START_FROM: Final = 5
_LEADER_EPOCH_FROM: Final = 9
_REPLICA_STATE_FROM: Final = 15
_ENDPOINTS_FROM: Final = 16
_REPLICA_STATE_TAG: Final = 1
#: How many topics and partitions are read or written before the work may pause.
_STEP: Final = 50
#: How many indexes of forgotten partitions, which are read many at once.
_FORGOTTEN_STEP: Final = 5_000

T = TypeVar("T")
#: Work that may pause at each `yield`.
_Steps = Generator[None, None, T]
_NO_REPLICA: Final = b"\xff\xff\xff\xff"
_TOPIC_ID_BYTES: Final = 16

_LIMITS_V4 = struct.Struct(">iiib")  # max wait, min bytes, max bytes, isolation
_LIMITS_V7 = struct.Struct(">iiibii")  # and session id, session epoch
_REPLICA = struct.Struct(">iq")  # id, broker epoch
_PARTITION_V4 = struct.Struct(">iqi")  # index, fetch offset, max bytes
_PARTITION_V5 = struct.Struct(">iqqi")  # and log start offset
_PARTITION_V9 = struct.Struct(">iiqqi")  # and current leader epoch
_PARTITION_V12 = struct.Struct(">iiqiqi")  # and last fetched epoch
_RESULT_V4 = struct.Struct(">ihqq")  # index, error, high watermark, last stable offset
_RESULT_V5 = struct.Struct(">ihqqq")  # and log start offset
_ABORTED = struct.Struct(">qq")  # producer id, first offset
_DIVERGING_EPOCH = struct.Struct(">iq")  # epoch, end offset
_LEADER = struct.Struct(">ii")  # id, epoch
_SNAPSHOT_ID = struct.Struct(">qi")  # end offset, epoch
_DIVERGING_TAG, _LEADER_TAG, _SNAPSHOT_TAG = range(3)


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
    replica_epoch: int = -1  # the broker epoch of the follower, from v15 on
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
    current_leader: tuple[int, int] | None = None  # id and epoch, if this broker is not the leader
    preferred_read_replica: int = -1  # the follower that the consumer should read from, from v11 on


def parse_fetch_request(frame: memoryview, position: int, version: int) -> FetchRequest:
    """Raises MalformedFrame."""
    return _finish(parse_fetch_request_in_steps(frame, position, version))


def parse_fetch_request_in_steps(frame: memoryview, position: int, version: int) -> _Steps[FetchRequest]:
    """Raises MalformedFrame."""
    try:
        return (yield from _read_request(WireCursor(frame, position, version >= FLEXIBLE_FROM), version))
    except (struct.error, IndexError):
        raise MalformedFrame("fetch request is cut short") from None


def _finish(steps: _Steps[T]) -> T:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def _read_request(cursor: WireCursor, version: int) -> _Steps[FetchRequest]:
    replica_id = replica_epoch = session_epoch = -1
    session_id = 0
    if version < _REPLICA_STATE_FROM:
        (replica_id,) = cursor.unpack(INT32)
    if version >= SESSIONS_FROM:
        max_wait_ms, min_bytes, max_bytes, isolation, session_id, session_epoch = cursor.unpack(_LIMITS_V7)
    else:
        max_wait_ms, min_bytes, max_bytes, isolation = cursor.unpack(_LIMITS_V4)
    topics = yield from _read_request_topics(cursor, version)
    forgotten: list[tuple[bytes, list[int]]] = []
    if version >= SESSIONS_FROM:
        forgotten = yield from _read_forgotten_topics(cursor, version)
    rack = cursor.string() if version >= RACKS_FROM else b""
    if cursor.flexible:
        for tag, value in cursor.tags():
            # Older versions have a field for the replica, which the tag must not override.
            if tag == _REPLICA_STATE_TAG and version >= _REPLICA_STATE_FROM:
                replica_id, replica_epoch = _REPLICA.unpack_from(value)
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


def _read_request_topics(
    cursor: WireCursor, version: int
) -> _Steps[list[tuple[bytes, list[FetchPartition]]]]:
    topics = []
    until_pause = _STEP
    for _ in range(cursor.count()):
        topic, left = _read_topic(cursor, version), cursor.count()
        partitions: list[FetchPartition] = []
        until_pause -= 1
        while left:
            count = min(left, max(until_pause, 1))
            partitions += [_read_request_partition(cursor, version) for _ in range(count)]
            left -= count
            until_pause -= count
            if until_pause <= 0:
                until_pause = _STEP
                yield
        cursor.skip_tags()
        topics.append((topic, partitions))
        if until_pause <= 0:
            until_pause = _STEP
            yield
    return topics


def _read_request_partition(cursor: WireCursor, version: int) -> FetchPartition:
    epoch = last_epoch = log_start = -1
    if version >= FLEXIBLE_FROM:
        partition = FetchPartition._make(cursor.unpack(_PARTITION_V12))
        cursor.skip_tags()
        return partition
    if version >= _LEADER_EPOCH_FROM:
        index, epoch, offset, log_start, size = cursor.unpack(_PARTITION_V9)
    elif version >= _LOG_START_FROM:
        index, offset, log_start, size = cursor.unpack(_PARTITION_V5)
    else:
        index, offset, size = cursor.unpack(_PARTITION_V4)
    return FetchPartition(index, epoch, offset, last_epoch, log_start, size)


def _read_forgotten_topics(cursor: WireCursor, version: int) -> _Steps[list[tuple[bytes, list[int]]]]:
    topics = []
    for number in range(cursor.count()):
        topic, left = _read_topic(cursor, version), cursor.count(INT32.size)
        indexes: list[int] = []
        while left:
            count = min(left, _FORGOTTEN_STEP)
            indexes += struct.unpack(f">{count}i", cursor.take(INT32.size * count))
            left -= count
            if left:
                yield
        cursor.skip_tags()
        topics.append((topic, indexes))
        if number % _STEP == _STEP - 1:
            yield
    return topics


def _read_topic(cursor: WireCursor, version: int) -> bytes:
    """An id from v13 on, a name before."""
    return bytes(cursor.take(_TOPIC_ID_BYTES)) if version >= TOPIC_IDS_FROM else cursor.string()


def encode_fetch_response(
    version: int,
    correlation_id: int,
    *,
    error: int,
    session_id: int,
    topics: list[tuple[bytes, list[PartitionData]]],
    endpoints: Sequence[NodeEndpoint] = (),
    throttle_ms: int = 0,
) -> list[BytesLike]:
    """The whole frame as buffers, size prefix first. `endpoints` are sent from v16 on."""
    return _finish(
        encode_fetch_response_in_steps(
            version,
            correlation_id,
            error=error,
            session_id=session_id,
            topics=topics,
            endpoints=endpoints,
            throttle_ms=throttle_ms,
        )
    )


def encode_fetch_response_in_steps(
    version: int,
    correlation_id: int,
    *,
    error: int,
    session_id: int,
    topics: list[tuple[bytes, list[PartitionData]]],
    endpoints: Sequence[NodeEndpoint] = (),
    throttle_ms: int = 0,
) -> _Steps[list[BytesLike]]:
    """The same in steps."""
    until_pause = _STEP
    flexible = version >= FLEXIBLE_FROM
    small = [INT32.pack(correlation_id), b"\x00" if flexible else b"", INT32.pack(throttle_ms)]
    if version >= SESSIONS_FROM:
        small += (INT16.pack(error), INT32.pack(session_id))
    small.append(_encode_count(len(topics), flexible))
    buffers: list[BytesLike] = [b""]
    for name, partitions in topics:
        if version < TOPIC_IDS_FROM:
            small.append(encode_uvarint(len(name) + 1) if flexible else INT16.pack(len(name)))
        small += (name, _encode_count(len(partitions), flexible))
        for data in partitions:
            small.append(_encode_partition(version, flexible, data))
            if data.records:
                # Only records stay separate buffers; everything between them is joined into one.
                buffers += (b"".join(small), data.records)
                small = []
            if flexible:
                small.append(_encode_partition_tags(data.diverging_epoch, data.current_leader))
            until_pause -= 1
            if not until_pause:
                until_pause = _STEP
                yield
        if flexible:
            small.append(b"\x00")
    if flexible:
        small.append(encode_leader_endpoints(endpoints if version >= _ENDPOINTS_FROM else ()))
    buffers.append(b"".join(small))
    size = INT32.pack(sum(map(len, buffers)))
    buffers[:2] = [size + buffers[1]]
    return buffers


def _encode_partition(version: int, flexible: bool, data: PartitionData) -> bytes:
    if version >= _LOG_START_FROM:
        head = _RESULT_V5.pack(
            data.partition, data.error, data.high_watermark, data.last_stable_offset, data.log_start_offset
        )
    else:
        head = _RESULT_V4.pack(data.partition, data.error, data.high_watermark, data.last_stable_offset)
    head += _encode_aborted(data.aborted, flexible)
    if version >= RACKS_FROM:
        preferred = data.preferred_read_replica
        head += _NO_REPLICA if preferred < 0 else INT32.pack(preferred)
    size = len(data.records)
    return head + (encode_uvarint(size + 1) if flexible else INT32.pack(size))


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
        tags.append(b"\x00\x0d" + _DIVERGING_EPOCH.pack(*diverging_epoch) + b"\x00")
    if current_leader is not None:
        tags.append(b"\x01\x09" + _LEADER.pack(*current_leader) + b"\x00")
    return bytes((len(tags),)) + b"".join(tags)


def _encode_count(count: int, flexible: bool) -> bytes:
    return encode_uvarint(count + 1) if flexible else INT32.pack(count)


REPLICA_FETCH_VERSION: Final = 17
#: A full request with this epoch begins a session.
INITIAL_SESSION_EPOCH: Final = 0
NO_SESSION_ID: Final = 0


_REPLICA_PARTITION = struct.Struct(">iiqiqiB")  # as FetchPartition, and no tagged fields
#: No rack, and one tagged field: number 1, of 13 bytes, with the replica's id and epoch and no tagged fields.
_REPLICA_STATE = struct.Struct(">BBBBiqB")
_RESPONSE_HEAD = struct.Struct(">ihi")  # throttle time, error, session id
_ABORTED_BYTES: Final = _ABORTED.size + 1
_RESULT_BYTES_MIN: Final = _RESULT_V5.size + 1 + INT32.size + 1 + 1

#: Partitions by topic id.
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
    """The body of the request, without its header."""
    asked = [_encode_replica_topic(topic_id, partitions) for topic_id, partitions in topics]
    dropped = [_encode_forgotten_topic(topic_id, indexes) for topic_id, indexes in forgotten]
    return b"".join(
        (
            _LIMITS_V7.pack(max_wait_ms, min_bytes, max_bytes, 0, session_id, session_epoch),
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
    """`body` is the response without its header. Raises MalformedFrame."""
    cursor = WireCursor(body)
    try:
        throttle_ms, error, session_id = cursor.unpack(_RESPONSE_HEAD)
        partitions: list[ReplicaPartitionData] = []
        for _ in range(cursor.count(_TOPIC_ID_BYTES + 2)):
            topic_id = bytes(cursor.take(_TOPIC_ID_BYTES))
            partitions += [
                _read_replica_partition(cursor, topic_id) for _ in range(cursor.count(_RESULT_BYTES_MIN))
            ]
            cursor.skip_tags()
        cursor.skip_tags()
        return ReplicaFetchResponse(throttle_ms, error, session_id, partitions)
    except (struct.error, IndexError):
        raise MalformedFrame("fetch response is cut short") from None


def _read_replica_partition(cursor: WireCursor, topic_id: bytes) -> ReplicaPartitionData:
    index, error, high_watermark, _, log_start = cursor.unpack(_RESULT_V5)
    for _ in range(cursor.count(_ABORTED_BYTES)):
        cursor.take(_ABORTED.size)
        cursor.skip_tags()
    cursor.take(INT32.size)  # the preferred read replica is for consumers
    records = cursor.take(max(cursor.uvarint() - 1, 0))
    if cursor.frame[cursor.position] == 0:  # nearly always: no tagged fields
        cursor.position += 1
        return ReplicaPartitionData(topic_id, index, error, high_watermark, log_start, records)
    diverging = leader = snapshot = None
    for tag, value in cursor.tags():
        if tag == _DIVERGING_TAG:
            diverging = _none_if_default(_DIVERGING_EPOCH.unpack_from(value))
        elif tag == _LEADER_TAG:
            leader = _none_if_default(_LEADER.unpack_from(value))
        elif tag == _SNAPSHOT_TAG:
            snapshot = _none_if_default(_SNAPSHOT_ID.unpack_from(value))
    return ReplicaPartitionData(
        topic_id, index, error, high_watermark, log_start, records, diverging, leader, snapshot
    )


def _none_if_default(pair: tuple[int, int]) -> tuple[int, int] | None:
    """A peer may write the default of a tagged field, -1 and -1, or omit the field."""
    return None if pair == (-1, -1) else pair


CONSUMER_VERSION_MIN: Final = 4
CONSUMER_VERSION_MAX: Final = 17
_NO_SESSION: Final = struct.pack(">ii", 0, -1)  # id, epoch


class ConsumerFetchResponse(NamedTuple):
    error: int
    #: Topic (a name, or an id from v13 on) and data.
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
    """The body of the request, without its header. `topic` is an id from v13 on, a name before."""
    flexible = version >= FLEXIBLE_FROM
    one, none, tags = (b"\x02", b"\x01", b"\x00") if flexible else (INT32.pack(1), INT32.pack(0), b"")
    if version < TOPIC_IDS_FROM:
        topic = (encode_uvarint(len(topic) + 1) if flexible else INT16.pack(len(topic))) + topic
    parts = [
        _NO_REPLICA if version < _REPLICA_STATE_FROM else b"",
        _LIMITS_V4.pack(wait_ms, bytes_min, bytes_max, isolation),
        _NO_SESSION if version >= SESSIONS_FROM else b"",
        one,
        topic,
        one,
        _encode_request_partition(version, asked),
        tags,
        tags,
    ]
    if version >= SESSIONS_FROM:
        parts.append(none)  # no forgotten topics
    if version >= RACKS_FROM:
        parts.append(b"\x01" if flexible else b"\x00\x00")
    parts.append(tags)
    return b"".join(parts)


def _encode_request_partition(version: int, asked: FetchPartition) -> bytes:
    if version >= FLEXIBLE_FROM:
        return _PARTITION_V12.pack(*asked)
    index, leader_epoch, offset, _, log_start, max_bytes = asked
    if version >= _LEADER_EPOCH_FROM:
        return _PARTITION_V9.pack(index, leader_epoch, offset, log_start, max_bytes)
    if version >= _LOG_START_FROM:
        return _PARTITION_V5.pack(index, offset, log_start, max_bytes)
    return _PARTITION_V4.pack(index, offset, max_bytes)


def parse_consumer_fetch_response(body: memoryview, version: int) -> ConsumerFetchResponse:
    """`body` is the response without its header. Raises MalformedFrame."""
    cursor = WireCursor(body, flexible=version >= FLEXIBLE_FROM)
    try:
        cursor.take(INT32.size)  # throttle time; the broker itself mutes the connection for that long
        error = 0
        if version >= SESSIONS_FROM:
            (error,) = cursor.unpack(INT16)
            cursor.take(INT32.size)  # session id; our consumers use no sessions
        partitions: list[tuple[bytes, PartitionData]] = []
        for _ in range(cursor.count(2)):
            topic = _read_topic(cursor, version)
            partitions += [(topic, _read_partition_data(cursor, version)) for _ in range(cursor.count(2))]
            cursor.skip_tags()
        cursor.skip_tags()
        return ConsumerFetchResponse(error, partitions)
    except (struct.error, IndexError):
        raise MalformedFrame("fetch response is cut short") from None


def _read_partition_data(cursor: WireCursor, version: int) -> PartitionData:
    log_start = -1
    if version >= _LOG_START_FROM:
        index, error, high_watermark, last_stable, log_start = cursor.unpack(_RESULT_V5)
    else:
        index, error, high_watermark, last_stable = cursor.unpack(_RESULT_V4)
    aborted = []
    for _ in range(cursor.count(2)):
        aborted.append(cursor.unpack(_ABORTED))
        cursor.skip_tags()
    if version >= RACKS_FROM:
        cursor.take(INT32.size)  # the preferred read replica is for consumers that send their rack
    records = cursor.take(max(cursor.length(), 0))
    leader = None
    if cursor.flexible:
        for tag, value in cursor.tags():
            if tag == _LEADER_TAG:
                leader = _LEADER.unpack_from(value)
    return PartitionData(
        index,
        error,
        high_watermark,
        last_stable,
        log_start,
        records,
        tuple(aborted),
        current_leader=leader,
    )
