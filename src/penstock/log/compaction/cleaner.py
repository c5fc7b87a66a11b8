"""Which log needs compaction most, and its cleaning: plain blocking calls that the node makes in a thread.

`cleaner-offset-checkpoint` keeps, in Kafka's format, the first offset of each log that is still dirty. A log
whose cleaning fails is left alone, with the reason, until its settings change or the node restarts.
"""

import errno
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from penstock.log.checkpoints import DamagedCheckpoint, PartitionKey, read_offsets, write_offsets
from penstock.log.compaction import CompactionStats
from penstock.log.config import LogConfig
from penstock.log.log import Log
from penstock.log.lookup import first_timestamp, retention_timestamp
from penstock.log.rewrite import CleaningCancelled, Compaction, DirtyRange
from penstock.log.segment import Segment

_logger = logging.getLogger("penstock.log")

CLEANER_CHECKPOINT: Final = "cleaner-offset-checkpoint"
#: The disk is full: nothing is wrong with the log, and space may return.
_NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


class Cleanable(NamedTuple):
    """A log that may be looked at, as the event loop saw it."""

    log: Log
    stable_offset: int  # of the last stable offset and the high watermark, the lower one
    high_watermark: int
    taken_offset: int = 0  # records held back before this have been taken over


class Dirt(NamedTuple):
    """How much of a log there is to clean."""

    dirty: DirtyRange
    clean_bytes: int
    dirty_bytes: int
    overdue: bool  # something has waited for longer than max.compaction.lag.ms

    @property
    def ratio(self) -> float:
        total = self.clean_bytes + self.dirty_bytes
        return self.dirty_bytes / total if total else 0.0

    def is_due(self, config: LogConfig) -> bool:
        return self.dirty_bytes > 0 and (self.overdue or self.ratio > config.min_cleanable_dirty_ratio)


class Uncleanable(NamedTuple):
    reason: str
    config: LogConfig  # with which it failed; another one is worth another try


@dataclass(frozen=True, slots=True, kw_only=True)
class CleaningReport:
    partition: PartitionKey
    first_dirty_offset: int
    next_dirty_offset: int  # the same as the first when the pass did not end well
    stats: CompactionStats
    unlink: tuple[Path, ...]  # replaced files, to be removed after the log's file_delete_delay_ms
    error: str | None


class Cleaner:
    """Safe to call from several threads, each of which cleans a log of its own.

    `busy` are the logs whose segments nobody else may remove meanwhile.
    """

    def __init__(self, data_directory: Path, *, dedupe_buffer_bytes: int) -> None:
        """`dedupe_buffer_bytes` is for each pass; what is set later counts for passes that begin later."""
        self._path = data_directory / CLEANER_CHECKPOINT
        self.dedupe_buffer_bytes = dedupe_buffer_bytes
        self._first_dirty = _load(self._path)
        self._seen: dict[PartitionKey, Log] = {}
        self._lock = threading.Lock()
        self.uncleanable: dict[PartitionKey, Uncleanable] = {}
        self.busy: set[PartitionKey] = set()

    def first_dirty_offset(self, partition: PartitionKey) -> int | None:
        return self._first_dirty.get(partition)

    def clean_filthiest(
        self,
        logs: Mapping[PartitionKey, Cleanable],
        *,
        now_ms: int,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> CleaningReport | None:
        """Clean the log that needs it most; None when none does. `logs` are all there are to clean."""
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

    def truncated(self, partition: PartitionKey, offset: int) -> None:
        """The log was cut: what is appended from here on is dirty."""
        with self._lock:
            if self._first_dirty.get(partition, 0) > offset:
                self._first_dirty[partition] = offset
                write_offsets(self._path, self._first_dirty)

    def _filthiest(
        self, logs: Mapping[PartitionKey, Cleanable], now_ms: int
    ) -> tuple[PartitionKey, Dirt] | None:
        due: list[tuple[PartitionKey, Dirt]] = []
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
                # What retention took away meanwhile, or went with its partition, need not be read.
                if segments == list(log.segments) and not log.is_closed:
                    self._give_up(partition, log.config, error)
                continue
            if dirt.is_due(log.config):
                due.append((partition, dirt))
        return max(due, key=lambda item: item[1].ratio, default=None)

    def _clean(
        self,
        partition: PartitionKey,
        cleanable: Cleanable,
        dirty: DirtyRange,
        now_ms: int,
        is_cancelled: Callable[[], bool],
    ) -> CleaningReport:
        config, next_dirty, error = cleanable.log.config, dirty.first_offset, None
        compaction = Compaction(
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
        except CleaningCancelled as cancelled:
            error = str(cancelled)
        except Exception as failure:
            error = _reason(failure)
            if not (isinstance(failure, OSError) and failure.errno in _NO_SPACE):
                self._give_up(partition, config, failure)
        report = CleaningReport(
            partition=partition,
            first_dirty_offset=dirty.first_offset,
            next_dirty_offset=next_dirty,
            stats=compaction.stats,
            unlink=tuple(compaction.unlink),
            error=error,
        )
        _logger.info("log compacted", extra={"report": report})
        return report

    def _advance(self, partition: PartitionKey, offset: int) -> None:
        with self._lock:
            self._first_dirty[partition] = offset
            write_offsets(self._path, self._first_dirty)

    def _is_uncleanable(self, partition: PartitionKey, config: LogConfig) -> bool:
        failed = self.uncleanable.get(partition)
        if failed is not None and failed.config != config:
            failed = self.uncleanable.pop(partition) and None
        return failed is not None

    def _give_up(self, partition: PartitionKey, config: LogConfig, failure: Exception) -> None:
        self.uncleanable[partition] = Uncleanable(_reason(failure), config)
        _logger.error("log cannot be compacted", extra={"partition": partition}, exc_info=failure)

    def _forget_missing(self, logs: Mapping[PartitionKey, Cleanable]) -> None:
        """A topic of the same name that is made anew must not inherit anything."""
        for known in (self._first_dirty, self.uncleanable):
            for partition in [partition for partition in known if self._is_another(partition, logs)]:
                del known[partition]
        self._seen = {partition: cleanable.log for partition, cleanable in logs.items()}

    def _is_another(self, partition: PartitionKey, logs: Mapping[PartitionKey, Cleanable]) -> bool:
        if partition not in logs:
            return True
        return self._seen.get(partition) not in (None, logs[partition].log)


def measure(cleanable: Cleanable, checkpoint: int | None, now_ms: int) -> Dirt:
    """May read a few bytes of each dirty segment's index. Raises OSError."""
    log, stable_offset, high_watermark, _ = cleanable
    segments = list(log.segments)
    first_offset = log.start_offset if checkpoint is None else checkpoint
    if not log.start_offset <= first_offset <= log.end_offset:
        # Retention moved the start, or the end was lost: take nothing for clean.
        first_offset = log.start_offset
    dirty = [segment for segment in segments[:-1] if _next_base(segment) > first_offset]
    unstable = [segment.base_offset for segment in segments[:-1] if _next_base(segment) > stable_offset]
    upper_offset = min([segments[-1].base_offset, *unstable, *_too_young(dirty, log, now_ms)])
    dirty = [segment for segment in dirty if segment.base_offset < upper_offset]
    reachable = [segment for segment in segments if segment.base_offset < upper_offset]
    dirty_bytes = sum(segment.size for segment in dirty)
    return Dirt(
        dirty=DirtyRange(first_offset, upper_offset, stable_offset, high_watermark),
        clean_bytes=sum(segment.size for segment in reachable) - dirty_bytes,
        dirty_bytes=dirty_bytes,
        overdue=_is_overdue(dirty, log, now_ms),
    )


def _too_young(dirty: list[Segment], log: Log, now_ms: int) -> Iterator[int]:
    """The base of the first dirty segment with a record that must stay uncompacted for a while yet."""
    lag_ms = log.config.min_compaction_lag_ms
    for segment in dirty if lag_ms > 0 else ():
        if retention_timestamp(segment, log.files) > now_ms - lag_ms:
            yield segment.base_offset
            return


def _is_overdue(dirty: list[Segment], log: Log, now_ms: int) -> bool:
    deadline_ms = now_ms - log.config.max_compaction_lag_ms
    if deadline_ms <= 0:
        return False
    return any(0 < first_timestamp(segment, log.files) < deadline_ms for segment in dirty)


def _next_base(segment: Segment) -> int:
    assert segment.next_base is not None, "only the active segment has none"
    return segment.next_base


def _load(path: Path) -> dict[PartitionKey, int]:
    try:
        return read_offsets(path)
    except DamagedCheckpoint as error:
        # Everything then counts as dirty, which costs one pass and loses nothing.
        _logger.warning("cleaner checkpoint ignored", extra={"reason": str(error)})
        return {}


def _reason(failure: Exception) -> str:
    return f"{type(failure).__name__}: {failure}"
