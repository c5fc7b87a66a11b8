"""Reads and writes messages by kio's schemas.

Each schema is loaded on first use, because importing all of them takes most of a second.

A request of an older version is converted to the newest version's class, so that a handler knows only one shape.
Responses are written to the same bytes as by kio's own writer, which makes one call for each number and one buffer
for tagged fields that most messages do not have. Here adjacent numbers are packed in one step; rare cases are left
to kio.
"""

import datetime
import io
import struct
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from operator import attrgetter
from pkgutil import resolve_name
from types import UnionType
from typing import Any, Final, NamedTuple, Union, get_args, get_origin

from kio.index import load_request_schema, load_response_schema
from kio.schema.index import api_key_map, schema_name_map
from kio.serial import entity_reader, entity_writer, writers
from kio.serial.errors import SerialError

from penstock.protocol.bounds import Patch, apply_patches, bounds_check, classify_type
from penstock.protocol.errors import MalformedFrame
from penstock.protocol.wire import encode_uvarint

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


MessageWriter = Callable[[io.BytesIO, Any], None]

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
def message_writer(entity: type[Any]) -> MessageWriter:
    if any("tag" in field.metadata for field in fields(entity)):
        return entity_writer(entity)  # type: ignore[no-any-return]
    steps: list[MessageWriter] = []
    numbers: list[Field[Any]] = []
    for field in fields(entity):
        if _is_number(field):
            numbers.append(field)
        else:
            steps += _numbers_writer(numbers)
            numbers = []
            steps.append(_field_value_writer(field.name, _field_writer(field, entity.__flexible__)))
    steps += _numbers_writer(numbers)
    if entity.__flexible__:
        steps.append(_write_no_tags)
    return _sequence(tuple(steps))


def _sequence(steps: tuple[MessageWriter, ...]) -> MessageWriter:
    def write(buffer: io.BytesIO, message: Any) -> None:
        for step in steps:
            step(buffer, message)

    return write


def _is_number(field: Field[Any]) -> bool:
    is_array, element, _ = classify_type(field.type)
    return not (is_array or is_dataclass(element)) and field.metadata["kafka_type"] in _NUMBERS


def _numbers_writer(run: list[Field[Any]]) -> list[MessageWriter]:
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


def _field_value_writer(name: str, write: MessageWriter) -> MessageWriter:
    value_of = attrgetter(name)
    return lambda buffer, message: write(buffer, value_of(message))


def _write_no_tags(buffer: io.BytesIO, _: Any) -> None:
    buffer.write(b"\x00")


def _field_writer(field: Field[Any], flexible: bool) -> MessageWriter:
    is_array, element, optional = classify_type(field.type)
    if is_dataclass(element):
        write = message_writer(element)  # type: ignore[arg-type]
        if optional and not is_array:
            return _nullable_entity(write)
    else:
        write = _value_writer(field.metadata["kafka_type"], flexible, optional and not is_array)
    return _array_writer(write, flexible) if is_array else write


def _nullable_entity(write_entity: MessageWriter) -> MessageWriter:
    def write(buffer: io.BytesIO, entity: Any) -> None:
        if entity is None:
            buffer.write(_NULL_ENTITY)
        else:
            buffer.write(_ENTITY)
            write_entity(buffer, entity)

    return write


def _array_writer(write_element: MessageWriter, flexible: bool) -> MessageWriter:
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


def element_writer(entity: type[Any], name: str) -> MessageWriter:
    """What writes one element of an array of messages, for `EncodedElements`."""
    (field,) = (field for field in fields(entity) if field.name == name)
    is_array, element, _ = classify_type(field.type)
    assert is_array, (entity, name)
    assert is_dataclass(element), (entity, name)
    return message_writer(element)  # type: ignore[arg-type]


def _value_writer(kind: str, flexible: bool, optional: bool) -> MessageWriter:
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


def _number_writer(kind: str) -> MessageWriter:
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


#: Older versions of these say what the newest cannot (topic names, one group or member beside many): their
#: handlers read each version as it is.
#: OffsetCommit, OffsetFetch, FindCoordinator, LeaveGroup, DeleteTopics, AddPartitionsToTxn.
_READ_AS_SENT = frozenset({8, 9, 10, 13, 20, 24})
#: Keys of requests that Kafka does not have.
_PENSTOCK_API_KEYS_FROM = 30_000
#: Metadata of these versions can ask what one may do in the cluster; the newest cannot.
_READ_AS_VERSION = {(3, 8): 10, (3, 9): 10, (3, 10): 10}


def newest_version(api_key: int) -> int:
    return int(max(schema_name_map[api_key_map[api_key]]))


@cache
def request_is_flexible(api_key: int, version: int) -> bool:
    """Requests of our own, which have no schema, are not."""
    return api_key < _PENSTOCK_API_KEYS_FROM and bool(load_request_schema(api_key, version).__flexible__)


@cache
def request_decoder(api_key: int, version: int) -> Callable[[memoryview, int], Any]:
    """Bytes of any version -> the newest version's request. Raises MalformedFrame."""
    read = request_reader(api_key, version)
    upgrade = upgrader(
        load_request_schema(api_key, version),
        load_request_schema(api_key, _handler_version(api_key, version)),
    )
    return lambda frame, position: upgrade(read(frame, position))


def _handler_version(api_key: int, version: int) -> int:
    """The version in whose class a handler gets a request of this version."""
    if api_key in _READ_AS_SENT:
        return version
    return _READ_AS_VERSION.get((api_key, version)) or newest_version(api_key)


@cache
def request_reader(api_key: int, version: int) -> Callable[[memoryview, int], Any]:
    """Bytes of one version -> that version's own request. Raises MalformedFrame."""
    return _reader(load_request_schema(api_key, version), version)


@cache
def response_reader(api_key: int, version: int) -> Callable[[memoryview, int], Any]:
    """Bytes of one version -> that version's own response, as a peer sent it. Raises MalformedFrame."""
    return _reader(load_response_schema(api_key, version), version)


def _reader(schema: Any, version: int) -> Callable[[memoryview, int], Any]:
    check, read_entity = bounds_check(schema), entity_reader(schema)

    def read(frame: memoryview, position: int) -> Any:
        patches: list[Patch] = []
        check(frame, position, len(frame), patches)
        message = apply_patches(frame, patches) if patches else frame.toreadonly()
        try:
            request, _ = read_entity(message, position)
        except (SerialError, ValueError, OverflowError) as error:
            raise MalformedFrame(f"{schema.__name__} v{version}: {error}") from None
        return request

    return read


@cache
def response_encoder(api_key: int, version: int) -> Callable[[io.BytesIO, Any], None]:
    """Writes the newest version's response (or this version's own class) as `version`."""
    return message_writer(load_response_schema(api_key, version))


@cache
def response_element_encoder(api_key: int, version: int, name: str) -> Callable[[Any], bytes]:
    """One element of an array in that response, for `EncodedElements`."""
    write = element_writer(load_response_schema(api_key, version), name)

    def encode(element: Any) -> bytes:
        out = io.BytesIO()
        write(out, element)
        return out.getvalue()

    return encode


@cache
def request_encoder(api_key: int, version: int) -> Callable[[io.BytesIO, Any], None]:
    """Writes the newest version's request (or this version's own class) as `version`."""
    return message_writer(load_request_schema(api_key, version))


def schema_class(path: str) -> Any:
    """`schema_class("metadata.v13.response:MetadataResponse")`, for handlers that load on first use."""
    return resolve_name(f"kio.schema.{path}")
