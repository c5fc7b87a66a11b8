"""Arrow arrays from spans of raw memory: bytes are copied once, into one contiguous buffer for each column."""

import numpy as np
import pyarrow as pa

from penstock.spark.columns import kernels
from penstock.spark.columns.kernels import Int64s
from penstock.spark.columns.memory import empty
from penstock.spark.columns.schema import HEADER, HEADERS


def binary(starts: Int64s, lengths: Int64s, kind: pa.DataType) -> pa.Array:
    """A column of binary or string; a negative length is a null."""
    total, nulls = kernels.measure(lengths)
    assert total < 1 << 31, "Arrow's offsets are of 32 bits; a scan pauses well before"
    offsets = empty(len(starts) + 1, np.int32)
    data = pa.allocate_buffer(total)
    gathered = kernels.gather(starts, lengths, offsets, data.address)
    assert gathered == total
    validity = _bitmap(lengths >= 0) if nulls else None
    return pa.Array.from_buffers(kind, len(starts), [validity, pa.py_buffer(offsets), data], nulls)


def headers(starts: Int64s, counts: Int64s) -> pa.Array:
    """A list of key and value for each record; null, as in Spark's own connector, for one without headers."""
    offsets = empty(len(counts) + 1, np.int32)
    offsets[0] = 0
    np.cumsum(counts, out=offsets[1:])
    spans = empty((kernels.HEADER_FIELDS, int(offsets[-1])), np.int64)
    noted = kernels.read_headers(starts, counts, spans)
    assert noted == offsets[-1]
    keys = _strings(spans[kernels.KEY_AT], spans[kernels.KEY_BYTES])
    values = binary(spans[kernels.VALUE_AT], spans[kernels.VALUE_BYTES], pa.binary())
    items = pa.StructArray.from_arrays([keys, values], fields=list(HEADER))
    nulls = int(np.count_nonzero(counts == 0))
    validity = _bitmap(counts > 0) if nulls else None
    buffers = [validity, pa.py_buffer(offsets)]
    return pa.Array.from_buffers(HEADERS, len(counts), buffers, nulls, children=[items])


def _strings(starts: Int64s, lengths: Int64s) -> pa.Array:
    """Text as Java reads it: what is not UTF-8 becomes U+FFFD. Arrow would hand out the bytes, and fail later."""
    text = binary(starts, lengths, pa.string())
    if not np.frombuffer(text.buffers()[2], np.uint8).max(initial=0) & 0x80:
        return text
    try:
        text.validate(full=True)
    except pa.ArrowInvalid:
        raw = text.view(pa.binary()).to_pylist()
        return pa.array([key.decode(errors="replace") for key in raw], pa.string())
    return text


def _bitmap(valid: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> pa.Buffer:
    return pa.py_buffer(np.packbits(valid, bitorder="little"))
