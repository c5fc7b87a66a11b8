"""Frames for the raw load: encoded once by kio, then only patched and resent.

A produce frame differs between two sends in its correlation id alone; an incremental fetch differs in its
session, its epoch and its offsets. Their responses have a fixed shape as long as nothing went wrong.
"""

import io
import struct
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple
from uuid import UUID

from kio.schema.fetch.v16 import request as fetch
from kio.schema.produce.v11 import request as produce
from kio.schema.request_header.v2.header import RequestHeader
from kio.serial import entity_writer

CLIENT_ID = "bench"
ACKS_ALL = -1
_CORRELATION_AT = 8
_FETCH_BODY_AT = 4 + 2 + 2 + 4 + 2 + len(CLIENT_ID) + 1
_SESSION_AT = _FETCH_BODY_AT + 4 + 4 + 4 + 1
#: After the session: its id and epoch, one topic (count, uuid); then come the partitions behind their count.
_PARTITION_COUNT_AT = _SESSION_AT + 4 + 4 + 1 + 16
#: As many as a count of two bytes can tell.
_PARTITIONS_MAX = 2**14 - 2
_PARTITION_BYTES = 4 + 4 + 8 + 4 + 8 + 4 + 1
_OFFSET_IN_PARTITION = 4 + 4


def request_frame(request: Any, correlation_id: int = 0) -> bytes:
    """A whole frame for any kio request, size included."""
    header_class = request.__header_schema__
    header = header_class(
        request_api_key=request.__api_key__,
        request_api_version=request.__version__,
        correlation_id=correlation_id,
        client_id=CLIENT_ID,
    )
    body = io.BytesIO()
    entity_writer(header_class)(body, header)
    entity_writer(type(request))(body, request)
    return struct.pack(">i", body.tell()) + body.getvalue()


def patch_correlation_id(frame: bytearray, correlation_id: int) -> None:
    struct.pack_into(">i", frame, _CORRELATION_AT, correlation_id)


def produce_frame(topic: str, partition: int, batch: bytes) -> bytes:
    part = produce.PartitionProduceData(index=partition, records=batch)
    data = produce.TopicProduceData(name=topic, partition_data=(part,))
    return request_frame(
        produce.ProduceRequest(
            transactional_id=None, acks=ACKS_ALL, timeout=timedelta(seconds=30), topic_data=(data,)
        )
    )


class Ring:
    """The frames of one connection, laid out twice in a row so that any run of them is one slice.

    Slot i has correlation id i and goes to partition i modulo their number; there are `window` slots or more.
    """

    def __init__(self, topic: str, partitions: Sequence[int], batch: bytes, window: int) -> None:
        self.slots = len(partitions) * -(-window // len(partitions))
        frames = [
            bytearray(produce_frame(topic, partitions[i % len(partitions)], batch)) for i in range(self.slots)
        ]
        for slot, frame in enumerate(frames):
            patch_correlation_id(frame, slot)
        self.frame_bytes = len(frames[0])
        self._twice = memoryview(b"".join(frames * 2))
        self._next = 0

    def take(self, count: int) -> memoryview:
        """The next `count` frames, at most as many as there are slots."""
        assert count <= self.slots, "a run longer than the ring"
        start = self._next * self.frame_bytes
        self._next = (self._next + count) % self.slots
        return self._twice[start : start + count * self.frame_bytes]


class Ack(NamedTuple):
    """A produce response for one partition, with the fields that a run of them shares left in."""

    size: int
    correlation_id: int
    header_tags: int
    topics: int
    name: bytes
    partitions: int
    partition: int
    error_code: int
    base_offset: int
    append_time: int
    log_start_offset: int
    record_errors: int
    error_message: int
    partition_tags: int
    topic_tags: int
    throttle_ms: int
    body_tags: int


def ack_struct(topic: str) -> struct.Struct:
    """The layout of a successful produce response (v11) to a request for one partition of `topic`."""
    return struct.Struct(f">iibb{1 + len(topic)}sbihqqqbbbbib")


def fetch_frame(
    topic_id: UUID, partitions: Sequence[int], *, partition_bytes_max: int, wait_ms: int
) -> bytearray:
    """The first fetch of a session (id 0, epoch 0); `patch_fetch` turns it into every later one."""
    assert len(partitions) <= _PARTITIONS_MAX, "the partition count must stay two bytes"
    wanted = tuple(
        fetch.FetchPartition(partition=p, fetch_offset=0, partition_max_bytes=partition_bytes_max)
        for p in partitions
    )
    frame = request_frame(
        fetch.FetchRequest(
            max_wait=timedelta(milliseconds=wait_ms),
            min_bytes=1,
            max_bytes=50 * 2**20,
            session_id=0,
            session_epoch=0,
            topics=(fetch.FetchTopic(topic_id=topic_id, partitions=wanted),),
            forgotten_topics_data=(),
        )
    )
    return bytearray(frame)


def patch_fetch(frame: bytearray, session_id: int, session_epoch: int, offsets: Sequence[int]) -> None:
    struct.pack_into(">ii", frame, _SESSION_AT, session_id, session_epoch)
    at = _PARTITION_COUNT_AT + (1 if len(offsets) < 127 else 2) + _OFFSET_IN_PARTITION
    for offset in offsets:
        struct.pack_into(">q", frame, at, offset)
        at += _PARTITION_BYTES


class FetchedPartition(NamedTuple):
    partition: int
    error_code: int
    high_watermark: int
    records: memoryview


class Fetched(NamedTuple):
    error_code: int
    session_id: int
    partitions: list[FetchedPartition]


_FETCH_HEAD = struct.Struct(">ibihi")
_PARTITION_HEAD = struct.Struct(">ihqqq")


def read_fetch_response(frame: memoryview) -> Fetched:
    """A fetch response (v16) without its size field; records are views into `frame`."""
    _, _, _, error_code, session_id = _FETCH_HEAD.unpack_from(frame)
    topics, at = read_count(frame, _FETCH_HEAD.size)
    partitions: list[FetchedPartition] = []
    for _ in range(topics):
        count, at = read_count(frame, at + 16)
        for _ in range(count):
            partition, at = _read_partition(frame, at)
            partitions.append(partition)
        at = skip_tags(frame, at)
    return Fetched(error_code, session_id, partitions)


def _read_partition(frame: memoryview, at: int) -> tuple[FetchedPartition, int]:
    index, error_code, high_watermark, _, _ = _PARTITION_HEAD.unpack_from(frame, at)
    aborted, at = read_count(frame, at + _PARTITION_HEAD.size)
    assert aborted == 0, "the load writes no transactions"
    size, at = read_count(frame, at + 4)
    records = frame[at : at + size]
    return FetchedPartition(index, error_code, high_watermark, records), skip_tags(frame, at + size)


def read_count(frame: memoryview, at: int) -> tuple[int, int]:
    """A compact length: one more than the number it stands for, null being the same as none."""
    value, at = _read_unsigned(frame, at)
    return max(value - 1, 0), at


def _read_unsigned(frame: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = frame[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def skip_tags(frame: memoryview, at: int) -> int:
    count, at = _read_unsigned(frame, at)
    for _ in range(count):
        _, at = _read_unsigned(frame, at)
        size, at = _read_unsigned(frame, at)
        at += size
    return at


assert RequestHeader is fetch.FetchRequest.__header_schema__, "the offsets above are for header version 2"
