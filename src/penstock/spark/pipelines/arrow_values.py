"""Converts Python values to Arrow columns. A value that does not fit is an error of its row, and the row becomes null.

Decimals are checked before Arrow sees them, because very small ones crash the process in Arrow. Functions import
pyarrow themselves, because a pipeline can be declared without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from decimal import Context, Decimal, DecimalException, Inexact, InvalidOperation
from typing import TYPE_CHECKING, Any, Final

from penstock.spark.pipelines.declaration import Parsed

if TYPE_CHECKING:
    import pyarrow as pa


#: (value, field name) -> a sentence that says what is wrong, or None.
DecimalCheck = Callable[[Any, str], str | None]
#: Arrow cannot rescale a decimal with more decimal places than this, even if they are zeros.
_DECIMAL_PLACES_MAX: Final = 38


def decimal_check(kind: pa.DataType) -> DecimalCheck | None:
    """Return the check for values of this type, or None if it contains no decimals."""
    import pyarrow as pa

    if pa.types.is_decimal(kind):
        return _check_of_decimal(kind.precision, kind.scale)
    if pa.types.is_list(kind):
        return _check_of_parts([decimal_check(kind.value_type)], _list_parts)
    if pa.types.is_map(kind):
        return _check_of_parts([decimal_check(kind.item_type)], _map_parts)
    if pa.types.is_struct(kind):
        names = [field.name for field in kind]
        return _check_of_parts(
            [decimal_check(field.type) for field in kind], lambda value: _struct_parts(value, names)
        )
    return None


def _check_of_decimal(precision: int, scale: int) -> DecimalCheck:
    unit = Decimal((0, (1,), -scale))
    exactly = Context(prec=precision, traps=[Inexact, InvalidOperation])

    def flaw(value: Any, name: str) -> str | None:
        if not isinstance(value, Decimal) or _fits(value, unit, exactly):
            return None
        return f"{name} must fit decimal({precision},{scale}), but is {_shortened(str(value))}"

    return flaw


def _fits(value: Decimal, unit: Decimal, exactly: Context) -> bool:
    try:
        value.quantize(unit, context=exactly)
    except DecimalException:
        return False
    exponent = value.as_tuple().exponent
    return isinstance(exponent, int) and exponent >= -_DECIMAL_PLACES_MAX


# The parts of a nested value: the index of the check, the part, and the suffix of its name.

_Parts = Iterable[tuple[int, Any, str]]


def _check_of_parts(flaws: list[DecimalCheck | None], parts: Callable[[Any], _Parts]) -> DecimalCheck | None:
    if not any(flaws):
        return None

    def flaw(value: Any, name: str) -> str | None:
        for number, part, suffix in parts(value):
            check = flaws[number]
            found = check(part, f"{name}{suffix}") if check is not None else None
            if found is not None:
                return found
        return None

    return flaw


def _list_parts(value: Any) -> _Parts:
    if isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield 0, each, f"[{number}]"


def _map_parts(value: Any) -> _Parts:
    pairs = value.items() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    for pair in pairs:
        if isinstance(pair, tuple) and len(pair) == 2:
            yield 0, pair[1], f"[{pair[0]}]"


def _struct_parts(value: Any, names: list[str]) -> _Parts:
    """Yield the fields of a dict, or of a tuple in the order of the columns."""
    if isinstance(value, dict):
        value = [value.get(name) for name in names]
    if isinstance(value, list | tuple):
        for number, (name, each) in enumerate(zip(names, value, strict=False)):
            yield number, each, f".{name}"


_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_SECOND_FIRST: Final = (datetime.min.replace(tzinfo=UTC) - _EPOCH).days * 86_400
_SECOND_LAST: Final = ((datetime.max.replace(tzinfo=UTC) - _EPOCH).days + 1) * 86_400 - 1


class RowError(Exception):
    """A row cannot be parsed. The message names the field."""


def arrow_struct(schema: Any) -> pa.StructType:
    """Return the columns as one Arrow type. Every field is nullable, because failed rows are null."""
    import pyarrow as pa
    from pyspark.sql.pandas.types import to_arrow_schema

    return pa.struct([field.with_nullable(True) for field in to_arrow_schema(schema, timezone="UTC")])


def parse_each(values: Any, kind: pa.StructType, parse: Callable[[bytes | None], dict[str, Any]]) -> Parsed:
    """Parse the values one by one. `parse` raises RowError for a value that does not fit."""
    rows: list[dict[str, Any] | None] = []
    errors: dict[int, str] = {}
    for number, value in enumerate(values.to_pylist()):
        try:
            rows.append(parse(value))
        except RowError as error:
            rows.append(None)
            errors[number] = str(error)
    return struct_from_rows(rows, kind, errors)


def struct_from_rows(
    rows: list[dict[str, Any] | None], kind: pa.StructType, errors: dict[int, str]
) -> Parsed:
    """Convert rows to a struct array, column by column, which is much faster than row by row."""
    getters = [({} if row is None else row).get for row in rows]
    columns = [[get(field.name) for get in getters] for field in kind]
    return struct_from_columns(columns, kind, [row is None for row in rows], errors)


def struct_from_columns(
    columns: list[list[Any]], kind: pa.StructType, is_null: list[bool], errors: dict[int, str]
) -> Parsed:
    """Build a struct array from columns. Rows with errors become null, even if their columns have values."""
    import pyarrow as pa

    arrays = [_column(values, field, errors) for values, field in zip(columns, kind, strict=True)]
    for number in errors:
        is_null[number] = True
    mask = pa.array(is_null, pa.bool_())
    return Parsed(pa.StructArray.from_arrays(arrays, fields=list(kind), mask=mask), errors)


def _column(values: list[Any], field: pa.Field, errors: dict[int, str]) -> pa.Array:
    import pyarrow as pa

    of_decimals = decimal_check(field.type)
    if of_decimals is not None:
        _remove_misfits(values, lambda value: of_decimals(value, field.name), errors)
    try:
        array = pa.array(values, type=field.type)
        if not _exceeds_datetime(array):
            return array
    except _misfit_errors():
        pass
    _remove_misfits(values, lambda value: _misfit_message(value, field), errors)
    return pa.array(values, type=field.type)


def _remove_misfits(values: list[Any], flaw_of: Callable[[Any], str | None], errors: dict[int, str]) -> None:
    for number, value in enumerate(values):
        flaw = None if value is None else flaw_of(value)
        if flaw is not None:
            values[number] = None
            errors.setdefault(number, flaw)


def _misfit_message(value: Any, field: pa.Field) -> str | None:
    import pyarrow as pa

    try:
        pa.array([value], type=field.type).to_pylist()
    except _misfit_errors() as error:
        return f"{field.name} must be {field.type}, but is {short_repr(value)} ({error})"
    return None


def _misfit_errors() -> tuple[type[Exception], ...]:
    import pyarrow as pa

    return (pa.ArrowException, TypeError, ValueError, OverflowError)


def _exceeds_datetime(array: pa.Array) -> bool:
    """Return whether any timestamp is outside of years 1 to 9999, as a UTC offset can make it.

    Python's datetime cannot represent such a timestamp, so no row function could receive it.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_timestamp(array.type):
        found = pc.min_max(array.cast(pa.timestamp("s"), safe=False).cast(pa.int64())).as_py()
        return found["min"] is not None and not _SECOND_FIRST <= found["min"] <= found["max"] <= _SECOND_LAST
    if pa.types.is_struct(array.type):
        return any(map(_exceeds_datetime, array.flatten()))
    if pa.types.is_map(array.type):
        return _exceeds_datetime(array.items)
    return bool(pa.types.is_list(array.type)) and _exceeds_datetime(array.values)


def short_repr(value: object) -> str:
    """Return the repr of a value for an error message, shortened to 60 characters."""
    return _shortened(repr(value))


def _shortened(text: str) -> str:
    return text if len(text) <= 60 else text[:60] + "..."
