"""Records of groups that the coordinator assigns: consumer groups and share groups keep theirs in the same way.

A record is about the whole group, or about something in it that has a name. Keys start with the number of their kind,
values with their version, which is 0 for all of them.
"""

import struct
from collections.abc import Collection, Mapping
from enum import IntEnum
from functools import cache
from io import BytesIO
from typing import Any, Final, Generic, NamedTuple, TypeVar

from kio.serial import entity_reader, entity_writer

from penstock.groups.consumer.schemas import GroupKey, NamedKey
from penstock.groups.records import KeyValue, UnknownVersion, key_type

_INT16: Final = struct.Struct(">h")
_VERSION: Final = _INT16.pack(0)

KindT = TypeVar("KindT", bound=IntEnum)


class Record(NamedTuple, Generic[KindT]):
    """`value` is None for a tombstone; what else it is, its kind says."""

    kind: KindT
    group_id: str
    #: A member's id or a regular expression; empty where the record is about the whole group.
    name: str
    value: Any


class Forms(Generic[KindT]):
    """How the records of one kind of group become bytes, and bytes records."""

    def __init__(
        self,
        kinds: type[KindT],
        *,
        of_group: Collection[KindT],
        entities: Mapping[KindT, Any],
        parsers: Mapping[KindT, tuple[Any, Any]],
    ) -> None:
        """`entities` make an entity of a value, `parsers` (with its schema) a value of an entity.

        What has no parser is not written any more, and counts for nothing.
        """
        self._kinds = kinds
        self._of_group = frozenset(of_group)
        self._entities, self._parsers = entities, parsers

    def encode(self, record: Record[KindT]) -> KeyValue:
        kind = record.kind
        if kind in self._of_group:
            key: Any = GroupKey(group_id=record.group_id)
        else:
            key = NamedKey(group_id=record.group_id, name=record.name)
        value = None if record.value is None else _write(_VERSION, self._entities[kind](record.value))
        return _write(_INT16.pack(kind), key), value

    def decode(self, key: bytes, value: bytes | None) -> Record[KindT]:
        kind = self._kinds(key_type(key))
        is_of_group = kind in self._of_group
        parsed = _read(GroupKey if is_of_group else NamedKey, key)
        name = "" if is_of_group else parsed.name
        return Record(kind, parsed.group_id, name, None if value is None else self._parse(kind, value))

    def _parse(self, kind: KindT, value: bytes) -> Any:
        if kind not in self._parsers:
            return None
        if not value.startswith(_VERSION):
            raise UnknownVersion(f"{kind.name} record of version {key_type(value)}")
        schema, parse = self._parsers[kind]
        return parse(_read(schema, value))


@cache
def _writer(schema: Any) -> Any:
    return entity_writer(schema)


@cache
def _reader(schema: Any) -> Any:
    return entity_reader(schema)


def _write(prefix: bytes, entity: Any) -> bytes:
    buffer = BytesIO()
    buffer.write(prefix)
    schema: Any = type(entity)
    _writer(schema)(buffer, entity)
    return buffer.getvalue()


def _read(schema: Any, data: bytes) -> Any:
    entity, _ = _reader(schema)(data, _INT16.size)
    return entity
