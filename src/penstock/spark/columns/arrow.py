"""The Arrow schema of a topic, and memory for kernels.

Columns have the names and types of Spark's own Kafka connector, as Spark passes them to Arrow. New memory comes from
Arrow's pool, which keeps freed blocks. The C library returns large blocks to the system again and again, and the pages
of each new block are zeroed first: up to a third of the time of a decode.
"""

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from penstock.protocol.compression import BytesLike

HEADER_TYPE: Final = pa.struct([("key", pa.string()), ("value", pa.binary())])
#: Spark names the items of an array "element".
HEADERS_TYPE: Final = pa.list_(pa.field("element", HEADER_TYPE))

SCHEMA: Final = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("us", tz="UTC")),
        ("timestampType", pa.int32()),
        ("headers", HEADERS_TYPE),
    ]
)
COLUMNS: Final[tuple[str, ...]] = tuple(SCHEMA.names)
#: The columns of Spark's connector unless `includeHeaders` is set.
COLUMNS_WITHOUT_HEADERS: Final = COLUMNS[:-1]


def arrow_schema(columns: Sequence[str]) -> pa.Schema:
    """Return the schema of these columns, in this order. Raises ValueError for a name that is not a column."""
    unknown = [name for name in columns if name not in COLUMNS]
    if unknown or not columns:
        named = f"no column {', '.join(unknown)}" if unknown else "no table without columns"
        raise ValueError(f"A topic has {named}; its columns are {', '.join(COLUMNS)}.")
    return pa.schema([SCHEMA.field(name) for name in columns])


def address_of(buffer: BytesLike) -> int:
    """Return the address of a buffer. It is valid while the caller holds the buffer."""
    return int(pa.py_buffer(buffer).address)


def empty_array(shape: int | tuple[int, ...], dtype: type[np.generic]) -> NDArray[Any]:
    """Return an uninitialized array. `pa.py_buffer` makes an Arrow buffer of it without copying."""
    items = math.prod(shape) if isinstance(shape, tuple) else shape
    pooled = pa.allocate_buffer(items * np.dtype(dtype).itemsize)
    return np.frombuffer(pooled, dtype).reshape(shape)
