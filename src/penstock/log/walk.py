"""Walk over the batches of a log file, header by header, without holding more than a chunk of it."""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from penstock.protocol.checksum import crc32c
from penstock.protocol.records import CRC_FROM, HEADER_BYTES, BatchHeader, read_header

CHUNK_BYTES: Final = 1 << 20
#: Enough for the batches between two index entries, as a rule.
NEAR_BYTES: Final = 8192

ReadAt = Callable[[int, int, int], bytes | bytearray]


class Hole(NamedTuple):
    """Damaged bytes of a segment, and the offsets that were in them."""

    position: int
    end: int
    offset: int
    end_offset: int


def pread_at(fd: int, size: int, position: int) -> bytes:
    return os.pread(fd, size, position)


def past_holes(position: int, holes: Sequence[Hole]) -> int:
    """The position itself, or the end of the holes that begin there."""
    for hole in holes:
        if hole.position <= position < hole.end:
            position = hole.end
    return position


def walk(
    fd: int,
    position: int,
    end: int,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    read_at: ReadAt = pread_at,
    holes: Sequence[Hole] = (),
) -> Iterator[tuple[int, BatchHeader]]:
    """Position and header of each whole batch up to `end`. Stops early at bytes that are no batch.

    Holes, in ascending order, are passed over.
    """
    chunk: bytes | bytearray = b""
    chunk_start = position
    while True:
        if holes:
            position = past_holes(position, holes)
        if position + HEADER_BYTES > end:
            return
        if position + HEADER_BYTES > chunk_start + len(chunk):
            chunk, chunk_start = read_at(fd, min(chunk_bytes, end - position), position), position
            if len(chunk) < HEADER_BYTES:
                return
        header = read_header(chunk, position - chunk_start)
        if header.magic != 2 or header.size < HEADER_BYTES or position + header.size > end:
            return
        yield position, header
        position += header.size


def checksum_holds(fd: int, position: int, header: BatchHeader) -> bool:
    """Whether the batch at a position is what was written; read in pieces, as its length may lie."""
    crc, at, end = 0, position + CRC_FROM, position + header.size
    while at < end:
        piece = os.pread(fd, min(CHUNK_BYTES, end - at), at)
        if not piece:
            return False
        crc = crc32c(piece, crc)
        at += len(piece)
    return crc == header.crc


def read_batch(fd: int, position: int, header: BatchHeader) -> bytes:
    """The whole batch. Raises OSError when the file is shorter than its header says."""
    data = os.pread(fd, header.size, position)
    if len(data) != header.size:
        raise OSError(f"batch at {position} is cut short: {len(data)} of {header.size} bytes")
    return data
