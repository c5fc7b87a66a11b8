"""Checks every length and count of a message against the bytes that remain, before anything is allocated.

kio's native reader trusts a count and reserves memory for it, which ends the process when a peer claims four
billion elements. So every request is checked first, along the same schema. The check keeps nothing except the
positions of tagged fields that the schema does not know, which a newer client may send and kio refuses to read.
"""

from collections.abc import Callable
from dataclasses import Field, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Union, get_args, get_origin

from penstock.protocol.errors import MalformedFrame
from penstock.protocol.wire import read_uvarint

#: A run of bytes, and what to put in its place.
Patch = tuple[int, int, bytes]
#: (buffer, position, end, patches found so far) -> position after the value
BoundsCheck = Callable[[memoryview, int, int, list[Patch]], int]

#: (buffer, position, end) -> (count, position after it)
CountReader = Callable[[memoryview, int, int], tuple[int, int]]

_FIXED_BYTES = {
    "int8": 1, "int16": 2, "int32": 4, "int64": 8, "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8,
    "float64": 8, "bool": 1, "uuid": 16, "error_code": 2, "timedelta_i32": 4, "timedelta_i64": 8,
    "datetime_i64": 8,
}  # fmt: skip
_LENGTH_BYTES = {"string": 2, "bytes": 4, "records": 4}


@cache
def bounds_check(entity: type[Any]) -> BoundsCheck:
    """A walk over one entity of this schema."""
    steps: list[BoundsCheck] = []
    tagged: dict[int, BoundsCheck] = {}
    fixed_bytes = 0
    for field in fields(entity):
        tag = field.metadata.get("tag")
        if tag is not None:
            tagged[tag] = _field_walk(field, entity.__flexible__, nullable=False)
        elif (size := _fixed_size(field)) is not None:
            fixed_bytes += size
        else:
            steps += _skip(fixed_bytes)
            fixed_bytes = 0
            steps.append(_field_walk(field, entity.__flexible__, nullable=True))
    steps += _skip(fixed_bytes)
    if entity.__flexible__:
        steps.append(_tags_walk(tagged))
    return _sequence(tuple(steps))


def _sequence(steps: tuple[BoundsCheck, ...]) -> BoundsCheck:
    if len(steps) == 1:
        return steps[0]

    def walk(data: memoryview, position: int, end: int, patches: list[Patch]) -> int:
        for step in steps:
            position = step(data, position, end, patches)
        return position

    return walk


def _skip(size: int) -> tuple[BoundsCheck, ...]:
    def walk(data: memoryview, position: int, end: int, patches: list[Patch]) -> int:
        if position + size > end:
            raise _cut_short()
        return position + size

    return (walk,) if size else ()


def _fixed_size(field: Field[Any]) -> int | None:
    is_array, element, _ = classify_type(field.type)
    if is_array or is_dataclass(element):
        return None
    return _FIXED_BYTES.get(field.metadata["kafka_type"])


def _field_walk(field: Field[Any], flexible: bool, *, nullable: bool) -> BoundsCheck:
    is_array, element, optional = classify_type(field.type)
    if is_dataclass(element):
        walk = bounds_check(element)  # type: ignore[arg-type]
        if not is_array and optional and nullable:
            walk = _nullable_entity(walk)
        return _array_walk(walk, _count_reader(flexible, optional)) if is_array else walk
    kafka_type = field.metadata["kafka_type"]
    size = _FIXED_BYTES.get(kafka_type)
    if size is None:
        walk = _compact_bytes if flexible else _legacy_bytes(_LENGTH_BYTES[kafka_type])
        return _array_walk(walk, _count_reader(flexible, optional)) if is_array else walk
    return _fixed_array_walk(size, _count_reader(flexible, optional)) if is_array else _skip(size)[0]


def classify_type(annotation: Any) -> tuple[bool, Any, bool]:
    """(is an array, type of the element, may be null)"""
    optional = False
    if get_origin(annotation) in (UnionType, Union):
        optional = type(None) in get_args(annotation)
        (annotation,) = (a for a in get_args(annotation) if a is not type(None))
    if get_origin(annotation) is tuple:
        return True, classify_type(get_args(annotation)[0])[1], optional
    return False, annotation, optional


def _array_walk(element: BoundsCheck, read_count: CountReader) -> BoundsCheck:
    def walk(data: memoryview, position: int, end: int, patches: list[Patch]) -> int:
        count, position = read_count(data, position, end)
        if count > end - position:  # an element takes a byte at the least
            raise MalformedFrame(f"array of {count} elements in {end - position} bytes")
        for _ in range(count):
            position = element(data, position, end, patches)
        return position

    return walk


def _fixed_array_walk(size: int, read_count: CountReader) -> BoundsCheck:
    def walk(data: memoryview, position: int, end: int, patches: list[Patch]) -> int:
        count, position = read_count(data, position, end)
        if count * size > end - position:
            raise MalformedFrame(f"array of {count} elements in {end - position} bytes")
        return position + count * size

    return walk


def _nullable_entity(walk_entity: BoundsCheck) -> BoundsCheck:
    def walk(data: memoryview, position: int, end: int, patches: list[Patch]) -> int:
        if position >= end:
            raise _cut_short()
        is_null = data[position] == 0xFF
        return position + 1 if is_null else walk_entity(data, position + 1, end, patches)

    return walk


def _tags_walk(known: dict[int, BoundsCheck]) -> BoundsCheck:
    def walk(data: memoryview, position: int, end: int, patches: list[Patch]) -> int:
        if position < end and data[position] == 0:
            return position + 1
        start = position
        count, position = read_uvarint(data, position, end)
        kept: list[tuple[int, int]] = []
        for _ in range(count):
            tag_at = position
            tag, position = read_uvarint(data, position, end)
            size, position = read_uvarint(data, position, end)
            after = position + size
            if after > end:
                raise _cut_short()
            if tag in known:
                inner: list[Patch] = []
                if known[tag](data, position, after, inner) != after or inner:
                    raise MalformedFrame(f"tagged field {tag} does not fill its {size} bytes as it should")
                kept.append((tag_at, after))
            position = after
        if len(kept) < count:
            fields_kept = b"".join(bytes(data[first:last]) for first, last in kept)
            patches.append((start, position, bytes((len(kept),)) + fields_kept))
        return position

    return walk


def apply_patches(data: memoryview, patches: list[Patch]) -> bytes:
    """The message without what its schema does not know."""
    parts: list[bytes | memoryview] = []
    position = 0
    for start, end, instead in patches:
        parts += (data[position:start], instead)
        position = end
    return b"".join((*parts, data[position:]))


def _compact_bytes(data: memoryview, position: int, end: int, patches: list[Patch]) -> int:
    size, position = read_uvarint(data, position, end)
    position += max(size - 1, 0)
    if position > end:
        raise _cut_short()
    return position


def _legacy_bytes(length_bytes: int) -> BoundsCheck:
    def walk(data: memoryview, position: int, end: int, patches: list[Patch]) -> int:
        if position + length_bytes > end:
            raise _cut_short()
        size = int.from_bytes(data[position : position + length_bytes], "big", signed=True)
        position += length_bytes + max(size, 0)
        if position > end or size < -1:
            raise _cut_short()
        return position

    return walk


def _count_reader(flexible: bool, nullable: bool) -> CountReader:
    read_count = _compact_count if flexible else _legacy_count

    def read(data: memoryview, position: int, end: int) -> tuple[int, int]:
        count, position = read_count(data, position, end)
        if count < -1 or (count == -1 and not nullable):
            raise MalformedFrame(f"array of {count} elements")
        return max(count, 0), position

    return read


def _compact_count(data: memoryview, position: int, end: int) -> tuple[int, int]:
    count, position = read_uvarint(data, position, end)
    return count - 1, position


def _legacy_count(data: memoryview, position: int, end: int) -> tuple[int, int]:
    if position + 4 > end:
        raise _cut_short()
    return int.from_bytes(data[position : position + 4], "big", signed=True), position + 4


def _cut_short() -> MalformedFrame:
    return MalformedFrame("request is cut short")
