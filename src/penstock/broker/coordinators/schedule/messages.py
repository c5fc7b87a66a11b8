"""What movers ask of shards on other nodes: an API of our own, which clients are not told of."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Final, NamedTuple
from uuid import UUID

from penstock.protocol.compression import Codec
from penstock.protocol.errors import ErrorCode, MalformedFrame
from penstock.scheduling.held import open_block
from penstock.scheduling.moving import Chunk
from penstock.scheduling.records import Position, Source

_ASK: Final = struct.Struct(">b16siiqiI")  # what, source, position, count of chunks
_CHUNK: Final = struct.Struct(">biqiII")  # codec, position, count of records, count of blocks
_SIZE: Final = struct.Struct(">I")
_ANSWER: Final = struct.Struct(">hbiqi")  # error, whether there is a position, position
_NO_POSITION: Final = Position(-1, -1, 0)


class What(IntEnum):
    POSITION = 0  # where is the source?
    REGISTER = 1  # begin at this position, unless the source is known
    MOVE = 2  # from this position on, take over these chunks


class Ask(NamedTuple):
    what: What
    source: Source
    position: Position = _NO_POSITION
    chunks: Sequence[Chunk] = ()


class Answer(NamedTuple):
    error: ErrorCode
    position: Position | None = None


def pack_ask(ask: Ask) -> bytes:
    source = ask.source
    parts = [_ASK.pack(ask.what, source.topic_id.bytes, source.partition, *ask.position, len(ask.chunks))]
    for chunk in ask.chunks:
        parts.append(_CHUNK.pack(chunk.codec, *chunk.position, chunk.record_count, len(chunk.blocks)))
        for block in chunk.blocks:
            parts += (_SIZE.pack(len(block)), block)
    return b"".join(parts)


def read_ask(frame: memoryview, position: int) -> Ask:
    """Raises MalformedFrame."""
    try:
        what, topic_id, partition, *at, count = _ASK.unpack_from(frame, position)
        position += _ASK.size
        chunks: list[Chunk] = []
        for _ in range(count):
            chunk, position = _read_chunk(frame, position)
            chunks.append(chunk)
        return Ask(What(what), Source(UUID(bytes=bytes(topic_id)), partition), Position(*at), chunks)
    except (struct.error, ValueError) as error:
        raise MalformedFrame(f"schedule request: {error}") from None


def _read_chunk(frame: memoryview, position: int) -> tuple[Chunk, int]:
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
    return Chunk(Codec(codec), tuple(blocks), record_count, Position(*at)), position


def _check_blocks(blocks: Sequence[bytes], record_count: int) -> None:
    """What is stored is read by every leader to come. Raises ValueError."""
    times = [open_block(block).times for block in blocks]
    if sum(map(len, times)) != record_count or not all(times) or any(min(some) < 0 for some in times):
        raise ValueError(f"blocks that do not hold {record_count} records with their times")


def pack_answer(answer: Answer) -> bytes:
    has_position = answer.position is not None
    return _ANSWER.pack(answer.error.value, has_position, *(answer.position or _NO_POSITION))


def read_answer(frame: memoryview, position: int) -> Answer:
    """Raises MalformedFrame."""
    try:
        error, has_position, *at = _ANSWER.unpack_from(frame, position)
        return Answer(ErrorCode(error), Position(*at) if has_position else None)
    except (struct.error, ValueError) as error_found:
        raise MalformedFrame(f"schedule answer: {error_found}") from None
