"""Where received bytes live: one shared landing buffer, and pooled buffers for frames that come in pieces.

Frames are handled synchronously out of the landing buffer, so ten thousand idle connections cost no buffer at
all. A frame that did not arrive whole gets a buffer of its own until it does; those, and requests that are
worked on off the loop, are counted against one bound. A frame's memory follows what has arrived of it, not what its
size field announces: its buffer has room for a few times as much as is there, and grows.
"""

import mmap
import sys
from collections.abc import Callable
from typing import Final

LANDING_BYTES: Final = 256 * 1024
#: While the bound is reached each connection may still bring this much, which then waits outside of the bound.
_LANDING_BYTES_MIN: Final = 4 * 1024
_POOLED_BYTES_MIN: Final = 4 * 1024
_POOLED_BYTES_MAX: Final = 4 * 1024 * 1024
_POOL_KEEPS_BYTES: Final = 32 * 1024 * 1024
#: Room that a frame gets: at least this, and this many times what has arrived. The bytes copied when it grows are then
#: less than a third of the frame.
_ROOM_BYTES_MIN: Final = 16 * 1024
_ROOM_FACTOR: Final = 4


class PartialFrame:
    """A frame, its size field included, that has not arrived whole. `view[filled:]` is where it goes on."""

    __slots__ = ("_buffer", "_held_bytes", "filled", "needed", "view")

    def __init__(self, buffer: bytearray | mmap.mmap, held_bytes: int, filled: int, needed: int) -> None:
        self._buffer = buffer
        self._held_bytes = held_bytes
        self.filled = filled
        self.needed = needed
        self.view = memoryview(buffer)[: min(held_bytes, needed)]

    @property
    def is_whole(self) -> bool:
        return self.filled == self.needed

    @property
    def is_out_of_room(self) -> bool:
        return self.filled == len(self.view) and self.filled < self.needed


class FrameBuffers:
    """`on_freed` is called whenever one who was given no memory may ask again."""

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
        #: The one frame that grows beyond the bound: without it, frames that all wait to grow would wait for ever.
        self._overdrawn: PartialFrame | None = None

    @property
    def is_full(self) -> bool:
        return self.bytes_in_use >= self._bytes_max

    @property
    def may_overdraw(self) -> bool:
        return self._overdrawn is None

    def begin(self, piece: memoryview, needed: int) -> PartialFrame | None:
        """Keep the beginning of a frame of `needed` bytes; None while the bound is reached.

        One frame always fits, or none could ever be received.
        """
        capacity = _capacity(len(piece), needed)
        if self.bytes_in_use and self.bytes_in_use + capacity > self._bytes_max:
            return None
        frame = PartialFrame(self._take(capacity, needed), capacity, len(piece), needed)
        frame.view[: len(piece)] = piece
        return frame

    def grow(self, frame: PartialFrame) -> bool:
        """Make room for more of a frame that has filled its own; False while the bound is reached."""
        capacity = _capacity(frame.filled, frame.needed)
        if (
            self.bytes_in_use + capacity - frame._held_bytes > self._bytes_max
            and self.bytes_in_use > frame._held_bytes
            and frame is not self._overdrawn
        ):
            if self._overdrawn is not None:
                return False
            self._overdrawn = frame
        before, view, held_bytes = frame._buffer, frame.view, frame._held_bytes
        if isinstance(before, mmap.mmap):
            self.hold(capacity - held_bytes)
        else:
            frame._buffer = self._take(capacity, frame.needed)
            memoryview(frame._buffer)[: frame.filled] = view[: frame.filled]
            self._give_back(before)
        frame._held_bytes = capacity
        frame.view = memoryview(frame._buffer)[: min(capacity, frame.needed)]
        return True

    def end(self, frame: PartialFrame) -> None:
        """The frame has been handled, or its connection has gone."""
        if frame is self._overdrawn:
            self._overdrawn = None
        if isinstance(frame._buffer, bytearray):
            self._give_back(frame._buffer)
        else:
            self.release(frame._held_bytes)

    def _take(self, capacity: int, needed: int) -> bytearray | mmap.mmap:
        """What is larger than the pool's buffers is memory that costs nothing before it is written to."""
        self.hold(capacity)
        if capacity > _POOLED_BYTES_MAX:
            return mmap.mmap(-1, needed)
        free = self._free.get(capacity)
        if not free:
            return bytearray(capacity)
        self._free_bytes -= capacity
        return free.pop()

    def _give_back(self, buffer: bytearray) -> None:
        capacity = len(buffer)
        if self._free_bytes + capacity <= _POOL_KEEPS_BYTES:
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


def _capacity(arrived: int, needed: int) -> int:
    """Powers of two, so that buffers are reused."""
    size = min(needed, max(arrived * _ROOM_FACTOR, _ROOM_BYTES_MIN))
    if size > _POOLED_BYTES_MAX:
        return size
    return max(_POOLED_BYTES_MIN, 1 << (size - 1).bit_length())
