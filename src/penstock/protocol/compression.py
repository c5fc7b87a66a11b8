"""The compression codecs of record batches. Each decompresses into a bounded buffer."""

import mmap
import struct
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Any, Final

import cramjam

from penstock.protocol.errors import ApiError, ErrorCode

BytesLike = bytes | bytearray | memoryview


class Codec(IntEnum):
    """Bits 0-2 of a batch's attributes."""

    NONE = 0
    GZIP = 1
    SNAPPY = 2
    LZ4 = 3
    ZSTD = 4


# Java and most Python clients frame snappy blocks in xerial's format; librdkafka sends one bare block.
_XERIAL_MAGIC: Final = b"\x82SNAPPY\x00"
_XERIAL_HEADER: Final = _XERIAL_MAGIC + struct.pack(">ii", 1, 1)
_XERIAL_BLOCK_BYTES: Final = 32 * 1024
_ZSTD_MAGIC: Final = 0xFD2FB528
_ZSTD_BLOCK_BYTES: Final = 128 * 1024
_LZ4_MAGIC: Final = 0x184D2204
_DEFLATE_RATIO_MAX: Final = 1032
#: How many block headers are read to find out the decompressed size; that takes a fraction of a millisecond.
_BLOCKS_MAX: Final = 512
#: Buffers of at least this size are mapped memory.
_MAPPED_BYTES_MIN: Final = 256 * 1024


def compress(codec: Codec, data: BytesLike) -> bytes:
    match codec:
        case Codec.NONE:
            return bytes(data)
        case Codec.GZIP:
            return bytes(cramjam.gzip.compress(data))
        case Codec.SNAPPY:
            return _xerial_compress(memoryview(data))
        case Codec.LZ4:
            return _lz4_compress(data)
        case Codec.ZSTD:
            return bytes(cramjam.zstd.compress(data))


def decompress(codec: Codec, data: BytesLike, max_bytes: int) -> bytes | memoryview:
    """Raises CORRUPT_MESSAGE for damaged data and for more than `max_bytes` of output.

    Data whose headers announce more than `max_bytes` is refused before it is decompressed.
    """
    if codec is Codec.NONE:
        return memoryview(data)
    announced = announced_bytes(codec, data, max_bytes)
    if announced > max_bytes:
        raise _too_large(max_bytes)
    match codec:
        case Codec.GZIP:
            return _bounded(cramjam.gzip.decompress_into, data, announced, max_bytes)
        case Codec.SNAPPY:
            return _snappy_decompress(memoryview(data), announced)
        case Codec.LZ4:
            return _bounded(cramjam.lz4.decompress_into, data, announced, max_bytes)
        case Codec.ZSTD:
            return _bounded(cramjam.zstd.decompress_into, data, announced, max_bytes)


def _bounded(
    decompress_into: Callable[[Any, Any], int], data: BytesLike, announced: int, max_bytes: int
) -> memoryview:
    """Decompresses into a buffer of the announced size; if that is too small, into one of `max_bytes`."""
    for size in dict.fromkeys((announced, max_bytes)):
        output = _buffer(size)
        try:
            return output[: decompress_into(data, output)]
        except cramjam.DecompressionError as error:
            if "whole buffer" not in str(error):
                raise ApiError(ErrorCode.corrupt_message, f"cannot decompress: {error}") from None
    raise _too_large(max_bytes)


def _buffer(size: int) -> memoryview:
    """The system clears mapped memory page by page on first use; clearing it here would block all threads."""
    return memoryview(bytearray(size) if size < _MAPPED_BYTES_MIN else mmap.mmap(-1, size))


# -- the decompressed size, from the headers ----------------------------------------------------------------


def announced_bytes(codec: Codec, data: BytesLike, max_bytes: int) -> int:
    """The decompressed size according to the headers of the data, without decompressing it.

    Exact if a header has the size, otherwise the most that the blocks can hold. The result exceeds `max_bytes` only if
    the headers announce that much. It is `max_bytes` if they say nothing, or if that takes too many blocks to find out.
    The decoder detects wrong headers.
    """
    view = memoryview(data)
    try:
        match codec:
            case Codec.NONE:
                return len(view)
            case Codec.GZIP:
                return _gzip_announced(view, max_bytes)
            case Codec.SNAPPY:
                return _snappy_announced(view, max_bytes)
            case Codec.LZ4:
                return _lz4_announced(view, max_bytes)
            case Codec.ZSTD:
                return _zstd_announced(view, max_bytes)
    except (struct.error, IndexError):
        return max_bytes  # cut short; the decoder reports that


def _gzip_announced(data: memoryview, max_bytes: int) -> int:
    """The last four bytes are the size modulo 2^32; deflate expands a byte to at most 1032."""
    (size,) = struct.unpack_from("<I", data, len(data) - 4)
    is_possible: bool = size <= _DEFLATE_RATIO_MAX * len(data)
    return size if is_possible else max_bytes


def _zstd_announced(data: memoryview, max_bytes: int) -> int:
    """RFC 8878: the frame header may have the size; each block expands to at most 128 KiB."""
    magic, descriptor = struct.unpack_from("<IB", data)
    if magic != _ZSTD_MAGIC:
        return max_bytes
    size_flag, is_single_segment = descriptor >> 6, descriptor >> 5 & 1
    position = 5 + (not is_single_segment) + (0, 1, 2, 4)[descriptor & 3]
    if size_flag or is_single_segment:
        layout = ("<B", "<H", "<I", "<Q")[size_flag]
        (size,) = struct.unpack_from(layout, data, position)
        return int(size) + (256 if size_flag == 1 else 0)
    total = 0
    for _ in range(_BLOCKS_MAX):
        header = int.from_bytes(data[position : position + 3], "little")
        is_last, kind, length = header & 1, header >> 1 & 3, header >> 3
        total += length if kind < 2 else _ZSTD_BLOCK_BYTES
        position += 3 + (1 if kind == 1 else length)
        if is_last:
            # Bytes after the frame and its checksum are another frame, whose size is unknown.
            is_all = position + 4 * (descriptor >> 2 & 1) == len(data)
            return min(total, max_bytes) if is_all else max_bytes
    return max_bytes


def _lz4_announced(data: memoryview, max_bytes: int) -> int:
    """The frame header has the size, or else the largest size of a block."""
    magic, flags, block = struct.unpack_from("<IBB", data)
    if magic != _LZ4_MAGIC:
        return max_bytes
    if flags & 8:
        return int(struct.unpack_from("<Q", data, 6)[0])
    block_bytes = 1 << (8 + 2 * (block >> 4 & 7))
    position, total = 7 + 4 * (flags & 1), 0
    for _ in range(_BLOCKS_MAX):
        (length,) = struct.unpack_from("<I", data, position)
        if length == 0 or total >= max_bytes:
            return min(total, max_bytes)
        total += block_bytes
        position += 4 + (length & 0x7FFF_FFFF) + 4 * (flags >> 4 & 1)
    return max_bytes


def _snappy_announced(data: memoryview, max_bytes: int) -> int:
    """Each block begins with its size."""
    if bytes(data[:8]) != _XERIAL_MAGIC:
        return _snappy_length(data)
    total = 0
    for count, block in enumerate(_xerial_blocks(data)):
        total += _snappy_length(block)
        if total > max_bytes:
            return total
        if count == _BLOCKS_MAX:
            return max_bytes
    return total


class DecompressedTooLarge(ApiError):
    """The data decompresses to more than the caller allows."""


def _too_large(max_bytes: int) -> ApiError:
    return DecompressedTooLarge(
        ErrorCode.corrupt_message, f"batch decompresses to more than {max_bytes} bytes"
    )


def _lz4_compress(data: BytesLike) -> bytes:
    """Java clients cannot read frames of linked blocks, which the one-shot function would write."""
    compressor = cramjam.lz4.Compressor(content_checksum=False, block_linked=False)
    compressor.compress(bytes(data))
    return bytes(compressor.finish())


def _xerial_compress(data: memoryview) -> bytes:
    parts = [_XERIAL_HEADER]
    for start in range(0, len(data), _XERIAL_BLOCK_BYTES):
        block = bytes(cramjam.snappy.compress_raw(data[start : start + _XERIAL_BLOCK_BYTES]))
        parts += (struct.pack(">i", len(block)), block)
    return b"".join(parts)


def _snappy_decompress(data: memoryview, size: int) -> memoryview:
    blocks = _xerial_blocks(data) if bytes(data[:8]) == _XERIAL_MAGIC else (data,)
    output, position = _buffer(size), 0
    for block in blocks:
        if position + _snappy_length(block) > len(output):
            raise _too_large(len(output))
        try:
            position += cramjam.snappy.decompress_raw_into(block, output[position:])
        except cramjam.DecompressionError as error:
            raise ApiError(ErrorCode.corrupt_message, f"cannot decompress: {error}") from None
    return output[:position]


def _xerial_blocks(data: memoryview) -> Iterator[memoryview]:
    position = len(_XERIAL_HEADER)
    while position < len(data):
        if position + 4 > len(data):
            raise ApiError(ErrorCode.corrupt_message, "snappy frame is cut short")
        (length,) = struct.unpack_from(">i", data, position)
        position += 4
        if length < 0 or position + length > len(data):
            raise ApiError(ErrorCode.corrupt_message, f"snappy block of impossible length {length}")
        yield data[position : position + length]
        position += length


def _snappy_length(block: memoryview) -> int:
    try:
        return int(cramjam.snappy.decompress_raw_len(block))
    except cramjam.DecompressionError as error:
        raise ApiError(ErrorCode.corrupt_message, f"cannot decompress: {error}") from None
