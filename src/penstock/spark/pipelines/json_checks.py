"""What a value of JSON must be to fit a column: strict, and with a sentence for each that does not."""

from __future__ import annotations

import json
import math
from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime
from decimal import Decimal, InvalidOperation
from typing import Any, Final

from penstock.spark.pipelines.declaration import PipelineError
from penstock.spark.pipelines.parsing import RowError, shown

#: Of a value and the name of its field; raises RowError.
Check = Callable[[Any, str], Any]
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


def decoder(*, exact: bool) -> Callable[[str], Any]:
    parse_float = Decimal if exact else float
    return json.JSONDecoder(parse_float=parse_float, parse_constant=_refuse_constant).decode


def loads(value: bytes | None, decode: Callable[[str], Any]) -> Any:
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


def struct_check(schema: Any, path: str) -> Check:
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


def _check_of(kind: Any, path: str) -> Check:
    from pyspark.sql import types

    match kind:
        case types.StructType():
            return struct_check(kind, f"{path}.")
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


def _array(kind: Any, path: str) -> Check:
    check_element = _check_of(kind.elementType, path)

    def check(value: Any, name: str) -> list[Any]:
        if type(value) is not list:
            raise _wrong(name, "a list", value)
        return list(_elements(enumerate(value), name, kind.containsNull, check_element))

    return check


def _map(kind: Any, path: str) -> Check:
    check_element = _check_of(kind.valueType, path)

    def check(value: Any, name: str) -> list[tuple[str, Any]]:
        if type(value) is not dict:
            raise _wrong(name, "an object", value)
        found = _elements(value.items(), name, kind.valueContainsNull, check_element)
        return list(zip(value, found, strict=True))

    return check


def _elements(items: Any, name: str, may_be_null: bool, check: Check) -> Iterator[Any]:
    for key, value in items:
        if value is None and not may_be_null:
            raise RowError(f"{name}[{key}] is null")
        yield None if value is None else check(value, f"{name}[{key}]")


def _integer(bits: int) -> Check:
    least, most = -(1 << bits - 1), (1 << bits - 1) - 1

    def check(value: Any, name: str) -> int:
        if type(value) is not int:
            raise _wrong(name, "a whole number", value)
        if not least <= value <= most:
            raise RowError(f"{name} must be from {least} to {most}, and is {shown(value)}")
        return value

    return check


_NUMBERS: Final = (float, int, Decimal)


def _floating(bits: int) -> Check:
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


def _decimal(precision: int, scale: int) -> Check:
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


_SCALARS: Final[dict[str, Check]] = {
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
