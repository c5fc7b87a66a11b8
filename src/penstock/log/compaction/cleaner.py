"""`LogCleaner`: chooses the log with the highest dirty ratio and compacts it.

Its calls block; the node runs them in a thread.

`cleaner-offset-checkpoint` holds, in Kafka's format, the first dirty offset of each log. A log that cannot be
compacted is skipped, with the reason recorded, until its settings change or the node restarts.
"""

import errno
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from penstock.log.checkpoints import (
    CorruptCheckpoint,
    TopicPartition,
    read_offset_checkpoint,
    write_offset_checkpoint,
)
from penstock.log.compaction.batch_filter import CleanerStats
from penstock.log.compaction.cleaning_pass import CleaningAborted, CleaningPass, DirtyRange
from penstock.log.config import LogConfig
from penstock.log.index_files import first_timestamp, retention_timestamp
from penstock.log.log import Log
from penstock.log.reader import DamagedRead
from penstock.log.segment import LogSegment

_logger = logging.getLogger("penstock.log")

CLEANER_OFFSET_CHECKPOINT: Final = "cleaner-offset-checkpoint"
#: The disk is full: the log is not at fault, and space may return.
_NO_SPACE_ERRNOS: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


class CleanableLog(NamedTuple):
    """A log and its offsets, as read on the event loop."""

    log: Log
    stable_offset: int  # the lower one of the last stable offset and the high watermark
    high_watermark: int
    taken_offset: int = 0  # held records before this offset have been taken over


class LogToClean(NamedTuple):
    """How much of a log is dirty."""

    dirty: DirtyRange
    clean_bytes: int
    dirty_bytes: int
    overdue: bool  # a record has waited for longer than max.compaction.lag.ms

    @property
    def ratio(self) -> float:
        total = self.clean_bytes + self.dirty_bytes
        return self.dirty_bytes / total if total else 0.0

    def is_due(self, config: LogConfig) -> bool:
        return self.dirty_bytes > 0 and (self.overdue or self.ratio > config.min_cleanable_dirty_ratio)


class UncleanablePartition(NamedTuple):
    reason: str
    config: LogConfig  # the config that it failed with; another config is worth a retry


@dataclass(frozen=True, slots=True, kw_only=True)
class CleaningReport:
    partition: TopicPartition
    first_dirty_offset: int
    next_dirty_offset: int  # the same as the first if the pass failed
    stats: CleanerStats
    unlink: tuple[Path, ...]  # replaced files, to be removed after the log's file_delete_delay_ms
    error: str | None
    damage: DamagedRead | None = None  # what the pass failed for, if that is what it was


class LogCleaner:
    """Thread-safe; each thread cleans a different log.

    `busy` holds the logs whose segments no other thread may remove meanwhile.
    """

    def __init__(self, data_directory: Path, *, dedupe_buffer_bytes: int) -> None:
        """`dedupe_buffer_bytes` applies to each pass; a changed value applies to passes that start later."""
        self._path = data_directory / CLEANER_OFFSET_CHECKPOINT
        self.dedupe_buffer_bytes = dedupe_buffer_bytes
        self._first_dirty = _load_checkpoint(self._path)
        self._seen: dict[TopicPartition, Log] = {}
        self._lock = threading.Lock()
        self.uncleanable: dict[TopicPartition, UncleanablePartition] = {}
        self.busy: set[TopicPartition] = set()

    def first_dirty_offset(self, partition: TopicPartition) -> int | None:
        return self._first_dirty.get(partition)

    def clean_filthiest_log(
        self,
        logs: Mapping[TopicPartition, CleanableLog],
        *,
        now_ms: int,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> CleaningReport | None:
        """Cleans the log that needs it most; returns None if no log does. `logs` are all the cleanable logs."""
        with self._lock:
            self._forget_missing(logs)
            choice = self._filthiest(logs, now_ms)
            if choice is None:
                return None
            partition, dirt = choice
            self.busy.add(partition)
        try:
            return self._clean(partition, logs[partition], dirt.dirty, now_ms, is_cancelled)
        finally:
            self.busy.discard(partition)

    def truncated(self, partition: TopicPartition, offset: int) -> None:
        """The log was truncated: records appended from this offset on are dirty."""
        with self._lock:
            if self._first_dirty.get(partition, 0) > offset:
                self._first_dirty[partition] = offset
                write_offset_checkpoint(self._path, self._first_dirty)

    def _filthiest(
        self, logs: Mapping[TopicPartition, CleanableLog], now_ms: int
    ) -> tuple[TopicPartition, LogToClean] | None:
        due: list[tuple[TopicPartition, LogToClean]] = []
        for partition, cleanable in logs.items():
            log = cleanable.log
            if partition in self.busy or not log.config.cleanup_compact:
                continue
            if self._is_uncleanable(partition, log.config):
                continue
            segments = list(log.segments)
            try:
                dirt = measure(cleanable, self._first_dirty.get(partition), now_ms)
            except Exception as error:
                # Not a failure if retention removed segments meanwhile, or the partition was deleted.
                if segments == list(log.segments) and not log.is_closed:
                    self._give_up(partition, log.config, error)
                continue
            if dirt.is_due(log.config):
                due.append((partition, dirt))
        return max(due, key=lambda item: item[1].ratio, default=None)

    def _clean(
        self,
        partition: TopicPartition,
        cleanable: CleanableLog,
        dirty: DirtyRange,
        now_ms: int,
        is_cancelled: Callable[[], bool],
    ) -> CleaningReport:
        config, next_dirty, error = cleanable.log.config, dirty.first_offset, None
        damage: DamagedRead | None = None
        compaction = CleaningPass(
            cleanable.log,
            dirty,
            now_ms=now_ms,
            dedupe_buffer_bytes=self.dedupe_buffer_bytes,
            is_cancelled=is_cancelled,
            taken_offset=cleanable.taken_offset,
        )
        try:
            next_dirty = compaction.run()
            if not cleanable.log.is_closed:
                self._advance(partition, next_dirty)
        except CleaningAborted as cancelled:
            error = str(cancelled)
        except Exception as failure:
            error, damage = _reason(failure), failure if isinstance(failure, DamagedRead) else None
            if not (isinstance(failure, OSError) and failure.errno in _NO_SPACE_ERRNOS):
                self._give_up(partition, config, failure)
        report = CleaningReport(
            partition=partition,
            first_dirty_offset=dirty.first_offset,
            next_dirty_offset=next_dirty,
            stats=compaction.stats,
            unlink=tuple(compaction.unlink),
            error=error,
            damage=damage,
        )
        _logger.info("log compacted", extra={"report": report})
        return report

    def _advance(self, partition: TopicPartition, offset: int) -> None:
        with self._lock:
            self._first_dirty[partition] = offset
            write_offset_checkpoint(self._path, self._first_dirty)

    def _is_uncleanable(self, partition: TopicPartition, config: LogConfig) -> bool:
        failed = self.uncleanable.get(partition)
        if failed is not None and failed.config != config:
            failed = self.uncleanable.pop(partition) and None
        return failed is not None

    def _give_up(self, partition: TopicPartition, config: LogConfig, failure: Exception) -> None:
        self.uncleanable[partition] = UncleanablePartition(_reason(failure), config)
        _logger.error("log cannot be compacted", extra={"partition": partition}, exc_info=failure)

    def _forget_missing(self, logs: Mapping[TopicPartition, CleanableLog]) -> None:
        """A topic that is created again under the same name must not inherit anything."""
        for known in (self._first_dirty, self.uncleanable):
            for partition in [partition for partition in known if self._is_another(partition, logs)]:
                del known[partition]
        self._seen = {partition: cleanable.log for partition, cleanable in logs.items()}

    def _is_another(self, partition: TopicPartition, logs: Mapping[TopicPartition, CleanableLog]) -> bool:
        if partition not in logs:
            return True
        return self._seen.get(partition) not in (None, logs[partition].log)


def measure(cleanable: CleanableLog, checkpoint: int | None, now_ms: int) -> LogToClean:
    """May read a few bytes of each dirty segment's index. Raises OSError."""
    log, stable_offset, high_watermark, _ = cleanable
    segments = list(log.segments)
    first_offset = log.start_offset if checkpoint is None else checkpoint
    if not log.start_offset <= first_offset <= log.end_offset:
        # Retention moved the start, or the end was lost: treat the whole log as dirty.
        first_offset = log.start_offset
    dirty = [segment for segment in segments[:-1] if _next_base(segment) > first_offset]
    unstable = [segment.base_offset for segment in segments[:-1] if _next_base(segment) > stable_offset]
    upper_offset = min([segments[-1].base_offset, *unstable, *_too_young(dirty, log, now_ms)])
    dirty = [segment for segment in dirty if segment.base_offset < upper_offset]
    reachable = [segment for segment in segments if segment.base_offset < upper_offset]
    dirty_bytes = sum(segment.size for segment in dirty)
    return LogToClean(
        dirty=DirtyRange(first_offset, upper_offset, stable_offset, high_watermark),
        clean_bytes=sum(segment.size for segment in reachable) - dirty_bytes,
        dirty_bytes=dirty_bytes,
        overdue=_is_overdue(dirty, log, now_ms),
    )


def _too_young(dirty: list[LogSegment], log: Log, now_ms: int) -> Iterator[int]:
    """Yields the base offset of the first dirty segment with a record younger than min.compaction.lag.ms."""
    lag_ms = log.config.min_compaction_lag_ms
    for segment in dirty if lag_ms > 0 else ():
        if retention_timestamp(segment, log.files) > now_ms - lag_ms:
            yield segment.base_offset
            return


def _is_overdue(dirty: list[LogSegment], log: Log, now_ms: int) -> bool:
    deadline_ms = now_ms - log.config.max_compaction_lag_ms
    if deadline_ms <= 0:
        return False
    return any(0 < first_timestamp(segment, log.files) < deadline_ms for segment in dirty)


def _next_base(segment: LogSegment) -> int:
    assert segment.next_base is not None, "only the active segment has none"
    return segment.next_base


def _load_checkpoint(path: Path) -> dict[TopicPartition, int]:
    try:
        return read_offset_checkpoint(path)
    except CorruptCheckpoint as error:
        # Everything then counts as dirty, which costs one pass and loses nothing.
        _logger.warning("cleaner checkpoint ignored", extra={"reason": str(error)})
        return {}


def _reason(failure: Exception) -> str:
    return f"{type(failure).__name__}: {failure}"
