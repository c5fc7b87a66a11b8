"""Where received bytes live: one shared landing buffer, and pooled buffers for frames that come in pieces.

Frames are handled synchronously out of the landing buffer, so ten thousand idle connections cost no buffer at
all. A frame that did not arrive whole gets a buffer of its own until it does; those are counted against one bound.
"""

from typing import Final

LANDING_BYTES: Final = 256 * 1024
_POOLED_BYTES_MIN: Final = 4 * 1024
_POOLED_BYTES_MAX: Final = 4 * 1024 * 1024
_POOL_KEEPS_BYTES: Final = 32 * 1024 * 1024


class FrameBuffers:
    def __init__(self, bytes_max: int) -> None:
        self.landing = memoryview(bytearray(LANDING_BYTES))
        self._bytes_max = bytes_max
        self.bytes_in_use = 0
        self._free: dict[int, list[bytearray]] = {}
        self._free_bytes = 0

    def take(self, size: int) -> bytearray | None:
        """A buffer of at least `size` bytes, or None while the bound is reached.

        One frame always fits, however large, or it could never be received.
        """
        if self.bytes_in_use and self.bytes_in_use + size > self._bytes_max:
            return None
        capacity = _capacity(size)
        free = self._free.get(capacity)
        if free:
            buffer = free.pop()
            self._free_bytes -= capacity
        else:
            buffer = bytearray(capacity)
        self.bytes_in_use += capacity
        return buffer

    def give_back(self, buffer: bytearray) -> None:
        capacity = len(buffer)
        self.bytes_in_use -= capacity
        if capacity <= _POOLED_BYTES_MAX and self._free_bytes + capacity <= _POOL_KEEPS_BYTES:
            self._free.setdefault(capacity, []).append(buffer)
            self._free_bytes += capacity


def _capacity(size: int) -> int:
    """Powers of two, so that buffers are reused; a giant gets exactly what it needs."""
    if size > _POOLED_BYTES_MAX:
        return size
    return max(_POOLED_BYTES_MIN, 1 << (size - 1).bit_length())
