"""The columns of a pipeline as types for msgspec, and in words for those whose values do not fit."""

from __future__ import annotations

import re
from datetime import date, datetime
from decimal import Decimal
from typing import Annotated, Any, Final, NotRequired, TypedDict

import msgspec
from msgspec import Meta

from penstock.spark.pipelines.declaration import PipelineError

#: The first number that is infinite as one of 32 bits.
_FLOAT_END: Final = 3.4028235677973366e38


def _integer(bits: int) -> tuple[Any, str]:
    least, most = -(1 << bits - 1), (1 << bits - 1) - 1
    return Annotated[int, Meta(ge=least, le=most)], f"a whole number from {least} to {most}"


_SCALARS: Final[dict[str, tuple[Any, str]]] = {
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
_FOUND: Final = {
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


class Words:
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
            f", and is {_FOUND.get(got[1], got[1])}" if got is not None else ""
        )


def row_type(schema: Any, words: Words) -> type[msgspec.Struct]:
    """Fields are named c0, c1...; what JSON calls them may be no names for Python. Raises PipelineError."""
    names = [field.name for field in schema.fields]
    for name in names:
        if names.count(name) > 1:
            raise PipelineError(f"there are two columns {name}")
    fields = [(f"c{number}", *_field(field, words)) for number, field in enumerate(schema.fields)]
    # What JSON is made of has no cycles for a collector to look for.
    return msgspec.defstruct("Row", fields, kw_only=True, gc=False)


def _field(field: Any, words: Words) -> tuple[Any, Any]:
    kind = _type(field.dataType, field.name, words)
    if field.nullable:
        return kind | None, msgspec.field(name=field.name, default=None)
    return kind, msgspec.field(name=field.name)


def _type(kind: Any, path: str, words: Words) -> Any:
    from pyspark.sql import types

    match kind:
        case types.StructType():
            words.want(path, "an object")
            return _object(kind, path, words)
        case types.ArrayType():
            words.want(path, "a list")
            return list[_element(kind.elementType, kind.containsNull, path, words)]  # type: ignore[misc]
        case types.MapType() if isinstance(kind.keyType, types.StringType):
            words.want(path, "an object")
            return dict[str, _element(kind.valueType, kind.valueContainsNull, path, words)]  # type: ignore[misc]
        case types.DecimalType():
            words.want(path, "a number")
            return Decimal
    if kind.typeName() not in _SCALARS:
        raise PipelineError(f"column {path} is {kind.simpleString()}, which cannot be read from JSON")
    scalar, wanted = _SCALARS[kind.typeName()]
    words.want(path, wanted)
    return scalar


def _element(kind: Any, may_be_null: bool, path: str, words: Words) -> Any:
    found = _type(kind, f"{path}[]", words)
    return found | None if may_be_null else found


def _object(schema: Any, path: str, words: Words) -> Any:
    """Objects within are dicts, as Arrow takes them."""
    fields = {}
    for field in schema.fields:
        kind = _type(field.dataType, f"{path}.{field.name}", words)
        fields[field.name] = NotRequired[kind | None] if field.nullable else kind
    typed_dict: Any = TypedDict
    return typed_dict("Object", fields)
