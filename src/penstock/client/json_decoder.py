"""JSON into dataclasses and TypedDicts by the standard library alone, for those who have no msgspec.

Reads what the annotation asks for and nothing else: a number for a number, text for text, and for moments,
identifiers and decimals the text that `written` makes of them.
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

__all__ = ["Misfit", "reader", "written"]

#: Takes what JSON has and where it was; returns what the annotation asks for.
Check = Callable[[Any, str], Any]


class Misfit(ValueError):
    """A part of the value is not what is asked for; the sentence names it."""


def reader(annotation: Any) -> Callable[[bytes], Any]:
    """Raises TypeError for an annotation that is not understood."""
    check = _check(annotation, {})
    return lambda data: check(json.loads(data, parse_constant=_no_constant), "$")


def _no_constant(name: str) -> NoReturn:
    raise Misfit(f"{name} is no JSON")


def _misfit(wanted: str, value: Any, place: str) -> Misfit:
    return Misfit(f"expected {wanted}, got {_KINDS.get(type(value), type(value).__name__)} at {place}")


_KINDS: Final = {dict: "an object", list: "an array", str: "text", bool: "a flag", type(None): "null"}


# By annotation


def _check(annotation: Any, known: dict[Any, Check]) -> Check:
    if get_origin(annotation) in (Annotated, Required, NotRequired):
        return _check(get_args(annotation)[0], known)
    if annotation in (Any, object):
        return lambda value, place: value
    if annotation in _SCALARS:
        return _SCALARS[annotation]
    if isinstance(annotation, type) and get_origin(annotation) is None:
        return _of_class(annotation, known)
    return _of_generic(annotation, known)


def _of_class(kind: type, known: dict[Any, Check]) -> Check:
    if kind in _BARE:
        return _check(_BARE[kind], known)
    if kind in _FROM_TEXT:
        return _from(kind, _FROM_TEXT[kind])
    if issubclass(kind, Enum):
        return _from(kind, kind)
    if dataclasses.is_dataclass(kind) or is_typeddict(kind):
        return _of_fields(kind, known)
    raise TypeError(f"nothing is known of how JSON becomes a {kind.__qualname__}; msgspec knows more kinds")


def _of_generic(annotation: Any, known: dict[Any, Check]) -> Check:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return _any_of(annotation, [_check(each, known) for each in arguments])
    if origin is Literal:
        return _one_of(arguments)
    if origin in (list, set, frozenset):
        return _items(origin, _check(arguments[0], known))
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return _items(tuple, _check(arguments[0], known))
    if origin is dict and arguments[0] is str:
        return _members(_check(arguments[1], known))
    raise TypeError(f"nothing is known of how JSON becomes a {annotation}; msgspec knows more kinds")


# One value


def _scalar(kind: type | tuple[type, ...], wanted: str) -> Check:
    def check(value: Any, place: str) -> Any:
        # True is an int for Python, and none for anybody else.
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise _misfit(wanted, value, place)
        return value

    return check


def _float(value: Any, place: str) -> float:
    return float(_NUMBER(value, place))


_NUMBER: Final = _scalar((int, float), "a number")
_SCALARS: Final[dict[Any, Check]] = {
    bool: _scalar(bool, "a flag"),
    int: _scalar(int, "a whole number"),
    float: _float,
    str: _scalar(str, "text"),
    types.NoneType: _scalar(types.NoneType, "null"),
}
_BARE: Final[dict[Any, Any]] = {
    dict: dict[str, Any],
    list: list[Any],
    tuple: tuple[Any, ...],
    set: set[Any],
    frozenset: frozenset[Any],
}
_FROM_TEXT: Final[dict[Any, Callable[[str], Any]]] = {
    datetime: datetime.fromisoformat,
    date: date.fromisoformat,
    time: time.fromisoformat,
    UUID: UUID,
    Decimal: Decimal,
    bytes: lambda text: base64.b64decode(text, validate=True),
}


def _from(kind: type, made: Callable[[Any], Any]) -> Check:
    def check(value: Any, place: str) -> Any:
        if kind in _FROM_TEXT and not isinstance(value, str):
            raise _misfit("text", value, place)
        try:
            return made(value)
        except (ValueError, ArithmeticError) as flaw:
            raise Misfit(f"expected a {kind.__qualname__} at {place}: {flaw}") from None

    return check


def _one_of(allowed: tuple[Any, ...]) -> Check:
    def check(value: Any, place: str) -> Any:
        if not any(value == each and type(value) is type(each) for each in allowed):
            raise Misfit(f"expected one of {', '.join(map(repr, allowed))} at {place}")
        return value

    return check


def _any_of(annotation: Any, checks: list[Check]) -> Check:
    def check(value: Any, place: str) -> Any:
        flaws = []
        for each in checks:
            try:
                return each(value, place)
            except Misfit as flaw:
                flaws.append(str(flaw))
        raise Misfit("; ".join(flaws))

    return check


# Several


def _items(made: Callable[[list[Any]], Any], item: Check) -> Check:
    def check(value: Any, place: str) -> Any:
        if not isinstance(value, list):
            raise _misfit("an array", value, place)
        return made([item(each, f"{place}[{index}]") for index, each in enumerate(value)])

    return check


def _members(member: Check) -> Check:
    def check(value: Any, place: str) -> Any:
        if not isinstance(value, dict):
            raise _misfit("an object", value, place)
        return {name: member(each, f"{place}.{name}") for name, each in value.items()}

    return check


def _of_fields(kind: Any, known: dict[Any, Check]) -> Check:
    """Members that are not asked for are let be, as msgspec does."""
    if kind in known:
        return known[kind]
    fields: dict[str, Check] = {}

    def check(value: Any, place: str) -> Any:
        if not isinstance(value, dict):
            raise _misfit("an object", value, place)
        for name in required:
            if name not in value:
                raise Misfit(f"object missing required field {name} at {place}")
        return kind(
            **{name: fields[name](value[name], f"{place}.{name}") for name in fields if name in value}
        )

    known[kind] = check  # before its fields are looked at: a kind may have itself for a field
    hints = get_type_hints(kind, include_extras=True)
    names, required = _fields(kind, hints)
    fields.update({name: _check(hints[name], known) for name in names})
    return check


def _fields(kind: Any, hints: dict[str, Any]) -> tuple[list[str], list[str]]:
    """All that may be given, and what must be."""
    if is_typeddict(kind):
        return list(hints), [name for name in hints if _is_required(kind, name, hints[name])]
    given = [each for each in dataclasses.fields(kind) if each.init]
    missing = dataclasses.MISSING
    required = [each.name for each in given if each.default is missing and each.default_factory is missing]
    return [each.name for each in given], required


def _is_required(kind: Any, name: str, hint: Any) -> bool:
    # The class has not seen what its annotations say if they were written as text.
    return get_origin(hint) is not NotRequired and (
        get_origin(hint) is Required or name in kind.__required_keys__
    )


# And back


def written(value: object) -> bytes:
    """Raises TypeError or ValueError for what has no JSON."""
    text = json.dumps(value, default=_plain, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode()


def _plain(value: Any) -> Any:
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
    raise TypeError(f"{type(value).__qualname__} has no form in JSON")
