"""A virtual disk: a folder in memory, of which a power loss keeps what was synced and a random part of the rest."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Final

from simulation.engine.loop import VirtualLoop

_SYNC_S: Final = (0.000_5, 0.004)
_SLOW_S: Final = (0.015, 0.05)
_SLOW_CHANCE: Final = 0.03


class Disk:
    def __init__(self, loop: VirtualLoop, folder: Path) -> None:
        self.loop = loop
        self.folder = folder
        self.is_full = self.is_slow = False
        #: The next sync reports an error.
        self.fails_next_sync = False
        #: Changes with every start of the machine, not of the process.
        self.boots = 0
        #: Incremented when the disk is replaced with an empty one.
        self.replacements = 0
        self._synced_bytes: dict[tuple[int, int], int] = {}  # by device and inode
        folder.mkdir(parents=True)

    def __repr__(self) -> str:
        return f"<Disk {self.folder}{' full' if self.is_full else ''}>"

    def sync_seconds(self) -> float:
        is_slow = self.is_slow or self.loop.chance(_SLOW_CHANCE)
        return self.loop.between(*(_SLOW_S if is_slow else _SYNC_S))

    def require_space(self) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def synced(self, descriptor: int) -> None:
        """A process syncs an open file. Raises OSError."""
        if self.fails_next_sync:
            self.fails_next_sync = False
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        found = os.fstat(descriptor)
        self._synced_bytes[found.st_dev, found.st_ino] = found.st_size

    def synced_bytes(self, path: Path) -> int:
        """How much of a file a power loss would keep for certain."""
        found = path.stat()
        return min(self._synced_bytes.get((found.st_dev, found.st_ino), 0), found.st_size)

    def lose_power(self) -> None:
        """Of bytes that were not synced, a random part stays; the end of that part may be torn."""
        self.boots += 1
        for path in sorted(self.folder.rglob("*")):
            if not path.is_file():
                continue
            found = path.stat()
            synced = min(self._synced_bytes.get((found.st_dev, found.st_ino), 0), found.st_size)
            if synced < found.st_size:
                kept = synced + self.loop.draw(found.st_size - synced + 1)
                if self.loop.chance(0.4):
                    kept = synced
                os.truncate(path, kept)
        self.fails_next_sync = False

    def replace(self) -> None:
        """Replace the disk with an empty one."""
        self.boots += 1
        self.replacements += 1
        shutil.rmtree(self.folder)
        self.folder.mkdir()
        self._synced_bytes.clear()
        self.is_full = self.fails_next_sync = False

    def flip_bit(self, path: Path, position: int) -> None:
        with open(path, "r+b") as file:
            file.seek(position)
            (byte,) = file.read(1)
            file.seek(position)
            file.write(bytes((byte ^ (1 << self.loop.draw(8)),)))
