"""Metadata snapshots: `<end offset>-<epoch>.checkpoint` files in Kafka's format.

A new snapshot allows the log before the previous one to be deleted. All functions block.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from penstock.broker.quorum.control_records import (
    CONTROL_BYTES_MAX,
    AnyControlRecord,
    ControlType,
    SnapshotFooter,
    SnapshotHeader,
    control_type,
    decode_voters,
    encode_control_batch,
)
from penstock.cluster import metadata_records
from penstock.cluster.image import ClusterImage
from penstock.cluster.metadata_records import MetadataRecord, decode_record, encode_records
from penstock.protocol.durable_files import sync_directory
from penstock.protocol.record_batch import (
    Record,
    checksum,
    decode_records,
    encode_batch,
    encode_record,
    iter_batches,
    iter_records,
    pack_new_batch,
)
from penstock.protocol.steps import Steps
from penstock.raft.types import KRaftVersion, OffsetAndEpoch, Voters, VoterSet

_SUFFIX: Final = ".checkpoint"
_PART: Final = ".part"
_NAME: Final = re.compile(r"([0-9]{20})-([0-9]{10})\.checkpoint")
#: Records of one batch in a snapshot.
_BATCH_RECORDS_MAX: Final = 1000
_DECODED_BYTES_MAX: Final = 1 << 30


class DamagedSnapshot(Exception):
    """The file is not what was written, so it must not be used."""


class Snapshot(NamedTuple):
    image: ClusterImage
    voters: VoterSet


def path_of(folder: Path, id: OffsetAndEpoch) -> Path:
    return folder / f"{id.offset:020d}-{id.epoch:010d}{_SUFFIX}"


def stored(folder: Path) -> list[OffsetAndEpoch]:
    """Return the ids of the complete snapshots, oldest first."""
    matches = filter(None, map(_NAME.fullmatch, os.listdir(folder)))
    return sorted(OffsetAndEpoch(int(match[1]), int(match[2])) for match in matches)


def remove_unfinished(folder: Path) -> None:
    for path in folder.glob(f"*{_SUFFIX}{_PART}"):
        path.unlink(missing_ok=True)


def remove(folder: Path, ids: Iterable[OffsetAndEpoch]) -> None:
    for id in ids:
        path_of(folder, id).unlink(missing_ok=True)


# Writing


def write(
    folder: Path,
    id: OffsetAndEpoch,
    image: ClusterImage,
    voters: VoterSet,
    *,
    last_timestamp_ms: int,
    now_ms: int,
) -> None:
    """Write the whole image; durable when it returns. Raises OSError, and then leaves no partial file behind."""
    part = _part(folder, id)
    try:
        with open(part, "wb") as file:
            for batch in _batches(id, image, voters, last_timestamp_ms, now_ms):
                file.write(batch)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path_of(folder, id))
        sync_directory(folder)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def _batches(
    id: OffsetAndEpoch, image: ClusterImage, voters: VoterSet, last_timestamp_ms: int, now_ms: int
) -> Iterator[bytearray]:
    from penstock.cluster.image_snapshot import snapshot_records

    head: list[AnyControlRecord] = [SnapshotHeader(last_timestamp_ms)]
    if len(voters):
        head += (KRaftVersion(), Voters(voters=voters))
    yield encode_control_batch(head, epoch=id.epoch, now_ms=now_ms)
    offset = len(head)
    for run in snapshot_records(image):
        for start in range(0, len(run), _BATCH_RECORDS_MAX):
            values = encode_records(run[start : start + _BATCH_RECORDS_MAX])
            records = [Record(offset + index, now_ms, None, value) for index, value in enumerate(values)]
            yield encode_batch(records, leader_epoch=id.epoch)
            offset += len(records)
    yield encode_control_batch((SnapshotFooter(),), base_offset=offset, epoch=id.epoch, now_ms=now_ms)


# Receiving


def receive(folder: Path, id: OffsetAndEpoch, position: int, data: bytes) -> None:
    """Write one piece; position 0 starts the file again."""
    with open(_part(folder, id), "wb" if position == 0 else "r+b") as file:
        file.seek(position)
        file.write(data)
        file.truncate()


def finish_receiving(folder: Path, id: OffsetAndEpoch) -> Snapshot:
    """Check a completely received snapshot, and store it durably under its name. Raises DamagedSnapshot, OSError."""
    part = _part(folder, id)
    snapshot = _read(part)
    with open(part, "rb+") as file:
        os.fsync(file.fileno())
    os.replace(part, path_of(folder, id))
    sync_directory(folder)
    return snapshot


def read_piece(folder: Path, id: OffsetAndEpoch, position: int, bytes_max: int) -> tuple[int, bytes]:
    """Return the size of the whole snapshot, and a piece of it. Raises FileNotFoundError."""
    with open(path_of(folder, id), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(position)
        return size, file.read(bytes_max)


# Loading


def load(folder: Path, id: OffsetAndEpoch) -> Snapshot:
    """Raises DamagedSnapshot, OSError."""
    return _read(path_of(folder, id))


def _read(path: Path) -> Snapshot:
    data = path.read_bytes()
    image, voters = ClusterImage(), VoterSet()
    position, is_whole = 0, False
    for header, batch in iter_batches(data):
        position += header.size
        if checksum(batch) != header.crc:
            raise DamagedSnapshot(f"{path}: bad checksum in the batch that ends at byte {position}")
        if not header.is_control:
            image.apply(iter_metadata(batch))
            continue
        for record in decode_records(batch, CONTROL_BYTES_MAX):
            kind = control_type(record)
            is_whole = kind == ControlType.SNAPSHOT_FOOTER
            if kind == ControlType.KRAFT_VOTERS:
                assert record.value is not None
                voters = decode_voters(record.value)
    if not is_whole or position != len(data):
        raise DamagedSnapshot(f"{path} is cut short")
    return Snapshot(image, voters)


def iter_metadata(batch: memoryview) -> Iterator[MetadataRecord]:
    """Decode a batch of the metadata log or of a snapshot. Raises ApiError, UnreadableRecord."""
    for record in iter_records(batch, _DECODED_BYTES_MAX):
        yield decode_record(record.value or b"")


def encode_metadata(records: Sequence[MetadataRecord], now_ms: int) -> Steps[bytearray]:
    """Encode a batch for the metadata log."""
    body = bytearray()
    for index, record in enumerate(records):
        body += encode_record(Record(index, now_ms, None, metadata_records.encode_record(record)), 0, now_ms)
        yield
    return pack_new_batch(body, len(records), now_ms)


def _part(folder: Path, id: OffsetAndEpoch) -> Path:
    path = path_of(folder, id)
    return path.with_name(path.name + _PART)
