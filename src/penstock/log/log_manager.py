"""One data folder: who owns it, whose it is, and the partitions in it, in Kafka's layout."""

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

from penstock.log import boot, identity
from penstock.log.checkpoints import PartitionKey, replace_durably, sync_directory
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
from penstock.log.offset_files import OffsetFiles
from penstock.log.recovery import Crash
from penstock.log.space import RESERVE_BYTES, DiskSpace
from penstock.log.synced_offsets import SyncedOffsets

LOCK: Final = ".lock"
CLEAN_SHUTDOWN: Final = ".kafka_cleanshutdown"

#: As Kafka writes it, for a node without a broker epoch.
_CLEAN_MARKER: Final = b'{"version":0,"brokerEpoch":-1}'

_logger = logging.getLogger("penstock.log")


class StoreLocked(Exception):
    """Another process has this data folder open."""


class Wanted(NamedTuple):
    """A partition that should be served."""

    topic_id: UUID
    config: LogConfig


class OpenReport(NamedTuple):
    """The partitions that serve, and why the others do not."""

    opened: dict[PartitionKey, Log]
    failed: dict[PartitionKey, Exception]
    #: Opened, but they end before what was synced of them once: files have gone.
    short: frozenset[PartitionKey] = frozenset()


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
        assert files.space is not None
        self.directory = directory
        self.files = files
        self.space = files.space
        self.logs: dict[PartitionKey, Log] = {}
        self.failed: dict[PartitionKey, Exception] = {}
        self.clean = (directory / CLEAN_SHUTDOWN).exists()
        #: The directory by which the quorum knows this node as a voter.
        self.voter_id = identity.read_voter_id(directory) or owner.directory_id
        self._owner = owner
        self._lock_fd = lock_fd
        self._threads = threads
        self._producer_expiry_ms = producer_expiry_ms
        self._offsets = OffsetFiles(directory)
        self._synced = SyncedOffsets(directory)
        self._same_boot = boot.is_same_boot(directory, boot.current_boot_id())
        # Checkpoints, creation and deletion may come from different threads.
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
        """Raises StoreLocked, WrongOwner, or OSError. Not `founding`: a new folder has no cluster id yet."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        lock_fd = lock_folder(directory)
        try:
            owner = identity.claim(directory, node_id=node_id, cluster_id=cluster_id, founding=founding)
            space = DiskSpace(directory, reserve_bytes)
            files = FilePool(descriptors_max=descriptors_max, tails_max=tails_max, space=space)
            store = cls(
                directory, lock_fd, owner, files, threads=threads, producer_expiry_ms=producer_expiry_ms
            )
            store._begin()
        except BaseException:
            os.close(lock_fd)
            raise
        return store

    def configure(self, *, threads: int, producer_expiry_ms: int) -> None:
        """For what is opened, closed or forgotten from now on."""
        with self._lock:
            self._threads, self._producer_expiry_ms = threads, producer_expiry_ms
            for log in self.logs.values():
                log.producers.expiry_ms = producer_expiry_ms

    def __repr__(self) -> str:
        return f"<LogStore {self.directory} {len(self.logs)} logs>"

    @property
    def cluster_id(self) -> str:
        """Empty until `join_cluster`, where a node looks for its cluster first."""
        return self._owner.cluster_id

    def join_cluster(self, cluster_id: str | None = None) -> None:
        """Durable when it returns: this is the folder's cluster; None makes a new id. Raises WrongOwner."""
        if not self._owner.cluster_id:
            self._owner = identity.join(self.directory, self._owner, cluster_id)
        elif cluster_id is not None and cluster_id != self._owner.cluster_id:
            raise identity.WrongOwner(
                f"{self.directory} belongs to cluster {self._owner.cluster_id}, not to {cluster_id}"
            )

    @property
    def directory_id(self) -> UUID:
        return self._owner.directory_id

    def renew_voter_id(self) -> None:
        """This node has forgotten what it has voted and acknowledged, and must not vote as who it was."""
        self.voter_id = identity.renew_voter_id(self.directory)

    @property
    def high_watermarks(self) -> Mapping[PartitionKey, int]:
        return self._offsets.high_watermarks

    # Partitions

    def stored(self) -> list[PartitionKey]:
        """What the folder holds, opened or not."""
        return sorted(self._stored_folders())

    def topic_id(self, topic: str, index: int) -> UUID | None:
        return identity.read_topic_id(self._folder(topic, index))

    def open_or_create(
        self, topic: str, index: int, topic_id: UUID, config: LogConfig, *, now_ms: int
    ) -> Log:
        """Raises what keeps the partition from being opened."""
        key = (topic, index)
        report = self.open_or_create_these({key: Wanted(topic_id, config)}, now_ms=now_ms)
        if key in report.failed:
            raise report.failed[key]
        return report.opened[key]

    def synced_offset(self, topic: str, index: int, topic_id: UUID) -> int:
        """Up to where a log was synced once; it may have lost that since."""
        noted = self._synced.offset((topic_id, index))
        return max(noted, self._offsets.recovery_points.get((topic, index), 0))

    def has_held(self, topic: str, index: int, topic_id: UUID) -> bool:
        """Whether this folder once held records of the partition, as far as its notes tell."""
        noted = self._synced.offset((topic_id, index)) > 0
        # Notes by name may be of an earlier topic, so they count only where there is nothing better.
        return noted or (self._synced.is_new and (topic, index) in self._offsets.recovery_points)

    @property
    def has_unsynced_notes(self) -> bool:
        return self._synced.is_dirty

    def sync_notes(self) -> None:
        """Make durable how far each log is synced. Raises OSError."""
        self._synced.sync()

    def open_or_create_these(self, wanted: Mapping[PartitionKey, Wanted], *, now_ms: int) -> OpenReport:
        """Several at a time; one that cannot be opened stops no other. New folders survive a power cut.

        A folder left by an earlier topic of the same name is set aside. Raises OSError when a sync fails.
        """
        blocked = self._make_way(wanted)
        synced = {key: self.synced_offset(*key, item.topic_id) for key, item in wanted.items()}
        makes_folders = not wanted.keys() <= self._stored_folders()

        def open_one(item: tuple[PartitionKey, Wanted]) -> Log | Exception:
            return blocked.get(item[0]) or self._try_open(*item, now_ms)

        with ThreadPoolExecutor(max_workers=self._threads, thread_name_prefix="recovery") as pool:
            outcomes = dict(zip(wanted, pool.map(open_one, wanted.items()), strict=True))
        if makes_folders:
            sync_directory(self.directory)
            # Only now that the folders are durable: a note without a folder tells of a folder that has gone.
            self._synced.sync()
        failed = {key: outcome for key, outcome in outcomes.items() if isinstance(outcome, Exception)}
        self._report(failed)
        opened = {key: outcome for key, outcome in outcomes.items() if isinstance(outcome, Log)}
        short = frozenset(key for key, log in opened.items() if log.end_offset < synced[key])
        return OpenReport(opened=opened, failed=failed, short=short)

    def _make_way(self, wanted: Mapping[PartitionKey, Wanted]) -> dict[PartitionKey, Exception]:
        """Nothing is left that other topics of the same names left behind. Returns where that failed."""
        blocked: dict[PartitionKey, Exception] = {}
        for key in self._stored_folders() & wanted.keys():
            try:
                if self.topic_id(*key) not in (None, wanted[key].topic_id):
                    self._set_aside(*key, stray_folder(*key, uuid4().hex))
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
        """Take a partition out of the folder at once. Returns what `purge` removes."""
        return self._set_aside(topic, index, deleted_folder(topic, index, uuid4().hex))

    def keep_aside(self, topic: str, index: int) -> Path:
        """Take a damaged partition out of the folder's way; an operator may look at it."""
        return self._set_aside(topic, index, stray_folder(topic, index, uuid4().hex))

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
            _remove(folder)

    def truncate(self, topic: str, index: int, offset: int, *, now_ms: int) -> None:
        """Drop every batch that reaches `offset` or beyond, while nothing appends. Durable when it returns.

        The recovery point goes back too, or it would vouch for whatever is appended there next.
        """
        with self._lock:
            self._vouch_no_further((topic, index), offset)
            self.logs[topic, index].truncate_to(offset, now_ms)
            self.checkpoint()

    def restart_at(self, topic: str, index: int, offset: int, *, now_ms: int) -> None:
        """Drop everything; the next batch gets this offset. As for `truncate`."""
        with self._lock:
            self._vouch_no_further((topic, index), offset)
            self.logs[topic, index].truncate_fully_and_start_at(offset, now_ms)
            self.checkpoint()

    def _vouch_no_further(self, key: PartitionKey, offset: int) -> None:
        """Before the log is cut: a crash in between must not look as if synced records had gone."""
        if max(self.logs[key].recovery_point, self._offsets.recovery_points.get(key, 0)) > offset:
            self._offsets.recovery_points[key] = offset
            self.space.with_reserve(self._offsets.write)

    # Checkpoints

    def save_start(self, topic: str, index: int, offset: int) -> None:
        """To be called before files from before the start are unlinked, or they would be missed."""
        if self._offsets.start_offsets.get((topic, index), 0) < offset:
            self.checkpoint()

    def checkpoint(self, high_watermarks: Mapping[PartitionKey, int] | None = None) -> None:
        """Write down how far each log is synced and where it starts, and the high watermarks if given."""
        with self._lock:
            self._offsets.recovery_points.update({key: log.recovery_point for key, log in self.logs.items()})
            self._offsets.start_offsets.update({key: log.start_offset for key, log in self.logs.items()})
            self.space.with_reserve(partial(self._offsets.write, high_watermarks))
            self._synced.sync()

    def save_high_watermarks(self, high_watermarks: Mapping[PartitionKey, int]) -> None:
        """These alone: recovery points have an interval of their own, and what lies below one is not checked again."""
        with self._lock:
            self.space.with_reserve(partial(self._offsets.write_high_watermarks, high_watermarks))

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
                self._synced.close()
                os.close(self._lock_fd)

    def _close_cleanly(
        self, logs: dict[PartitionKey, Log], high_watermarks: Mapping[PartitionKey, int] | None
    ) -> None:
        with ThreadPoolExecutor(max_workers=self._threads, thread_name_prefix="closing") as pool:
            closing = [pool.submit(log.close) for log in logs.values()]
        for closed in closing:  # all of them are by now, whichever failed
            closed.result()
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

    def _try_open(self, key: PartitionKey, wanted: Wanted, now_ms: int) -> Log | Exception:
        try:
            log = self._open(key, wanted, now_ms)
        except Exception as error:
            return error
        with self._lock:
            self.failed.pop(key, None)
            self.logs[key] = log
        return log

    def _report(self, failed: dict[PartitionKey, Exception]) -> None:
        with self._lock:
            self.failed.update(failed)
        for (topic, index), error in failed.items():
            extra = {"topic": topic, "partition": index, "reason": f"{type(error).__name__}: {error}"}
            # What the system says of itself is told in its words; anything else is a mistake in this software.
            unforeseen = None if isinstance(error, OSError) else error
            _logger.error("partition cannot be opened", extra=extra, exc_info=unforeseen)

    def _open(self, key: PartitionKey, wanted: Wanted, now_ms: int) -> Log:
        folder = self._folder(*key)
        if not folder.exists() and self.space.refuse():
            raise OSError(ENOSPC, "the disk is full", str(folder))
        folder.mkdir(exist_ok=True)
        if self.topic_id(*key) is None:
            identity.write_topic_id(folder, wanted.topic_id)
        return Log.open(
            folder,
            wanted.config,
            files=self.files,
            clean=self.clean,
            recovery_point=self._offsets.recovery_points.get(key, 0),
            start_offset=self._offsets.start_offsets.get(key, 0),
            now_ms=now_ms,
            producer_expiry_ms=self._producer_expiry_ms,
            crash=Crash(self._synced.offset((wanted.topic_id, key[1])), self._same_boot),
            slot=self._synced.slot((wanted.topic_id, key[1])),
        )

    def _folder(self, topic: str, index: int) -> Path:
        return self.directory / partition_folder(topic, index)

    def _stored_folders(self) -> set[PartitionKey]:
        with os.scandir(self.directory) as entries:
            names = [entry.name for entry in entries if entry.is_dir() and not is_deleted_folder(entry.name)]
        return {key for key in map(parse_partition_folder, names) if key is not None}


def lock_folder(directory: Path) -> int:
    """A descriptor that holds the folder until it is closed. Raises StoreLocked, OSError."""
    fd = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise StoreLocked(f"{directory} is in use by another process") from None
    return fd


def _remove(folder: Path) -> None:
    import shutil  # it loads three compression libraries, which a start without leftovers can do without

    shutil.rmtree(folder, ignore_errors=True)
