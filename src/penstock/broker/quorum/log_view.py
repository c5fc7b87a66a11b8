"""The metadata log as the raft core sees it."""

from __future__ import annotations

from penstock.log.log import Log
from penstock.raft.values import OffsetAndEpoch


class MetadataLogView:
    """`snapshot` is set by whoever takes or installs one."""

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
        """The epoch of a snapshot that the log begins after is known too, and ended there."""
        log, snapshot = self._log, self.snapshot
        if snapshot is None or snapshot.offset != log.start_offset:
            return log.end_offset_for(epoch)
        epochs = log.epochs.epochs
        if snapshot.epoch <= epoch and (not epochs or epoch < epochs[0]):
            return snapshot.epoch, snapshot.offset
        return log.end_offset_for(epoch)
