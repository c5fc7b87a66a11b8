"""JSON objects to Arrow columns. msgspec decodes from each value only the fields that are columns.

The columns of a pipeline become msgspec types, and descriptions for the error messages.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import date, datetime
from decimal import Decimal
from operator import attrgetter
from typing import Annotated, Any, Final, NotRequired, TypedDict

import msgspec
import pyarrow as pa
from msgspec import Meta
from pyspark.sql import types

from penstock.spark.pipelines.arrow_values import arrow_struct, struct_from_columns
from penstock.spark.pipelines.declaration import Parsed, PipelineError

#: The smallest number that is infinite as a 32-bit float.
_FLOAT_END: Final = 3.4028235677973366e38


def _integer(bits: int) -> tuple[Any, str]:
    least, most = -(1 << bits - 1), (1 << bits - 1) - 1
    return Annotated[int, Meta(ge=least, le=most)], f"a whole number from {least} to {most}"


_SCALAR_TYPES: Final[dict[str, tuple[Any, str]]] = {
    "string": (str, "text"),
    "boolean": (bool, "true or false"),
    "byte": _integer(8),
    "short": _integer(16),
    "integer": _integer(32),
    "long": _integer(64),
    "float": (Annotated[float, Meta(gt=-_FLOAT_END, lt=_FLOAT_END)], "a number of 32 bits"),
    "double": (float, "a number of 64 bits"),
    "timestamp": (datetime, "a date and time such as 2030-01-31T12:00:00Z"),
    "timestamp_ntz": (
        Annotated[datetime, Meta(tz=False)],
        "a date and time without offset such as 2030-01-31T12:00:00",
    ),
    "date": (date, "a date such as 2030-01-31"),
    "binary": (bytes, "text in base64"),
}
_JSON_TYPE_NAMES: Final = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number with a point or exponent",
    "str": "text",
    "array": "a list",
    "object": "an object",
}
_AT: Final = re.compile(r"^(.*) - at `\$\.?(.*)`$", re.DOTALL)
_GOT: Final = re.compile(r", got `(\w+)`$")
_MISSING: Final = re.compile(r"^Object missing required field `(.*)`$", re.DOTALL)
_INDEX: Final = re.compile(r"\[(?:\d+|\.\.\.)\]")


class ExpectedTypes:
    """A description of each expected type, by path. The path of an element in a list or map contains []."""

    def __init__(self) -> None:
        self._wanted = {"": "an object"}

    def add(self, path: str, description: str) -> None:
        self._wanted[_INDEX.sub("[]", path)] = description

    def describe(self, error: msgspec.ValidationError) -> str:
        """Return a message with our name of the expected type, or with msgspec's if the path is unknown."""
        text, path = str(error), ""
        if found := _AT.match(text):
            text, path = found.groups()
        if missing := _MISSING.match(text):
            return f"{path}.{missing[1]} is missing".removeprefix(".")
        name, wanted = path or "the value", self._wanted.get(_INDEX.sub("[]", path))
        got = _GOT.search(text)
        if got is not None and got[1] == "null" and path:
            return f"{name} is null"
        if wanted is None:
            return f"{name} does not fit: {text}"
        return f"{name} must be {wanted}" + (
            f", but is {_JSON_TYPE_NAMES.get(got[1], got[1])}" if got is not None else ""
        )


def row_type(schema: Any, expected: ExpectedTypes) -> type[msgspec.Struct]:
    """Return the msgspec type. Its fields are c0, c1...: JSON names may be invalid in Python. Raises PipelineError."""
    names = [field.name for field in schema.fields]
    for name in names:
        if names.count(name) > 1:
            raise PipelineError(f"there are two columns {name}")
    fields = [(f"c{number}", *_struct_field(field, expected)) for number, field in enumerate(schema.fields)]
    # Decoded JSON has no cycles, so the garbage collector need not track it.
    return msgspec.defstruct("Row", fields, kw_only=True, gc=False)


def _struct_field(field: Any, expected: ExpectedTypes) -> tuple[Any, Any]:
    kind = _msgspec_type(field.dataType, field.name, expected)
    if field.nullable:
        return kind | None, msgspec.field(name=field.name, default=None)
    return kind, msgspec.field(name=field.name)


def _msgspec_type(kind: Any, path: str, expected: ExpectedTypes) -> Any:
    match kind:
        case types.StructType():
            expected.add(path, "an object")
            return _object_type(kind, path, expected)
        case types.ArrayType():
            expected.add(path, "a list")
            return list[_element_type(kind.elementType, kind.containsNull, path, expected)]  # type: ignore[misc]
        case types.MapType() if isinstance(kind.keyType, types.StringType):
            expected.add(path, "an object")
            return dict[str, _element_type(kind.valueType, kind.valueContainsNull, path, expected)]  # type: ignore[misc]
        case types.DecimalType():
            expected.add(path, "a number")
            return Decimal
    if kind.typeName() not in _SCALAR_TYPES:
        raise PipelineError(f"column {path} is {kind.simpleString()}, which cannot be read from JSON")
    scalar, wanted = _SCALAR_TYPES[kind.typeName()]
    expected.add(path, wanted)
    return scalar


def _element_type(kind: Any, may_be_null: bool, path: str, expected: ExpectedTypes) -> Any:
    found = _msgspec_type(kind, f"{path}[]", expected)
    return found | None if may_be_null else found


def _object_type(schema: Any, path: str, expected: ExpectedTypes) -> Any:
    """Return the type of a nested object, which is decoded to a dict, as Arrow expects it."""
    fields = {}
    for field in schema.fields:
        kind = _msgspec_type(field.dataType, f"{path}.{field.name}", expected)
        fields[field.name] = NotRequired[kind | None] if field.nullable else kind
    typed_dict: Any = TypedDict
    return typed_dict("Object", fields)


_Decode = Callable[[bytes], msgspec.Struct]


class JsonReader:
    def __init__(self, schema: Any) -> None:
        """Raises PipelineError for a type that cannot be read from JSON."""
        self.kind = arrow_struct(schema)
        self._expected = ExpectedTypes()
        kind = row_type(schema, self._expected)
        self._decode: _Decode = msgspec.json.Decoder(kind).decode
        self._getters = [attrgetter(name) for name in kind.__struct_fields__]
        self._nothing = kind(**dict.fromkeys(kind.__struct_fields__))

    def parse(self, values: pa.Array) -> Parsed:
        # msgspec does not check skipped fields, so it would accept text there that is not UTF-8.
        rows, errors = self._read(values.to_pylist(), self._decode if _is_utf8(values) else self._decode_text)
        columns = [list(map(getter, rows)) for getter in self._getters]
        return struct_from_columns(columns, self.kind, [False] * len(rows), errors)

    def _decode_text(self, value: bytes) -> msgspec.Struct:
        return self._decode(str(value, "utf-8"))  # type: ignore[arg-type]

    def _read(self, values: list[Any], decode: _Decode) -> tuple[list[msgspec.Struct], dict[int, str]]:
        rows: list[msgspec.Struct] = []
        errors: dict[int, str] = {}
        reading = map(decode, values)
        while True:
            try:
                # On an error, the list keeps what it has received, and the iterator continues after the failed value.
                rows.extend(reading)
                return rows, errors
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError) as error:
                errors[len(rows)] = self._describe(error, values[len(rows)])
                rows.append(self._nothing)

    def _describe(self, error: Exception, value: bytes | None) -> str:
        if value is None:
            return "there is no value"
        match error:
            case msgspec.ValidationError():
                return self._expected.describe(error)
            case msgspec.DecodeError():
                return f"the value is not valid JSON: {str(error).removeprefix('JSON is malformed: ')}"
            case UnicodeDecodeError():
                return f"the value is not UTF-8 (byte {error.start})"
            case RecursionError():
                return "the value is nested too deeply"
        raise error


def _is_utf8(values: pa.Array) -> bool:
    try:
        values.cast(pa.string())
    except pa.ArrowException:
        return False
    return True
