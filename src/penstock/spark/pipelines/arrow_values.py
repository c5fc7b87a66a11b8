"""Values of Python to Arrow columns. What does not fit is an error of its row, and its row is null."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from penstock.spark.pipelines.declaration import Parsed
from penstock.spark.pipelines.parsing_decimals import decimal_flaw

if TYPE_CHECKING:
    import pyarrow as pa

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_SECOND_FIRST: Final = (datetime.min.replace(tzinfo=UTC) - _EPOCH).days * 86_400
_SECOND_LAST: Final = ((datetime.max.replace(tzinfo=UTC) - _EPOCH).days + 1) * 86_400 - 1


class RowError(Exception):
    """A row is refused; the sentence names the field."""


def arrow_struct(schema: Any) -> pa.StructType:
    """The columns as one Arrow type, in which every field may be null: rows that failed are."""
    import pyarrow as pa
    from pyspark.sql.pandas.types import to_arrow_schema

    return pa.struct([field.with_nullable(True) for field in to_arrow_schema(schema, timezone="UTC")])


def parse_each(values: Any, kind: pa.StructType, parse: Callable[[bytes | None], dict[str, Any]]) -> Parsed:
    """`parse` raises RowError."""
    rows: list[dict[str, Any] | None] = []
    errors: dict[int, str] = {}
    for number, value in enumerate(values.to_pylist()):
        try:
            rows.append(parse(value))
        except RowError as error:
            rows.append(None)
            errors[number] = str(error)
    return to_struct(rows, kind, errors)


def to_struct(rows: list[dict[str, Any] | None], kind: pa.StructType, errors: dict[int, str]) -> Parsed:
    """Column by column, which is much faster than row by row."""
    getters = [({} if row is None else row).get for row in rows]
    columns = [[get(field.name) for get in getters] for field in kind]
    return from_columns(columns, kind, [row is None for row in rows], errors)


def from_columns(
    columns: list[list[Any]], kind: pa.StructType, is_null: list[bool], errors: dict[int, str]
) -> Parsed:
    """Rows with errors are null too, whatever the columns have of them."""
    import pyarrow as pa

    arrays = [_column(values, field, errors) for values, field in zip(columns, kind, strict=True)]
    for number in errors:
        is_null[number] = True
    mask = pa.array(is_null, pa.bool_())
    return Parsed(pa.StructArray.from_arrays(arrays, fields=list(kind), mask=mask), errors)


def _column(values: list[Any], field: pa.Field, errors: dict[int, str]) -> pa.Array:
    import pyarrow as pa

    of_decimals = decimal_flaw(field.type)
    if of_decimals is not None:
        _leave_out(values, lambda value: of_decimals(value, field.name), errors)
    try:
        array = pa.array(values, type=field.type)
        if not _is_beyond_python(array):
            return array
    except _misfits():
        pass
    _leave_out(values, lambda value: _flaw(value, field), errors)
    return pa.array(values, type=field.type)


def _leave_out(values: list[Any], flaw_of: Callable[[Any], str | None], errors: dict[int, str]) -> None:
    for number, value in enumerate(values):
        flaw = None if value is None else flaw_of(value)
        if flaw is not None:
            values[number] = None
            errors.setdefault(number, flaw)


def _flaw(value: Any, field: pa.Field) -> str | None:
    import pyarrow as pa

    try:
        pa.array([value], type=field.type).to_pylist()
    except _misfits() as error:
        return f"{field.name} must be {field.type}, and is {shown(value)} ({error})"
    return None


def _misfits() -> tuple[type[Exception], ...]:
    import pyarrow as pa

    return (pa.ArrowException, TypeError, ValueError, OverflowError)


def _is_beyond_python(array: pa.Array) -> bool:
    """Moments out of the years 1 to 9999, which offsets can make: no row function could be given them."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_timestamp(array.type):
        found = pc.min_max(array.cast(pa.timestamp("s"), safe=False).cast(pa.int64())).as_py()
        return found["min"] is not None and not _SECOND_FIRST <= found["min"] <= found["max"] <= _SECOND_LAST
    if pa.types.is_struct(array.type):
        return any(map(_is_beyond_python, array.flatten()))
    if pa.types.is_map(array.type):
        return _is_beyond_python(array.items)
    return bool(pa.types.is_list(array.type)) and _is_beyond_python(array.values)


def shown(value: object) -> str:
    """For sentences: short, whatever it is."""
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."
