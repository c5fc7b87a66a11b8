"""Memory that ends at a guard page: reading one byte too many ends the process."""

import ctypes
import mmap
from typing import Final

_PROT_NONE: Final = 0
_libc: Final = ctypes.CDLL(None, use_errno=True)


class GuardedMemory:
    """Bytes that end right before the guard page."""

    def __init__(self, bytes_max: int) -> None:
        self._room = -(-bytes_max // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory = mmap.mmap(-1, self._room + mmap.PAGESIZE)
        anchor = ctypes.c_char.from_buffer(self._memory)
        self._start = ctypes.addressof(anchor)
        guard = ctypes.c_void_p(self._start + self._room)
        if _libc.mprotect(guard, ctypes.c_size_t(mmap.PAGESIZE), _PROT_NONE):
            raise OSError(ctypes.get_errno(), "mprotect")

    def place(self, data: bytes | bytearray) -> int:
        """Copy `data` and return its address. The next call overwrites the copy."""
        assert len(data) <= self._room
        address = self._start + self._room - len(data)
        ctypes.memmove(address, bytes(data), len(data))
        return address

    def view(self, data: bytes | bytearray) -> memoryview:
        self.place(data)
        return memoryview(self._memory)[self._room - len(data) : self._room]
