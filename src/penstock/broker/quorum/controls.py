"""Control records: what the quorum writes for itself into the metadata log and its snapshots, as Kafka does."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Final, NamedTuple, assert_never

from penstock.broker.quorum.control_values import (
    decode_voters,
    encode_kraft_version,
    encode_leader_change,
    encode_snapshot_footer,
    encode_snapshot_header,
    encode_voters,
)
from penstock.protocol.compression import BytesLike
from penstock.protocol.records import CONTROL, Record, decode_records, encode_batch, iter_batches
from penstock.raft.values import ControlRecord, KRaftVersion, LeaderChange, Voters, VoterSet

#: Control records are small and never compressed.
CONTROL_BYTES_MAX: Final = 16 * 1024 * 1024
_KEY = struct.Struct(">hh")  # version of the key, type
_VERSION: Final = 0


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


AnyControl = ControlRecord | SnapshotHeader | SnapshotFooter


def encode_control_batch(
    records: Sequence[AnyControl], *, base_offset: int = 0, epoch: int, now_ms: int
) -> bytearray:
    encoded = []
    for place, record in enumerate(records):
        kind, value = _encode(record)
        key = _KEY.pack(_VERSION, kind)
        encoded.append(Record(offset=base_offset + place, timestamp=now_ms, key=key, value=value))
    return encode_batch(encoded, leader_epoch=epoch, attributes=CONTROL)


def control_type(record: Record) -> int:
    """-1 for what has no type."""
    if record.key is None or len(record.key) < _KEY.size:
        return -1
    return int(_KEY.unpack_from(record.key)[1])


def voters_in(data: BytesLike) -> Iterator[tuple[int, VoterSet]]:
    """The Voters records of whole batches, with their offsets."""
    for header, batch in iter_batches(data):
        if header.is_control:
            for record in decode_records(batch, CONTROL_BYTES_MAX):
                if control_type(record) == ControlType.KRAFT_VOTERS:
                    assert record.value is not None
                    yield record.offset, decode_voters(record.value)


def _encode(record: AnyControl) -> tuple[int, bytes]:
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
