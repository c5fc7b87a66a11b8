"""Lifts a request of an older version to the newest version's class: a handler knows only one shape."""

import datetime
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Union, get_args, get_origin

Upgrade = Callable[[Any], Any]

_ZERO = datetime.timedelta(0)
_IMPLICIT_DEFAULTS: dict[str, Any] = {
    "string": "", "bytes": b"", "records": None, "bool": False, "uuid": None,
    "timedelta_i32": _ZERO, "timedelta_i64": _ZERO, "float64": 0.0,
}  # fmt: skip


@cache
def upgrader(old: type[Any], new: type[Any]) -> Upgrade:
    """Fields the old version lacks take the newest version's defaults; fields it dropped are left behind."""
    if old is new:
        return lambda entity: entity
    old_fields = {field.name: field for field in fields(old)}
    kept: list[tuple[str, Upgrade | None]] = []
    defaults: dict[str, Any] = {}
    for field in fields(new):
        if field.name in old_fields:
            kept.append((field.name, _value_upgrade(old_fields[field.name], field)))
        else:
            defaults[field.name] = _default(field)

    def upgrade(entity: Any) -> Any:
        values = dict(defaults)
        for name, convert in kept:
            value = getattr(entity, name)
            values[name] = value if convert is None or value is None else convert(value)
        return new(**values)

    return upgrade


def _value_upgrade(old: Field[Any], new: Field[Any]) -> Upgrade | None:
    old_is_array, old_type = _element_type(old.type)
    new_is_array, new_type = _element_type(new.type)
    if not (is_dataclass(old_type) and is_dataclass(new_type)):
        return None
    assert old_is_array == new_is_array
    convert = upgrader(old_type, new_type)  # type: ignore[arg-type]
    return (lambda items: tuple(map(convert, items))) if new_is_array else convert


def _element_type(annotation: Any) -> tuple[bool, Any]:
    if get_origin(annotation) in (UnionType, Union):
        (annotation,) = (a for a in get_args(annotation) if a is not type(None))
    if get_origin(annotation) is tuple:
        return True, _element_type(get_args(annotation)[0])[1]
    return False, annotation


def _default(field: Field[Any]) -> Any:
    if field.default is not MISSING:
        return field.default
    is_array, element = _element_type(field.type)
    if is_array:
        return ()
    if is_dataclass(element) or "kafka_type" not in field.metadata:
        return None
    if get_origin(field.type) in (UnionType, Union):
        return None
    return _IMPLICIT_DEFAULTS.get(field.metadata["kafka_type"], 0)
