"""Where received bytes live: one shared landing buffer, and pooled buffers for frames that come in pieces.

Frames are handled synchronously out of the landing buffer, so ten thousand idle connections cost no buffer at
all. A frame that did not arrive whole gets a buffer of its own until it does; those, and requests that are
worked on off the loop, are counted against one bound.
"""

import sys
from collections.abc import Callable
from typing import Final

LANDING_BYTES: Final = 256 * 1024
#: While the bound is reached each connection may still bring this much, which then waits outside of the bound.
_LANDING_BYTES_MIN: Final = 4 * 1024
_POOLED_BYTES_MIN: Final = 4 * 1024
_POOLED_BYTES_MAX: Final = 4 * 1024 * 1024
_POOL_KEEPS_BYTES: Final = 32 * 1024 * 1024


class FrameBuffers:
    """`on_freed` is called whenever someone who was told None by `take` may try again."""

    def __init__(self, bytes_max: int, on_freed: Callable[[], None] = lambda: None) -> None:
        self._whole_landing = memoryview(bytearray(LANDING_BYTES))
        self._small_landing = self._whole_landing[:_LANDING_BYTES_MIN]
        self.landing = self._whole_landing
        self._bytes_max = bytes_max if bytes_max >= 0 else sys.maxsize
        self._on_freed = on_freed
        self.bytes_in_use = 0
        self.backlog_bytes = 0
        self._free: dict[int, list[bytearray]] = {}
        self._free_bytes = 0

    @property
    def is_full(self) -> bool:
        return self.bytes_in_use >= self._bytes_max

    def take(self, size: int) -> bytearray | None:
        """A buffer of at least `size` bytes, or None while the bound is reached.

        One frame always fits, however large, or it could never be received.
        """
        capacity = _capacity(size)
        if self.bytes_in_use and self.bytes_in_use + capacity > self._bytes_max:
            return None
        free = self._free.get(capacity)
        if free:
            buffer = free.pop()
            self._free_bytes -= capacity
        else:
            buffer = bytearray(capacity)
        self.hold(capacity)
        return buffer

    def give_back(self, buffer: bytearray) -> None:
        capacity = len(buffer)
        if capacity <= _POOLED_BYTES_MAX and self._free_bytes + capacity <= _POOL_KEEPS_BYTES:
            self._free.setdefault(capacity, []).append(buffer)
            self._free_bytes += capacity
        self.release(capacity)

    def hold(self, size: int) -> None:
        """Count bytes that someone else keeps: of a request that is worked on off the loop."""
        self.bytes_in_use += size
        self._fit_landing()

    def release(self, size: int) -> None:
        self.bytes_in_use -= size
        self._fit_landing()
        self._on_freed()

    def count_backlog(self, change: int) -> None:
        """Frames that were received and not looked at yet; they wait for others, so they never block any."""
        self.backlog_bytes += change
        self._fit_landing()

    def _fit_landing(self) -> None:
        is_short = self.bytes_in_use + self.backlog_bytes >= self._bytes_max
        self.landing = self._small_landing if is_short else self._whole_landing


def _capacity(size: int) -> int:
    """Powers of two, so that buffers are reused; a giant gets exactly what it needs."""
    if size > _POOLED_BYTES_MAX:
        return size
    return max(_POOLED_BYTES_MIN, 1 << (size - 1).bit_length())
