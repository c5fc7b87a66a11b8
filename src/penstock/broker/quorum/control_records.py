"""Control records, which the quorum writes into the metadata log and its snapshots, in Kafka's format.

The values, version 0 of each, are packed by hand: kio's classes for them would cost every start several milliseconds.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from typing import Final, NamedTuple, assert_never
from uuid import UUID

from penstock.protocol.compression import BytesLike
from penstock.protocol.errors import MalformedFrame
from penstock.protocol.record_batch import CONTROL, Record, decode_records, encode_batch, iter_batches
from penstock.protocol.wire import WireCursor, encode_compact_string, encode_uvarint
from penstock.raft.types import (
    Address,
    ControlRecord,
    KRaftVersion,
    LeaderChange,
    ReplicaKey,
    Voter,
    Voters,
    VoterSet,
)

_NO_TAGS: Final = b"\x00"
_VALUE_VERSION: Final = b"\x00\x00"  # every value starts with its version
_KRAFT_VERSIONS: Final = b"\x00\x00\x00\x01"  # the range of kraft.version that a voter supports: 0 to 1
_NO_DIRECTORY: Final = UUID(int=0)
_INT16 = struct.Struct(">h")
_INT32 = struct.Struct(">i")
_INT64 = struct.Struct(">q")
_UINT16 = struct.Struct(">H")
_VOTER = struct.Struct(">i16s")  # id, directory


def encode_leader_change(record: LeaderChange) -> bytes:
    voters, granting = (
        _array(_INT32.pack(key.id) + _NO_TAGS for key in keys) for keys in (record.voters, record.granting)
    )
    return _VALUE_VERSION + _INT32.pack(record.leader_id) + voters + granting + _NO_TAGS


def encode_kraft_version(record: KRaftVersion) -> bytes:
    return _VALUE_VERSION + _INT16.pack(record.version) + _NO_TAGS


def encode_snapshot_header(last_timestamp_ms: int) -> bytes:
    return _VALUE_VERSION + _INT64.pack(last_timestamp_ms) + _NO_TAGS


def encode_snapshot_footer() -> bytes:
    return _VALUE_VERSION + _NO_TAGS


def encode_voters(voters: VoterSet) -> bytes:
    return _VALUE_VERSION + _array(map(_voter, voters)) + _NO_TAGS


def _voter(voter: Voter) -> bytes:
    id, directory = voter.key
    key = _VOTER.pack(id, (directory or _NO_DIRECTORY).bytes)
    return key + _array(map(_address, voter.addresses)) + _KRAFT_VERSIONS + _NO_TAGS + _NO_TAGS


def _address(at: Address) -> bytes:
    return encode_compact_string(at.name) + encode_compact_string(at.host) + _UINT16.pack(at.port) + _NO_TAGS


def _array(elements: Iterable[bytes]) -> bytes:
    encoded = list(elements)
    return encode_uvarint(len(encoded) + 1) + b"".join(encoded)


def decode_voters(value: bytes) -> VoterSet:
    """Raises MalformedFrame."""
    cursor = WireCursor(memoryview(value), len(_VALUE_VERSION))
    try:
        return VoterSet(tuple(_read_voter(cursor) for _ in range(cursor.count())))
    except (struct.error, IndexError, UnicodeDecodeError):
        raise MalformedFrame("a voters record is cut short or damaged") from None


def _read_voter(cursor: WireCursor) -> Voter:
    id, directory = cursor.unpack(_VOTER)
    addresses = tuple(_read_address(cursor) for _ in range(cursor.count()))
    cursor.take(len(_KRAFT_VERSIONS))
    cursor.skip_tags()
    cursor.skip_tags()
    directory_id = UUID(bytes=directory)
    return Voter(ReplicaKey(id, None if directory_id == _NO_DIRECTORY else directory_id), addresses)


def _read_address(cursor: WireCursor) -> Address:
    name, host = cursor.string().decode(), cursor.string().decode()
    (port,) = cursor.unpack(_UINT16)
    cursor.skip_tags()
    return Address(name, host, port)


#: Control records are small and never compressed.
CONTROL_BYTES_MAX: Final = 16 * 1024 * 1024
_KEY = struct.Struct(">hh")  # version of the key, type
_KEY_VERSION: Final = 0


class ControlType(IntEnum):
    LEADER_CHANGE = 2
    SNAPSHOT_HEADER = 3
    SNAPSHOT_FOOTER = 4
    KRAFT_VERSION = 5
    KRAFT_VOTERS = 6


class SnapshotHeader(NamedTuple):
    last_timestamp_ms: int


class SnapshotFooter(NamedTuple):
    pass


AnyControlRecord = ControlRecord | SnapshotHeader | SnapshotFooter


def encode_control_batch(
    records: Sequence[AnyControlRecord], *, base_offset: int = 0, epoch: int, now_ms: int
) -> bytearray:
    encoded = []
    for index, record in enumerate(records):
        kind, value = _encode_value(record)
        key = _KEY.pack(_KEY_VERSION, kind)
        encoded.append(Record(offset=base_offset + index, timestamp=now_ms, key=key, value=value))
    return encode_batch(encoded, leader_epoch=epoch, attributes=CONTROL)


def control_type(record: Record) -> int:
    """Return the type of a control record; -1 if its key has none."""
    if record.key is None or len(record.key) < _KEY.size:
        return -1
    return int(_KEY.unpack_from(record.key)[1])


def voters_in(data: BytesLike) -> Iterator[tuple[int, VoterSet]]:
    """Yield the Voters records of whole batches, with their offsets."""
    for header, batch in iter_batches(data):
        if header.is_control:
            for record in decode_records(batch, CONTROL_BYTES_MAX):
                if control_type(record) == ControlType.KRAFT_VOTERS:
                    assert record.value is not None
                    yield record.offset, decode_voters(record.value)


def _encode_value(record: AnyControlRecord) -> tuple[int, bytes]:
    match record:
        case LeaderChange():
            return ControlType.LEADER_CHANGE, encode_leader_change(record)
        case KRaftVersion():
            return ControlType.KRAFT_VERSION, encode_kraft_version(record)
        case Voters():
            return ControlType.KRAFT_VOTERS, encode_voters(record.voters)
        case SnapshotHeader():
            return ControlType.SNAPSHOT_HEADER, encode_snapshot_header(record.last_timestamp_ms)
        case SnapshotFooter():
            return ControlType.SNAPSHOT_FOOTER, encode_snapshot_footer()
    assert_never(record)
