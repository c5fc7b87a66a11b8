"""Checks every length and count of a message against the bytes that remain, before anything is allocated.

kio's native reader trusts a count and reserves memory for it, which ends the process when a peer claims four
billion elements. So every request is checked first, along the same schema. The check keeps nothing except what has to
be replaced before kio can read the message: tagged fields that the schema does not know, which a newer client may send,
and durations beyond the range that it can read.
"""

import struct
import sys
from collections.abc import Callable
from dataclasses import Field, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Union, get_args, get_origin

from penstock.protocol.errors import MalformedFrame
from penstock.protocol.wire import TAGS_MAX, read_uvarint

#: Start and end of a run of bytes, and the bytes that replace it.
Patch = tuple[int, int, bytes]


class Found:
    """What a check has come across: what to replace, and how many elements arrays may still have."""

    __slots__ = ("elements_left", "patches")

    def __init__(self, elements_max: int = sys.maxsize) -> None:
        self.elements_left = elements_max
        self.patches: list[Patch] = []

    def count(self, elements: int) -> None:
        """Raises TooManyElements."""
        self.elements_left -= elements
        if self.elements_left < 0:
            raise TooManyElements("too many elements of arrays")


class TooManyElements(MalformedFrame):
    """A message has more elements of arrays than its reader allows."""


#: (buffer, position, end, what was found so far) -> position after the value
BoundsCheck = Callable[[memoryview, int, int, Found], int]

#: (buffer, position, end) -> (count, position after it)
CountReader = Callable[[memoryview, int, int], tuple[int, int]]

_FIXED_BYTES = {
    "int8": 1, "int16": 2, "int32": 4, "int64": 8, "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8,
    "float64": 8, "bool": 1, "uuid": 16, "error_code": 2, "timedelta_i32": 4, "timedelta_i64": 8,
    "datetime_i64": 8,
}  # fmt: skip
_LENGTH_BYTES = {"string": 2, "bytes": 4, "records": 4}

#: Clients may send Long.MAX_VALUE for "as long as possible". A duration that kio cannot read, because it has more than
#: 64 bits in microseconds, is replaced by the longest one.
_DURATION = "timedelta_i64"
_DURATION_MS_MAX = (2**63 - 1) // 1000
_INT64 = struct.Struct(">q")


@cache
def bounds_check(entity: type[Any]) -> BoundsCheck:
    """A function that checks one entity of this schema."""
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

    def walk(data: memoryview, position: int, end: int, found: Found) -> int:
        for step in steps:
            position = step(data, position, end, found)
        return position

    return walk


def _skip(size: int) -> tuple[BoundsCheck, ...]:
    def walk(data: memoryview, position: int, end: int, found: Found) -> int:
        if position + size > end:
            raise _cut_short()
        return position + size

    return (walk,) if size else ()


def _fixed_size(field: Field[Any]) -> int | None:
    is_array, element, _ = classify_type(field.type)
    if is_array or is_dataclass(element):
        return None
    kafka_type = field.metadata["kafka_type"]
    return None if kafka_type == _DURATION else _FIXED_BYTES.get(kafka_type)


def _field_walk(field: Field[Any], flexible: bool, *, nullable: bool) -> BoundsCheck:
    is_array, element, optional = classify_type(field.type)
    if is_dataclass(element):
        walk = bounds_check(element)  # type: ignore[arg-type]
        if not is_array and optional and nullable:
            walk = _nullable_entity(walk)
        return _array_walk(walk, _count_reader(flexible, optional)) if is_array else walk
    kafka_type = field.metadata["kafka_type"]
    if kafka_type == _DURATION and not is_array:
        return _duration_walk
    size = _FIXED_BYTES.get(kafka_type)
    if size is None:
        walk = _compact_bytes if flexible else _legacy_bytes(_LENGTH_BYTES[kafka_type])
        return _array_walk(walk, _count_reader(flexible, optional)) if is_array else walk
    return _fixed_array_walk(size, _count_reader(flexible, optional)) if is_array else _skip(size)[0]


def field_check(field: Field[Any], flexible: bool) -> BoundsCheck:
    """A function that checks one field without a tag."""
    return _field_walk(field, flexible, nullable=True)


def skip_unknown_tags(data: memoryview, position: int, end: int, found: Found) -> int:
    """Return the position after the tagged fields of a message whose schema has none."""
    return _tags_walk({})(data, position, end, found)


def array_count(flexible: bool, nullable: bool) -> Callable[[memoryview, int, int], tuple[int | None, int]]:
    """A function that reads the number of elements of an array; None stands for null."""
    read_count = _compact_count if flexible else _legacy_count

    def read(data: memoryview, position: int, end: int) -> tuple[int | None, int]:
        count, position = read_count(data, position, end)
        if count < -1 or (count == -1 and not nullable):
            raise MalformedFrame(f"array of {count} elements")
        if count > end - position:  # an element takes at least one byte
            raise MalformedFrame(f"array of {count} elements in {end - position} bytes")
        return (None if count == -1 else count), position

    return read


def classify_type(annotation: Any) -> tuple[bool, Any, bool]:
    """Returns whether it is an array, the type of the value or element, and whether it may be null."""
    optional = False
    if get_origin(annotation) in (UnionType, Union):
        optional = type(None) in get_args(annotation)
        (annotation,) = (a for a in get_args(annotation) if a is not type(None))
    if get_origin(annotation) is tuple:
        return True, classify_type(get_args(annotation)[0])[1], optional
    return False, annotation, optional


def _array_walk(element: BoundsCheck, read_count: CountReader) -> BoundsCheck:
    def walk(data: memoryview, position: int, end: int, found: Found) -> int:
        count, position = read_count(data, position, end)
        if count > end - position:  # an element takes at least one byte
            raise MalformedFrame(f"array of {count} elements in {end - position} bytes")
        found.count(count)
        for _ in range(count):
            position = element(data, position, end, found)
        return position

    return walk


def _fixed_array_walk(size: int, read_count: CountReader) -> BoundsCheck:
    def walk(data: memoryview, position: int, end: int, found: Found) -> int:
        count, position = read_count(data, position, end)
        if count * size > end - position:
            raise MalformedFrame(f"array of {count} elements in {end - position} bytes")
        found.count(count)
        return position + count * size

    return walk


def _duration_walk(data: memoryview, position: int, end: int, found: Found) -> int:
    after = position + _INT64.size
    if after > end:
        raise _cut_short()
    (milliseconds,) = _INT64.unpack_from(data, position)
    if abs(milliseconds) > _DURATION_MS_MAX:
        nearest = _DURATION_MS_MAX if milliseconds > 0 else -_DURATION_MS_MAX
        found.patches.append((position, after, _INT64.pack(nearest)))
    return after


def _nullable_entity(walk_entity: BoundsCheck) -> BoundsCheck:
    def walk(data: memoryview, position: int, end: int, found: Found) -> int:
        is_null, position = null_mark(data, position, end)
        return position if is_null else walk_entity(data, position, end, found)

    return walk


def null_mark(data: memoryview, position: int, end: int) -> tuple[bool, int]:
    """Return whether a message that may be null is null, and the position after the mark."""
    if position >= end:
        raise _cut_short()
    return data[position] == 0xFF, position + 1


def _tags_walk(known: dict[int, BoundsCheck]) -> BoundsCheck:
    def walk(data: memoryview, position: int, end: int, found: Found) -> int:
        if position < end and data[position] == 0:
            return position + 1
        start = position
        count, position = read_uvarint(data, position, end)
        if count > TAGS_MAX:
            raise MalformedFrame(f"{count} tagged fields in one struct")
        kept: list[tuple[int, int]] = []
        for _ in range(count):
            tag_at = position
            tag, position = read_uvarint(data, position, end)
            size, position = read_uvarint(data, position, end)
            after = position + size
            if after > end:
                raise _cut_short()
            if tag in known:
                inner = Found(found.elements_left)
                if known[tag](data, position, after, inner) != after or inner.patches:
                    raise MalformedFrame(f"tagged field {tag} does not fill its {size} bytes exactly")
                found.elements_left = inner.elements_left
                kept.append((tag_at, after))
            position = after
        if len(kept) < count:
            fields_kept = b"".join(bytes(data[first:last]) for first, last in kept)
            found.patches.append((start, position, bytes((len(kept),)) + fields_kept))
        return position

    return walk


def apply_patches(data: memoryview, patches: list[Patch]) -> bytes:
    """The message as kio can read it."""
    parts: list[bytes | memoryview] = []
    position = 0
    for start, end, instead in patches:
        parts += (data[position:start], instead)
        position = end
    return b"".join((*parts, data[position:]))


def _compact_bytes(data: memoryview, position: int, end: int, found: Found) -> int:
    size, position = read_uvarint(data, position, end)
    position += max(size - 1, 0)
    if position > end:
        raise _cut_short()
    return position


def _legacy_bytes(length_bytes: int) -> BoundsCheck:
    def walk(data: memoryview, position: int, end: int, found: Found) -> int:
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
