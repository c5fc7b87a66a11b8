"""Zigzag varints as records carry them, with every read bounded by the buffer."""

from penstock.protocol.errors import ApiError, ErrorCode

# Ten groups of seven bits hold 64 bits; a longer run is damage, not a number.
_GROUPS_MAX = 10


def encode_varint(value: int) -> bytes:
    """Zigzag, so that small negative numbers stay short."""
    value = (value << 1) ^ (value >> 63)
    out = bytearray()
    while value > 0x7F:
        out.append((value & 0x7F) | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def read_varint(data: bytes | memoryview, position: int) -> tuple[int, int]:
    """Returns (value, next position)."""
    value = shift = 0
    try:
        for index in range(position, position + _GROUPS_MAX):
            byte = data[index]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return (value >> 1) ^ -(value & 1), index + 1
            shift += 7
    except IndexError:
        pass
    raise ApiError(ErrorCode.corrupt_message, "record varint is cut short or too long")
