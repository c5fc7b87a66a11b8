"""Asks the kernel to begin writing a file back now, without waiting for it and without making it durable.

Left alone, Linux lets dirty pages pile up to a tenth of the memory and then makes whoever writes next wait for
the disk, which here is the event loop. Where the call does not exist, nothing is done.
"""

import sys
from collections.abc import Callable
from functools import cache
from typing import Final

_SYNC_FILE_RANGE_WRITE: Final = 2


def begin_writeback(fd: int) -> None:
    """Blocking when the disk's queue is full: belongs in a thread. Errors are left for fsync to report."""
    call = _sync_file_range()
    if call is not None:
        call(fd, 0, 0, _SYNC_FILE_RANGE_WRITE)  # no length: to the end of the file


@cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    import ctypes

    try:
        call = ctypes.CDLL(None, use_errno=True).sync_file_range
    except (OSError, AttributeError):
        return None
    call.argtypes = (ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong, ctypes.c_uint)
    call.restype = ctypes.c_int
    return call
