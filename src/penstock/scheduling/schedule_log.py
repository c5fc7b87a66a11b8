"""Held records as bytes: what is left of a record once its batch is gone, many of them in one block.

A block keeps times, sizes and contents apart, so that many times are read in one step and no record is looked into
before it is released. Contents are key and value as a batch encodes them, then the other headers.
"""

import struct
from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import add
from typing import Final, NamedTuple

from penstock.protocol.compression import BytesLike

_COUNT: Final = struct.Struct(">I")
_TIME_BYTES: Final = 8
_SIZES: Final = 3  # of key and value, count of headers, of the headers
_SIZES_BYTES: Final = 4 * _SIZES


class HeldRecord(NamedTuple):
    due_ms: int
    key_value: bytes
    header_count: int
    headers: bytes

    @property
    def size(self) -> int:
        return len(self.key_value) + len(self.headers)


class Block(NamedTuple):
    """Opened, but not taken apart. Times of a batch that is not appended yet may be relative: see `intake`."""

    times: tuple[int, ...]
    sizes: tuple[int, ...]  # three for each record
    contents: memoryview

    @property
    def record_count(self) -> int:
        return len(self.times)

    def starts(self) -> list[int]:
        """Where each record's contents begin; one more, for the end of the last."""
        return list(accumulate(map(add, self.sizes[::3], self.sizes[2::3]), initial=0))

    def start(self, index: int) -> int:
        """As one of `starts`, for who needs few of them."""
        before = _SIZES * index
        return sum(self.sizes[:before:_SIZES]) + sum(self.sizes[2:before:_SIZES])

    def record(self, index: int, start: int) -> HeldRecord:
        key_value_bytes, header_count, headers_bytes = self.sizes[_SIZES * index : _SIZES * index + _SIZES]
        middle = start + key_value_bytes
        return HeldRecord(
            self.times[index],
            bytes(self.contents[start:middle]),
            header_count,
            bytes(self.contents[middle : middle + headers_bytes]),
        )

    def part(self, indices: Sequence[int], starts: Sequence[int]) -> bytes:
        """Some of the records, packed as a block of their own."""
        sizes: list[int] = []
        for index in indices:
            sizes += self.sizes[_SIZES * index : _SIZES * index + _SIZES]
        contents = [self.contents[starts[index] : starts[index + 1]] for index in indices]
        return _packed([self.times[index] for index in indices], sizes, contents)


def pack_block(records: Iterable[HeldRecord]) -> bytes:
    times: list[int] = []
    sizes: list[int] = []
    contents: list[bytes] = []
    for due_ms, key_value, header_count, headers in records:
        times.append(due_ms)
        sizes += (len(key_value), header_count, len(headers))
        contents += (key_value, headers)
    return _packed(times, sizes, contents)


def open_block(data: BytesLike, position: int = 0) -> Block:
    """From `position` to the end. Raises ValueError for damage."""
    view = memoryview(data)
    try:
        (count,) = _COUNT.unpack_from(view, position)
        position += _COUNT.size
        if count * (_TIME_BYTES + _SIZES_BYTES) > len(view) - position:
            raise ValueError(f"block of {count} held records in {len(view)} bytes")
        times = struct.unpack_from(f">{count}q", view, position)
        position += count * _TIME_BYTES
        sizes = struct.unpack_from(f">{_SIZES * count}I", view, position)
    except struct.error as error:
        raise ValueError(f"block of held records: {error}") from None
    contents = view[position + count * _SIZES_BYTES :]
    if sum(sizes[::3]) + sum(sizes[2::3]) != len(contents):
        raise ValueError(f"block of held records with {len(contents)} bytes of contents")
    return Block(times, sizes, contents)


def _packed(times: Sequence[int], sizes: Sequence[int], contents: Iterable[BytesLike]) -> bytes:
    return b"".join(
        (
            _COUNT.pack(len(times)),
            struct.pack(f">{len(times)}q", *times),
            struct.pack(f">{len(sizes)}I", *sizes),
            *contents,
        )
    )
