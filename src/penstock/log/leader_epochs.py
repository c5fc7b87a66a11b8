"""Which leader epoch starts at which offset: the `leader-epoch-checkpoint` file, and lookups in it."""

import logging
from bisect import bisect_left, bisect_right
from pathlib import Path
from typing import Final

from penstock.log.checkpoints import CorruptCheckpoint, read_checkpoint, write_checkpoint

UNDEFINED_EPOCH_END: Final = (-1, -1)

_logger = logging.getLogger("penstock.log")


class LeaderEpochCache:
    """Epochs and their start offsets, both ascending. `dirty`: the file is not up to date."""

    __slots__ = ("dirty", "epochs", "latest", "starts")

    def __init__(self) -> None:
        self.epochs: list[int] = []
        self.starts: list[int] = []
        self.latest = -1
        self.dirty = False

    def __repr__(self) -> str:
        return f"<EpochCache {self.entries()}>"

    def entries(self) -> list[tuple[int, int]]:
        return list(zip(self.epochs, self.starts, strict=True))

    def assign(self, epoch: int, start_offset: int) -> None:
        """Starts an epoch. Removes the entries that it contradicts, which an epoch without data left behind."""
        assert min(epoch, start_offset) >= 0, (epoch, start_offset)
        if epoch == self.latest and start_offset >= self.starts[-1]:
            return
        while self.epochs and (self.epochs[-1] >= epoch or self.starts[-1] >= start_offset):
            self.epochs.pop()
            self.starts.pop()
        self.epochs.append(epoch)
        self.starts.append(start_offset)
        self._changed()

    def end_offset_for(self, epoch: int, log_end_offset: int) -> tuple[int, int]:
        """Returns the largest known epoch up to the requested one, and its end offset; (-1, -1) if unknown."""
        if epoch < 0 or epoch > self.latest:
            return UNDEFINED_EPOCH_END
        if epoch == self.latest:
            return epoch, log_end_offset
        following = bisect_right(self.epochs, epoch)
        return (self.epochs[following - 1] if following else epoch), self.starts[following]

    def epoch_at(self, offset: int) -> int:
        """Returns the epoch in which an offset was written, -1 if unknown."""
        slot = bisect_right(self.starts, offset) - 1
        return self.epochs[slot] if slot >= 0 else -1

    def truncate_end(self, end_offset: int) -> None:
        """Removes epochs that start at or beyond the end of the log."""
        keep = bisect_left(self.starts, end_offset)
        if keep < len(self.starts):
            del self.epochs[keep:], self.starts[keep:]
            self._changed()

    def truncate_start(self, start_offset: int) -> None:
        """Removes epochs that ended before the start of the log; the epoch at the start then begins there."""
        passed = bisect_right(self.starts, start_offset) - 1
        if passed >= 0 and (passed > 0 or self.starts[0] < start_offset):
            del self.epochs[:passed], self.starts[:passed]
            self.starts[0] = start_offset
            self._changed()

    def clear(self) -> None:
        if self.epochs:
            self.epochs.clear()
            self.starts.clear()
            self._changed()

    def _changed(self) -> None:
        self.latest = self.epochs[-1] if self.epochs else -1
        self.dirty = True


def load(path: Path) -> LeaderEpochCache | None:
    """Returns None if the file is missing or corrupt: it can be rebuilt, because every batch has its epoch."""
    if not path.exists():
        return None
    cache = LeaderEpochCache()
    try:
        for row in read_checkpoint(path):
            epoch, start = (int(number) for number in row.split(" "))
            if epoch <= cache.latest or start < 0:
                raise CorruptCheckpoint(f"{path} has a row out of order: {row!r}")
            cache.assign(epoch, start)
    except ValueError as error:
        _logger.warning("epoch checkpoint dropped", extra={"file": str(path), "reason": str(error)})
        return None
    cache.dirty = False
    return cache


def write(path: Path, entries: list[tuple[int, int]]) -> None:
    write_checkpoint(path, (f"{epoch} {start}" for epoch, start in entries))
