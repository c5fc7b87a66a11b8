"""Metadata records as bytes: frame version, key and version as unsigned varints, then the message."""

import io
from collections.abc import Iterable
from functools import cache
from typing import Final

from kio.serial import entity_reader, entity_writer
from kio.serial.errors import SerialError
from kio.serial.readers import read_unsigned_varint
from kio.serial.writers import write_unsigned_varint

from penstock.cluster.records import RECORD_TYPES
from penstock.cluster.wire import MetadataRecord

FRAME_VERSION: Final = 1


class UnreadableRecord(Exception):
    """A metadata record that this version cannot read: going on without it would be guessing."""


def encode_record(record: MetadataRecord) -> bytes:
    buffer = io.BytesIO()
    write_unsigned_varint(buffer, FRAME_VERSION)
    write_unsigned_varint(buffer, record.__api_key__)
    write_unsigned_varint(buffer, record.__version__)
    entity_writer(type(record))(buffer, record)
    return buffer.getvalue()


def encode_records(records: Iterable[MetadataRecord]) -> list[bytes]:
    """The values of the log records that hold them, in order; metadata records have no key."""
    return [encode_record(record) for record in records]


def decode_record(data: bytes) -> MetadataRecord:
    """Raises UnreadableRecord."""
    try:
        return _decode(data)
    except SerialError as error:
        raise UnreadableRecord(f"metadata record is cut short or damaged: {error}") from error
    except KeyError as error:
        # kio's reader knows no way past a tagged field that it has not heard of.
        raise UnreadableRecord(f"metadata record is of a newer kind: {error}") from error


def _decode(data: bytes) -> MetadataRecord:
    frame_version, position = read_unsigned_varint(data, 0)
    if frame_version != FRAME_VERSION:
        raise UnreadableRecord(f"metadata record has frame version {frame_version}, expected {FRAME_VERSION}")
    key, size = read_unsigned_varint(data, position)
    position += size
    version, size = read_unsigned_varint(data, position)
    position += size
    record_type = _record_type(key)
    if not record_type.__readable_from__ <= version <= record_type.__version__:
        raise UnreadableRecord(
            f"{record_type.__name__} has version {version}, readable are "
            f"{record_type.__readable_from__} to {record_type.__version__}"
        )
    record: MetadataRecord
    record, size = entity_reader(record_type)(data, position)
    if position + size != len(data):
        raise UnreadableRecord(f"{len(data) - position - size} bytes after {record_type.__name__}")
    return record


def _record_type(key: int) -> type[MetadataRecord]:
    found = RECORD_TYPES.get(key) or _other_record_types().get(key)
    if found is None:
        raise UnreadableRecord(f"metadata record has unknown key {key}")
    return found


@cache
def _other_record_types() -> dict[int, type[MetadataRecord]]:
    from penstock.cluster.seldom_records import SELDOM_RECORD_TYPES
    from penstock.cluster.tenant_records import TENANT_RECORD_TYPES

    return SELDOM_RECORD_TYPES | TENANT_RECORD_TYPES
