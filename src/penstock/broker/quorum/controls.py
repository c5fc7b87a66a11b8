"""Control records: what the quorum writes for itself into the metadata log and its snapshots, as Kafka does."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Any, Final, NamedTuple, assert_never

from kio.serial import entity_reader, entity_writer

from penstock.protocol.compression import BytesLike
from penstock.protocol.records import CONTROL, Record, decode_records, encode_batch, iter_batches
from penstock.raft.values import (
    Address,
    ControlRecord,
    KRaftVersion,
    LeaderChange,
    ReplicaKey,
    Voter,
    Voters,
    VoterSet,
)

#: Control records are small and never compressed.
CONTROL_BYTES_MAX: Final = 16 * 1024 * 1024
_KEY = struct.Struct(">hh")  # version of the key, type
_VERSION: Final = 0
_KRAFT_VERSION_MAX: Final = 1


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
            return ControlType.LEADER_CHANGE, _leader_change(record)
        case KRaftVersion():
            return ControlType.KRAFT_VERSION, _kraft_version(record)
        case Voters():
            return ControlType.KRAFT_VOTERS, encode_voters(record.voters)
        case SnapshotHeader():
            return ControlType.SNAPSHOT_HEADER, _snapshot_header(record)
        case SnapshotFooter():
            return ControlType.SNAPSHOT_FOOTER, _snapshot_footer()
    assert_never(record)


def _leader_change(record: LeaderChange) -> bytes:
    from kio.schema.leader_change_message.v0.data import LeaderChangeMessage
    from kio.schema.leader_change_message.v0.data import Voter as WireVoter

    return _written(
        LeaderChangeMessage(
            version=_VERSION,
            leader_id=record.leader_id,
            voters=tuple(WireVoter(voter_id=key.id) for key in record.voters),
            granting_voters=tuple(WireVoter(voter_id=key.id) for key in record.granting),
        )
    )


def _kraft_version(record: KRaftVersion) -> bytes:
    from kio.schema.k_raft_version_record.v0.data import KRaftVersionRecord

    return _written(KRaftVersionRecord(version=_VERSION, k_raft_version=record.version))


def encode_voters(voters: VoterSet) -> bytes:
    from kio.schema.voters_record.v0 import data as wire

    return _written(
        wire.VotersRecord(
            version=_VERSION,
            voters=tuple(
                wire.Voter(
                    voter_id=voter.key.id,
                    voter_directory_id=voter.key.directory,
                    endpoints=tuple(
                        wire.Endpoint(name=at.name, host=at.host, port=at.port) for at in voter.addresses
                    ),
                    k_raft_version_feature=wire.KRaftVersionFeature(
                        min_supported_version=0, max_supported_version=_KRAFT_VERSION_MAX
                    ),
                )
                for voter in voters
            ),
        )
    )


def decode_voters(value: bytes) -> VoterSet:
    from kio.schema.voters_record.v0.data import VotersRecord

    record, _ = entity_reader(VotersRecord)(value, 0)
    return VoterSet(
        tuple(
            Voter(
                ReplicaKey(int(voter.voter_id), voter.voter_directory_id),
                tuple(Address(at.name, at.host, int(at.port)) for at in voter.endpoints),
            )
            for voter in record.voters
        )
    )


def _snapshot_header(record: SnapshotHeader) -> bytes:
    from kio.schema.snapshot_header_record.v0.data import SnapshotHeaderRecord

    return _written(
        SnapshotHeaderRecord(version=_VERSION, last_contained_log_timestamp=record.last_timestamp_ms)
    )


def _snapshot_footer() -> bytes:
    from kio.schema.snapshot_footer_record.v0.data import SnapshotFooterRecord

    return _written(SnapshotFooterRecord(version=_VERSION))


def _written(message: Any) -> bytes:
    out = io.BytesIO()
    entity_writer(type(message))(out, message)
    return out.getvalue()
