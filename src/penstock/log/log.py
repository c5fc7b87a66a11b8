"""`Log`: one partition on disk. Only the event loop appends; any thread may read at the same time."""

import logging
import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from errno import ENOSPC
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Final, Self, TypeVar

from penstock.log import damage_file, index_files, producer_snapshots, reader, recovery, segment_files
from penstock.log.checkpoints import SyncedOffsetSlot
from penstock.log.config import INT32_MAX, LogConfig
from penstock.log.damage_file import Damage
from penstock.log.data_directory import DELETED_SUFFIX, PRODUCER_SNAPSHOT_SUFFIX, offset_file_name
from penstock.log.disk_space import NO_SPACE_ERRNOS
from penstock.log.flush import FlushJob, FlushState, RolledSegment
from penstock.log.indexes import AbortedTransaction, TransactionIndex
from penstock.log.producer_state import (
    NOT_STORED,
    VerificationGuard,
    batch_metadata,
    skipped_batch_metadata,
)
from penstock.log.reader import LogReader, damaged_read
from penstock.log.segment import (
    INDEX_INTERVAL_READ_BYTES,
    LogAppendInfo,
    LogOffsetMetadata,
    LogSegment,
    LogSegments,
    LogSlice,
    TimestampAndOffset,
    iter_batch_headers,
)
from penstock.log.segment_files import FilePool, SharedFile, Tail
from penstock.log.validation import validate_batch, validate_replicated_batch
from penstock.protocol.durable_files import sync_directory
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.record_batch import (
    CONTROL,
    LOG_APPEND_TIME,
    LOG_OVERHEAD_BYTES,
    TRANSACTIONAL,
    parse_end_marker,
    set_max_timestamp,
)

__all__ = ("Log", "LogAppendInfo", "LogOffsetMetadata", "LogSlice", "SegmentsChanged", "TimestampAndOffset")

#: Base offset, length and leader epoch: the fields that a broker sets, and that the checksum does not cover.
_STAMP: Final = struct.Struct(">qii")

Found = TypeVar("Found")

_logger = logging.getLogger("penstock.log")


class SegmentsChanged(Exception):
    """Retention or truncation removed segments that compaction was about to replace."""


class Log:
    """Created by `Log.open`. `end` is where the next batch goes, `synced` is how far the log is on disk."""

    def __init__(
        self,
        directory: Path,
        config: LogConfig,
        files: FilePool,
        loaded: recovery.LoadedLog,
        slot: SyncedOffsetSlot | None = None,
    ) -> None:
        segments = loaded.segments
        self.directory = directory
        self.config = config
        self.files = files
        self.start_offset = loaded.start_offset
        #: Whether segments before the start were missing when the log was opened, although nothing had deleted them.
        self.lost_first_segments = loaded.lost_first_segments
        self.producers = loaded.producers
        self.epochs = loaded.epochs
        #: Whether `aborted_in` may find anything, now or at some time since the log was opened.
        self.has_aborted = any(segment.has_aborted for segment in segments)
        self.end = LogOffsetMetadata(loaded.end_offset, segments.last.base_offset, segments.last.size)
        self._reader = LogReader(segments, files)
        self._tail = self._new_tail(segments.last)
        self._flush = FlushState(self.end, slot)
        self._set_damages(loaded.damages)
        self._use(config)
        self._replacing: tuple[LogSegment, ...] = ()
        # Held to change the list of segments: the event loop rolls segments, compaction replaces them in its thread.
        self._lock = threading.Lock()
        # Held for a whole replacement or truncation: each would remove files that the other uses.
        self._rearranging = threading.Lock()
        #: Whether the files are released: the partition was deleted, moved or replaced, or the node stops.
        self.is_closed = False

    @classmethod
    def open(
        cls,
        directory: Path,
        config: LogConfig,
        *,
        files: FilePool,
        clean: bool = False,
        recovery_point: int = 0,
        start_offset: int = 0,
        now_ms: int,
        producer_expiry_ms: int = 86_400_000,
        crash: recovery.CrashEvidence = recovery.NO_CRASH_EVIDENCE,
        slot: SyncedOffsetSlot | None = None,
    ) -> Self:
        """Blocking. Creates the folder if there is none. Raises OSError.

        `slot` is where each sync is recorded, `crash` what is known about the end of the last run.
        """
        loaded = recovery.load_log(
            directory,
            config,
            files=files,
            clean=clean,
            recovery_point=recovery_point,
            start_offset=start_offset,
            now_ms=now_ms,
            producer_expiry_ms=producer_expiry_ms,
            crash=crash,
        )
        return cls(directory, config, files, loaded, slot)

    def __repr__(self) -> str:
        return f"<Log {self.directory.name} [{self.start_offset}, {self.end.offset}) in {len(self.segments)}>"

    @property
    def end_offset(self) -> int:
        return self.end.offset

    @property
    def segments(self) -> Sequence[LogSegment]:
        return self._reader.segments.items

    @property
    def active_segment(self) -> LogSegment:
        return self._tail.segment

    @property
    def size_bytes(self) -> int:
        return self._reader.segments.size_bytes

    @property
    def synced(self) -> LogOffsetMetadata:
        return self._flush.synced

    @property
    def recovery_point(self) -> int:
        """A crash needs no recovery below this offset: data, indexes, snapshots and epochs are durable."""
        return self._flush.recovery_point

    @property
    def needs_flush(self) -> bool:
        """Whether something is not durable yet. A rolled segment needs a flush under every policy."""
        flush = self._flush
        behind = flush.synced.offset < self.end.offset
        return behind or flush.rolled_count > 0 or flush.directory_changed or self.epochs.dirty

    @property
    def rolled_unsynced(self) -> int:
        return self._flush.rolled_count

    def configure(self, config: LogConfig) -> None:
        self.config = config
        self._use(config)

    def _use(self, config: LogConfig) -> None:
        self._segment_ms_max, self._roll_bytes_max = config.segment_ms_max, config.roll_bytes_max
        self.producers.accepts_gaps = config.accepts_gaps

    # Appending

    def append(
        self,
        batch: memoryview,
        *,
        leader_epoch: int,
        now_ms: int,
        internal: bool = False,
        guard: VerificationGuard | None = None,
        control: bytearray | None = None,
    ) -> LogAppendInfo:
        """Checks, stamps and writes one batch. Raises ApiError, and then nothing has changed.

        `guard` comes from the verification of a transactional batch, if it needed one. `control` is a control batch
        with the records that were taken out of this batch, and is written right before it. If the disk fails in
        between, the control batch may be in the log alone; it is not valid then.
        """
        config = self.config
        header = validate_batch(batch, config, now_ms, internal, control is not None)
        _, length, _, _, _, attributes, delta, _, max_timestamp, producer_id, epoch, sequence, _ = header
        if producer_id >= 0:
            if internal:
                self.producers.check_epoch(producer_id, epoch)
            else:
                repeated = self.producers.check(
                    producer_id, epoch, sequence, delta, bool(attributes & TRANSACTIONAL), leader_epoch
                )
                if repeated is not None:
                    appended_ms = repeated.timestamp if config.timestamp_type == "LogAppendTime" else -1
                    return LogAppendInfo(
                        repeated.base_offset, repeated.last_offset, appended_ms, True, self.end
                    )
                if guard is not None:
                    self.producers.check_guard(producer_id, epoch, guard)
        if control is not None:
            self._write_control(control, leader_epoch, now_ms)
        append_time_ms = -1
        if config.timestamp_type == "LogAppendTime":
            append_time_ms = max_timestamp = now_ms
            set_max_timestamp(batch, attributes=attributes | LOG_APPEND_TIME, max_timestamp=now_ms)
        base_offset = self.end.offset
        _STAMP.pack_into(batch, 0, base_offset, length, leader_epoch)
        end = self._write(batch, base_offset + delta, max_timestamp, now_ms)
        if leader_epoch > self.epochs.latest:
            self.epochs.assign(leader_epoch, base_offset)
        if producer_id >= 0:
            self._learn(batch, header, base_offset, max_timestamp, now_ms)
        return LogAppendInfo(base_offset, base_offset + delta, append_time_ms, False, end)

    def skip(
        self, batch: memoryview, *, leader_epoch: int, now_ms: int, sparse: bool = False
    ) -> LogAppendInfo:
        """Checks a batch as `append` does and remembers its sequence, but does not write it. Raises ApiError.

        A retry is recognised and gets the same answer, without an offset. For batches that are not transactional;
        `sparse` as records may have been taken out of the batch.
        """
        header = validate_batch(batch, self.config, now_ms, False, sparse)
        _, _, _, _, _, _, delta, _, max_timestamp, producer_id, epoch, sequence, _ = header
        is_repeated, base_offset, last_offset = False, NOT_STORED, NOT_STORED
        if producer_id >= 0:
            repeated = self.producers.check(producer_id, epoch, sequence, delta, False, leader_epoch)
            if repeated is None:
                trace = skipped_batch_metadata(sequence, delta, max_timestamp)
                self.producers.learn(producer_id, epoch, trace, False, now_ms)
            else:
                is_repeated, base_offset, last_offset = True, repeated.base_offset, repeated.last_offset
        return LogAppendInfo(base_offset, last_offset, -1, is_repeated, self.end)

    def _write_control(self, control: bytearray, leader_epoch: int, now_ms: int) -> None:
        base_offset = self.end.offset
        _STAMP.pack_into(control, 0, base_offset, len(control) - LOG_OVERHEAD_BYTES, leader_epoch)
        self._write(memoryview(control), base_offset, now_ms, now_ms)
        if leader_epoch > self.epochs.latest:
            self.epochs.assign(leader_epoch, base_offset)

    def append_replicated(self, batch: memoryview, *, now_ms: int) -> LogAppendInfo:
        """Writes one batch as its leader stamped it. Raises ApiError if it does not continue this log."""
        header = validate_replicated_batch(batch, self.end.offset)
        base_offset, epoch, delta, max_timestamp = header[0], header[2], header[6], header[8]
        if base_offset != self.end.offset:
            self.producers.is_complete = False  # compaction may have removed all that a producer wrote
        if base_offset + delta - self.end.offset > INT32_MAX:
            # Compaction left a gap that relative offsets do not span: the next segment starts after it.
            self.roll(now_ms, base_offset)
        end = self._write(batch, base_offset + delta, max_timestamp, now_ms)
        if epoch > self.epochs.latest:
            self.epochs.assign(epoch, base_offset)
        if header[9] >= 0:
            self._learn(batch, header, base_offset, max_timestamp, now_ms)
        return LogAppendInfo(base_offset, base_offset + delta, -1, False, end)

    def roll(self, now_ms: int, next_offset: int | None = None) -> None:
        """Closes the active segment and starts the next one at the end of the log, or further on. Raises ApiError."""
        closed, end_offset = self._tail, self.end.offset if next_offset is None else next_offset
        assert end_offset > closed.segment.base_offset, "an empty segment has nothing to close"
        segment = LogSegment(self.directory, end_offset, created_ms=now_ms)
        segment.start_indexing()
        try:
            self._tail = self._new_tail(segment, fresh=True)
        except OSError as error:
            if self.files.space is not None and error.errno in NO_SPACE_ERRNOS:
                self.files.space.ran_out(error)
            raise ApiError(ErrorCode.kafka_storage_error, f"cannot start a segment: {error}") from None
        self._flush.add(
            RolledSegment(closed.segment, closed.released()),
            producer_snapshots.take_snapshot(self.producers, end_offset),
        )
        with self._lock:
            self._reader.segments.add(segment)
        self.end = LogOffsetMetadata(end_offset, end_offset, 0)

    def _new_tail(self, segment: LogSegment, *, fresh: bool = False) -> Tail:
        uses_reserve = self.config.uses_reserve

        def made() -> Tail:
            return Tail(segment, self.files.tails, fresh=fresh, uses_reserve=uses_reserve)

        space = self.files.space
        return space.with_reserve(made) if uses_reserve and space is not None else made()

    def _write(
        self, batch: memoryview, last_offset: int, max_timestamp: int, now_ms: int
    ) -> LogOffsetMetadata:
        segment = self._tail.segment
        if self._must_roll(segment, len(batch), last_offset, max_timestamp, now_ms):
            self.roll(now_ms)
            segment = self._tail.segment
        self._tail.write(batch)
        segment.note(last_offset, max_timestamp, len(batch), self.config)
        self.end = end = LogOffsetMetadata(last_offset + 1, segment.base_offset, segment.size)
        return end

    def _must_roll(
        self, segment: LogSegment, size: int, last_offset: int, max_timestamp: int, now_ms: int
    ) -> bool:
        if segment.size == 0:
            return not segment.can_hold(last_offset)
        first = segment.first_timestamp
        age_ms = max_timestamp - first if first >= 0 else now_ms - segment.created_ms
        return (
            segment.size + size > self._roll_bytes_max
            or age_ms > self._segment_ms_max
            or segment.index_full
            or not segment.can_hold(last_offset)
        )

    def _learn(
        self, batch: memoryview, header: tuple[int, ...], base_offset: int, max_timestamp: int, now_ms: int
    ) -> None:
        _, _, _, _, _, attributes, delta, _, _, producer_id, epoch, sequence, _ = header
        if attributes & CONTROL:
            marker = parse_end_marker(batch)
            if marker is not None and (ended := self.producers.learn_marker(marker, base_offset, now_ms)):
                self._tail.segment.note_ended(ended)
                self.has_aborted = self.has_aborted or not ended.committed
        else:
            transactional = bool(attributes & TRANSACTIONAL)
            trace = batch_metadata(sequence, base_offset, delta, max_timestamp)
            self.producers.learn(producer_id, epoch, trace, transactional, now_ms)

    # Reading

    def read(
        self,
        offset: int,
        max_bytes: int,
        upto: LogOffsetMetadata,
        *,
        at_least_one: bool = True,
        nowait: bool = False,
    ) -> LogSlice:
        """Returns whole batches from the one that contains `offset`, within one segment and never beyond `upto`.

        Raises OFFSET_OUT_OF_RANGE; with `nowait`, BlockingIOError if the read would have to wait for the disk.
        """
        if not self.start_offset <= offset <= self.end.offset:
            raise self._out_of_range(offset)
        if offset >= upto.offset:
            return LogSlice(b"", offset)
        if self.damages:
            return self._read_around_damage(offset, max_bytes, upto, at_least_one, nowait)
        return self._read(offset, max_bytes, upto, at_least_one, nowait)

    def _read(
        self, offset: int, max_bytes: int, upto: LogOffsetMetadata, at_least_one: bool, nowait: bool
    ) -> LogSlice:
        try:
            return self._reader.read(offset, max_bytes, upto, at_least_one, nowait)
        except BlockingIOError:
            raise
        except OSError:
            if offset < self.start_offset:
                raise self._out_of_range(offset) from None
            return self._looked_up(partial(self._reader.read, offset, max_bytes, upto, at_least_one, nowait))

    def _looked_up(self, look: Callable[[], Found]) -> Found:
        """Raises ApiError if the disk cannot be read."""
        try:
            while True:
                segments = self._reader.segments
                try:
                    return look()
                except FileNotFoundError:
                    # Retention or compaction may have removed the file between finding and opening it.
                    if self._reader.segments is segments:
                        raise
        except BlockingIOError:
            raise
        except OSError as error:
            raise ApiError(ErrorCode.kafka_storage_error, f"cannot read the log: {error}") from error

    def aborted_in(
        self, start_offset: int, upto_offset: int, *, nowait: bool = False
    ) -> tuple[AbortedTransaction, ...]:
        """Returns the aborted transactions with data between two offsets: producer id and first offset of each.

        Complete for offsets below the last stable offset. Raises ApiError; with `nowait`, BlockingIOError if an index
        would have to be loaded.
        """
        return self._looked_up(
            partial(self._reader.aborted_in, start_offset, upto_offset, nowait, self.start_offset)
        )

    def transaction_index(self, segment: LogSegment) -> TransactionIndex:
        """Blocks if the index is not loaded. Raises OSError."""
        return self._reader.transaction_index(segment, self.start_offset)

    def position_of(self, offset: int) -> LogOffsetMetadata:
        """Returns where the batch that contains an offset starts; the end of the log for an offset beyond it."""
        return self._looked_up(partial(self._position_of, offset))

    def _position_of(self, offset: int) -> LogOffsetMetadata:
        end = self.end
        if self._all_damages and offset < end.offset:
            lost = damage_file.at_offset(self._all_damages, offset)
            if lost is not None:
                return self._before_damage(lost)
        found = self._reader.find(offset, end) if offset < end.offset else None
        if found is None:
            return end
        segment, position = found
        file = self.files.pin(segment)
        try:
            walked = next(
                iter_batch_headers(
                    file.fd,
                    position,
                    segment.size,
                    chunk_bytes=INDEX_INTERVAL_READ_BYTES,
                    damaged_ranges=segment.damaged_ranges,
                ),
                None,
            )
        finally:
            self.files.unpin(file)
        if walked is None:
            raise damaged_read(segment, position)
        position, header = walked
        return LogOffsetMetadata(min(offset, header.base_offset), segment.base_offset, position)

    def offset_for_timestamp(self, timestamp: int, bytes_max: int | None = None) -> TimestampAndOffset | None:
        """Returns the first record whose timestamp is not below the given one. Blocking: decodes a batch.

        With `bytes_max`, raises DecompressionLimitReached if the search would have to decompress more bytes.
        """
        return self._looked_up(
            lambda: reader.find_offset_by_timestamp(self._reader.segments, timestamp, self._search(bytes_max))
        )

    def offset_of_max_timestamp(self, bytes_max: int | None = None) -> TimestampAndOffset | None:
        """Returns the first record that has the largest timestamp. Blocking, as above."""
        return self._looked_up(
            lambda: reader.find_max_timestamp(self._reader.segments, self._search(bytes_max))
        )

    def _search(self, bytes_max: int | None) -> reader.TimestampSearch:
        return reader.TimestampSearch(
            self.files,
            self.start_offset,
            bytes_max=self.config.decoded_bytes_max if bytes_max is None else bytes_max,
            trusts_headers=bytes_max is None,
        )

    def end_offset_for(self, epoch: int) -> tuple[int, int]:
        """OffsetForLeaderEpoch: returns the largest known epoch up to the requested one, and its end offset."""
        return self.epochs.end_offset_for(epoch, self.end.offset)

    def _out_of_range(self, offset: int) -> ApiError:
        return ApiError(
            ErrorCode.offset_out_of_range,
            f"offset {offset} is not within {self.start_offset} and {self.end.offset}",
        )

    # Damage

    def _set_damages(self, damages: Iterable[Damage]) -> None:
        self._all_damages = tuple(damages)
        #: The damage that reads are refused for, in order of offsets.
        self.damages = tuple(item for item in self._all_damages if not item.accepted)

    def _read_around_damage(
        self, offset: int, max_bytes: int, upto: LogOffsetMetadata, at_least_one: bool, nowait: bool
    ) -> LogSlice:
        """Raises CORRUPT_MESSAGE at a damaged offset; a read that starts before one ends there."""
        found = damage_file.at_offset(self.damages, offset)
        if found is not None:
            raise ApiError(ErrorCode.corrupt_message, f"{self.directory.name} is damaged at {found}")
        piece = self._read(offset, max_bytes, upto, at_least_one, nowait)
        following = min(
            (item.start_offset for item in self.damages if item.start_offset > offset), default=None
        )
        if following is not None and following < piece.next_offset:
            return piece._replace(next_offset=following)
        return piece

    def scan_for_damage(self, offset: int) -> tuple[Damage, ...]:
        """Reads the segment that contains an offset; from now on reads of its damaged ranges are refused. Blocking.

        Returns the damage that was not known before, which is durably listed by then. Raises OSError.
        """
        end, segment = self.end, self._reader.segments.holding(offset)
        is_active = segment.next_base is None
        size = end.position if is_active and end.segment_base == segment.base_offset else segment.size
        file = self.files.pin(segment)
        try:
            found = tuple(
                damage_file.scan_for_damage(
                    file.fd,
                    size,
                    base_offset=segment.base_offset,
                    damaged_ranges=segment.damaged_ranges,
                    end_offset=end.offset if is_active else segment.next_base,
                )
            )
        finally:
            self.files.unpin(file)
        if not found or segment.retired:
            return ()
        damages = sorted([*self._all_damages, *found])
        damage_file.save(self.directory, damages)
        segment.damaged_ranges = damage_file.ranges_in_segment(damages, segment.base_offset)
        self._set_damages(damages)
        for item in found:
            _logger.critical(
                "log damaged: acknowledged records cannot be read",
                extra={"file": str(segment.path), "damage": str(item)},
            )
        return found

    def _before_damage(self, lost: Damage) -> LogOffsetMetadata:
        if lost.segment_base != damage_file.NO_SEGMENT:
            return LogOffsetMetadata(lost.start_offset, lost.segment_base, lost.position)
        segment = self._reader.segments.holding(lost.start_offset)
        return LogOffsetMetadata(lost.start_offset, segment.base_offset, segment.size)

    def mark_lost_until(self, offset: int, now_ms: int) -> None:
        """Files at the end are missing: records their offsets as damage, and continues the log beyond it. Blocking."""
        assert offset > self.end.offset, (self, offset)
        lost = Damage(self.end.offset, offset)
        damage_file.save(self.directory, [*self._all_damages, lost])
        self._set_damages([*self._all_damages, lost])
        _logger.critical(
            "log damaged: acknowledged records cannot be read",
            extra={"directory": str(self.directory), "damage": str(lost)},
        )
        self.roll(now_ms, offset)

    # Flushing

    def flush_begin(self) -> FlushJob | None:
        """Call it on the event loop. The returned job makes everything appended so far durable. One job at a time."""
        return self._begin_flush() if self.needs_flush else None

    def flush_done(self, flush_job: FlushJob) -> None:
        """Call it on the event loop, once `flush_job.run()` has returned."""
        for segment in self._flush.done(flush_job, self.epochs):
            self.files.index_loaded(segment, *segment.loaded_indexes)

    def hold_tail(self) -> SharedFile:
        """Returns the active file. It stays open until the caller drops it, on the event loop."""
        return self._tail.opened().hold()

    def _begin_flush(self) -> FlushJob:
        return self._flush.begin(self.directory, self.end, self._tail.opened(), self.epochs)

    # Retention and replacement

    def delete_records_before(self, offset: int) -> None:
        """Moves the log start offset; retention deletes the segments before it."""
        if offset > self.end.offset:
            raise self._out_of_range(offset)
        if offset > self.start_offset:
            self.start_offset = offset
            self.producers.is_complete = False
            self.epochs.truncate_start(offset)
            self._forget_damage_before_start()

    def _forget_damage_before_start(self) -> None:
        if self._all_damages:
            self._set_damages(item for item in self._all_damages if item.end_offset > self.start_offset)

    def expired_segments(self, now_ms: int, below: int | None = None) -> list[LogSegment]:
        """Returns the oldest segments that retention may delete: by time, by size, or below the log start offset.

        They contain nothing at or beyond `below` (the high watermark), and include the last segment only if all of it
        has expired. May read a few bytes of each index.
        """
        # A thread runs this while the event loop appends: everything is read once, the end before the segments.
        end_offset = self.end.offset
        segments, config, start_offset = self._reader.segments, self.config, self.start_offset
        below = end_offset if below is None else below
        surplus_bytes = segments.size_bytes - config.retention_bytes
        gone: list[LogSegment] = []
        for segment in list(segments):
            following = end_offset if segment.next_base is None else segment.next_base
            if following > below or (segment.next_base is None and segment.size == 0):
                break
            passed = segment.next_base is not None and segment.next_base <= start_offset
            if not (
                passed or (config.cleanup_delete and self._is_expired(segment, config, now_ms, surplus_bytes))
            ):
                break
            gone.append(segment)
            surplus_bytes -= segment.size
        return gone

    def _is_expired(self, segment: LogSegment, config: LogConfig, now_ms: int, surplus_bytes: int) -> bool:
        if config.retention_bytes >= 0 and surplus_bytes >= segment.size:
            return True
        if config.retention_ms < 0:
            return False
        return now_ms - index_files.retention_timestamp(segment, self.files) > config.retention_ms

    def remove_segments(self, segments: Sequence[LogSegment], now_ms: int, *, end_offset: int) -> list[Path]:
        """Removes the oldest segments from the log. Returns files to unlink after `file_delete_delay_ms`.

        `end_offset` is the end of the log when this was decided: the active segment stays if it has grown since.
        """
        present = self._removable(segments)
        if end_offset != self.end.offset:
            present = [segment for segment in present if segment is not self._tail.segment]
        if not present:
            return []
        if present[-1] is self._tail.segment:
            self.roll(now_ms)
        self._save_producers_at(present[-1].next_base)
        with self._lock:
            remaining = self._reader.segments.without(present)
            self.start_offset = max(self.start_offset, remaining.first.base_offset)
            self.producers.is_complete = False
            self._reader.use(remaining)
            self._flush.release_segments(present)
            for segment in present:
                self.files.rename(segment, DELETED_SUFFIX)
                self.files.forget(segment)
        self.epochs.truncate_start(self.start_offset)
        self._forget_damage_before_start()
        bases = [segment.base_offset for segment in present]
        stale = [self.directory / offset_file_name(base, PRODUCER_SNAPSHOT_SUFFIX) for base in bases]
        return [*segment_files.existing_files(present), *(path for path in stale if path.exists())]

    def _save_producers_at(self, start_offset: int | None) -> None:
        """Saves the producer state that the rest of the log cannot restore; the next flush makes it durable."""
        assert start_offset is not None
        snapshot = self._flush.drop_snapshots_before(start_offset)
        if snapshot is not None:
            with suppress(OSError):
                snapshot.write(self.directory, synced=False)

    def _removable(self, segments: Sequence[LogSegment]) -> list[LogSegment]:
        """Returns the segments that are still there, up to the first that compaction is about to replace."""
        with self._lock:
            busy, current = self._replacing, self._reader.segments.items
            there = set(current)
            present = [segment for segment in segments if segment in there]
        assert present == current[: len(present)], "only the oldest segments can go"
        return list(takewhile(lambda segment: segment not in busy, present))

    def replace_segments(self, old: Sequence[LogSegment], new: Sequence[LogSegment]) -> list[Path]:
        """Replaces old segments with finished ones of a CleanedSegmentWriter. In any thread.

        Returns files to unlink after `file_delete_delay_ms`; until then reads in progress may use them.
        Raises SegmentsChanged if an old segment is already gone; nothing has changed then.
        """
        assert new, "even an empty range keeps a segment"
        with self._rearranging:
            return self._replace_segments(old, new)

    def _replace_segments(self, old: Sequence[LogSegment], new: Sequence[LogSegment]) -> list[Path]:
        self._begin_replacing(old)
        try:
            segment_files.commit_swap(new, self.files)
            # A flush would write the indexes of the old segments under names that now belong to the new ones.
            with self._flush.gate.lock:
                with self._lock:
                    self._reader.use(self._reader.segments.replaced(old, new))
                self._flush.release_segments(old)
                unlink = segment_files.finish_swap(old, new, self.files)
        finally:
            self._replacing = ()
        for segment in old:
            self.files.forget(segment)
        return unlink

    def _begin_replacing(self, old: Sequence[LogSegment]) -> None:
        with self._lock:
            if self.is_closed or not set(self._reader.segments.items).issuperset(old):
                raise SegmentsChanged(f"{self.directory.name}: segments to replace are gone")
            assert self._tail.segment not in old, "the active segment stays"
            self._replacing = tuple(old)

    # Truncation

    def truncate_to(self, offset: int, now_ms: int) -> None:
        """Removes every batch that reaches `offset` or beyond. Blocking; nothing may append meanwhile.

        For a log of a LogManager use `LogManager.truncate`, and call `LogCleaner.truncated` afterwards.
        """
        if offset >= self.end.offset:
            return
        with self._rearranging:
            if offset <= self.segments[0].base_offset:
                self._restart_at(offset, now_ms)
            else:
                self._truncate_to(self.position_of(offset), now_ms)

    def truncate_fully_and_start_at(self, offset: int, now_ms: int) -> None:
        """Removes everything; the next batch gets this offset. As for `truncate_to`."""
        with self._rearranging:
            self._restart_at(offset, now_ms)

    def _truncate_to(self, target: LogOffsetMetadata, now_ms: int) -> None:
        self._flush.gate.next_generation()
        self._flush.lower_synced_offset(target.offset)
        segments = self._reader.segments
        slot = segments.slot_of(target.segment_base)
        recovery.discard_segments(segments.items[slot + 1 :], self.files)
        self._tail.close()
        # A new segment object, so that threads which still rewrite or read the old one notice.
        cut = segments.items[slot]
        kept = recovery.truncate_segment(cut, target, self.transaction_index(cut), self.files, self.config)
        self._tail = self._new_tail(kept)
        self._reader.use(LogSegments([*segments.items[:slot], kept]))
        self._after_truncation(target, now_ms)

    def _restart_at(self, offset: int, now_ms: int) -> None:
        self._flush.gate.next_generation()
        self._flush.lower_synced_offset(offset)
        self._flush.release_all_segments()
        self._tail.close()
        recovery.discard_segments(list(self.segments), self.files)
        segment = LogSegment(self.directory, offset, created_ms=now_ms)
        segment.start_indexing()
        self._tail = self._new_tail(segment, fresh=True)
        self._reader.use(LogSegments([segment]))
        self.start_offset = offset
        self.producers.is_complete = offset == 0
        self.epochs.clear()
        producer_snapshots.remove_snapshots(
            self.directory, producer_snapshots.list_snapshot_offsets(self.directory)
        )
        self._after_truncation(LogOffsetMetadata(offset, offset, 0), now_ms)

    def _after_truncation(self, end: LogOffsetMetadata, now_ms: int) -> None:
        self.end = end
        self.start_offset = min(self.start_offset, end.offset)
        self._flush.truncate_to(end)
        self.epochs.truncate_end(end.offset)
        producer_snapshots.remove_snapshots(
            self.directory,
            (o for o in producer_snapshots.list_snapshot_offsets(self.directory) if o > end.offset),
        )
        # A snapshot that reappeared after a power failure would claim a sync that no longer holds.
        sync_directory(self.directory)
        if self._all_damages:
            self._set_damages(item for item in self._all_damages if item.start_offset < end.offset)
            damage_file.save(self.directory, self._all_damages)
        producer_snapshots.restore_producer_state(
            self.producers,
            self.directory,
            self._reader.segments,
            self.files,
            self.start_offset,
            end.offset,
            now_ms,
        )

    # Closing

    def close(self) -> None:
        """Blocking. Makes everything durable and writes what a clean start needs. Raises OSError."""
        try:
            self._finish()
        finally:
            self._close_files()

    def _finish(self) -> None:
        self._flush.stop()
        self.epochs.dirty = self._flush.directory_changed = True
        flush_job = self._begin_flush()
        flush_job.sync()
        self.flush_done(flush_job)
        if not flush_job.complete:
            raise OSError(ENOSPC, f"no space to close {self.directory}")
        index_files.write_indexes(self._tail.segment)
        producer_snapshots.take_snapshot(self.producers, self.end.offset).write(self.directory)

    def abandon(self) -> None:
        """Releases the files as they are; the next start has to recover."""
        self._flush.stop()
        self._close_files()

    def moved_to(self, directory: Path) -> None:
        """The folder has been renamed; reads in progress may still open files in it."""
        self.directory = directory
        for segment in self.segments:
            segment.directory = directory

    def _close_files(self) -> None:
        self.is_closed = True
        self._flush.release_all_segments()
        self._tail.close()
        for segment in self.segments:
            self.files.forget(segment)
