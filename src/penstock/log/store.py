"""One data folder: who owns it, whose it is, and the partitions in it, in Kafka's layout."""

import fcntl
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self
from uuid import UUID, uuid4

from penstock.log import identity
from penstock.log.checkpoints import (
    DamagedCheckpoint,
    PartitionKey,
    read_offsets,
    replace_durably,
    sync_directory,
    write_offsets,
)
from penstock.log.config import DAY_MS, LogConfig
from penstock.log.files import DESCRIPTORS_MAX, FilePool
from penstock.log.log import Log
from penstock.log.names import (
    deleted_folder,
    is_deleted_folder,
    parse_partition_folder,
    partition_folder,
    stray_folder,
)
from penstock.log.recovery import CorruptLog
from penstock.protocol.errors import ApiError

LOCK: Final = ".lock"
CLEAN_SHUTDOWN: Final = ".kafka_cleanshutdown"
RECOVERY_POINTS: Final = "recovery-point-offset-checkpoint"
START_OFFSETS: Final = "log-start-offset-checkpoint"
HIGH_WATERMARKS: Final = "replication-offset-checkpoint"
CLEANER_OFFSETS: Final = "cleaner-offset-checkpoint"

#: As Kafka writes it, for a node without a broker epoch.
_CLEAN_MARKER: Final = b'{"version":0,"brokerEpoch":-1}'

_logger = logging.getLogger("penstock.log")


class StoreLocked(Exception):
    """Another process has this data folder open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenReport:
    """The partitions that serve, and why the others do not."""

    opened: dict[PartitionKey, Log]
    failed: dict[PartitionKey, Exception]


class LogStore:
    """Blocking throughout: call it in a thread. Safe to call from several."""

    def __init__(
        self,
        directory: Path,
        lock_fd: int,
        owner: identity.Owner,
        files: FilePool,
        *,
        threads: int,
        producer_expiry_ms: int,
    ) -> None:
        self.directory = directory
        self.files = files
        self.logs: dict[PartitionKey, Log] = {}
        self.failed: dict[PartitionKey, Exception] = {}
        self.clean = (directory / CLEAN_SHUTDOWN).exists()
        self._owner = owner
        self._lock_fd = lock_fd
        self._threads = threads
        self._producer_expiry_ms = producer_expiry_ms
        self._recovery_points = _offsets(directory / RECOVERY_POINTS)
        self._start_offsets = _offsets(directory / START_OFFSETS)
        self.high_watermarks = _offsets(directory / HIGH_WATERMARKS)
        # Checkpoints and deletion may come from different threads.
        self._lock = threading.RLock()

    @classmethod
    def open(
        cls,
        directory: Path,
        *,
        node_id: int,
        threads: int = 4,
        descriptors_max: int = DESCRIPTORS_MAX,
        producer_expiry_ms: int = DAY_MS,
        cluster_id: str | None = None,
    ) -> Self:
        """Raises StoreLocked, WrongOwner, or OSError."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        lock_fd = _lock(directory)
        try:
            owner = identity.claim(directory, node_id=node_id, cluster_id=cluster_id)
            files = FilePool(descriptors_max=descriptors_max)
            store = cls(
                directory, lock_fd, owner, files, threads=threads, producer_expiry_ms=producer_expiry_ms
            )
            store._begin()
        except BaseException:
            os.close(lock_fd)
            raise
        return store

    def __repr__(self) -> str:
        return f"<LogStore {self.directory} {len(self.logs)} logs>"

    @property
    def cluster_id(self) -> str:
        return self._owner.cluster_id

    @property
    def directory_id(self) -> UUID:
        return self._owner.directory_id

    @property
    def cleaner_checkpoint(self) -> Path:
        return self.directory / CLEANER_OFFSETS

    # Partitions

    def stored(self) -> list[PartitionKey]:
        """What the folder holds, opened or not."""
        return sorted(self._stored_folders())

    def topic_id(self, topic: str, index: int) -> UUID | None:
        return identity.read_topic_id(self._folder(topic, index))

    def open_all(self, config_for: Callable[[str, int], LogConfig], *, now_ms: int) -> OpenReport:
        """Open what is not open yet, several at a time; one that cannot be opened stops no other."""
        waiting = [key for key in self.stored() if key not in self.logs]
        return self.open_these({key: config_for(*key) for key in waiting}, now_ms=now_ms)

    def open_these(self, configs: Mapping[PartitionKey, LogConfig], *, now_ms: int) -> OpenReport:
        with ThreadPoolExecutor(max_workers=self._threads, thread_name_prefix="recovery") as pool:
            results = pool.map(lambda key: self._try_open(key, configs[key], now_ms), configs)
            outcomes = dict(zip(configs, results, strict=True))
        failed = {key: outcome for key, outcome in outcomes.items() if isinstance(outcome, Exception)}
        opened = {key: outcome for key, outcome in outcomes.items() if isinstance(outcome, Log)}
        return OpenReport(opened=opened, failed=failed)

    def open_or_create(
        self, topic: str, index: int, topic_id: UUID, config: LogConfig, *, now_ms: int
    ) -> Log:
        """A folder left by an earlier topic of this name is set aside. Raises CorruptLog or OSError."""
        if self._folder(topic, index).is_dir():
            stored_id = self.topic_id(topic, index)
            if stored_id in (None, topic_id):
                return self._open(topic, index, config, now_ms)
            self._set_aside(topic, index, stray_folder(topic, index, uuid4().hex))
        return self.create(topic, index, topic_id, config, now_ms=now_ms)

    def create(self, topic: str, index: int, topic_id: UUID, config: LogConfig, *, now_ms: int) -> Log:
        """A new, empty partition whose folder survives a power cut. Raises OSError when it exists."""
        folder = self._folder(topic, index)
        folder.mkdir()
        identity.write_topic_id(folder, topic_id)
        sync_directory(self.directory)
        with self._lock:
            self._forget_offsets(topic, index)
        return self._open(topic, index, config, now_ms)

    def create_these(
        self, partitions: Mapping[PartitionKey, tuple[UUID, LogConfig]], *, now_ms: int
    ) -> dict[PartitionKey, Log]:
        """New, empty partitions whose folders survive a power cut. Raises OSError."""
        for (topic, index), (topic_id, _) in partitions.items():
            folder = self._folder(topic, index)
            folder.mkdir()
            identity.write_topic_id(folder, topic_id)
        sync_directory(self.directory)
        with self._lock:
            for topic, index in partitions:
                self._forget_offsets(topic, index)
        return {key: self._open(*key, config, now_ms) for key, (_, config) in partitions.items()}

    def delete(self, topic: str, index: int) -> Path:
        """Take a partition out of the folder at once. Returns what `purge` removes."""
        return self._set_aside(topic, index, deleted_folder(topic, index, uuid4().hex))

    def _set_aside(self, topic: str, index: int, name: str) -> Path:
        _logger.info("partition set aside", extra={"topic": topic, "partition": index, "folder": name})
        target = self.directory / name
        with self._lock:
            log = self.logs.pop((topic, index), None)
            self.failed.pop((topic, index), None)
            if log is not None:
                log.abandon()
            os.rename(self._folder(topic, index), target)
            if log is not None:
                log.moved_to(target)
            self._forget_offsets(topic, index)
            sync_directory(self.directory)
        return target

    def purge(self, folders: Iterable[Path]) -> None:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)

    # Checkpoints

    def checkpoint(self, high_watermarks: Mapping[PartitionKey, int] | None = None) -> None:
        """Write down how far each log is synced and where it starts, and the high watermarks if given."""
        with self._lock:
            self._recovery_points.update({key: log.recovery_point for key, log in self.logs.items()})
            self._start_offsets.update({key: log.start_offset for key, log in self.logs.items()})
            write_offsets(self.directory / RECOVERY_POINTS, self._recovery_points)
            write_offsets(self.directory / START_OFFSETS, self._start_offsets)
            if high_watermarks is not None:
                self.high_watermarks.update(high_watermarks)
                write_offsets(self.directory / HIGH_WATERMARKS, self.high_watermarks)

    def close(self, *, clean: bool = True, high_watermarks: Mapping[PartitionKey, int] | None = None) -> None:
        """`clean=False` leaves everything as a crash would. Raises OSError when a sync fails."""
        with self._lock:
            logs, self.logs = self.logs, {}
            try:
                if clean:
                    self._close_cleanly(logs, high_watermarks)
                else:
                    for log in logs.values():
                        log.abandon()
            finally:
                self.files.close()
                os.close(self._lock_fd)

    def _close_cleanly(
        self, logs: dict[PartitionKey, Log], high_watermarks: Mapping[PartitionKey, int] | None
    ) -> None:
        with ThreadPoolExecutor(max_workers=self._threads, thread_name_prefix="closing") as pool:
            list(pool.map(Log.close, logs.values()))
        self.logs = logs
        self.checkpoint(high_watermarks)
        self.logs = {}
        # A partition that could not be opened has not ended cleanly, and the marker speaks for all of them.
        if not self.failed:
            replace_durably(self.directory / CLEAN_SHUTDOWN, _CLEAN_MARKER)

    def _begin(self) -> None:
        """From here on only a clean close makes the folder clean again."""
        (self.directory / CLEAN_SHUTDOWN).unlink(missing_ok=True)
        self.purge(path for path in self.directory.iterdir() if is_deleted_folder(path.name))
        sync_directory(self.directory)

    def _try_open(self, key: PartitionKey, config: LogConfig, now_ms: int) -> Log | Exception:
        try:
            return self._open(*key, config, now_ms)
        except (OSError, CorruptLog, ApiError) as error:
            _logger.error(
                "partition cannot be opened",
                extra={"topic": key[0], "partition": key[1], "reason": str(error)},
            )
            self.failed[key] = error
            return error

    def _open(self, topic: str, index: int, config: LogConfig, now_ms: int) -> Log:
        key = (topic, index)
        log = Log.open(
            self._folder(topic, index),
            config,
            files=self.files,
            clean=self.clean,
            recovery_point=self._recovery_points.get(key, 0),
            start_offset=self._start_offsets.get(key, 0),
            now_ms=now_ms,
            producer_expiry_ms=self._producer_expiry_ms,
        )
        self.failed.pop(key, None)
        self.logs[key] = log
        return log

    def _forget_offsets(self, topic: str, index: int) -> None:
        for offsets in (self._recovery_points, self._start_offsets, self.high_watermarks):
            offsets.pop((topic, index), None)

    def _folder(self, topic: str, index: int) -> Path:
        return self.directory / partition_folder(topic, index)

    def _stored_folders(self) -> set[PartitionKey]:
        with os.scandir(self.directory) as entries:
            names = [entry.name for entry in entries if entry.is_dir() and not is_deleted_folder(entry.name)]
        return {key for key in map(parse_partition_folder, names) if key is not None}


def _lock(directory: Path) -> int:
    fd = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise StoreLocked(f"{directory} is in use by another process") from None
    return fd


def _offsets(path: Path) -> dict[PartitionKey, int]:
    """A damaged checkpoint costs time, not data: everything is then checked from the start."""
    try:
        return read_offsets(path)
    except DamagedCheckpoint as error:
        _logger.warning("checkpoint dropped", extra={"file": str(path), "reason": str(error)})
        return {}
