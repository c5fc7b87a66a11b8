"""`LogManager`: one data directory, locked by this process, and the logs of all partitions in it, in Kafka's layout."""

import fcntl
import logging
import os
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from errno import ENOSPC
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, Self
from uuid import UUID, uuid4

from penstock.log import data_directory
from penstock.log.checkpoints import OffsetCheckpoints, SyncedOffsets, TopicPartition
from penstock.log.config import DAY_MS, LogConfig
from penstock.log.data_directory import (
    is_log_delete_dir_name,
    log_delete_dir_name,
    log_dir_name,
    log_stray_dir_name,
    parse_log_dir_name,
)
from penstock.log.disk_space import RESERVE_BYTES, DiskSpace
from penstock.log.log import Log
from penstock.log.recovery import CrashEvidence
from penstock.log.segment_files import DESCRIPTORS_MAX, FilePool
from penstock.protocol.durable_files import replace_durably, sync_directory

LOCK_FILE: Final = ".lock"
CLEAN_SHUTDOWN_FILE: Final = ".kafka_cleanshutdown"

#: As Kafka writes it, for a node without a broker epoch.
_CLEAN_SHUTDOWN_CONTENT: Final = b'{"version":0,"brokerEpoch":-1}'

_logger = logging.getLogger("penstock.log")


class DataDirectoryLocked(Exception):
    """Another process has this data folder open."""


class LogToOpen(NamedTuple):
    """A partition to open."""

    topic_id: UUID
    config: LogConfig


class OpenReport(NamedTuple):
    """The partitions that were opened, and why the others were not."""

    opened: dict[TopicPartition, Log]
    failed: dict[TopicPartition, Exception]
    #: Opened, but they end before an offset up to which they were once synced: files are missing.
    short: frozenset[TopicPartition] = frozenset()


class LogManager:
    """All methods block: call them in a thread. Thread-safe."""

    def __init__(
        self,
        directory: Path,
        lock_fd: int,
        meta_properties: data_directory.MetaProperties,
        files: FilePool,
        *,
        threads: int,
        producer_expiry_ms: int,
    ) -> None:
        assert files.space is not None
        self.directory = directory
        self.files = files
        self.space = files.space
        self.logs: dict[TopicPartition, Log] = {}
        self.failed: dict[TopicPartition, Exception] = {}
        self.clean = (directory / CLEAN_SHUTDOWN_FILE).exists()
        #: The id under which the quorum knows this node as a voter.
        self.voter_id = data_directory.read_voter_id(directory) or meta_properties.directory_id
        self._meta_properties = meta_properties
        self._lock_fd = lock_fd
        self._threads = threads
        self._producer_expiry_ms = producer_expiry_ms
        self._offsets = OffsetCheckpoints(directory)
        self._synced = SyncedOffsets(directory)
        self._same_boot = data_directory.is_same_boot(directory, data_directory.current_boot_id())
        # Checkpoints, creation and deletion may run in different threads.
        self._lock = threading.RLock()

    @classmethod
    def open(
        cls,
        directory: Path,
        *,
        node_id: int,
        threads: int = 4,
        descriptors_max: int = DESCRIPTORS_MAX,
        tails_max: int = DESCRIPTORS_MAX,
        reserve_bytes: int = RESERVE_BYTES,
        producer_expiry_ms: int = DAY_MS,
        cluster_id: str | None = None,
        founding: bool = True,
    ) -> Self:
        """Raises DataDirectoryLocked, InconsistentMetaProperties, or OSError.

        Unless the node is `founding`, a new folder has no cluster id yet.
        """
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        lock_fd = lock_data_directory(directory)
        try:
            meta_properties = data_directory.load_or_create_meta_properties(
                directory, node_id=node_id, cluster_id=cluster_id, founding=founding
            )
            space = DiskSpace(directory, reserve_bytes)
            files = FilePool(descriptors_max=descriptors_max, tails_max=tails_max, space=space)
            store = cls(
                directory,
                lock_fd,
                meta_properties,
                files,
                threads=threads,
                producer_expiry_ms=producer_expiry_ms,
            )
            store._begin()
        except BaseException:
            os.close(lock_fd)
            raise
        return store

    def configure(self, *, threads: int, producer_expiry_ms: int) -> None:
        """Applies to logs opened or closed, and producers that expire, from now on."""
        with self._lock:
            self._threads, self._producer_expiry_ms = threads, producer_expiry_ms
            for log in self.logs.values():
                log.producers.expiry_ms = producer_expiry_ms

    def __repr__(self) -> str:
        return f"<LogStore {self.directory} {len(self.logs)} logs>"

    @property
    def cluster_id(self) -> str:
        """Empty until `join_cluster` if the node has to find its cluster first."""
        return self._meta_properties.cluster_id

    def join_cluster(self, cluster_id: str | None = None) -> None:
        """Makes this the folder's cluster, durably; None creates a new id. Raises InconsistentMetaProperties."""
        if not self._meta_properties.cluster_id:
            self._meta_properties = data_directory.assign_cluster_id(
                self.directory, self._meta_properties, cluster_id
            )
        elif cluster_id is not None and cluster_id != self._meta_properties.cluster_id:
            raise data_directory.InconsistentMetaProperties(
                f"{self.directory} belongs to cluster {self._meta_properties.cluster_id}, not to {cluster_id}"
            )

    @property
    def directory_id(self) -> UUID:
        return self._meta_properties.directory_id

    def renew_voter_id(self) -> None:
        """The node has lost its votes and acknowledgements, so it must not vote under its old id."""
        self.voter_id = data_directory.renew_voter_id(self.directory)

    @property
    def high_watermarks(self) -> Mapping[TopicPartition, int]:
        return self._offsets.high_watermarks

    # Partitions

    def stored(self) -> list[TopicPartition]:
        """Returns the partitions in the folder, opened or not."""
        return sorted(self._stored_folders())

    def topic_id(self, topic: str, index: int) -> UUID | None:
        return data_directory.read_topic_id(self._folder(topic, index))

    def open_or_create(
        self, topic: str, index: int, topic_id: UUID, config: LogConfig, *, now_ms: int
    ) -> Log:
        """Raises the error that prevents the partition from being opened."""
        key = (topic, index)
        report = self.open_or_create_these({key: LogToOpen(topic_id, config)}, now_ms=now_ms)
        if key in report.failed:
            raise report.failed[key]
        return report.opened[key]

    def synced_offset(self, topic: str, index: int, topic_id: UUID) -> int:
        """Returns the offset up to which a log was once synced; it may have lost records since."""
        noted = self._synced.offset((topic_id, index))
        return max(noted, self._offsets.recovery_points.get((topic, index), 0))

    def has_held(self, topic: str, index: int, topic_id: UUID) -> bool:
        """Whether this folder once held records of the partition, according to its checkpoints."""
        noted = self._synced.offset((topic_id, index)) > 0
        # Recovery points are stored by topic name and may be of an earlier topic, so they are only the second choice.
        return noted or (self._synced.is_new and (topic, index) in self._offsets.recovery_points)

    @property
    def synced_offsets_changed(self) -> bool:
        return self._synced.is_dirty

    def sync_synced_offsets(self) -> None:
        """Makes the synced offsets of all logs durable. Raises OSError."""
        self._synced.sync()

    def open_or_create_these(self, wanted: Mapping[TopicPartition, LogToOpen], *, now_ms: int) -> OpenReport:
        """Opens several at a time; a failure does not affect the others. New folders survive a power failure.

        A folder left by an earlier topic of the same name is set aside. Raises OSError if a sync fails.
        """
        blocked = self._set_aside_other_topics(wanted)
        synced = {key: self.synced_offset(*key, item.topic_id) for key, item in wanted.items()}
        makes_folders = not wanted.keys() <= self._stored_folders()

        def open_one(item: tuple[TopicPartition, LogToOpen]) -> Log | Exception:
            return blocked.get(item[0]) or self._try_open(*item, now_ms)

        with ThreadPoolExecutor(max_workers=self._threads, thread_name_prefix="recovery") as pool:
            outcomes = dict(zip(wanted, pool.map(open_one, wanted.items()), strict=True))
        if makes_folders:
            sync_directory(self.directory)
            # Only once the folders are durable: an entry without a folder means that the folder has been lost.
            self._synced.sync()
        failed = {key: outcome for key, outcome in outcomes.items() if isinstance(outcome, Exception)}
        self._report(failed)
        opened = {key: outcome for key, outcome in outcomes.items() if isinstance(outcome, Log)}
        short = frozenset(key for key, log in opened.items() if log.end_offset < synced[key])
        return OpenReport(opened=opened, failed=failed, short=short)

    def _set_aside_other_topics(
        self, wanted: Mapping[TopicPartition, LogToOpen]
    ) -> dict[TopicPartition, Exception]:
        """Removes what other topics of the same names left behind. Returns the partitions where that failed."""
        blocked: dict[TopicPartition, Exception] = {}
        for key in self._stored_folders() & wanted.keys():
            try:
                if self.topic_id(*key) not in (None, wanted[key].topic_id):
                    self._set_aside(*key, log_stray_dir_name(*key, uuid4().hex))
            except OSError as error:
                blocked[key] = error
        new = sorted(wanted.keys() - self._stored_folders())
        try:
            with self._lock:
                self._offsets.forget_durably(new)
                self._synced.forget((wanted[key].topic_id, key[1]) for key in new)
        except OSError as error:
            blocked.update(dict.fromkeys(new, error))
        return blocked

    def delete(self, topic: str, index: int) -> Path:
        """Removes a partition from the folder at once. Returns the path to pass to `purge`."""
        return self._set_aside(topic, index, log_delete_dir_name(topic, index, uuid4().hex))

    def rename_to_stray(self, topic: str, index: int) -> Path:
        """Moves a damaged partition out of the way, for an operator to inspect."""
        return self._set_aside(topic, index, log_stray_dir_name(topic, index, uuid4().hex))

    def _set_aside(self, topic: str, index: int, name: str) -> Path:
        _logger.info("partition set aside", extra={"topic": topic, "partition": index, "folder": name})
        target = self.directory / name
        with self._lock:
            log = self.logs.pop((topic, index), None)
            self.failed.pop((topic, index), None)
            if log is not None:
                log.abandon()
            topic_id = self.topic_id(topic, index)
            os.rename(self._folder(topic, index), target)
            if log is not None:
                log.moved_to(target)
            self._offsets.forget((topic, index))
            sync_directory(self.directory)
            if topic_id is not None:
                self._synced.forget([(topic_id, index)])
        return target

    def purge(self, folders: Iterable[Path]) -> None:
        for folder in folders:
            _remove_tree(folder)

    def truncate(self, topic: str, index: int, offset: int, *, now_ms: int) -> None:
        """Removes every batch that reaches `offset` or beyond; nothing may append meanwhile. Durable when it returns.

        Lowers the recovery point too: otherwise it would cover records that are appended there later.
        """
        with self._lock:
            self._lower_recovery_point((topic, index), offset)
            self.logs[topic, index].truncate_to(offset, now_ms)
            self.checkpoint()

    def truncate_fully_and_start_at(self, topic: str, index: int, offset: int, *, now_ms: int) -> None:
        """Removes everything; the next batch gets this offset. As for `truncate`."""
        with self._lock:
            self._lower_recovery_point((topic, index), offset)
            self.logs[topic, index].truncate_fully_and_start_at(offset, now_ms)
            self.checkpoint()

    def _lower_recovery_point(self, key: TopicPartition, offset: int) -> None:
        """Call it before the log is truncated: a crash in between must not look like a loss of synced records."""
        if max(self.logs[key].recovery_point, self._offsets.recovery_points.get(key, 0)) > offset:
            self._offsets.recovery_points[key] = offset
            self.space.with_reserve(self._offsets.write)

    # Checkpoints

    def checkpoint_start_offset(self, topic: str, index: int, offset: int) -> None:
        """Call it before files below the start offset are unlinked; otherwise the next start would report them
        missing."""
        if self._offsets.start_offsets.get((topic, index), 0) < offset:
            self.checkpoint()

    def checkpoint(self, high_watermarks: Mapping[TopicPartition, int] | None = None) -> None:
        """Writes the recovery point and the start offset of each log, and the high watermarks if given."""
        with self._lock:
            self._offsets.recovery_points.update({key: log.recovery_point for key, log in self.logs.items()})
            self._offsets.start_offsets.update({key: log.start_offset for key, log in self.logs.items()})
            self.space.with_reserve(partial(self._offsets.write, high_watermarks))
            self._synced.sync()

    def save_high_watermarks(self, high_watermarks: Mapping[TopicPartition, int]) -> None:
        """Writes only these: recovery points have their own interval, and recovery skips what is below them."""
        with self._lock:
            self.space.with_reserve(partial(self._offsets.write_high_watermarks, high_watermarks))

    def close(
        self, *, clean: bool = True, high_watermarks: Mapping[TopicPartition, int] | None = None
    ) -> None:
        """`clean=False` leaves everything as a crash would. Raises OSError if a sync fails."""
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
                self._synced.close()
                os.close(self._lock_fd)

    def _close_cleanly(
        self, logs: dict[TopicPartition, Log], high_watermarks: Mapping[TopicPartition, int] | None
    ) -> None:
        with ThreadPoolExecutor(max_workers=self._threads, thread_name_prefix="closing") as pool:
            closing = [pool.submit(log.close) for log in logs.values()]
        for closed in closing:  # all of them have ended by now, even if one failed
            closed.result()
        self.logs = logs
        self.checkpoint(high_watermarks)
        self.logs = {}
        # A partition that could not be opened was not closed cleanly, and the marker covers all partitions.
        if not self.failed:
            replace_durably(self.directory / CLEAN_SHUTDOWN_FILE, _CLEAN_SHUTDOWN_CONTENT)

    def _begin(self) -> None:
        """From here on only a clean close marks the folder as clean again."""
        (self.directory / CLEAN_SHUTDOWN_FILE).unlink(missing_ok=True)
        self.purge(path for path in self.directory.iterdir() if is_log_delete_dir_name(path.name))
        sync_directory(self.directory)

    def _try_open(self, key: TopicPartition, wanted: LogToOpen, now_ms: int) -> Log | Exception:
        try:
            log = self._open(key, wanted, now_ms)
        except Exception as error:
            return error
        with self._lock:
            self.failed.pop(key, None)
            self.logs[key] = log
        return log

    def _report(self, failed: dict[TopicPartition, Exception]) -> None:
        with self._lock:
            self.failed.update(failed)
        for (topic, index), error in failed.items():
            extra = {"topic": topic, "partition": index, "reason": f"{type(error).__name__}: {error}"}
            # An OSError explains itself; anything else is a bug, and is logged with its traceback.
            unforeseen = None if isinstance(error, OSError) else error
            _logger.error("partition cannot be opened", extra=extra, exc_info=unforeseen)

    def _open(self, key: TopicPartition, wanted: LogToOpen, now_ms: int) -> Log:
        folder = self._folder(*key)
        if not folder.exists() and self.space.refuse():
            raise OSError(ENOSPC, "the disk is full", str(folder))
        folder.mkdir(exist_ok=True)
        if self.topic_id(*key) is None:
            data_directory.write_topic_id(folder, wanted.topic_id)
        return Log.open(
            folder,
            wanted.config,
            files=self.files,
            clean=self.clean,
            recovery_point=self._offsets.recovery_points.get(key, 0),
            start_offset=self._offsets.start_offsets.get(key, 0),
            now_ms=now_ms,
            producer_expiry_ms=self._producer_expiry_ms,
            crash=CrashEvidence(self._synced.offset((wanted.topic_id, key[1])), self._same_boot),
            slot=self._synced.slot((wanted.topic_id, key[1])),
        )

    def _folder(self, topic: str, index: int) -> Path:
        return self.directory / log_dir_name(topic, index)

    def _stored_folders(self) -> set[TopicPartition]:
        with os.scandir(self.directory) as entries:
            names = [
                entry.name for entry in entries if entry.is_dir() and not is_log_delete_dir_name(entry.name)
            ]
        return {key for key in map(parse_log_dir_name, names) if key is not None}


def lock_data_directory(directory: Path) -> int:
    """Returns a descriptor that locks the folder until it is closed. Raises DataDirectoryLocked, OSError."""
    fd = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise DataDirectoryLocked(f"{directory} is in use by another process") from None
    return fd


def _remove_tree(folder: Path) -> None:
    import shutil  # loads three compression libraries, which a start without leftovers does not need

    shutil.rmtree(folder, ignore_errors=True)
