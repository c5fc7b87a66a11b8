"""Walk over the batches of a log file, header by header, without holding more than a chunk of it."""

import os
from collections.abc import Callable, Iterator
from typing import Final

from penstock.protocol.checksum import crc32c
from penstock.protocol.records import CRC_FROM, HEADER_BYTES, BatchHeader, read_header

CHUNK_BYTES: Final = 1 << 20
#: Enough for the batches between two index entries, as a rule.
NEAR_BYTES: Final = 8192

ReadAt = Callable[[int, int, int], bytes | bytearray]


def pread_at(fd: int, size: int, position: int) -> bytes:
    return os.pread(fd, size, position)


def walk(
    fd: int, position: int, end: int, *, chunk_bytes: int = CHUNK_BYTES, read_at: ReadAt = pread_at
) -> Iterator[tuple[int, BatchHeader]]:
    """Position and header of each whole batch up to `end`. Stops early at bytes that are no batch."""
    chunk: bytes | bytearray = b""
    chunk_start = position
    while position + HEADER_BYTES <= end:
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
