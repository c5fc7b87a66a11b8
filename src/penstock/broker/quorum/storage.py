"""What of the quorum is on this node's disk: the metadata log, its newest snapshot, the vote, and who votes."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple
from uuid import UUID

from penstock.broker.quorum import election_file, snapshots
from penstock.broker.quorum.controls import voters_in
from penstock.broker.quorum.log_view import MetadataLogView
from penstock.cluster.names import CLUSTER_METADATA
from penstock.log.config import LogConfig
from penstock.log.log import Log
from penstock.log.recovery import CorruptLog
from penstock.log.validation import check_served
from penstock.protocol.errors import ApiError
from penstock.raft.values import Election, OffsetAndEpoch, VoterHistory, VoterSet, plausible_election

if TYPE_CHECKING:
    from penstock.broker.quorum.snapshots import Snapshot
    from penstock.log.store import LogStore

logger = logging.getLogger("penstock.quorum")

METADATA_TOPIC_ID: Final = UUID(int=1)
METADATA_CONFIG: Final = LogConfig(
    segment_bytes=64 << 20,  # small enough for snapshots to give space back
    retention_ms=-1,
    retention_bytes=-1,
    cleanup_delete=False,
    max_message_bytes=2**31 - 1,
    flush="ack",
    uses_reserve=True,
)
_READ_BYTES: Final = 1 << 20


class QuorumState(NamedTuple):
    log: Log
    election: Election | None
    voters: VoterHistory
    snapshot_id: OffsetAndEpoch | None
    snapshot: Snapshot | None

    @property
    def folder(self) -> Path:
        return self.log.directory

    @property
    def is_empty(self) -> bool:
        return self.log.end_offset == 0 and self.snapshot is None


def open_state(store: LogStore, *, now_ms: int) -> QuorumState:
    """Blocking. Raises CorruptLog, DamagedSnapshot, DamagedElection, OSError."""
    synced_offset = store.synced_offset(CLUSTER_METADATA, 0, METADATA_TOPIC_ID)
    if synced_offset and (CLUSTER_METADATA, 0) not in store.stored():
        raise CorruptLog(f"the folder of {CLUSTER_METADATA} has gone, and with it how this node has voted")
    log = store.open_or_create(CLUSTER_METADATA, 0, METADATA_TOPIC_ID, METADATA_CONFIG, now_ms=now_ms)
    if log.damages:
        raise CorruptLog(f"{log.directory}: {log.damages[0]}")
    snapshots.remove_unfinished(log.directory)
    id, snapshot = _newest_snapshot(log)
    if max(log.end_offset, id.offset if id is not None else 0) < synced_offset:
        # A voter that has forgotten what it helped to commit could help to elect one that never had it.
        raise CorruptLog(f"{log.directory} ends at {log.end_offset}, but was synced up to {synced_offset}")
    if id is not None and id.offset > log.end_offset:
        # A snapshot was installed, and the end came before the log took it up.
        store.restart_at(CLUSTER_METADATA, 0, id.offset, now_ms=now_ms)
    voters = VoterHistory()
    if id is not None and snapshot is not None:
        voters.add(id.offset - 1, snapshot.voters)
    _read_voters(log, id.offset if id is not None else log.start_offset, voters)
    return QuorumState(log, _election(log, id), voters, id, snapshot)


def _election(log: Log, snapshot_id: OffsetAndEpoch | None) -> Election | None:
    """Raises DamagedElection."""
    stored = election_file.load(log.directory)
    if stored is None:
        return None
    last_epoch = MetadataLogView(log, snapshot_id).last_epoch
    election = plausible_election(stored, last_epoch)
    if election is not stored:
        logger.error(
            "the quorum epoch on disk is none that elections could have reached; going on from the log's own",
            extra={"stored_epoch": stored.epoch, "log_epoch": last_epoch, "epoch": election.epoch},
        )
    return election


def _newest_snapshot(log: Log) -> tuple[OffsetAndEpoch | None, Snapshot | None]:
    """A damaged one is passed over where the log still has all that came after the one before it."""
    ids = snapshots.stored(log.directory)
    while ids:
        id = ids.pop()
        try:
            return id, snapshots.load(log.directory, id)
        except snapshots.DamagedSnapshot as error:
            covered_from = ids[-1].offset if ids else 0
            if not log.start_offset <= covered_from <= id.offset <= log.end_offset:
                raise
            logger.error("metadata snapshot passed over", extra={"reason": str(error)})
    return None, None


def _read_voters(log: Log, offset: int, voters: VoterHistory) -> None:
    """Reads all that will be replayed, so its checksums are checked here once and for all. Raises CorruptLog."""
    while offset < log.end_offset:
        try:
            piece = log.read(offset, _READ_BYTES, log.end)
            check_served(piece.data)
        except ApiError as error:
            bad = first_damaged_offset(log, offset)
            raise CorruptLog(f"{log.directory} is damaged at offset {bad}: {error.message}") from None
        for at, voter_set in voters_in(piece.data):
            if at >= offset:
                voters.add(at, voter_set)
        offset = piece.next_offset


def first_damaged_offset(log: Log, offset: int) -> int:
    """The first offset from `offset` on whose batch is not what was written; the end where there is none."""
    while offset < log.end_offset:
        try:
            piece = log.read(offset, 1, log.end)
            check_served(piece.data)
        except ApiError:
            break
        offset = piece.next_offset
    return offset


def whole_voters(store: LogStore) -> VoterSet:
    """Who votes, by what of a damaged metadata log can still be read; nobody where nothing can."""
    log, voters = store.logs.get((CLUSTER_METADATA, 0)), VoterHistory()
    if log is None:
        return voters.latest
    for id in snapshots.stored(log.directory):
        with suppress(snapshots.DamagedSnapshot, OSError):
            voters.add(id.offset - 1, snapshots.load(log.directory, id).voters)
    offset = log.start_offset
    while offset < log.end_offset:
        try:
            piece = log.read(offset, 1, log.end)
            check_served(piece.data)
        except ApiError:
            offset += 1  # the next batch begins further on
            continue
        for at, voter_set in voters_in(piece.data):
            if at > voters.latest_offset:
                voters.add(at, voter_set)
        offset = piece.next_offset
    return voters.latest
