"""Memory for kernels: addresses of what is there, and new memory from Arrow's pool.

The pool keeps what is given back. The C library returns large blocks to the system again and again, and then the
pages of each new one are zeroed first: up to a third of the time of a decode.
"""

import math
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from penstock.protocol.compression import BytesLike


def address_of(buffer: BytesLike) -> int:
    """Good for as long as the buffer is held."""
    return int(pa.py_buffer(buffer).address)


def empty(shape: int | tuple[int, ...], dtype: type[np.generic]) -> NDArray[Any]:
    """An array of anything. `pa.py_buffer` makes an Arrow buffer of it without copying."""
    items = math.prod(shape) if isinstance(shape, tuple) else shape
    pooled = pa.allocate_buffer(items * np.dtype(dtype).itemsize)
    return np.frombuffer(pooled, dtype).reshape(shape)
