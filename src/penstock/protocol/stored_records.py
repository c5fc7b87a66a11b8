"""Records that brokers store in Kafka's published formats, declared as dataclasses on kio's serializers.

kio has no schemas for them. A key starts with an int16 record type, a value with an int16 version. Metadata records
have their own frame; see `penstock.cluster.metadata_records`.
"""

import struct
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field
from io import BytesIO
from typing import Any, ClassVar, Final, TypeVar, dataclass_transform

from kio.serial import entity_reader
from kio.static.constants import EntityType

from penstock.protocol.schemas import message_writer

KeyValue = tuple[bytes, bytes | None]

_INT16: Final = struct.Struct(">h")
_STRING_BYTES_MAX: Final = 32_767


def kafka_field(kafka_type: str, *, default: object = MISSING, tag: int | None = None) -> Any:
    """A dataclass field with its wire type; a tagged field is written only if it is not its default."""
    assert tag is None or default is not MISSING
    metadata = {"kafka_type": kafka_type} if tag is None else {"kafka_type": kafka_type, "tag": tag}
    return field(default=default, metadata=metadata)


class RecordSchema:
    """The attributes that kio requires of a record."""

    __slots__ = ()
    __type__: ClassVar = EntityType.data
    __version__: ClassVar[int] = 0
    __flexible__: ClassVar[bool] = True


class KeySchema(RecordSchema):
    __slots__ = ()
    __flexible__: ClassVar[bool] = False


class NestedSchema(RecordSchema):
    """A structure inside a record."""

    __slots__ = ()
    __type__: ClassVar = EntityType.nested


SchemaT = TypeVar("SchemaT", bound=RecordSchema)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(kafka_field, field))
def schema(*, version: int = 0, flexible: bool | None = None) -> Callable[[type[SchemaT]], type[SchemaT]]:
    """Makes a class a dataclass that is encoded as this version; `flexible` is inherited unless given."""

    def declare(cls: type[SchemaT]) -> type[SchemaT]:
        cls.__version__ = version
        if flexible is not None:
            cls.__flexible__ = flexible
        return dataclass(frozen=True, slots=True, kw_only=True)(cls)

    return declare


class UnknownVersion(ValueError):
    """The value has a newer format than this code supports. The code must not skip it, because data would be lost."""


def can_store(*texts: str) -> bool:
    """Whether the texts fit the 16-bit lengths of stored strings."""
    return all(len(text.encode()) <= _STRING_BYTES_MAX for text in texts)


def key_type(key: bytes) -> int:
    return int(_INT16.unpack_from(key)[0])


def value_version(value: bytes) -> int:
    return int(_INT16.unpack_from(value)[0])


def encode_entity(number: int, entity: Any) -> bytes:
    """`number` is the record type of a key or the version of a value."""
    buffer = BytesIO()
    buffer.write(_INT16.pack(number))
    schema: Any = type(entity)
    message_writer(schema)(buffer, entity)
    return buffer.getvalue()


def decode_entity(schema: Any, data: bytes) -> Any:
    entity, _ = entity_reader(schema)(data, _INT16.size)
    return entity
