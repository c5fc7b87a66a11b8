"""The indexes of one segment, in memory and in Kafka's file formats: offset index, time index and transaction
index.

The offset and time indexes are sparse. The transaction index lists the aborted transactions whose markers are in
the segment. All of them are caches of the log and can be rebuilt from it.
"""

import struct
import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import Final

from penstock.log.producer_state import CompletedTransaction
from penstock.protocol.record_batch import CONTROL, TRANSACTIONAL

OFFSET_ENTRY_BYTES: Final = 8
_TIME_ENTRY: Final = struct.Struct(">qi")
TIME_ENTRY_BYTES: Final = _TIME_ENTRY.size


class CorruptIndex(ValueError):
    """An index file with invalid content; it is rebuilt from the log."""


class OffsetIndex:
    """Maps the relative last offset of a batch to the batch's position in the file."""

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
        """Returns offset and position of the last entry that ends at or before an offset; (-1, 0) for the start."""
        slot = bisect_right(self.offsets, relative_offset) - 1
        return (self.offsets[slot], self.positions[slot]) if slot >= 0 else (-1, 0)

    def position_at_or_below(self, relative_offset: int) -> int:
        """Returns where to start scanning for an offset: no batch before this position contains it."""
        return self.entry_at_or_below(relative_offset)[1]

    def boundary_at_or_below(self, position: int) -> int:
        """Returns the largest known start of a batch that is not beyond `position`."""
        slot = bisect_right(self.positions, position) - 1
        return self.positions[slot] if slot >= 0 else 0

    def truncate(self, position: int) -> None:
        """Removes every batch at or beyond a position."""
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
        """Raises CorruptIndex unless the entries ascend and stay within the log."""
        if len(data) % OFFSET_ENTRY_BYTES:
            raise CorruptIndex(f"offset index of {len(data)} bytes")
        entries = array("i", data)
        _big_endian(entries)
        index = cls()
        index.offsets, index.positions = entries[0::2], entries[1::2]
        if not (_ascends(index.offsets) and _ascends(index.positions)):
            raise CorruptIndex("offset index does not ascend")
        if len(index) and (
            index.offsets[0] < 0 or index.positions[0] < 0 or index.positions[-1] >= log_bytes
        ):
            raise CorruptIndex("offset index points outside its log")
        return index


class TimeIndex:
    """Maps the largest timestamp so far to the relative last offset of the batch that contains it."""

    __slots__ = ("data", "last_timestamp")

    def __init__(self) -> None:
        self.data = bytearray()
        self.last_timestamp = -1

    def __len__(self) -> int:
        return len(self.data) // TIME_ENTRY_BYTES

    def append(self, timestamp: int, relative_offset: int) -> None:
        """Adds an entry only for a timestamp beyond the last one."""
        if timestamp > self.last_timestamp:
            self.data += _TIME_ENTRY.pack(timestamp, relative_offset)
            self.last_timestamp = timestamp

    def last_entry(self) -> tuple[int, int]:
        return self._entry(len(self) - 1) if self.data else (-1, 0)

    def offset_before(self, timestamp: int) -> int:
        """Returns a relative offset; no batch that ends before it reaches the timestamp."""
        slot = bisect_right(range(len(self)), timestamp, key=lambda n: self._entry(n)[0]) - 1
        return self._entry(slot)[1] if slot >= 0 else 0

    def truncate(self, relative_offset: int) -> None:
        """Removes every entry at or beyond an offset."""
        keep = bisect_right(range(len(self)), relative_offset - 1, key=lambda n: self._entry(n)[1])
        del self.data[keep * TIME_ENTRY_BYTES :]
        self.last_timestamp = self.last_entry()[0]

    def encode(self) -> bytes:
        return bytes(self.data)

    @classmethod
    def decode(cls, data: bytes) -> "TimeIndex":
        """Raises CorruptIndex unless timestamps and offsets ascend."""
        if len(data) % TIME_ENTRY_BYTES:
            raise CorruptIndex(f"time index of {len(data)} bytes")
        last_timestamp, last_offset = -1, -1
        for timestamp, offset in _TIME_ENTRY.iter_unpack(data):
            if timestamp <= last_timestamp or offset < last_offset or offset < 0:
                raise CorruptIndex("time index does not ascend")
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


#: version, producer id, first offset, the marker's offset, last stable offset
_TRANSACTION_ENTRY: Final = struct.Struct(">hqqqq")
TRANSACTION_ENTRY_BYTES: Final = _TRANSACTION_ENTRY.size
_TRANSACTION_INDEX_VERSION: Final = 0

#: Producer id and first offset, as fetch responses list them.
AbortedTransaction = tuple[int, int]


class TransactionIndex:
    """Ordered by the offsets of the markers. The event loop appends while other threads search."""

    __slots__ = ("data",)

    def __init__(self, data: bytes = b"") -> None:
        self.data = bytearray(data)

    def __len__(self) -> int:
        return len(self.data) // TRANSACTION_ENTRY_BYTES

    def note(self, ended: CompletedTransaction) -> None:
        """Adds a transaction whose marker is in the segment, if it was aborted: only those matter to readers."""
        if ended.committed:
            return
        self.data += _TRANSACTION_ENTRY.pack(
            _TRANSACTION_INDEX_VERSION,
            ended.producer_id,
            ended.first_offset,
            ended.marker_offset,
            ended.last_stable_offset,
        )

    def copy_entry(self, source: "TransactionIndex", marker_offset: int) -> None:
        """Copies the entry of a marker from another index, if there is one."""
        slot = source._slot_of(marker_offset)
        if slot < len(source) and source._entry(slot)[3] == marker_offset:
            self.data += source.data[slot * TRANSACTION_ENTRY_BYTES : (slot + 1) * TRANSACTION_ENTRY_BYTES]

    def collect(self, start_offset: int, upto_offset: int, found: list[AbortedTransaction]) -> bool:
        """Adds those with data between two offsets. Returns True if no later marker can belong to another one."""
        for slot in range(self._slot_of(start_offset), len(self)):
            _, producer_id, first_offset, _, last_stable_offset = self._entry(slot)
            if first_offset < upto_offset:
                found.append((producer_id, first_offset))
            if last_stable_offset >= upto_offset:
                return True
        return False

    def truncate(self, end_offset: int) -> None:
        """Removes every marker at or beyond an offset."""
        del self.data[self._slot_of(end_offset) * TRANSACTION_ENTRY_BYTES :]

    def encode(self) -> bytes:
        return bytes(self.data)

    @classmethod
    def decode(cls, data: bytes, base_offset: int) -> "TransactionIndex":
        """Raises CorruptIndex unless the markers ascend within the segment, each after its transaction's start."""
        if len(data) % TRANSACTION_ENTRY_BYTES:
            raise CorruptIndex(f"transaction index of {len(data)} bytes")
        last_offset = base_offset - 1
        for version, _, first_offset, marker_offset, last_stable_offset in _TRANSACTION_ENTRY.iter_unpack(
            data
        ):
            if version != _TRANSACTION_INDEX_VERSION:
                raise CorruptIndex(f"transaction index of version {version}")
            ascends = last_offset < marker_offset < 1 << 62
            if not (ascends and 0 <= first_offset < marker_offset and last_stable_offset >= 0):
                raise CorruptIndex("transaction index does not ascend")
            last_offset = marker_offset
        return cls(data)

    def _slot_of(self, marker_offset: int) -> int:
        """Returns the first entry whose marker is at or after an offset."""
        return bisect_left(range(len(self)), marker_offset, key=lambda slot: self._entry(slot)[3])

    def _entry(self, slot: int) -> tuple[int, int, int, int, int]:
        return _TRANSACTION_ENTRY.unpack_from(self.data, slot * TRANSACTION_ENTRY_BYTES)


class AbortedTransactionFilter:
    """Finds the batches of aborted transactions during a read, as every read_committed client does."""

    __slots__ = ("_coming", "_open")

    def __init__(self, aborted: Iterable[AbortedTransaction]) -> None:
        self._coming = sorted(aborted, key=lambda one: one[1], reverse=True)
        self._open: set[int] = set()

    def has(self, base_offset: int, attributes: int, producer_id: int) -> bool:
        """Returns whether a batch belongs to one of them.

        Must be called for every batch in order: a marker may be all that is left, or read, of its transaction.
        """
        while self._coming and self._coming[-1][1] <= base_offset:
            self._open.add(self._coming.pop()[0])
        if attributes & CONTROL:
            self._open.discard(producer_id)
            return False
        return bool(attributes & TRANSACTIONAL) and producer_id in self._open
