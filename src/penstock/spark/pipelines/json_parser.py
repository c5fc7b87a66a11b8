"""JSON objects to Arrow columns: msgspec reads each value for its columns only.

The columns of a pipeline become types for msgspec, and words for the error messages of values that do not fit.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import date, datetime
from decimal import Decimal
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, Final, NotRequired, TypedDict

import msgspec
from msgspec import Meta

from penstock.spark.pipelines.arrow_values import arrow_struct, struct_from_columns
from penstock.spark.pipelines.declaration import Parsed, PipelineError

if TYPE_CHECKING:
    import pyarrow as pa


#: The first number that is infinite as one of 32 bits.
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
    """What a value must be, by its path; elements of lists and maps have [] in theirs."""

    def __init__(self) -> None:
        self._wanted = {"": "an object"}

    def want(self, path: str, words: str) -> None:
        self._wanted[_INDEX.sub("[]", path)] = words

    def told(self, error: msgspec.ValidationError) -> str:
        """In our words; in those of msgspec where we have none."""
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
            f", and is {_JSON_TYPE_NAMES.get(got[1], got[1])}" if got is not None else ""
        )


def row_type(schema: Any, words: ExpectedTypes) -> type[msgspec.Struct]:
    """Fields are named c0, c1...; what JSON calls them may be no names for Python. Raises PipelineError."""
    names = [field.name for field in schema.fields]
    for name in names:
        if names.count(name) > 1:
            raise PipelineError(f"there are two columns {name}")
    fields = [(f"c{number}", *_struct_field(field, words)) for number, field in enumerate(schema.fields)]
    # What JSON is made of has no cycles for a collector to look for.
    return msgspec.defstruct("Row", fields, kw_only=True, gc=False)


def _struct_field(field: Any, words: ExpectedTypes) -> tuple[Any, Any]:
    kind = _msgspec_type(field.dataType, field.name, words)
    if field.nullable:
        return kind | None, msgspec.field(name=field.name, default=None)
    return kind, msgspec.field(name=field.name)


def _msgspec_type(kind: Any, path: str, words: ExpectedTypes) -> Any:
    from pyspark.sql import types

    match kind:
        case types.StructType():
            words.want(path, "an object")
            return _object_type(kind, path, words)
        case types.ArrayType():
            words.want(path, "a list")
            return list[_element_type(kind.elementType, kind.containsNull, path, words)]  # type: ignore[misc]
        case types.MapType() if isinstance(kind.keyType, types.StringType):
            words.want(path, "an object")
            return dict[str, _element_type(kind.valueType, kind.valueContainsNull, path, words)]  # type: ignore[misc]
        case types.DecimalType():
            words.want(path, "a number")
            return Decimal
    if kind.typeName() not in _SCALAR_TYPES:
        raise PipelineError(f"column {path} is {kind.simpleString()}, which cannot be read from JSON")
    scalar, wanted = _SCALAR_TYPES[kind.typeName()]
    words.want(path, wanted)
    return scalar


def _element_type(kind: Any, may_be_null: bool, path: str, words: ExpectedTypes) -> Any:
    found = _msgspec_type(kind, f"{path}[]", words)
    return found | None if may_be_null else found


def _object_type(schema: Any, path: str, words: ExpectedTypes) -> Any:
    """Objects within are dicts, as Arrow takes them."""
    fields = {}
    for field in schema.fields:
        kind = _msgspec_type(field.dataType, f"{path}.{field.name}", words)
        fields[field.name] = NotRequired[kind | None] if field.nullable else kind
    typed_dict: Any = TypedDict
    return typed_dict("Object", fields)


_Decode = Callable[[bytes], msgspec.Struct]


class JsonReader:
    def __init__(self, schema: Any) -> None:
        """Raises PipelineError for types that JSON has no way to write."""
        self.kind = arrow_struct(schema)
        self._words = ExpectedTypes()
        kind = row_type(schema, self._words)
        self._decode: _Decode = msgspec.json.Decoder(kind).decode
        self._getters = [attrgetter(name) for name in kind.__struct_fields__]
        self._nothing = kind(**dict.fromkeys(kind.__struct_fields__))

    def parse(self, values: pa.Array) -> Parsed:
        # What msgspec skips it does not look into: text that is not UTF-8 would pass there.
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
                # A list keeps what it was given before the error, and the iterator goes on after it.
                rows.extend(reading)
                return rows, errors
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError) as error:
                errors[len(rows)] = self._told(error, values[len(rows)])
                rows.append(self._nothing)

    def _told(self, error: Exception, value: bytes | None) -> str:
        if value is None:
            return "there is no value"
        match error:
            case msgspec.ValidationError():
                return self._words.told(error)
            case msgspec.DecodeError():
                return f"the value is no JSON: {str(error).removeprefix('JSON is malformed: ')}"
            case UnicodeDecodeError():
                return f"the value is not UTF-8 (byte {error.start})"
            case RecursionError():
                return "the value is nested too deeply"
        raise error


def _is_utf8(values: pa.Array) -> bool:
    import pyarrow as pa

    try:
        values.cast(pa.string())
    except pa.ArrowException:
        return False
    return True
