"""Repairs a damaged metadata log that no other voter has: an operator accepts the loss, and the log is truncated.

All functions block.
"""

import shutil
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

from penstock.broker.quorum import snapshots, storage
from penstock.broker.quorum.storage import METADATA_CONFIG, METADATA_TOPIC_ID, first_damaged_offset
from penstock.cluster.topic_names import CLUSTER_METADATA
from penstock.log.data_directory import log_dir_name, log_stray_dir_name, read_meta_properties
from penstock.log.log import Log
from penstock.log.log_manager import LogManager
from penstock.protocol.durable_files import sync_directory
from penstock.raft.types import OffsetAndEpoch


class Unrepairable(Exception):
    """The metadata log is missing, or too little of it is left to continue with."""


class Repaired(NamedTuple):
    end_offset: int
    offsets_cut: int
    copy: Path


def cut_damage(data_dir: Path, *, now_ms: int) -> Repaired:
    """Copy the log, then truncate it at the first damage. Raises Unrepairable, StoreLocked, WrongOwner, OSError."""
    folder = data_dir / log_dir_name(CLUSTER_METADATA, 0)
    if not folder.exists():
        raise Unrepairable(f"{folder} is missing; restore a copy of it, or start with another data folder")
    store = LogManager.open(data_dir, node_id=read_meta_properties(data_dir).node_id, founding=False)
    try:
        copy = data_dir / log_stray_dir_name(CLUSTER_METADATA, 0, uuid4().hex)
        shutil.copytree(folder, copy)
        sync_directory(data_dir)
        synced_offset = store.synced_offset(CLUSTER_METADATA, 0, METADATA_TOPIC_ID)
        log = store.open_or_create(CLUSTER_METADATA, 0, METADATA_TOPIC_ID, METADATA_CONFIG, now_ms=now_ms)
        before = max(log.end_offset, synced_offset)
        snapshot = _newest_whole_snapshot(log)
        if log.start_offset > (0 if snapshot is None else snapshot.offset):
            raise Unrepairable(f"no intact snapshot covers the offsets before {log.start_offset}")
        _forget_damaged_vote(log)
        cut = first_damaged_offset(log, log.start_offset if snapshot is None else snapshot.offset)
        store.truncate(CLUSTER_METADATA, 0, cut, now_ms=now_ms)
        return Repaired(log.end_offset, before - log.end_offset, copy)
    finally:
        store.close(clean=False)


def _newest_whole_snapshot(log: Log) -> OffsetAndEpoch | None:
    """Return the newest intact snapshot. Damaged ones are deleted, because the copy of the log has them."""
    for id in reversed(snapshots.stored(log.directory)):
        try:
            snapshots.load(log.directory, id)
        except snapshots.DamagedSnapshot:
            snapshots.remove(log.directory, [id])
        else:
            return id
    return None


def _forget_damaged_vote(log: Log) -> None:
    try:
        storage.load_election(log.directory)
    except storage.DamagedElection:
        (log.directory / storage.ELECTION_FILE).unlink()
