"""The Schedule API (key 30000): requests of movers to schedule shards on other brokers.

It is our own API, and clients do not see it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Final, NamedTuple
from uuid import UUID

from penstock.protocol.compression import Codec
from penstock.protocol.errors import ErrorCode, MalformedFrame
from penstock.scheduling.schedule_log import ScheduleSource, SourcePosition, open_block
from penstock.scheduling.schedule_shard import HeldChunk

_REQUEST: Final = struct.Struct(">b16siiqiI")  # operation, source, position, number of chunks
_CHUNK: Final = struct.Struct(">biqiII")  # codec, position, number of records, number of blocks
_SIZE: Final = struct.Struct(">I")
_RESPONSE: Final = struct.Struct(">hbiqi")  # error, whether there is a position, position
_NO_POSITION: Final = SourcePosition(-1, -1, 0)


class ScheduleOperation(IntEnum):
    POSITION = 0  # return the position of the source
    REGISTER = 1  # start the source at this position, unless it is known
    MOVE = 2  # store these chunks if the source is at this position


class ScheduleRequest(NamedTuple):
    what: ScheduleOperation
    source: ScheduleSource
    position: SourcePosition = _NO_POSITION
    chunks: Sequence[HeldChunk] = ()


class ScheduleResponse(NamedTuple):
    error: ErrorCode
    position: SourcePosition | None = None


def encode_request(ask: ScheduleRequest) -> bytes:
    source = ask.source
    parts = [_REQUEST.pack(ask.what, source.topic_id.bytes, source.partition, *ask.position, len(ask.chunks))]
    for chunk in ask.chunks:
        parts.append(_CHUNK.pack(chunk.codec, *chunk.position, chunk.record_count, len(chunk.blocks)))
        for block in chunk.blocks:
            parts += (_SIZE.pack(len(block)), block)
    return b"".join(parts)


def decode_request(frame: memoryview, position: int) -> ScheduleRequest:
    """Raises MalformedFrame."""
    try:
        what, topic_id, partition, *at, count = _REQUEST.unpack_from(frame, position)
        position += _REQUEST.size
        chunks: list[HeldChunk] = []
        for _ in range(count):
            chunk, position = _decode_chunk(frame, position)
            chunks.append(chunk)
        return ScheduleRequest(
            ScheduleOperation(what),
            ScheduleSource(UUID(bytes=bytes(topic_id)), partition),
            SourcePosition(*at),
            chunks,
        )
    except (struct.error, ValueError) as error:
        raise MalformedFrame(f"schedule request: {error}") from None


def _decode_chunk(frame: memoryview, position: int) -> tuple[HeldChunk, int]:
    codec, *at, record_count, block_count = _CHUNK.unpack_from(frame, position)
    position += _CHUNK.size
    blocks = []
    for _ in range(block_count):
        (size,) = _SIZE.unpack_from(frame, position)
        position += _SIZE.size
        if size > len(frame) - position:
            raise ValueError(f"block of {size} bytes")
        blocks.append(bytes(frame[position : position + size]))
        position += size
    _check_blocks(blocks, record_count)
    return HeldChunk(Codec(codec), tuple(blocks), record_count, SourcePosition(*at)), position


def _check_blocks(blocks: Sequence[bytes], record_count: int) -> None:
    """Reject invalid blocks, because every later leader has to read what is stored. Raises ValueError."""
    times = [open_block(block).times for block in blocks]
    if sum(map(len, times)) != record_count or not all(times) or any(min(some) < 0 for some in times):
        raise ValueError(f"blocks that do not hold {record_count} records with their times")


def encode_response(answer: ScheduleResponse) -> bytes:
    has_position = answer.position is not None
    return _RESPONSE.pack(answer.error.value, has_position, *(answer.position or _NO_POSITION))


def decode_response(frame: memoryview, position: int) -> ScheduleResponse:
    """Raises MalformedFrame."""
    try:
        error, has_position, *at = _RESPONSE.unpack_from(frame, position)
        return ScheduleResponse(ErrorCode(error), SourcePosition(*at) if has_position else None)
    except (struct.error, ValueError) as error_found:
        raise MalformedFrame(f"schedule answer: {error_found}") from None
