"""JSON objects to Arrow columns: many at once by Arrow where that is right, one by one where Arrow will not have them.

Arrow's reader takes lines of JSON. It is given only values that are one object each as far as can be seen without
parsing: it cannot be trusted with others, for it takes two objects in one value for two rows, and a bare `null` ends
the process. What it reads is what `json` would have read; all that it refuses is read by `json`, which tells why.
"""

from __future__ import annotations

import json
import math
from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any, Final

from penstock.spark.pipelines.declaration import Parsed, PipelineError
from penstock.spark.pipelines.parsing import RowError, arrow_struct, parse_each, shown

if TYPE_CHECKING:
    import pyarrow as pa

#: After an object comes nothing but more of what it is in; and there are no numbers that JSON does not know.
_SUSPECT: Final = r"\}[ \t\r\n]*[^ \t\r\n,}\]]|[:,\[][ \t\r\n]*-?[NI]|\x00"
_OBJECT: Final = r"^\{"
#: A value of less than this cannot be nested so deeply that `json` would not read it.
_BYTES_SHALLOW: Final = 1_000
_BRACKETS_MAX: Final = 400
#: Where a batch is refused, so many are tried together before they are read one by one.
_TOGETHER: Final = 128


class _Refused(Exception):
    """By Arrow; `json` has the last word."""


class JsonReader:
    def __init__(self, schema: Any) -> None:
        """Raises PipelineError for types that JSON has no way to write."""
        self.kind = arrow_struct(schema)
        self._check = _struct(schema, "")
        self._decode = _decoder(exact="decimal" in schema.simpleString())
        self._required = [field.name for field in schema.fields if not field.nullable]
        #: None where all are read one by one.
        self._fast = None
        if not any(_has_required(field.dataType) for field in schema.fields):
            self._fast = _fast_schema(self.kind)

    def parse(self, values: pa.Array) -> Parsed:
        import pyarrow as pa

        if self._fast is None or not len(values):
            return self._one_by_one(values)
        try:
            return self._together(values)
        except _Refused:
            parts = [self._part(values.slice(at, _TOGETHER)) for at in range(0, len(values), _TOGETHER)]
        errors = {
            index * _TOGETHER + number: error
            for index, part in enumerate(parts)
            for number, error in part.errors.items()
        }
        return Parsed(pa.concat_arrays([part.rows for part in parts]), errors)

    def _part(self, values: pa.Array) -> Parsed:
        try:
            return self._together(values)
        except _Refused:
            return self._one_by_one(values)

    # One by one

    def _one_by_one(self, values: pa.Array) -> Parsed:
        return parse_each(values, self.kind, self._read)

    def _read(self, value: bytes | None) -> dict[str, Any]:
        row: dict[str, Any] = self._check(_loads(value, self._decode), "the value")
        return row

    # Together

    def _together(self, values: pa.Array) -> Parsed:
        """Raises _Refused."""
        import pyarrow as pa
        import pyarrow.compute as pc

        assert self._fast is not None
        texts = _utf8(values)
        is_fit = _fit(texts)
        if pc.all(is_fit).as_py():
            return Parsed(self._arrow(texts), {})
        others = pc.indices_nonzero(pc.invert(is_fit))
        if len(others) * 2 > len(values):
            raise _Refused
        read = self._arrow(pc.if_else(is_fit, texts, "{}"), is_fit)
        each = self._one_by_one(values.take(others))
        order = pc.replace_with_mask(
            pa.array(range(len(values)), pa.int64()),
            pc.invert(is_fit),
            pa.array(range(len(values), len(values) + len(others)), pa.int64()),
        )
        where = others.to_pylist()
        errors = {where[number]: error for number, error in each.errors.items()}
        return Parsed(pa.concat_arrays([read, each.rows]).take(order), errors)

    def _arrow(self, texts: pa.Array, counts: pa.Array | None = None) -> pa.StructArray:
        import pyarrow as pa

        rows = _read_lines(texts, self._fast)
        if len(rows) != len(texts):
            raise _Refused
        self._refuse_doubtful(rows, counts)
        try:
            return rows.cast(self.kind)
        except pa.ArrowException:
            raise _Refused from None

    def _refuse_doubtful(self, rows: pa.StructArray, counts: pa.Array | None) -> None:
        """Nulls where there must be none, and numbers that became infinite."""
        for name in self._required:
            column = rows.field(name)
            if counts is not None:
                column = column.filter(counts)
            if column.null_count:
                raise _Refused
        if not all(map(_is_finite, rows.flatten())):
            raise _Refused


def _utf8(values: pa.Array) -> pa.Array:
    import pyarrow as pa

    try:
        return values.cast(pa.string())
    except pa.ArrowException:
        raise _Refused from None


def _fit(texts: pa.Array) -> pa.Array:
    """Those that Arrow's reader can be trusted with."""
    import pyarrow.compute as pc

    is_object = pc.match_substring_regex(texts, _OBJECT)
    is_fit = pc.and_not(is_object, pc.match_substring_regex(texts, _SUSPECT))
    longest = pc.max(pc.binary_length(texts)).as_py()
    if longest is not None and longest > _BYTES_SHALLOW:
        brackets = pc.add(pc.count_substring(texts, "["), pc.count_substring(texts, "{"))
        is_fit = pc.and_(is_fit, pc.less(brackets, _BRACKETS_MAX))
    return pc.fill_null(is_fit, False)


def _read_lines(texts: pa.Array, schema: pa.Schema) -> pa.StructArray:
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.json as pj

    whole = pa.ListArray.from_arrays(pa.array([0, len(texts)], pa.int32()), texts)
    data = pc.binary_join(whole, "\n")[0].as_buffer()
    try:
        table = pj.read_json(
            pa.BufferReader(data),
            read_options=pj.ReadOptions(use_threads=False, block_size=max(data.size + 1, 64)),
            parse_options=pj.ParseOptions(
                explicit_schema=schema, unexpected_field_behavior="ignore", newlines_in_values=True
            ),
        )
    except (pa.ArrowException, UnicodeDecodeError):
        raise _Refused from None
    return table.combine_chunks().to_struct_array().combine_chunks()


def _is_finite(column: pa.Array) -> bool:
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_floating(column.type):
        return bool(pc.all(pc.is_finite(column)).as_py() is not False)
    if pa.types.is_struct(column.type) or pa.types.is_list(column.type):
        parts = column.flatten()
        return all(map(_is_finite, parts)) if isinstance(parts, list) else _is_finite(parts)
    return True


# What Arrow reads


def _fast_schema(kind: pa.StructType) -> pa.Schema | None:
    """None where there are types that Arrow reads in another way than we do."""
    import pyarrow as pa

    fields = [_fast_field(field) for field in kind]
    return None if not fields or any(each is None for each in fields) else pa.schema(fields)


def _fast_field(field: pa.Field) -> pa.Field | None:
    kind = _fast_type(field.type)
    return None if kind is None else field.with_type(kind).with_nullable(True)


def _fast_type(kind: pa.DataType) -> pa.DataType | None:
    import pyarrow as pa

    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return pa.string()
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return kind
    if pa.types.is_boolean(kind) or pa.types.is_string(kind):
        return kind
    if pa.types.is_list(kind):
        element = _fast_field(kind.value_field)
        return None if element is None else pa.list_(element)
    if pa.types.is_struct(kind):
        fields = [_fast_field(each) for each in kind]
        return None if any(each is None for each in fields) else pa.struct(fields)
    return None


def _has_required(kind: Any) -> bool:
    """Below the top."""
    from pyspark.sql.types import ArrayType, StructType

    if isinstance(kind, StructType):
        return any(not field.nullable or _has_required(field.dataType) for field in kind.fields)
    if isinstance(kind, ArrayType):
        return not kind.containsNull or _has_required(kind.elementType)
    return False


# One by one: strict, with sentences

#: Of a value and the name of its field; raises RowError.
_Check = Callable[[Any, str], Any]
_KINDS: Final = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    Decimal: "a number",
    str: "text",
    list: "a list",
    dict: "an object",
    type(None): "null",
}


def _decoder(*, exact: bool) -> Callable[[str], Any]:
    parse_float = Decimal if exact else float
    return json.JSONDecoder(parse_float=parse_float, parse_constant=_refuse_constant).decode


def _loads(value: bytes | None, decode: Callable[[str], Any]) -> Any:
    if value is None:
        raise RowError("there is no value")
    try:
        return decode(value.decode())
    except UnicodeDecodeError as error:
        raise RowError(f"the value is not UTF-8 (byte {error.start})") from None
    except RecursionError:
        raise RowError("the value is nested too deeply") from None
    except ValueError as error:
        raise RowError(f"the value is no JSON: {error}") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _wrong(name: str, wanted: str, value: object) -> RowError:
    told = str(value) if isinstance(value, Decimal) else shown(value)
    return RowError(f"{name} must be {wanted}, and is {_KINDS.get(type(value), 'something else')}: {told}")


def _struct(schema: Any, path: str) -> _Check:
    fields = [
        (field.name, f"{path}{field.name}", field.nullable, _check_of(field.dataType, f"{path}{field.name}"))
        for field in schema.fields
    ]

    def check(value: Any, name: str) -> dict[str, Any]:
        if type(value) is not dict:
            raise _wrong(name, "an object", value)
        row = {}
        for key, path, nullable, check_field in fields:
            found = value.get(key)
            if found is not None:
                row[key] = check_field(found, path)
            elif not nullable:
                raise RowError(f"{path} is {'null' if key in value else 'missing'}")
        return row

    return check


def _check_of(kind: Any, path: str) -> _Check:
    from pyspark.sql import types

    match kind:
        case types.StructType():
            return _struct(kind, f"{path}.")
        case types.ArrayType():
            return _array(kind, path)
        case types.MapType() if isinstance(kind.keyType, types.StringType):
            return _map(kind, path)
        case types.DecimalType():
            return _decimal(kind.precision, kind.scale)
    scalar = _SCALARS.get(kind.typeName())
    if scalar is None:
        raise PipelineError(f"column {path} is {kind.simpleString()}, which cannot be read from JSON")
    return scalar


def _array(kind: Any, path: str) -> _Check:
    check_element = _check_of(kind.elementType, path)

    def check(value: Any, name: str) -> list[Any]:
        if type(value) is not list:
            raise _wrong(name, "a list", value)
        return list(_elements(enumerate(value), name, kind.containsNull, check_element))

    return check


def _map(kind: Any, path: str) -> _Check:
    check_element = _check_of(kind.valueType, path)

    def check(value: Any, name: str) -> list[tuple[str, Any]]:
        if type(value) is not dict:
            raise _wrong(name, "an object", value)
        found = _elements(value.items(), name, kind.valueContainsNull, check_element)
        return list(zip(value, found, strict=True))

    return check


def _elements(items: Any, name: str, may_be_null: bool, check: _Check) -> Iterator[Any]:
    for key, value in items:
        if value is None and not may_be_null:
            raise RowError(f"{name}[{key}] is null")
        yield None if value is None else check(value, f"{name}[{key}]")


def _integer(bits: int) -> _Check:
    least, most = -(1 << bits - 1), (1 << bits - 1) - 1

    def check(value: Any, name: str) -> int:
        if type(value) is not int:
            raise _wrong(name, "a whole number", value)
        if not least <= value <= most:
            raise RowError(f"{name} must be from {least} to {most}, and is {shown(value)}")
        return value

    return check


_NUMBERS: Final = (float, int, Decimal)


def _floating(bits: int) -> _Check:
    largest = 3.4028235677973366e38 if bits == 32 else math.inf

    def check(value: Any, name: str) -> float:
        if type(value) not in _NUMBERS:
            raise _wrong(name, "a number", value)
        try:
            found = float(value)
        except OverflowError:
            found = math.inf
        if not abs(found) < largest:
            raise RowError(f"{name} is too large a number")
        return found

    return check


def _decimal(precision: int, scale: int) -> _Check:
    def check(value: Any, name: str) -> Decimal:
        if type(value) is not int and type(value) is not Decimal and type(value) is not str:
            raise _wrong(name, "a number", value)
        try:
            found = Decimal(value)
        except InvalidOperation:
            raise _wrong(name, "a number", value) from None
        _, digits, exponent = found.as_tuple()
        if not isinstance(exponent, int) or -exponent > scale or len(digits) + exponent > precision - scale:
            raise RowError(f"{name} must fit decimal({precision},{scale}), and is {shown(str(value))}")
        return found

    return check


def _text(value: Any, name: str) -> str:
    if type(value) is not str:
        raise _wrong(name, "text", value)
    return value


def _truth(value: Any, name: str) -> bool:
    if type(value) is not bool:
        raise _wrong(name, "true or false", value)
    return value


def _binary(value: Any, name: str) -> bytes:
    if type(value) is not str:
        raise _wrong(name, "text in base64", value)
    try:
        return b64decode(value, validate=True)
    except (Base64Error, ValueError):
        raise _wrong(name, "text in base64", value) from None


def _timestamp(value: Any, name: str) -> datetime:
    """Without an offset it is UTC."""
    found = _moment(value, name)
    return found.replace(tzinfo=UTC) if found.tzinfo is None else found


def _local_timestamp(value: Any, name: str) -> datetime:
    found = _moment(value, name)
    if found.tzinfo is not None:
        raise _wrong(name, "a date and time without offset", value)
    return found


def _moment(value: Any, name: str) -> datetime:
    wanted = "a date and time such as 2030-01-31T12:00:00Z"
    if type(value) is not str:
        raise _wrong(name, wanted, value)
    try:
        return datetime.fromisoformat(value)
    except ValueError:
        raise _wrong(name, wanted, value) from None


def _date(value: Any, name: str) -> date:
    if type(value) is not str:
        raise _wrong(name, "a date such as 2030-01-31", value)
    try:
        return date.fromisoformat(value)
    except ValueError:
        raise _wrong(name, "a date such as 2030-01-31", value) from None


_SCALARS: Final[dict[str, _Check]] = {
    "string": _text,
    "boolean": _truth,
    "byte": _integer(8),
    "short": _integer(16),
    "integer": _integer(32),
    "long": _integer(64),
    "float": _floating(32),
    "double": _floating(64),
    "timestamp": _timestamp,
    "timestamp_ntz": _local_timestamp,
    "date": _date,
    "binary": _binary,
}
