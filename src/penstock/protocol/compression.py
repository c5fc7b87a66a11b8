"""The four codecs of the record batch, each bounded when it decompresses."""

import struct
from collections.abc import Callable
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
    """Raises CORRUPT_MESSAGE for damaged data and for more than `max_bytes` of output."""
    match codec:
        case Codec.NONE:
            return memoryview(data)
        case Codec.GZIP:
            return _bounded(cramjam.gzip.decompress_into, data, max_bytes)
        case Codec.SNAPPY:
            return _snappy_decompress(memoryview(data), max_bytes)
        case Codec.LZ4:
            return _bounded(cramjam.lz4.decompress_into, data, max_bytes)
        case Codec.ZSTD:
            return _bounded(cramjam.zstd.decompress_into, data, max_bytes)


def _bounded(decompress_into: Callable[[Any, Any], int], data: BytesLike, max_bytes: int) -> memoryview:
    """Decompress into a buffer that doubles up to the bound, so that a bomb costs no more than the bound."""
    size = min(max(len(data) * 4, 4096), max_bytes)
    while True:
        output = bytearray(size)
        try:
            written = decompress_into(data, output)
        except cramjam.DecompressionError as error:
            if "whole buffer" not in str(error):
                raise ApiError(ErrorCode.corrupt_message, f"cannot decompress: {error}") from None
            if size >= max_bytes:
                raise _too_large(max_bytes) from None
            size = min(size * 4, max_bytes)
        else:
            return memoryview(output)[:written]


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(ErrorCode.corrupt_message, f"batch decompresses to more than {max_bytes} bytes")


def _lz4_compress(data: BytesLike) -> bytes:
    """Java clients read no frames of linked blocks, which the one-shot function would make."""
    compressor = cramjam.lz4.Compressor(content_checksum=False, block_linked=False)
    compressor.compress(bytes(data))
    return bytes(compressor.finish())


def _xerial_compress(data: memoryview) -> bytes:
    parts = [_XERIAL_HEADER]
    for start in range(0, len(data), _XERIAL_BLOCK_BYTES):
        block = bytes(cramjam.snappy.compress_raw(data[start : start + _XERIAL_BLOCK_BYTES]))
        parts += (struct.pack(">i", len(block)), block)
    return b"".join(parts)


def _snappy_decompress(data: memoryview, max_bytes: int) -> bytes:
    if bytes(data[:8]) != _XERIAL_MAGIC:
        return _snappy_block(data, max_bytes)
    parts = []
    position, left = len(_XERIAL_HEADER), max_bytes
    while position < len(data):
        if position + 4 > len(data):
            raise ApiError(ErrorCode.corrupt_message, "snappy frame is cut short")
        (length,) = struct.unpack_from(">i", data, position)
        position += 4
        if length < 0 or position + length > len(data):
            raise ApiError(ErrorCode.corrupt_message, f"snappy block of impossible length {length}")
        parts.append(_snappy_block(data[position : position + length], left))
        left -= len(parts[-1])
        position += length
    return b"".join(parts)


def _snappy_block(block: memoryview, max_bytes: int) -> bytes:
    try:
        if cramjam.snappy.decompress_raw_len(block) > max_bytes:
            raise _too_large(max_bytes)
        return bytes(cramjam.snappy.decompress_raw(block))
    except cramjam.DecompressionError as error:
        raise ApiError(ErrorCode.corrupt_message, f"cannot decompress: {error}") from None
