"""The sparse indexes of one segment, in memory and in Kafka's file formats. They are caches of the log."""

import struct
import sys
from array import array
from bisect import bisect_right
from typing import Final

OFFSET_ENTRY_BYTES: Final = 8
_TIME_ENTRY: Final = struct.Struct(">qi")
TIME_ENTRY_BYTES: Final = _TIME_ENTRY.size


class DamagedIndex(ValueError):
    """An index file that cannot be what was written; it is rebuilt from the log."""


class OffsetIndex:
    """Relative last offset of a batch -> the batch's position in the file."""

    __slots__ = ("offsets", "positions")

    def __init__(self) -> None:
        self.offsets = array("i")
        self.positions = array("i")

    def __len__(self) -> int:
        return len(self.offsets)

    def append(self, relative_offset: int, position: int) -> None:
        # Readers in other threads search the offsets first, so the position must be there already.
        self.positions.append(position)
        self.offsets.append(relative_offset)

    def entry_at_or_below(self, relative_offset: int) -> tuple[int, int]:
        """The offset and position of the last batch that ends at or before an offset; (-1, 0) for the start."""
        slot = bisect_right(self.offsets, relative_offset) - 1
        return (self.offsets[slot], self.positions[slot]) if slot >= 0 else (-1, 0)

    def position_at_or_below(self, relative_offset: int) -> int:
        """Where to start walking for an offset: no batch before this position contains it."""
        return self.entry_at_or_below(relative_offset)[1]

    def boundary_at_or_below(self, position: int) -> int:
        """The largest position known to start a batch that is not beyond `position`."""
        slot = bisect_right(self.positions, position) - 1
        return self.positions[slot] if slot >= 0 else 0

    def truncate(self, position: int) -> None:
        """Forget every batch at or beyond a position."""
        keep = bisect_right(self.positions, position - 1)
        del self.offsets[keep:]
        del self.positions[keep:]

    def encode(self) -> bytes:
        entries = array("i", bytes(len(self.offsets) * OFFSET_ENTRY_BYTES))
        entries[0::2] = self.offsets
        entries[1::2] = self.positions
        return _big_endian(entries).tobytes()

    @classmethod
    def decode(cls, data: bytes, log_bytes: int) -> "OffsetIndex":
        """Raises DamagedIndex unless the entries ascend and stay within the log."""
        if len(data) % OFFSET_ENTRY_BYTES:
            raise DamagedIndex(f"offset index of {len(data)} bytes")
        entries = array("i", data)
        _big_endian(entries)
        index = cls()
        index.offsets, index.positions = entries[0::2], entries[1::2]
        if not (_ascends(index.offsets) and _ascends(index.positions)):
            raise DamagedIndex("offset index does not ascend")
        if len(index) and (
            index.offsets[0] < 0 or index.positions[0] < 0 or index.positions[-1] >= log_bytes
        ):
            raise DamagedIndex("offset index points outside its log")
        return index


class TimeIndex:
    """Largest timestamp so far -> relative last offset of the batch that holds it."""

    __slots__ = ("data", "last_timestamp")

    def __init__(self) -> None:
        self.data = bytearray()
        self.last_timestamp = -1

    def __len__(self) -> int:
        return len(self.data) // TIME_ENTRY_BYTES

    def append(self, timestamp: int, relative_offset: int) -> None:
        """Only a timestamp beyond the last one makes an entry."""
        if timestamp > self.last_timestamp:
            self.data += _TIME_ENTRY.pack(timestamp, relative_offset)
            self.last_timestamp = timestamp

    def last_entry(self) -> tuple[int, int]:
        return self._entry(len(self) - 1) if self.data else (-1, 0)

    def offset_before(self, timestamp: int) -> int:
        """No batch that ends before this relative offset reaches the timestamp."""
        slot = bisect_right(range(len(self)), timestamp, key=lambda n: self._entry(n)[0]) - 1
        return self._entry(slot)[1] if slot >= 0 else 0

    def truncate(self, relative_offset: int) -> None:
        """Forget every entry at or beyond an offset."""
        keep = bisect_right(range(len(self)), relative_offset - 1, key=lambda n: self._entry(n)[1])
        del self.data[keep * TIME_ENTRY_BYTES :]
        self.last_timestamp = self.last_entry()[0]

    def encode(self) -> bytes:
        return bytes(self.data)

    @classmethod
    def decode(cls, data: bytes) -> "TimeIndex":
        """Raises DamagedIndex unless timestamps and offsets ascend."""
        if len(data) % TIME_ENTRY_BYTES:
            raise DamagedIndex(f"time index of {len(data)} bytes")
        last_timestamp, last_offset = -1, -1
        for timestamp, offset in _TIME_ENTRY.iter_unpack(data):
            if timestamp <= last_timestamp or offset < last_offset or offset < 0:
                raise DamagedIndex("time index does not ascend")
            last_timestamp, last_offset = timestamp, offset
        index = cls()
        index.data, index.last_timestamp = bytearray(data), last_timestamp
        return index

    def _entry(self, slot: int) -> tuple[int, int]:
        timestamp, offset = _TIME_ENTRY.unpack_from(self.data, slot * TIME_ENTRY_BYTES)
        return timestamp, offset


def _ascends(values: "array[int]") -> bool:
    return all(map(int.__lt__, values, values[1:]))


def _big_endian(values: "array[int]") -> "array[int]":
    assert values.itemsize == 4
    if sys.byteorder == "little":
        values.byteswap()
    return values
