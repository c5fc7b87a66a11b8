"""Reads and writes messages by kio's schemas.

Each schema is loaded on first use, because importing all of them takes most of a second.

A request of an older version is converted to the newest version's class, so that a handler knows only one shape.
Responses are written to the same bytes as by kio's own writer, which makes one call for each number and one buffer
for tagged fields that most messages do not have. Here adjacent numbers are packed in one step; rare cases are left
to kio.

Large messages can be read and written in steps, one element of an array at a time.
"""

import datetime
import io
import struct
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from operator import attrgetter
from pkgutil import resolve_name
from typing import Any, Final, NamedTuple

from kio.index import load_request_schema, load_response_schema
from kio.schema.index import api_key_map, schema_name_map
from kio.serial import entity_reader, entity_writer, writers
from kio.serial._parse import get_field_reader
from kio.serial.errors import SerialError

from penstock.protocol.bounds import (
    BoundsCheck,
    Found,
    apply_patches,
    array_count,
    bounds_check,
    classify_type,
    field_check,
    null_mark,
    skip_unknown_tags,
)
from penstock.protocol.errors import MalformedFrame
from penstock.protocol.steps import Steps
from penstock.protocol.wire import encode_uvarint

Upgrade = Callable[[Any], Any]

_ZERO = datetime.timedelta(0)
_IMPLICIT_DEFAULTS: dict[str, Any] = {
    "string": "", "bytes": b"", "records": None, "bool": False, "uuid": None,
    "timedelta_i32": _ZERO, "timedelta_i64": _ZERO, "float64": 0.0,
}  # fmt: skip


@cache
def upgrader(old: type[Any], new: type[Any]) -> Upgrade:
    """A function that converts an entity: new fields get their defaults, fields that were removed are dropped."""
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
    old_is_array, old_type, _ = classify_type(old.type)
    new_is_array, new_type, _ = classify_type(new.type)
    if not (is_dataclass(old_type) and is_dataclass(new_type)):
        return None
    assert old_is_array == new_is_array
    convert = upgrader(old_type, new_type)  # type: ignore[arg-type]
    return (lambda items: tuple(map(convert, items))) if new_is_array else convert


def _default(field: Field[Any]) -> Any:
    if field.default is not MISSING:
        return field.default
    is_array, element, optional = classify_type(field.type)
    if is_array:
        return ()
    if optional or is_dataclass(element) or "kafka_type" not in field.metadata:
        return None
    return _IMPLICIT_DEFAULTS.get(field.metadata["kafka_type"], 0)


MessageWriter = Callable[[io.BytesIO, Any], None]

#: The `struct` formats of numbers.
_NUMBERS: Final = {
    "bool": "?", "int8": "b", "int16": "h", "int32": "i", "int64": "q",
    "uint8": "B", "uint16": "H", "uint32": "I", "uint64": "Q", "float64": "d", "error_code": "h",
}  # fmt: skip
_INT32: Final = struct.Struct(">i")
_NULL_ENTITY, _ENTITY = b"\xff", b"\x01"


class EncodedElements(NamedTuple):
    """The elements of an array, already encoded; a message may have this in place of the array."""

    pieces: list[bytes]


@cache
def message_writer(entity: type[Any]) -> MessageWriter:
    if _has_tagged_fields(entity):
        return entity_writer(entity)  # type: ignore[no-any-return]
    return _fields_writer(fields(entity), entity.__flexible__, ends=True)


def _has_tagged_fields(entity: type[Any]) -> bool:
    return any("tag" in field.metadata for field in fields(entity))


def _fields_writer(run: Sequence[Field[Any]], flexible: bool, *, ends: bool) -> MessageWriter:
    """Write some fields of a message; with `ends` they are the last ones."""
    steps: list[MessageWriter] = []
    numbers: list[Field[Any]] = []
    for field in run:
        if _is_number(field):
            numbers.append(field)
        else:
            steps += _numbers_writer(numbers)
            numbers = []
            steps.append(_field_value_writer(field.name, _field_writer(field, flexible)))
    steps += _numbers_writer(numbers)
    if flexible and ends:
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
        _write_count(buffer, elements, flexible)
        if is_written:
            buffer.writelines(elements)
            return
        for element in elements or ():
            write_element(buffer, element)

    return write


def _write_count(buffer: io.BytesIO, elements: Any, flexible: bool) -> None:
    count = -1 if elements is None else len(elements)
    buffer.write(encode_uvarint(count + 1) if flexible else _INT32.pack(count))


StepwiseWriter = Callable[[io.BytesIO, Any], Steps[None]]


@cache
def stepwise_writer(entity: type[Any]) -> StepwiseWriter | None:
    """Return what writes the same bytes as `message_writer`, an element at a time; None without arrays of messages."""
    if not _has_steps(entity):
        return None
    parts: list[tuple[MessageWriter, StepwiseWriter]] = []
    run: list[Field[Any]] = []
    for field in fields(entity):
        if _is_message_array(field):
            before = _fields_writer(run, entity.__flexible__, ends=False)
            parts.append((before, _stepwise_array_writer(field, entity.__flexible__)))
            run = []
        else:
            run.append(field)
    write_rest = _fields_writer(run, entity.__flexible__, ends=True)

    def write(buffer: io.BytesIO, message: Any) -> Steps[None]:
        for write_before, write_array in parts:
            write_before(buffer, message)
            yield from write_array(buffer, message)
        write_rest(buffer, message)

    return write


def _write_encoded(buffer: io.BytesIO, element: bytes) -> None:
    buffer.write(element)


def _is_message_array(field: Field[Any]) -> bool:
    is_array, element, _ = classify_type(field.type)
    return is_array and is_dataclass(element)


def _stepwise_array_writer(field: Field[Any], flexible: bool) -> StepwiseWriter:
    element = classify_type(field.type)[1]
    write_whole, in_steps, elements_of = (
        message_writer(element),
        stepwise_writer(element),
        attrgetter(field.name),
    )

    def write(buffer: io.BytesIO, message: Any) -> Steps[None]:
        elements = elements_of(message)
        write_element: MessageWriter | None = None if in_steps is not None else write_whole
        if type(elements) is EncodedElements:
            elements = elements.pieces
            write_element = _write_encoded
        _write_count(buffer, elements, flexible)
        for each in elements or ():
            if write_element is not None:
                write_element(buffer, each)
            else:
                assert in_steps is not None
                yield from in_steps(buffer, each)
            yield

    return write


def element_writer(entity: type[Any], name: str) -> MessageWriter:
    """The writer of one element of an array of messages, for `EncodedElements`."""
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


#: Older versions of these requests have what the newest cannot express (topic names; one group or member beside many),
#: so their handlers get each version as it was sent:
#: OffsetCommit, OffsetFetch, FindCoordinator, LeaveGroup, DeleteTopics, AddPartitionsToTxn.
_READ_AS_SENT = frozenset({8, 9, 10, 13, 20, 24})
#: Our own APIs have keys from here on.
_PENSTOCK_API_KEYS_FROM = 30_000
#: These versions of Metadata can ask for the authorized operations on the cluster; the newest cannot.
_READ_AS_VERSION = {(3, 8): 10, (3, 9): 10, (3, 10): 10}


def newest_version(api_key: int) -> int:
    return int(max(schema_name_map[api_key_map[api_key]]))


@cache
def request_is_flexible(api_key: int, version: int) -> bool:
    """Our own APIs have no schema and are not flexible."""
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


@cache
def stepwise_request_decoder(api_key: int, version: int) -> Callable[[memoryview, int, int], Steps[Any]]:
    """Like `request_decoder`, in steps. The third argument is how many elements the arrays may have in all."""
    old = load_request_schema(api_key, version)
    new = load_request_schema(api_key, _handler_version(api_key, version))
    read = _stepwise_reader(old, new)

    def decode(frame: memoryview, position: int, elements_max: int) -> Steps[Any]:
        try:
            request, _ = yield from read(frame.toreadonly(), position, len(frame), Found(elements_max))
        except (SerialError, ValueError, OverflowError) as error:
            raise MalformedFrame(f"{old.__name__} v{version}: {error}") from None
        return request

    return decode


#: (frame, position, end, how many elements are left) -> a value, and the position after it
_Reader = Callable[[memoryview, int, int, Found], tuple[Any, int]]
_StepwiseReader = Callable[[memoryview, int, int, Found], Steps[tuple[Any, int]]]


def _stepwise_reader(old: Any, new: Any) -> _StepwiseReader:
    """Read a message with arrays of messages one element at a time, any other message as a whole."""
    if not _is_read_in_steps(old):
        return _in_one_step(_checked_reader(bounds_check(old), entity_reader(old), upgrader(old, new)))
    new_fields = {field.name: field for field in fields(new)}
    old_fields = {field.name: field for field in fields(old)}
    parts = [
        (name, _stepwise_field_reader(old, field, new_fields.get(name))) for name, field in old_fields.items()
    ]
    defaults = {name: _default(field) for name, field in new_fields.items() if name not in old_fields}

    def read(frame: memoryview, position: int, end: int, found: Found) -> Steps[tuple[Any, int]]:
        values = dict(defaults)
        for name, read_field in parts:
            value, position = yield from read_field(frame, position, end, found)
            if name in new_fields:
                values[name] = value
        if old.__flexible__:
            position = skip_unknown_tags(frame, position, end, Found())
        return new(**values), position

    return read


def _has_steps(entity: type[Any]) -> bool:
    return any(map(_is_message_array, fields(entity))) and not _has_tagged_fields(entity)


def _is_read_in_steps(entity: type[Any]) -> bool:
    """Whether a message has arrays of messages, of its own or in the messages that are its fields."""
    if _has_tagged_fields(entity):
        return False
    return any(_is_message_array(field) or _has_steps_inside(field) for field in fields(entity))


def _has_steps_inside(field: Field[Any]) -> bool:
    is_array, element, _ = classify_type(field.type)
    return not is_array and is_dataclass(element) and _is_read_in_steps(element)  # type: ignore[arg-type]


def _nested_reader(read_message: _StepwiseReader, optional: bool) -> _StepwiseReader:
    def read(frame: memoryview, position: int, end: int, found: Found) -> Steps[tuple[Any, int]]:
        if optional:
            is_null, position = null_mark(frame, position, end)
            if is_null:
                return None, position
        return (yield from read_message(frame, position, end, found))

    return read


def _stepwise_field_reader(entity: type[Any], old: Field[Any], new: Field[Any] | None) -> _StepwiseReader:
    if _has_steps_inside(old):
        _, element, optional = classify_type(old.type)
        newest = element if new is None else classify_type(new.type)[1]
        return _nested_reader(_stepwise_reader(element, newest), optional)
    if not _is_message_array(old):
        upgrade = None if new is None else _value_upgrade(old, new)
        read = get_field_reader(entity, old, False, False)
        return _in_one_step(_checked_reader(field_check(old, entity.__flexible__), read, upgrade))
    _, element, optional = classify_type(old.type)
    newest = element if new is None else classify_type(new.type)[1]
    in_steps = _stepwise_reader(element, newest) if _is_read_in_steps(element) else None
    read_whole = _checked_reader(bounds_check(element), entity_reader(element), upgrader(element, newest))
    read_count = array_count(entity.__flexible__, optional)

    def read_array(frame: memoryview, position: int, end: int, found: Found) -> Steps[tuple[Any, int]]:
        count, position = read_count(frame, position, end)
        if count is None:
            return None, position
        found.count(count)
        elements = []
        for _ in range(count):
            if in_steps is None:
                value, position = read_whole(frame, position, end, found)
            else:
                value, position = yield from in_steps(frame, position, end, found)
            elements.append(value)
            yield
        return tuple(elements), position

    return read_array


def _checked_reader(check: BoundsCheck, read: Callable[..., Any], upgrade: Upgrade | None) -> _Reader:
    def read_checked(frame: memoryview, position: int, end: int, found: Found) -> tuple[Any, int]:
        here_found = Found(found.elements_left)
        after = check(frame, position, end, here_found)
        found.elements_left = here_found.elements_left
        if patches := here_found.patches:
            here = [(first - position, last - position, instead) for first, last, instead in patches]
            value, _ = read(apply_patches(frame[position:after], here), 0)
        else:
            value, _ = read(frame, position)
        return (value if upgrade is None or value is None else upgrade(value)), after

    return read_checked


def _in_one_step(read: _Reader) -> _StepwiseReader:
    def read_whole(frame: memoryview, position: int, end: int, found: Found) -> Steps[tuple[Any, int]]:
        yield
        return read(frame, position, end, found)

    return read_whole


def _handler_version(api_key: int, version: int) -> int:
    """The version to whose class a request of this version is converted for its handler."""
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
        found = Found()
        check(frame, position, len(frame), found)
        message = apply_patches(frame, found.patches) if found.patches else frame.toreadonly()
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
def stepwise_response_encoder(api_key: int, version: int) -> StepwiseWriter | None:
    """Like `response_encoder`, in steps; None if the response has no arrays of messages."""
    return stepwise_writer(load_response_schema(api_key, version))


@cache
def response_element_encoder(api_key: int, version: int, name: str) -> Callable[[Any], bytes]:
    """Encodes one element of an array in that response, for `EncodedElements`."""
    write = element_writer(load_response_schema(api_key, version), name)

    def encode(element: Any) -> bytes:
        out = io.BytesIO()
        write(out, element)
        return out.getvalue()

    return encode


@cache
def stepwise_response_element_encoder(api_key: int, version: int, name: str) -> Callable[[Any], Steps[bytes]]:
    """Like `response_element_encoder`, in steps, for an element that has arrays of messages of its own."""
    schema = load_response_schema(api_key, version)
    (element,) = (classify_type(field.type)[1] for field in fields(schema) if field.name == name)
    write = stepwise_writer(element)
    assert write is not None, (schema, name)

    def encode(element: Any) -> Steps[bytes]:
        out = io.BytesIO()
        yield from write(out, element)
        return out.getvalue()

    return encode


@cache
def request_encoder(api_key: int, version: int) -> Callable[[io.BytesIO, Any], None]:
    """Writes the newest version's request (or this version's own class) as `version`."""
    return message_writer(load_request_schema(api_key, version))


def schema_class(path: str) -> Any:
    """`schema_class("metadata.v13.response:MetadataResponse")`, for handlers that load on first use."""
    return resolve_name(f"kio.schema.{path}")
