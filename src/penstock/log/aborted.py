"""The aborted transactions whose markers are in one segment, in memory and in Kafka's `.txnindex` format."""

import struct
from bisect import bisect_left
from collections.abc import Iterable
from typing import Final

from penstock.log.index import DamagedIndex
from penstock.log.transactions import Ended
from penstock.protocol.records import CONTROL, TRANSACTIONAL

#: version, producer id, first offset, the marker's offset, last stable offset
_ENTRY: Final = struct.Struct(">hqqqq")
ENTRY_BYTES: Final = _ENTRY.size
_VERSION: Final = 0

#: Producer id and first offset, as readers are told.
Aborted = tuple[int, int]


class AbortedIndex:
    """Ascends by the markers' offsets. Appended to by the loop while threads search it."""

    __slots__ = ("data",)

    def __init__(self, data: bytes = b"") -> None:
        self.data = bytearray(data)

    def __len__(self) -> int:
        return len(self.data) // ENTRY_BYTES

    def note(self, ended: Ended) -> None:
        """The marker of a transaction is in the segment; only those that were aborted matter to readers."""
        if ended.committed:
            return
        self.data += _ENTRY.pack(
            _VERSION, ended.producer_id, ended.first_offset, ended.marker_offset, ended.last_stable_offset
        )

    def copy_entry(self, source: "AbortedIndex", marker_offset: int) -> None:
        """Take over what another index says of a marker, if it says anything."""
        slot = source._slot_of(marker_offset)
        if slot < len(source) and source._entry(slot)[3] == marker_offset:
            self.data += source.data[slot * ENTRY_BYTES : (slot + 1) * ENTRY_BYTES]

    def collect(self, start_offset: int, upto_offset: int, found: list[Aborted]) -> bool:
        """Add those with data between two offsets. True when no later marker can have ended another one."""
        for slot in range(self._slot_of(start_offset), len(self)):
            _, producer_id, first_offset, _, last_stable_offset = self._entry(slot)
            if first_offset < upto_offset:
                found.append((producer_id, first_offset))
            if last_stable_offset >= upto_offset:
                return True
        return False

    def truncate(self, end_offset: int) -> None:
        """Forget every marker at or beyond an offset."""
        del self.data[self._slot_of(end_offset) * ENTRY_BYTES :]

    def encode(self) -> bytes:
        return bytes(self.data)

    @classmethod
    def decode(cls, data: bytes, base_offset: int) -> "AbortedIndex":
        """Raises DamagedIndex unless the markers ascend within the segment, each after its transaction's start."""
        if len(data) % ENTRY_BYTES:
            raise DamagedIndex(f"transaction index of {len(data)} bytes")
        last_offset = base_offset - 1
        for version, _, first_offset, marker_offset, last_stable_offset in _ENTRY.iter_unpack(data):
            if version != _VERSION:
                raise DamagedIndex(f"transaction index of version {version}")
            ascends = last_offset < marker_offset < 1 << 62
            if not (ascends and 0 <= first_offset < marker_offset and last_stable_offset >= 0):
                raise DamagedIndex("transaction index does not ascend")
            last_offset = marker_offset
        return cls(data)

    def _slot_of(self, marker_offset: int) -> int:
        """The first entry whose marker is at or after an offset."""
        return bisect_left(range(len(self)), marker_offset, key=lambda slot: self._entry(slot)[3])

    def _entry(self, slot: int) -> tuple[int, int, int, int, int]:
        return _ENTRY.unpack_from(self.data, slot * ENTRY_BYTES)


class AbortedOnTheWay:
    """Goes along with the batches of a read, as every client does that reads what is committed."""

    __slots__ = ("_coming", "_open")

    def __init__(self, aborted: Iterable[Aborted]) -> None:
        self._coming = sorted(aborted, key=lambda one: one[1], reverse=True)
        self._open: set[int] = set()

    def has(self, base_offset: int, attributes: int, producer_id: int) -> bool:
        """Whether a batch belongs to one of them.

        To be asked of every batch in turn: a marker may be all that is left, or read, of its transaction.
        """
        while self._coming and self._coming[-1][1] <= base_offset:
            self._open.add(self._coming.pop()[0])
        if attributes & CONTROL:
            self._open.discard(producer_id)
            return False
        return bool(attributes & TRANSACTIONAL) and producer_id in self._open
