"""What the rules may ask of the log. All of it is in memory: asking costs no I/O."""

from typing import Protocol

from penstock.raft.values import OffsetAndEpoch


class LogView(Protocol):
    @property
    def start_offset(self) -> int: ...

    @property
    def end_offset(self) -> int: ...

    @property
    def durable_offset(self) -> int:
        """Everything below survives a power loss."""

    @property
    def last_epoch(self) -> int:
        """The epoch of the last record; of the snapshot when there is none after it; -1 when there is nothing."""

    @property
    def snapshot(self) -> OffsetAndEpoch | None:
        """The newest snapshot; the log may start at or before its end."""

    def end_offset_for(self, epoch: int) -> tuple[int, int]:
        """The largest epoch known up to the asked one, and where it ended; (-1, -1) when that is unknown."""
