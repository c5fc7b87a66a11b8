"""Going on with a damaged metadata log where no other voter has it: an operator's decision. Blocking."""

import shutil
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

from penstock.broker.quorum import election_file, snapshots
from penstock.broker.quorum.state import METADATA_CONFIG, METADATA_TOPIC_ID, first_damaged_offset
from penstock.cluster.names import CLUSTER_METADATA
from penstock.log.checkpoints import sync_directory
from penstock.log.identity import owner_of
from penstock.log.log import Log
from penstock.log.names import partition_folder, stray_folder
from penstock.log.store import LogStore
from penstock.raft.values import OffsetAndEpoch


class Unrepairable(Exception):
    """There is nothing to accept, or nothing left to go on with."""


class Repaired(NamedTuple):
    end_offset: int
    offsets_cut: int
    copy: Path


def cut_damage(data_dir: Path, *, now_ms: int) -> Repaired:
    """End the log where it is damaged, after a copy was made. Raises Unrepairable, StoreLocked, WrongOwner, OSError."""
    folder = data_dir / partition_folder(CLUSTER_METADATA, 0)
    if not folder.exists():
        raise Unrepairable(f"{folder} is gone; put a copy of it back, or begin with another data folder")
    store = LogStore.open(data_dir, node_id=owner_of(data_dir).node_id, founding=False)
    try:
        copy = data_dir / stray_folder(CLUSTER_METADATA, 0, uuid4().hex)
        shutil.copytree(folder, copy)
        sync_directory(data_dir)
        synced_offset = store.synced_offset(CLUSTER_METADATA, 0, METADATA_TOPIC_ID)
        log = store.open_or_create(CLUSTER_METADATA, 0, METADATA_TOPIC_ID, METADATA_CONFIG, now_ms=now_ms)
        before = max(log.end_offset, synced_offset)
        snapshot = _newest_whole_snapshot(log)
        if log.start_offset > (0 if snapshot is None else snapshot.offset):
            raise Unrepairable(f"no whole snapshot is left of what was before offset {log.start_offset}")
        _forget_damaged_vote(log)
        cut = first_damaged_offset(log, log.start_offset if snapshot is None else snapshot.offset)
        store.truncate(CLUSTER_METADATA, 0, cut, now_ms=now_ms)
        return Repaired(log.end_offset, before - log.end_offset, copy)
    finally:
        store.close(clean=False)


def _newest_whole_snapshot(log: Log) -> OffsetAndEpoch | None:
    """Damaged ones go; the copy has them."""
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
        election_file.load(log.directory)
    except election_file.DamagedElection:
        (log.directory / election_file.NAME).unlink()
