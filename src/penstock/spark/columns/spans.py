"""Arrow columns as spans of raw memory, the other way of `gather`: nothing is copied but offsets."""

from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from penstock.spark.columns.kernels import Int64s

_HEADER: Final = pa.struct([("key", pa.large_binary()), ("value", pa.large_binary())])
#: How wide offsets are in the layouts that need no conversion.
_OFFSETS: Final = {
    pa.binary(): np.int32,
    pa.string(): np.int32,
    pa.large_binary(): np.int64,
    pa.large_string(): np.int64,
}


class Spans(NamedTuple):
    """Addresses hold while the owners are held. A length of -1 is a null."""

    starts: Int64s
    lengths: Int64s
    owners: tuple[pa.Array, ...]


class Headers(NamedTuple):
    first: Int64s  # of each row, in `spans`
    counts: Int64s
    spans: Int64s  # a matrix of the header fields of `kernels`
    owners: tuple[pa.Array, ...]


def spans_of(column: pa.Array, name: str) -> Spans:
    """Of a column of binary or string, in any of Arrow's layouts. Raises ValueError for every other type."""
    if column.type not in _OFFSETS:
        column = _cast(column, pa.large_binary(), name)
    if not len(column):
        return Spans(np.empty(0, np.int64), np.empty(0, np.int64), ())
    dtype = np.dtype(_OFFSETS[column.type])
    _, offsets, data = column.buffers()
    ends = np.frombuffer(offsets, dtype, len(column) + 1, column.offset * dtype.itemsize).astype(np.int64)
    lengths = np.diff(ends)
    if column.null_count:
        lengths[_is_null(column)] = -1
    return Spans(ends[:-1] + (data.address if data else 0), lengths, (column,))


def headers_of(column: pa.Array) -> Headers:
    """Of a column of arrays of key and value. Raises ValueError for other types, and for a header without a key."""
    lists = _cast(column, pa.large_list(_HEADER), "headers")
    ends = lists.offsets.to_numpy()
    items = lists.values.slice(ends[0], ends[-1] - ends[0])
    first = ends[:-1] - ends[0]
    counts = np.diff(ends)
    if lists.null_count:
        counts[_is_null(lists)] = 0  # what lies under a null is not ours
    keys, values = (spans_of(field, "headers") for field in items.flatten())
    _refuse_null_keys(first, counts, keys.lengths)
    spans = np.stack([keys.starts, keys.lengths, values.starts, values.lengths])
    return Headers(first, counts, spans, keys.owners + values.owners)


def timestamps_of(column: pa.Array, default_ms: int) -> Int64s:
    """In milliseconds; a null takes the default. Raises ValueError for what is no timestamp."""
    if not pa.types.is_timestamp(column.type):
        raise ValueError(f"Column timestamp is {column.type}; it must be a timestamp.")
    microseconds = column.cast(pa.timestamp("us", column.type.tz), safe=False).cast(pa.int64())
    milliseconds: Int64s = np.floor_divide(microseconds.fill_null(0).to_numpy(), 1000)
    if column.null_count:
        milliseconds[_is_null(column)] = default_ms
    return milliseconds


def _cast(column: pa.Array, kind: pa.DataType, name: str) -> pa.Array:
    try:
        return column.cast(kind)
    except (pa.ArrowNotImplementedError, pa.ArrowTypeError, pa.ArrowInvalid):
        wanted = "an array of struct<key: string, value: binary>" if name == "headers" else "binary or string"
        raise ValueError(f"Column {name} is {column.type}; it must be {wanted}.") from None


def _is_null(column: pa.Array) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    nulls: np.ndarray[tuple[int], np.dtype[np.bool_]] = column.is_null().to_numpy(zero_copy_only=False)
    return nulls


def _refuse_null_keys(first: Int64s, counts: Int64s, key_lengths: Int64s) -> None:
    rows = np.searchsorted(first, np.flatnonzero(key_lengths < 0), side="right") - 1
    rows = rows[counts[rows] > 0]
    if len(rows):
        raise ValueError(f"Row {rows[0]} has a header without a key.")
