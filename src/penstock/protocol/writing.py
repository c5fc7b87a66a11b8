"""Writes messages by their schemas, to the same bytes as kio's own writer.

That one takes a call for each number and a buffer for tagged fields, of which most messages have none. Every reply is
written here: numbers that stand together go in one step, and what is rare is left to kio.
"""

import io
import struct
from collections.abc import Callable
from dataclasses import Field, fields, is_dataclass
from functools import cache
from operator import attrgetter
from typing import Any, Final, NamedTuple

from kio.serial import entity_writer, writers

from penstock.protocol.bounds import classify
from penstock.protocol.produce import encode_uvarint

Write = Callable[[io.BytesIO, Any], None]

#: Kinds of numbers, and what the `struct` module calls them.
_NUMBERS: Final = {
    "bool": "?", "int8": "b", "int16": "h", "int32": "i", "int64": "q",
    "uint8": "B", "uint16": "H", "uint32": "I", "uint64": "Q", "float64": "d", "error_code": "h",
}  # fmt: skip
_INT32: Final = struct.Struct(">i")
_NULL_ENTITY, _ENTITY = b"\xff", b"\x01"


class EncodedElements(NamedTuple):
    """In the place of an array: its elements, each written already."""

    pieces: list[bytes]


@cache
def message_writer(entity: type[Any]) -> Write:
    if any("tag" in field.metadata for field in fields(entity)):
        return entity_writer(entity)  # type: ignore[no-any-return]
    steps: list[Write] = []
    numbers: list[Field[Any]] = []
    for field in fields(entity):
        if _is_number(field):
            numbers.append(field)
        else:
            steps += _numbers_writer(numbers)
            numbers = []
            steps.append(_of_field(field.name, _field_writer(field, entity.__flexible__)))
    steps += _numbers_writer(numbers)
    if entity.__flexible__:
        steps.append(_no_tags)
    return _sequence(tuple(steps))


def _sequence(steps: tuple[Write, ...]) -> Write:
    def write(buffer: io.BytesIO, message: Any) -> None:
        for step in steps:
            step(buffer, message)

    return write


def _is_number(field: Field[Any]) -> bool:
    is_array, element, _ = classify(field.type)
    return not (is_array or is_dataclass(element)) and field.metadata["kafka_type"] in _NUMBERS


def _numbers_writer(run: list[Field[Any]]) -> list[Write]:
    if not run:
        return []
    kinds = [field.metadata["kafka_type"] for field in run]
    pack = struct.Struct(">" + "".join(_NUMBERS[kind] for kind in kinds)).pack
    values_of = attrgetter(
        *(
            f"{field.name}.value" if kind == "error_code" else field.name
            for field, kind in zip(run, kinds, strict=True)
        )
    )
    if len(run) == 1:
        return [lambda buffer, message: buffer.write(pack(values_of(message)))]
    return [lambda buffer, message: buffer.write(pack(*values_of(message)))]


def _of_field(name: str, write: Write) -> Write:
    value_of = attrgetter(name)
    return lambda buffer, message: write(buffer, value_of(message))


def _no_tags(buffer: io.BytesIO, _: Any) -> None:
    buffer.write(b"\x00")


def _field_writer(field: Field[Any], flexible: bool) -> Write:
    is_array, element, optional = classify(field.type)
    if is_dataclass(element):
        write = message_writer(element)  # type: ignore[arg-type]
        if optional and not is_array:
            return _nullable_entity(write)
    else:
        write = _value_writer(field.metadata["kafka_type"], flexible, optional and not is_array)
    return _array_writer(write, flexible) if is_array else write


def _nullable_entity(write_entity: Write) -> Write:
    def write(buffer: io.BytesIO, entity: Any) -> None:
        if entity is None:
            buffer.write(_NULL_ENTITY)
        else:
            buffer.write(_ENTITY)
            write_entity(buffer, entity)

    return write


def _array_writer(write_element: Write, flexible: bool) -> Write:
    def write(buffer: io.BytesIO, elements: Any) -> None:
        is_written = type(elements) is EncodedElements
        if is_written:
            elements = elements.pieces
        count = -1 if elements is None else len(elements)
        buffer.write(encode_uvarint(count + 1) if flexible else _INT32.pack(count))
        if is_written:
            buffer.writelines(elements)
            return
        for element in elements or ():
            write_element(buffer, element)

    return write


def element_writer(entity: type[Any], name: str) -> Write:
    """What writes one element of an array of messages, for `EncodedElements`."""
    (field,) = (field for field in fields(entity) if field.name == name)
    is_array, element, _ = classify(field.type)
    assert is_array, (entity, name)
    assert is_dataclass(element), (entity, name)
    return message_writer(element)  # type: ignore[arg-type]


def _value_writer(kind: str, flexible: bool, optional: bool) -> Write:
    if kind in _NUMBERS:
        return _number_writer(kind)
    if kind in ("string", "bytes", "records") and flexible:
        return _write_nullable_compact if optional else _write_compact
    nullable = "nullable_" if optional else ""
    names = {
        "string": f"write_{nullable}legacy_string",
        "bytes": f"write_{nullable}legacy_bytes",
        "records": f"write_{nullable}legacy_bytes",
        "datetime_i64": f"write_{nullable}datetime_i64",
    }
    return getattr(writers, names.get(kind, f"write_{kind}"))  # type: ignore[no-any-return]


def _number_writer(kind: str) -> Write:
    if kind == "error_code":
        return writers.write_error_code  # type: ignore[no-any-return]
    pack = struct.Struct(">" + _NUMBERS[kind]).pack

    def write(buffer: io.BytesIO, value: Any) -> None:
        buffer.write(pack(value))

    return write


def _write_compact(buffer: io.BytesIO, value: str | bytes) -> None:
    data = value.encode() if isinstance(value, str) else value
    buffer.write(encode_uvarint(len(data) + 1))
    buffer.write(data)


def _write_nullable_compact(buffer: io.BytesIO, value: str | bytes | None) -> None:
    if value is None:
        buffer.write(b"\x00")
    else:
        _write_compact(buffer, value)
