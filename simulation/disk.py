"""One machine's disk: logs with synced and unsynced parts, small files replaced durably, and its ways to fail."""

from collections.abc import Callable
from typing import Any, Final
from uuid import UUID

from simulation.simlog import SimLog
from simulation.world import Life, World

_SYNC_MS: Final = (1, 4)
_SLOW_SYNC_MS: Final = (15, 50)
_SLOW_CHANCE: Final = 0.03


class DiskFull(Exception):
    """ENOSPC."""


class Disk:
    def __init__(self, world: World, directory: UUID) -> None:
        self.world = world
        self.directory = directory
        self.logs: dict[Any, SimLog] = {}
        #: Small files, written to a temporary name, synced and renamed: whole, old or new.
        self.files: dict[str, Any] = {}
        self.is_full = False
        self.is_slow = False
        #: The next fsync reports an error, and what it should have kept is gone with the power.
        self.fails_next_sync = False
        #: Changes with every start of the machine, not of the process.
        self.boot = 0
        self._syncing: dict[Any, list[Callable[[], None]]] = {}
        self._again: dict[Any, list[Callable[[], None]]] = {}

    def __repr__(self) -> str:
        return f"<Disk {self.directory.int:x}, {len(self.logs)} logs{', full' if self.is_full else ''}>"

    def require_room(self) -> None:
        if self.is_full:
            raise DiskFull

    def save(self, life: Life, name: str, content: Any, then: Callable[[], None]) -> None:
        """`then` is called when the file would survive a power loss."""

        def written() -> None:
            self.files[name] = content
            then()

        self.world.after(self._sync_ms(), life, written)

    def sync(self, life: Life, log: SimLog, then: Callable[[], None], failed: Callable[[], None]) -> None:
        """One fsync per log is under way; whoever asks meanwhile shares the next."""
        if log.name in self._syncing:
            self._again.setdefault(log.name, []).append(then)
            return
        self._syncing[log.name] = [then]
        self._begin_sync(life, log, failed)

    def _begin_sync(self, life: Life, log: SimLog, failed: Callable[[], None]) -> None:
        log.sync_begins()
        self.world.after(self._sync_ms(), life, self._synced, life, log, failed)

    def _synced(self, life: Life, log: SimLog, failed: Callable[[], None]) -> None:
        if self.fails_next_sync:
            self.fails_next_sync = False
            if not self.retries(log):
                failed()
                return
        log.sync_ends()
        waiters = self._syncing.pop(log.name)
        again = self._again.pop(log.name, None)
        if again is not None:
            self._syncing[log.name] = again
            self._begin_sync(life, log, failed)
        for then in waiters:
            then()

    def retries(self, log: SimLog) -> bool:
        """An fsync error ends the process: the kernel may have dropped the pages, and a retry would succeed."""
        return False

    def _sync_ms(self) -> int:
        world = self.world
        is_slow = self.is_slow or world.chance(_SLOW_CHANCE)
        return world.between(*(_SLOW_SYNC_MS if is_slow else _SYNC_MS))

    # --- faults ---

    def process_died(self) -> None:
        self._syncing.clear()
        self._again.clear()
        for log in self.logs.values():
            log.process_died()

    def power_lost(self) -> None:
        self.process_died()
        self.boot += 1
        for log in self.logs.values():
            log.power_lost(self.world.draw)

    def lost(self, directory: UUID) -> None:
        """The disk is replaced by an empty one."""
        self.process_died()
        self.boot += 1
        self.directory = directory
        self.logs = {}
        self.files = {}
        self.is_full = self.fails_next_sync = False
