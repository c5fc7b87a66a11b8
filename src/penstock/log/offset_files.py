"""What a data folder knows of its logs after a crash: how far each was synced, where it starts, its high watermark."""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from penstock.log.checkpoints import DamagedCheckpoint, PartitionKey, read_offsets, write_offsets

RECOVERY_POINTS: Final = "recovery-point-offset-checkpoint"
START_OFFSETS: Final = "log-start-offset-checkpoint"
HIGH_WATERMARKS: Final = "replication-offset-checkpoint"

_logger = logging.getLogger("penstock.log")


class OffsetFiles:
    """Kafka's three checkpoints. Who changes them holds the store's lock."""

    __slots__ = ("_directory", "_stale", "high_watermarks", "recovery_points", "start_offsets")

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.recovery_points = _read(directory / RECOVERY_POINTS)
        self.start_offsets = _read(directory / START_OFFSETS)
        self.high_watermarks = _read(directory / HIGH_WATERMARKS)
        self._stale: set[PartitionKey] = set()  # forgotten here, but not yet in the files

    def write(self, high_watermarks: Mapping[PartitionKey, int] | None = None) -> None:
        """Durable when it returns. Raises OSError."""
        write_offsets(self._directory / RECOVERY_POINTS, self.recovery_points)
        write_offsets(self._directory / START_OFFSETS, self.start_offsets)
        if high_watermarks is not None or self._stale:
            self.write_high_watermarks(high_watermarks or {})
        self._stale.clear()

    def write_high_watermarks(self, high_watermarks: Mapping[PartitionKey, int]) -> None:
        """Durable when it returns. Raises OSError."""
        self.high_watermarks.update(high_watermarks)
        write_offsets(self._directory / HIGH_WATERMARKS, self.high_watermarks)

    def forget(self, partition: PartitionKey) -> None:
        """The log has gone; the files follow when they are next written."""
        for offsets in (self.recovery_points, self.start_offsets, self.high_watermarks):
            if offsets.pop(partition, None) is not None:
                self._stale.add(partition)

    def forget_durably(self, partitions: Iterable[PartitionKey]) -> None:
        """Before logs of these names are made: one must never be opened by what is known of another."""
        names = list(partitions)
        for partition in names:
            self.forget(partition)
        if not self._stale.isdisjoint(names):
            self.write()


def _read(path: Path) -> dict[PartitionKey, int]:
    """A damaged checkpoint costs time, not data: everything is then checked from the start."""
    try:
        return read_offsets(path)
    except DamagedCheckpoint as error:
        _logger.warning("checkpoint dropped", extra={"file": str(path), "reason": str(error)})
        return {}
