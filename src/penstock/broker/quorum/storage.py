"""What the quorum keeps on this node's disk: the metadata log, its newest snapshot, the voters, and the vote.

The vote is in Kafka's `quorum-state` file in the folder of the metadata log: a voter must not forget it in a crash.
"""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple
from uuid import UUID

from penstock.broker.quorum import snapshots
from penstock.broker.quorum.control_records import voters_in
from penstock.cluster.topic_names import CLUSTER_METADATA
from penstock.log.config import LogConfig
from penstock.log.data_directory import format_uuid, parse_uuid
from penstock.log.log import Log
from penstock.log.recovery import CorruptLog
from penstock.log.validation import validate_fetched_batches
from penstock.protocol.durable_files import replace_durably
from penstock.protocol.errors import ApiError
from penstock.raft.types import (
    NO_LEADER,
    ElectionState,
    OffsetAndEpoch,
    ReplicaKey,
    VoterHistory,
    VoterSet,
    plausible_election,
)

if TYPE_CHECKING:
    from penstock.broker.quorum.snapshots import Snapshot
    from penstock.log.log_manager import LogManager


ELECTION_FILE: Final = "quorum-state"
_ELECTION_VERSION: Final = 1
_NO_DIRECTORY: Final = UUID(int=0)


class DamagedElection(Exception):
    """The record of this node's vote is damaged, so the node must not vote again."""


def save_election(folder: Path, election: ElectionState) -> None:
    """Blocking; durable when it returns. Raises OSError."""
    voted = election.voted
    document = {
        "leaderId": election.leader_id,
        "leaderEpoch": election.epoch,
        "votedId": NO_LEADER if voted is None else voted.id,
        "votedDirectoryId": format_uuid((voted and voted.directory) or _NO_DIRECTORY),
        "data_version": _ELECTION_VERSION,
    }
    replace_durably(folder / ELECTION_FILE, json.dumps(document, separators=(",", ":")).encode())


def load_election(folder: Path) -> ElectionState | None:
    """None if no vote was saved yet. Raises DamagedElection."""
    path = folder / ELECTION_FILE
    try:
        document = json.loads(path.read_text())
        return _parse_election(document)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedElection(f"{path} cannot be understood: {error}") from None


def _parse_election(document: dict[str, object]) -> ElectionState:
    if document["data_version"] not in (0, _ELECTION_VERSION):
        raise ValueError(f"version {document['data_version']}")
    epoch, leader, voted = (int(str(document[name])) for name in ("leaderEpoch", "leaderId", "votedId"))
    directory = parse_uuid(str(document["votedDirectoryId"])) if "votedDirectoryId" in document else None
    if directory == _NO_DIRECTORY:
        directory = None
    return ElectionState(epoch, leader, None if voted == NO_LEADER else ReplicaKey(voted, directory))


class MetadataLogView:
    """The code that takes or installs a snapshot sets `snapshot`."""

    __slots__ = ("_log", "snapshot")

    def __init__(self, log: Log, snapshot: OffsetAndEpoch | None) -> None:
        self._log = log
        self.snapshot = snapshot

    def __repr__(self) -> str:
        return f"<MetadataLogView of {self._log}, snapshot {self.snapshot}>"

    @property
    def start_offset(self) -> int:
        return self._log.start_offset

    @property
    def end_offset(self) -> int:
        return self._log.end.offset

    @property
    def durable_offset(self) -> int:
        return self._log.synced.offset

    @property
    def last_epoch(self) -> int:
        if self._log.epochs.latest >= 0:
            return self._log.epochs.latest
        return -1 if self.snapshot is None else self.snapshot.epoch

    def end_offset_for(self, epoch: int) -> tuple[int, int]:
        """If the log starts at the end of its snapshot, the epoch of the snapshot is known too, and ends there."""
        log, snapshot = self._log, self.snapshot
        if snapshot is None or snapshot.offset != log.start_offset:
            return log.end_offset_for(epoch)
        epochs = log.epochs.epochs
        if snapshot.epoch <= epoch and (not epochs or epoch < epochs[0]):
            return snapshot.epoch, snapshot.offset
        return log.end_offset_for(epoch)


logger = logging.getLogger("penstock.quorum")

METADATA_TOPIC_ID: Final = UUID(int=1)
METADATA_CONFIG: Final = LogConfig(
    segment_bytes=64 << 20,  # small, so that snapshots free space
    retention_ms=-1,
    retention_bytes=-1,
    cleanup_delete=False,
    max_message_bytes=2**31 - 1,
    flush="ack",
    uses_reserve=True,
)
_READ_BYTES: Final = 1 << 20


class QuorumStorage(NamedTuple):
    log: Log
    election: ElectionState | None
    voters: VoterHistory
    snapshot_id: OffsetAndEpoch | None
    snapshot: Snapshot | None

    @property
    def folder(self) -> Path:
        return self.log.directory

    @property
    def is_empty(self) -> bool:
        return self.log.end_offset == 0 and self.snapshot is None


def open_storage(store: LogManager, *, now_ms: int) -> QuorumStorage:
    """Blocking. Raises CorruptLog, DamagedSnapshot, DamagedElection, OSError."""
    synced_offset = store.synced_offset(CLUSTER_METADATA, 0, METADATA_TOPIC_ID)
    if synced_offset and (CLUSTER_METADATA, 0) not in store.stored():
        raise CorruptLog(f"the folder of {CLUSTER_METADATA} is missing, and with it this node's vote")
    log = store.open_or_create(CLUSTER_METADATA, 0, METADATA_TOPIC_ID, METADATA_CONFIG, now_ms=now_ms)
    if log.damages:
        raise CorruptLog(f"{log.directory}: {log.damages[0]}")
    snapshots.remove_unfinished(log.directory)
    id, snapshot = _newest_snapshot(log)
    if max(log.end_offset, id.offset if id is not None else 0) < synced_offset:
        # A voter that lost committed records could help to elect a leader that lacks them.
        raise CorruptLog(f"{log.directory} ends at {log.end_offset}, but was synced up to {synced_offset}")
    if id is not None and id.offset > log.end_offset:
        # The node stopped after a snapshot was installed and before the log was moved to its end.
        store.truncate_fully_and_start_at(CLUSTER_METADATA, 0, id.offset, now_ms=now_ms)
    voters = VoterHistory()
    if id is not None and snapshot is not None:
        voters.add(id.offset - 1, snapshot.voters)
    _read_voters(log, id.offset if id is not None else log.start_offset, voters)
    return QuorumStorage(log, _stored_election(log, id), voters, id, snapshot)


def _stored_election(log: Log, snapshot_id: OffsetAndEpoch | None) -> ElectionState | None:
    """Raises DamagedElection."""
    stored = load_election(log.directory)
    if stored is None:
        return None
    last_epoch = MetadataLogView(log, snapshot_id).last_epoch
    election = plausible_election(stored, last_epoch)
    if election is not stored:
        logger.error(
            "elections cannot have reached the stored quorum epoch; continuing from the epoch of the log",
            extra={"stored_epoch": stored.epoch, "log_epoch": last_epoch, "epoch": election.epoch},
        )
    return election


def _newest_snapshot(log: Log) -> tuple[OffsetAndEpoch | None, Snapshot | None]:
    """Skips a damaged snapshot if the log still has all records since the snapshot before it."""
    ids = snapshots.stored(log.directory)
    while ids:
        id = ids.pop()
        try:
            return id, snapshots.load(log.directory, id)
        except snapshots.DamagedSnapshot as error:
            covered_from = ids[-1].offset if ids else 0
            if not log.start_offset <= covered_from <= id.offset <= log.end_offset:
                raise
            logger.error("damaged metadata snapshot skipped", extra={"reason": str(error)})
    return None, None


def _read_voters(log: Log, offset: int, voters: VoterHistory) -> None:
    """Reads and checks all records that will be replayed. Raises CorruptLog."""
    while offset < log.end_offset:
        try:
            piece = log.read(offset, _READ_BYTES, log.end)
            validate_fetched_batches(piece.data)
        except ApiError as error:
            bad = first_damaged_offset(log, offset)
            raise CorruptLog(f"{log.directory} is damaged at offset {bad}: {error.message}") from None
        for at, voter_set in voters_in(piece.data):
            if at >= offset:
                voters.add(at, voter_set)
        offset = piece.next_offset


def first_damaged_offset(log: Log, offset: int) -> int:
    """The offset of the first damaged batch from `offset` on; the end of the log if there is none."""
    while offset < log.end_offset:
        try:
            piece = log.read(offset, 1, log.end)
            validate_fetched_batches(piece.data)
        except ApiError:
            break
        offset = piece.next_offset
    return offset


def readable_voters(store: LogManager) -> VoterSet:
    """Return the voters according to the readable part of a damaged metadata log; empty if none of it can be read."""
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
            validate_fetched_batches(piece.data)
        except ApiError:
            offset += 1  # the next batch begins at a later offset
            continue
        for at, voter_set in voters_in(piece.data):
            if at > voters.latest_offset:
                voters.add(at, voter_set)
        offset = piece.next_offset
    return voters.latest
