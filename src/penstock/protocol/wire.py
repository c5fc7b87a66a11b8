"""Primitives of the wire format, and the cursor that reads messages which are packed by hand.

Messages use unsigned varints for lengths, counts and tags. Records use zigzag varints: at most five bytes for an int,
ten for a long. Every read is bounded by the buffer.
"""

import struct
from collections.abc import Sequence
from typing import Any, Final

from penstock.protocol.errors import ApiError, ErrorCode, MalformedFrame

#: The most tagged fields that one struct may have.
TAGS_MAX: Final = 1_000
_UVARINT_BYTES_MAX: Final = 5
# Groups of seven bits: five hold 32 bits, ten hold 64. A longer varint is damaged.
_INT_GROUPS_MAX = 5
_LONG_GROUPS_MAX = 10

INT16: Final = struct.Struct(">h")
INT32: Final = struct.Struct(">i")

#: The varints of one byte by value; negative values count from the end.
_ONE_BYTE_VARINTS = tuple(bytes(((value << 1) ^ (value >> 63),)) for value in (*range(64), *range(-64, 0)))


def encode_varint(value: int) -> bytes:
    """Zigzag, so that small negative numbers stay short. The value must fit in 64 bits."""
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
        if value < 0x80:  # nearly all take one or two bytes, and a scan reads six for every record
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


def encode_uvarint(value: int) -> bytes:
    if value < 0x80:
        return bytes((value,))
    out = bytearray()
    while value >= 0x80:
        out.append((value & 0x7F) | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def read_uvarint(data: memoryview, position: int, end: int) -> tuple[int, int]:
    """Returns (value, next position). Raises MalformedFrame."""
    if position < end and data[position] < 0x80:  # nearly always
        return data[position], position + 1
    value = shift = 0
    for index in range(position, min(position + _UVARINT_BYTES_MAX, end)):
        byte = data[index]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, index + 1
        shift += 7
    raise MalformedFrame("varint is cut short or too long")


def skip_tags(frame: memoryview, position: int, end: int) -> int:
    """Returns the position after the tagged fields of a struct."""
    if frame[position] == 0:
        return position + 1
    count, position = read_uvarint(frame, position, end)
    if count > TAGS_MAX:
        raise MalformedFrame(f"{count} tagged fields in one struct")
    for _ in range(count):
        _, position = read_uvarint(frame, position, end)
        size, position = read_uvarint(frame, position, end)
        position += size
        if position > end:
            raise MalformedFrame("tagged field is cut short")
    return position


def encode_compact_string(text: str | None) -> bytes:
    if text is None:
        return b"\x00"
    raw = text.encode()
    return encode_uvarint(len(raw) + 1) + raw


class WireCursor:
    """Reads one message from a frame.

    Lengths and counts are checked against the bytes that remain before anything is allocated for them. `unpack` raises
    struct.error at the end of the frame, an index raises IndexError, and everything else MalformedFrame.
    """

    __slots__ = ("end", "flexible", "frame", "position")

    def __init__(self, frame: memoryview, position: int = 0, flexible: bool = True) -> None:
        self.frame = frame
        self.position = position
        self.end = len(frame)
        self.flexible = flexible

    def unpack(self, layout: struct.Struct) -> tuple[Any, ...]:
        values = layout.unpack_from(self.frame, self.position)
        self.position += layout.size
        return values

    def take(self, size: int) -> memoryview:
        start = self.position
        after = start + size
        if size < 0 or after > self.end:
            raise MalformedFrame(f"field of {size} bytes where {self.end - start} remain")
        self.position = after
        return self.frame[start:after]

    def uvarint(self) -> int:
        value, self.position = read_uvarint(self.frame, self.position, self.end)
        return value

    def length(self) -> int:
        """The length of an array or of bytes; -1 if it is null."""
        if self.flexible:
            value, self.position = read_uvarint(self.frame, self.position, self.end)
            return value - 1
        (size,) = INT32.unpack_from(self.frame, self.position)
        self.position += 4
        return int(size)

    def count(self, element_bytes_min: int = 1) -> int:
        """The number of elements of an array; a null array has none."""
        if self.flexible:  # as in length(), without a call
            count, self.position = read_uvarint(self.frame, self.position, self.end)
            count -= 1
        else:
            (count,) = INT32.unpack_from(self.frame, self.position)
            self.position += 4
        if count <= 0:
            return 0
        if count * element_bytes_min > self.end - self.position:
            raise MalformedFrame(f"array of {count} elements in {self.end - self.position} bytes")
        return int(count)

    def nullable_string(self) -> bytes | None:
        size = self._string_length()
        return None if size == -1 else bytes(self.take(size))

    def string(self) -> bytes:
        size = self._string_length()
        return bytes(self.take(size)) if size else b""

    def _string_length(self) -> int:
        if self.flexible:
            size, self.position = read_uvarint(self.frame, self.position, self.end)
            return size - 1
        (size,) = INT16.unpack_from(self.frame, self.position)
        self.position += 2
        return int(size)

    def int32s(self) -> list[int]:
        count = self.count(INT32.size)
        return list(struct.unpack(f">{count}i", self.take(INT32.size * count)))

    def tags(self) -> Sequence[tuple[int, memoryview]]:
        """The numbers and values of the tagged fields of a struct."""
        if self.frame[self.position] == 0:
            self.position += 1
            return ()
        frame, end, found = self.frame, self.end, []
        count, position = read_uvarint(frame, self.position, end)
        if count > TAGS_MAX:
            raise MalformedFrame(f"{count} tagged fields in one struct")
        for _ in range(count):
            tag, position = read_uvarint(frame, position, end)
            size, position = read_uvarint(frame, position, end)
            if position + size > end:
                raise MalformedFrame("tagged field is cut short")
            found.append((tag, frame[position : position + size]))
            position += size
        self.position = position
        return found

    def skip_tags(self) -> None:
        if self.flexible:
            self.position = skip_tags(self.frame, self.position, self.end)
