"""The newest offset of every key in the dirty part of a log, in a fixed amount of memory.

Keys are not kept: an entry is a 16-byte hash and an offset, in flat arrays, 24 bytes in all. The table grows
as keys come, and says so when the next key would take it past its bound.
"""

import struct
from array import array
from hashlib import blake2b
from typing import Final

ENTRY_BYTES: Final = 24
#: Open addressing slows down sharply beyond this.
LOAD_MAX: Final = 0.75

_HALVES: Final = struct.Struct("<QQ")
_SLOTS_AT_FIRST: Final = 64
_EMPTY: Final = 0  # offsets are stored plus one, so that a fresh table is all zeros


class KeyMap:
    __slots__ = (
        "_entries_max",
        "_highs",
        "_lows",
        "_offsets",
        "_slots",
        "_slots_max",
        "entries",
        "latest_offset",
    )

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes` bounds the table, including the moment when it moves to a larger one."""
        self._slots_max = max_bytes // ENTRY_BYTES
        if self._slots_max < 2:
            raise ValueError(f"{max_bytes} bytes hold not even one key")
        self.entries = 0
        #: The map speaks for every offset up to this one.
        self.latest_offset = -1
        self._allocate(min(_SLOTS_AT_FIRST, self._slots_max))

    def put(self, key: bytes, offset: int) -> bool:
        """Later offsets replace earlier ones. False, with nothing changed, when the key does not fit."""
        assert offset > self.latest_offset, "offsets come in order"
        high, low = _HALVES.unpack(blake2b(key, digest_size=16).digest())
        slot = self._slot(high, low)
        if self._offsets[slot] == _EMPTY:
            if self.entries >= self._entries_max:
                if not self._grow():
                    return False
                slot = self._slot(high, low)
            self._highs[slot], self._lows[slot] = high, low
            self.entries += 1
        self._offsets[slot] = offset + 1
        self.latest_offset = offset
        return True

    def get(self, key: bytes) -> int:
        """The newest offset of the key, or -1."""
        high, low = _HALVES.unpack(blake2b(key, digest_size=16).digest())
        return self._offsets[self._slot(high, low)] - 1

    def cover(self, offset: int) -> None:
        """Everything up to this offset has been seen, keys or none."""
        self.latest_offset = max(self.latest_offset, offset)

    @property
    def size_bytes(self) -> int:
        return self._slots * ENTRY_BYTES

    def _slot(self, high: int, low: int) -> int:
        """Where this hash is, or the empty slot where it belongs."""
        offsets, lows, highs, slots = self._offsets, self._lows, self._highs, self._slots
        slot = low % slots
        while offsets[slot] != _EMPTY and (lows[slot] != low or highs[slot] != high):
            slot = slot + 1 if slot + 1 < slots else 0
        return slot

    def _allocate(self, slots: int) -> None:
        self._slots = slots
        self._entries_max = min(int(slots * LOAD_MAX), slots - 1)  # one empty slot ends every search
        self._highs, self._lows = (array("Q", (0,)) * slots for _ in range(2))
        self._offsets = array("q", (_EMPTY,)) * slots

    def _grow(self) -> bool:
        """Move to a table of at most twice the size; both must fit the bound while the entries move."""
        slots = min(2 * self._slots, self._slots_max - self._slots)
        if slots <= self._slots:
            return False
        entries = zip(self._highs, self._lows, self._offsets, strict=True)
        self._allocate(slots)
        for high, low, stored in entries:
            if stored != _EMPTY:
                slot = self._slot(high, low)
                self._highs[slot], self._lows[slot], self._offsets[slot] = high, low, stored
        return True
