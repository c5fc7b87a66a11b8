"""Converts JSON into dataclasses and TypedDicts with the standard library alone, where msgspec is not installed.

It does not coerce types: a number must be a number, text must be text, and times, UUIDs and decimals must be the text
that `encode_json` writes for them.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import types
from collections.abc import Callable
from datetime import date, datetime, time
from decimal import Decimal
from enum import Enum
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    NoReturn,
    NotRequired,
    Required,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)
from uuid import UUID

__all__ = ["JsonMismatch", "encode_json", "json_reader"]

#: Converts a JSON value at a path to the annotated type.
Converter = Callable[[Any, str], Any]


class JsonMismatch(ValueError):
    """A part of the value does not match the annotation; the message names it."""


def json_reader(annotation: Any) -> Callable[[bytes], Any]:
    """Raises TypeError for an annotation that is not supported."""
    check = _converter(annotation, {})
    return lambda data: check(json.loads(data, parse_constant=_reject_constant), "$")


def _reject_constant(name: str) -> NoReturn:
    raise JsonMismatch(f"{name} is not JSON")


def _mismatch(wanted: str, value: Any, path: str) -> JsonMismatch:
    return JsonMismatch(
        f"expected {wanted}, got {_JSON_TYPE_NAMES.get(type(value), type(value).__name__)} at {path}"
    )


_JSON_TYPE_NAMES: Final = {
    dict: "an object",
    list: "an array",
    str: "text",
    bool: "a flag",
    type(None): "null",
}


# By annotation


def _converter(annotation: Any, known: dict[Any, Converter]) -> Converter:
    if get_origin(annotation) in (Annotated, Required, NotRequired):
        return _converter(get_args(annotation)[0], known)
    if annotation in (Any, object):
        return lambda value, path: value
    if annotation in _SCALAR_CONVERTERS:
        return _SCALAR_CONVERTERS[annotation]
    if isinstance(annotation, type) and get_origin(annotation) is None:
        return _class_converter(annotation, known)
    return _generic_converter(annotation, known)


def _class_converter(kind: type, known: dict[Any, Converter]) -> Converter:
    if kind in _UNPARAMETRIZED:
        return _converter(_UNPARAMETRIZED[kind], known)
    if kind in _TEXT_PARSERS:
        return _parsed_converter(kind, _TEXT_PARSERS[kind])
    if issubclass(kind, Enum):
        return _parsed_converter(kind, kind)
    if dataclasses.is_dataclass(kind) or is_typeddict(kind):
        return _fields_converter(kind, known)
    raise TypeError(f"cannot convert JSON to {kind.__qualname__}; msgspec supports more types")


def _generic_converter(annotation: Any, known: dict[Any, Converter]) -> Converter:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return _union_converter(annotation, [_converter(each, known) for each in arguments])
    if origin is Literal:
        return _literal_converter(arguments)
    if origin in (list, set, frozenset):
        return _array_converter(origin, _converter(arguments[0], known))
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return _array_converter(tuple, _converter(arguments[0], known))
    if origin is dict and arguments[0] is str:
        return _object_converter(_converter(arguments[1], known))
    raise TypeError(f"cannot convert JSON to {annotation}; msgspec supports more types")


# Scalars


def _scalar_converter(kind: type | tuple[type, ...], wanted: str) -> Converter:
    def check(value: Any, path: str) -> Any:
        # In Python a bool is an int; in JSON it is not a number.
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise _mismatch(wanted, value, path)
        return value

    return check


def _convert_float(value: Any, path: str) -> float:
    return float(_convert_number(value, path))


_convert_number: Final = _scalar_converter((int, float), "a number")
_SCALAR_CONVERTERS: Final[dict[Any, Converter]] = {
    bool: _scalar_converter(bool, "a flag"),
    int: _scalar_converter(int, "a whole number"),
    float: _convert_float,
    str: _scalar_converter(str, "text"),
    types.NoneType: _scalar_converter(types.NoneType, "null"),
}
_UNPARAMETRIZED: Final[dict[Any, Any]] = {
    dict: dict[str, Any],
    list: list[Any],
    tuple: tuple[Any, ...],
    set: set[Any],
    frozenset: frozenset[Any],
}
_TEXT_PARSERS: Final[dict[Any, Callable[[str], Any]]] = {
    datetime: datetime.fromisoformat,
    date: date.fromisoformat,
    time: time.fromisoformat,
    UUID: UUID,
    Decimal: Decimal,
    bytes: lambda text: base64.b64decode(text, validate=True),
}


def _parsed_converter(kind: type, made: Callable[[Any], Any]) -> Converter:
    def check(value: Any, path: str) -> Any:
        if kind in _TEXT_PARSERS and not isinstance(value, str):
            raise _mismatch("text", value, path)
        try:
            return made(value)
        except (ValueError, ArithmeticError) as flaw:
            raise JsonMismatch(f"expected a {kind.__qualname__} at {path}: {flaw}") from None

    return check


def _literal_converter(allowed: tuple[Any, ...]) -> Converter:
    def check(value: Any, path: str) -> Any:
        if not any(value == each and type(value) is type(each) for each in allowed):
            raise JsonMismatch(f"expected one of {', '.join(map(repr, allowed))} at {path}")
        return value

    return check


def _union_converter(annotation: Any, checks: list[Converter]) -> Converter:
    def check(value: Any, path: str) -> Any:
        flaws = []
        for each in checks:
            try:
                return each(value, path)
            except JsonMismatch as flaw:
                flaws.append(str(flaw))
        raise JsonMismatch("; ".join(flaws))

    return check


# Arrays and objects


def _array_converter(made: Callable[[list[Any]], Any], item: Converter) -> Converter:
    def check(value: Any, path: str) -> Any:
        if not isinstance(value, list):
            raise _mismatch("an array", value, path)
        return made([item(each, f"{path}[{index}]") for index, each in enumerate(value)])

    return check


def _object_converter(member: Converter) -> Converter:
    def check(value: Any, path: str) -> Any:
        if not isinstance(value, dict):
            raise _mismatch("an object", value, path)
        return {name: member(each, f"{path}.{name}") for name, each in value.items()}

    return check


def _fields_converter(kind: Any, known: dict[Any, Converter]) -> Converter:
    """Ignores unknown members, as msgspec does."""
    if kind in known:
        return known[kind]
    fields: dict[str, Converter] = {}

    def check(value: Any, path: str) -> Any:
        if not isinstance(value, dict):
            raise _mismatch("an object", value, path)
        for name in required:
            if name not in value:
                raise JsonMismatch(f"object missing required field {name} at {path}")
        return kind(**{name: fields[name](value[name], f"{path}.{name}") for name in fields if name in value})

    known[kind] = check  # before its fields, because a class may contain itself
    hints = get_type_hints(kind, include_extras=True)
    names, required = _field_names(kind, hints)
    fields.update({name: _converter(hints[name], known) for name in names})
    return check


def _field_names(kind: Any, hints: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Returns all fields, and the required ones."""
    if is_typeddict(kind):
        return list(hints), [name for name in hints if _is_required(kind, name, hints[name])]
    given = [each for each in dataclasses.fields(kind) if each.init]
    missing = dataclasses.MISSING
    required = [each.name for each in given if each.default is missing and each.default_factory is missing]
    return [each.name for each in given], required


def _is_required(kind: Any, name: str, hint: Any) -> bool:
    # __required_keys__ is wrong if the annotations are strings, so check the resolved hint.
    return get_origin(hint) is not NotRequired and (
        get_origin(hint) is Required or name in kind.__required_keys__
    )


# Encoding


def encode_json(value: object) -> bytes:
    """Raises TypeError or ValueError for a value that cannot be converted."""
    text = json.dumps(value, default=_json_value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode()


def _json_value(value: Any) -> Any:
    if hasattr(type(value), "__pydantic_serializer__"):
        return type(value).__pydantic_serializer__.to_python(value, mode="json", by_alias=True)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    match value:
        case datetime():
            return value.isoformat().replace("+00:00", "Z")
        case date() | time():
            return value.isoformat()
        case UUID() | Decimal():
            return str(value)
        case Enum():
            return value.value
        case set() | frozenset():
            return list(value)
        case bytes() | bytearray():
            return base64.b64encode(value).decode()
    raise TypeError(f"{type(value).__qualname__} cannot be converted to JSON")
