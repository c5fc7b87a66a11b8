"""Memory for received bytes: one shared receive buffer, and pooled buffers for frames that arrive in parts.

The connection handles frames synchronously out of the shared buffer, so ten thousand idle connections need no
buffers. A frame that has not arrived completely gets its own buffer until it has. These buffers, and requests that
are processed off the event loop, count against one limit. The memory of a frame follows the bytes that have arrived,
not the size that the frame announces: its buffer has room for a few times as much, and grows.
"""

import mmap
import sys
from collections.abc import Callable
from typing import Final

RECEIVE_BUFFER_BYTES: Final = 256 * 1024
#: While the limit is reached, a connection receives at most this much at once. It waits outside of the limit.
_RECEIVE_BUFFER_BYTES_MIN: Final = 4 * 1024
_POOLED_BYTES_MIN: Final = 4 * 1024
_POOLED_BYTES_MAX: Final = 4 * 1024 * 1024
_POOL_BYTES_MAX: Final = 32 * 1024 * 1024
#: The buffer of a frame has at least this size, and this many times the bytes that have arrived. So growing copies less
#: than a third of the frame in all.
_ROOM_BYTES_MIN: Final = 16 * 1024
_ROOM_FACTOR: Final = 4


class PartialFrame:
    """A frame, including its size field, that has not arrived completely. `view[filled:]` receives the next bytes."""

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
    """`on_freed` is called whenever memory was freed, so that a connection that got none can try again."""

    def __init__(self, bytes_max: int, on_freed: Callable[[], None] = lambda: None) -> None:
        self._full_receive_buffer = memoryview(bytearray(RECEIVE_BUFFER_BYTES))
        self._small_receive_buffer = self._full_receive_buffer[:_RECEIVE_BUFFER_BYTES_MIN]
        self.receive_buffer = self._full_receive_buffer
        self._bytes_max = bytes_max if bytes_max >= 0 else sys.maxsize
        self._on_freed = on_freed
        self.bytes_in_use = 0
        self.backlog_bytes = 0
        self._free: dict[int, list[bytearray]] = {}
        self._free_bytes = 0
        #: The one frame that may grow beyond the limit: without it, frames that all wait to grow would wait forever.
        self._overdrawn: PartialFrame | None = None

    @property
    def is_full(self) -> bool:
        return self.bytes_in_use >= self._bytes_max

    @property
    def is_crowded(self) -> bool:
        """Whether frames that clients have to wait for anyway should give way: they would keep others waiting."""
        return 2 * self.bytes_in_use >= self._bytes_max

    @property
    def may_overdraw(self) -> bool:
        return self._overdrawn is None

    def begin(self, piece: memoryview, needed: int) -> PartialFrame | None:
        """Store the beginning of a frame of `needed` bytes; return None while the limit is reached.

        While no memory is in use any frame is accepted, or a large frame could never be received.
        """
        capacity = _capacity(len(piece), needed)
        if self.bytes_in_use and self.bytes_in_use + capacity > self._bytes_max:
            return None
        frame = PartialFrame(self._take(capacity, needed), capacity, len(piece), needed)
        frame.view[: len(piece)] = piece
        return frame

    def grow(self, frame: PartialFrame) -> bool:
        """Enlarge the buffer of a frame that has filled it; return False while the limit is reached."""
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
        """Free the buffer of a frame that has been handled, or whose connection has ended."""
        if frame is self._overdrawn:
            self._overdrawn = None
        if isinstance(frame._buffer, bytearray):
            self._give_back(frame._buffer)
        else:
            self.release(frame._held_bytes)

    def _take(self, capacity: int, needed: int) -> bytearray | mmap.mmap:
        """Return a buffer; one larger than the pool's buffers is mapped memory, which costs nothing until written."""
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
        if self._free_bytes + capacity <= _POOL_BYTES_MAX:
            self._free.setdefault(capacity, []).append(buffer)
            self._free_bytes += capacity
        self.release(capacity)

    def hold(self, size: int) -> None:
        """Count the bytes of a request that is processed off the event loop, and held by its handler."""
        self.bytes_in_use += size
        self._fit_receive_buffer()

    def release(self, size: int) -> None:
        self.bytes_in_use -= size
        self._fit_receive_buffer()
        self._on_freed()

    def count_backlog(self, change: int) -> None:
        """Count frames that were received but not handled yet.

        They wait for other requests, so they do not count against the limit and never block any request.
        """
        self.backlog_bytes += change
        self._fit_receive_buffer()

    def _fit_receive_buffer(self) -> None:
        is_short = self.bytes_in_use + self.backlog_bytes >= self._bytes_max
        self.receive_buffer = self._small_receive_buffer if is_short else self._full_receive_buffer


def kept(frame: memoryview) -> memoryview:
    """Return a frame that keeps its content when its handler has returned: a copy, unless it has mapped memory."""
    return frame if isinstance(frame.obj, mmap.mmap) else memoryview(bytearray(frame))


def _capacity(arrived: int, needed: int) -> int:
    """Return the size of a frame's buffer: a power of two for pooled buffers, so that they can be reused."""
    size = min(needed, max(arrived * _ROOM_FACTOR, _ROOM_BYTES_MIN))
    if size > _POOLED_BYTES_MAX:
        return size
    return max(_POOLED_BYTES_MIN, 1 << (size - 1).bit_length())
