"""Primitives of the wire format. Every read is bounded by the buffer.

Records carry zigzag varints: at most five bytes for an int, ten for a long.
"""

from penstock.protocol.errors import ApiError, ErrorCode

# Groups of seven bits: five hold 32 bits, ten hold 64; a longer run is damage, not a number.
_INT_GROUPS_MAX = 5
_LONG_GROUPS_MAX = 10


#: Those of one byte, by their value: negative ones count from the end.
_ONE_BYTE_VARINTS = tuple(bytes(((value << 1) ^ (value >> 63),)) for value in (*range(64), *range(-64, 0)))


def encode_varint(value: int) -> bytes:
    """Zigzag, so that small negative numbers stay short. Takes what fits in 64 bits."""
    if -64 <= value < 64:
        return _ONE_BYTE_VARINTS[value]
    assert -(1 << 63) <= value < 1 << 63
    value = (value << 1) ^ (value >> 63)
    out = bytearray()
    while value > 0x7F:
        out.append((value & 0x7F) | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def read_varint(
    data: bytes | memoryview, position: int, groups_max: int = _INT_GROUPS_MAX
) -> tuple[int, int]:
    """A length, count or delta of at most five bytes. Returns (value, next position)."""
    try:
        value = data[position]
        if value < 0x80:  # one or two bytes is what nearly all take, and a scan reads six for every record
            return (value >> 1) ^ -(value & 1), position + 1
        byte = data[position + 1]
        value = (value & 0x7F) | (byte & 0x7F) << 7
        if byte < 0x80:
            return (value >> 1) ^ -(value & 1), position + 2
        return _read_rest(data, position + 2, value, groups_max - 2)
    except IndexError:
        raise _malformed_varint() from None


def read_varlong(data: bytes | memoryview, position: int) -> tuple[int, int]:
    """A timestamp delta of at most ten bytes. Returns (value, next position)."""
    return read_varint(data, position, _LONG_GROUPS_MAX)


def _read_rest(data: bytes | memoryview, position: int, value: int, groups_max: int) -> tuple[int, int]:
    shift = 14
    for index in range(position, position + groups_max):
        byte = data[index]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return (value >> 1) ^ -(value & 1), index + 1
        shift += 7
    raise _malformed_varint()


def _malformed_varint() -> ApiError:
    return ApiError(ErrorCode.corrupt_message, "record varint is cut short or too long")
