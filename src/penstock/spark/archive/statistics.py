"""What a Parquet file says of its columns, as Delta keeps it, so that readers can leave files out. Pure.

Only what all readers understand alike is told: no fractions (some take what is not a number for the greatest, others
leave it out), nothing nested.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta
from typing import Any, Final

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_TEXT_LENGTH_MAX: Final = 64


def file_statistics(metadata: Any, schema: Any) -> str:
    """Of a file with this Arrow schema, as JSON."""
    mins: dict[str, Any] = {}
    maxs: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    for name, kind, chunks in _columns(metadata, schema):
        told = [each.statistics for each in chunks]
        if any(each is None or not each.has_null_count for each in told):
            continue
        nulls[name] = sum(each.null_count for each in told)
        bounds = _bounds(kind, [each for each in told if each.num_values])
        if bounds is not None:
            mins[name], maxs[name] = bounds
    content = {"numRecords": metadata.num_rows, "minValues": mins, "maxValues": maxs, "nullCount": nulls}
    return json.dumps(content, separators=(",", ":"))


def _columns(metadata: Any, schema: Any) -> Iterator[tuple[str, Any, list[Any]]]:
    """Those at the top: name, type, and what is stored of each in every part of the file."""
    import pyarrow as pa

    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    paths = {metadata.schema.column(index).path: index for index in range(metadata.num_columns)}
    for field in schema:
        if not pa.types.is_nested(field.type) and field.name in paths:
            yield field.name, field.type, [group.column(paths[field.name]) for group in groups]


def _bounds(kind: Any, told: list[Any]) -> tuple[Any, Any] | None:
    tell = _teller(kind)
    if tell is None or not told or not all(each.has_min_max for each in told):
        return None
    try:
        return tell(min(each.min_raw for each in told), max(each.max_raw for each in told))
    except (OverflowError, ValueError):
        return None  # a moment that calendars do not have


def _teller(kind: Any) -> Callable[[Any, Any], tuple[Any, Any] | None] | None:
    import pyarrow as pa

    if pa.types.is_integer(kind):
        return lambda low, high: (low, high)
    if pa.types.is_date32(kind):
        return lambda low, high: (_day(low), _day(high))
    if pa.types.is_timestamp(kind) and kind.unit == "us" and kind.tz is not None:
        return lambda low, high: (_moment(low // 1000), _moment(-(-high // 1000)))
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return _texts
    return None


def _day(number: int) -> str:
    return (date(1970, 1, 1) + timedelta(days=number)).isoformat()


def _moment(milliseconds: int) -> str:
    """Delta has milliseconds here, so bounds are widened to whole ones."""
    moment = _EPOCH + timedelta(milliseconds=milliseconds)
    return moment.replace(tzinfo=None).isoformat(timespec="milliseconds") + "Z"


def _texts(low: bytes | str, high: bytes | str) -> tuple[str, str] | None:
    first, last = (each.decode() if isinstance(each, bytes) else each for each in (low, high))
    return (first, last) if max(len(first), len(last)) <= _TEXT_LENGTH_MAX else None
