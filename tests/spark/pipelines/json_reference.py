"""A simple reference parser of JSON by a schema, with `json`. Raises ValueError."""

import json
import math
import re
from base64 import b64decode
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

from pyspark.sql import types

BITS = {"byte": 8, "short": 16, "integer": 32, "long": 64}
TIME = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d{1,6})?(Z|[+-]\d\d:?\d\d)?", re.ASCII)
DATE = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)


class Pairs(list):
    """Return an object with repeated keys, as in the text."""


def read(value: bytes | None, schema: types.StructType) -> dict[str, Any]:
    require(value is not None)
    found = json.loads(
        value.decode(), parse_float=Decimal, parse_constant=refuse, object_pairs_hook=checked_pairs
    )
    check_text(found)
    return fitted(found, schema)


def require(holds: bool) -> None:
    if not holds:
        raise ValueError


def refuse(_: str) -> None:
    raise ValueError


def checked_pairs(pairs: list[tuple[str, Any]]) -> Pairs:
    for pair in pairs:
        check_text(list(pair))
    return Pairs(pairs)


def check_text(value: Any) -> None:
    """Refuse lone surrogates anywhere in a value."""
    if isinstance(value, str):
        value.encode()
    elif type(value) is list:
        for each in value:
            check_text(each)


def fitted(value: Any, kind: types.DataType) -> Any:
    match kind:
        case types.StructType():
            require(type(value) is Pairs)
            fields = {field.name: field for field in kind.fields}
            row = {
                key: nullable(found, fields[key].dataType, fields[key].nullable)
                for key, found in value
                if key in fields
            }
            require(all(field.nullable or field.name in row for field in kind.fields))
            return dict.fromkeys(fields) | row
        case types.ArrayType():
            require(type(value) is list)
            return [nullable(each, kind.elementType, kind.containsNull) for each in value]
        case types.MapType():
            require(type(value) is Pairs)
            return list(
                {key: nullable(each, kind.valueType, kind.valueContainsNull) for key, each in value}.items()
            )
        case types.DecimalType():
            return decimal(value, kind)
    return scalar(value, kind.typeName())


def nullable(value: Any, kind: types.DataType, may_be_null: bool) -> Any:
    require(value is not None or may_be_null)
    return None if value is None else fitted(value, kind)


def decimal(value: Any, kind: types.DecimalType) -> Decimal:
    require(type(value) in (int, Decimal, str))
    try:
        found = Decimal(value)
    except ArithmeticError:
        raise ValueError from None
    require(found.is_finite())
    require(abs(found) < 10 ** (kind.precision - kind.scale))
    whole = found.scaleb(kind.scale)
    require(whole == whole.to_integral_value())
    return found


def scalar(value: Any, name: str) -> Any:
    match name:
        case "string":
            require(type(value) is str)
            return value
        case "boolean":
            require(type(value) is bool)
            return value
        case "byte" | "short" | "integer" | "long":
            require(type(value) is int and -(2 ** (BITS[name] - 1)) <= value < 2 ** (BITS[name] - 1))
            return value
        case "float" | "double":
            return floating(value, name)
    require(type(value) is str)
    if name == "binary":
        return b64decode(value, validate=True)
    if name == "date":
        require(DATE.fullmatch(value) is not None)
        return date.fromisoformat(value)
    require(TIME.fullmatch(value) is not None)
    found = datetime.fromisoformat(value)
    if name == "timestamp_ntz":
        require(found.tzinfo is None)
        return found
    try:
        return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
    except OverflowError:
        raise ValueError from None


def floating(value: Any, name: str) -> float:
    require(type(value) in (int, Decimal))
    try:
        found = float(value)
    except OverflowError:
        raise ValueError from None
    require(abs(found) < (3.4028235677973366e38 if name == "float" else math.inf))
    return found
