"""One partition on disk. Appends belong to the event loop; reads may come from any thread meanwhile."""

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

from penstock.log import damage, leftovers, lookup, recovery, replay, retention, snapshots, timestamps
from penstock.log.aborted import Aborted, AbortedIndex
from penstock.log.checkpoints import sync_directory
from penstock.log.config import INT32_MAX, LogConfig
from penstock.log.damage import Damage
from penstock.log.files import FilePool
from penstock.log.flush import FlushState, FlushTicket, Rolled
from penstock.log.names import DELETED, SNAPSHOT, offset_file
from penstock.log.positions import Appended, LogPosition, Slice, TimestampMatch
from penstock.log.producers import trace_of
from penstock.log.reader import Reader, damaged
from penstock.log.segment import Segment
from penstock.log.segments import SegmentList
from penstock.log.space import NO_SPACE
from penstock.log.synced_offsets import SyncedSlot
from penstock.log.tail import SharedFile, Tail
from penstock.log.transactions import VerificationGuard
from penstock.log.validation import checked_header, checked_replica
from penstock.log.walk import NEAR_BYTES, walk
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.records import (
    CONTROL,
    LENGTH_OVERHEAD_BYTES,
    LOG_APPEND_TIME,
    TRANSACTIONAL,
    parse_end_marker,
    restamp,
)

__all__ = ("Appended", "Log", "LogPosition", "SegmentsChanged", "Slice", "TimestampMatch")

#: Base offset, length and leader epoch: what a broker stamps, and the checksum does not cover.
_STAMP: Final = struct.Struct(">qii")

Found = TypeVar("Found")

_logger = logging.getLogger("penstock.log")


class SegmentsChanged(Exception):
    """Retention or truncation took segments that compaction was about to replace."""


class Log:
    """Open one with `Log.open`. `end` is where the next batch goes, `synced` is how far the disk has it."""

    def __init__(
        self,
        directory: Path,
        config: LogConfig,
        files: FilePool,
        loaded: recovery.Loaded,
        slot: SyncedSlot | None = None,
    ) -> None:
        segments = loaded.segments
        self.directory = directory
        self.config = config
        self.files = files
        self.start_offset = loaded.start_offset
        #: When it was opened, files from before its start had gone that nobody has deleted.
        self.was_beheaded = loaded.is_beheaded
        self.producers = loaded.producers
        self.epochs = loaded.epochs
        #: Whether there is anything for `aborted_in` to find, or was since it was opened.
        self.has_aborted = any(segment.has_aborted for segment in segments)
        self.end = LogPosition(loaded.end_offset, segments.last.base_offset, segments.last.size)
        self._reader = Reader(segments, files)
        self._tail = self._new_tail(segments.last)
        self._flush = FlushState(self.end, slot)
        self._set_damages(loaded.damages)
        self._segment_ms_max = config.segment_ms_max
        self._replacing: tuple[Segment, ...] = ()
        # Taken by whoever changes the list of segments: rolling on the loop, compaction in its thread.
        self._lock = threading.Lock()
        # Held for all of a replacement or a truncation, which would pull the files from under each other.
        self._rearranging = threading.Lock()
        #: The files are let go of: the partition was deleted, moved away or replaced, or the node stops.
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
        crash: recovery.Crash = recovery.UNKNOWN_CRASH,
        slot: SyncedSlot | None = None,
    ) -> Self:
        """Blocking. A new folder is made when there is none. Raises OSError.

        `slot` is where each sync is noted, `crash` what the notes of the last run say.
        """
        loaded = recovery.load(
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
    def segments(self) -> Sequence[Segment]:
        return self._reader.segments.items

    @property
    def active_segment(self) -> Segment:
        return self._tail.segment

    @property
    def size_bytes(self) -> int:
        return self._reader.segments.size_bytes

    @property
    def synced(self) -> LogPosition:
        return self._flush.synced

    @property
    def recovery_point(self) -> int:
        """Below this offset a crash leaves nothing to find out: data, indexes and notes are all durable."""
        return self._flush.recovery_point

    @property
    def needs_flush(self) -> bool:
        """Something is not durable yet. A rolled segment wants a flush under every policy."""
        flush = self._flush
        behind = flush.synced.offset < self.end.offset
        return behind or flush.rolled_count > 0 or flush.names_changed or self.epochs.dirty

    @property
    def rolled_unsynced(self) -> int:
        return self._flush.rolled_count

    def configure(self, config: LogConfig) -> None:
        self.config = config
        self._segment_ms_max = config.segment_ms_max

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
    ) -> Appended:
        """Check, stamp and write one batch. Raises ApiError, and then nothing has changed.

        `guard` is of the verification that a transactional batch has gone through, if it had to. `control` is a control
        batch that goes right before it, with the records that were taken out of it. It may be in the log alone when
        the disk fails in between, and does not count then.
        """
        config = self.config
        header = checked_header(batch, config, now_ms, internal, control is not None)
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
                    return Appended(repeated.base_offset, repeated.last_offset, appended_ms, True, self.end)
                if guard is not None:
                    self.producers.check_guard(producer_id, epoch, guard)
        if control is not None:
            self._write_control(control, leader_epoch, now_ms)
        append_time_ms = -1
        if config.timestamp_type == "LogAppendTime":
            append_time_ms = max_timestamp = now_ms
            restamp(batch, attributes=attributes | LOG_APPEND_TIME, max_timestamp=now_ms)
        base_offset = self.end.offset
        _STAMP.pack_into(batch, 0, base_offset, length, leader_epoch)
        end = self._write(batch, base_offset + delta, max_timestamp, now_ms)
        if leader_epoch > self.epochs.latest:
            self.epochs.assign(leader_epoch, base_offset)
        if producer_id >= 0:
            self._learn(batch, header, base_offset, max_timestamp, now_ms)
        return Appended(base_offset, base_offset + delta, append_time_ms, False, end)

    def _write_control(self, control: bytearray, leader_epoch: int, now_ms: int) -> None:
        base_offset = self.end.offset
        _STAMP.pack_into(control, 0, base_offset, len(control) - LENGTH_OVERHEAD_BYTES, leader_epoch)
        self._write(memoryview(control), base_offset, now_ms, now_ms)
        if leader_epoch > self.epochs.latest:
            self.epochs.assign(leader_epoch, base_offset)

    def append_replicated(self, batch: memoryview, *, now_ms: int) -> Appended:
        """Write one batch as its leader stamped it. Raises ApiError when it does not continue this log."""
        header = checked_replica(batch, self.end.offset)
        base_offset, epoch, delta, max_timestamp = header[0], header[2], header[6], header[8]
        if base_offset != self.end.offset:
            self.producers.is_complete = False  # what compaction took may be all that a producer wrote
        if base_offset + delta - self.end.offset > INT32_MAX:
            # Compaction left a gap that relative offsets do not span: the next segment begins beyond it.
            self.roll(now_ms, base_offset)
        end = self._write(batch, base_offset + delta, max_timestamp, now_ms)
        if epoch > self.epochs.latest:
            self.epochs.assign(epoch, base_offset)
        if header[9] >= 0:
            self._learn(batch, header, base_offset, max_timestamp, now_ms)
        return Appended(base_offset, base_offset + delta, -1, False, end)

    def roll(self, now_ms: int, next_offset: int | None = None) -> None:
        """Close the active segment and start the next one at the end of the log, or further on. Raises ApiError."""
        closed, end_offset = self._tail, self.end.offset if next_offset is None else next_offset
        assert end_offset > closed.segment.base_offset, "an empty segment has nothing to close"
        segment = Segment(self.directory, end_offset, created_ms=now_ms)
        segment.start_indexing()
        try:
            self._tail = self._new_tail(segment, fresh=True)
        except OSError as error:
            if self.files.space is not None and error.errno in NO_SPACE:
                self.files.space.ran_out(error)
            raise ApiError(ErrorCode.kafka_storage_error, f"cannot start a segment: {error}") from None
        self._flush.add(Rolled(closed.segment, closed.released()), snapshots.take(self.producers, end_offset))
        with self._lock:
            self._reader.segments.add(segment)
        self.end = LogPosition(end_offset, end_offset, 0)

    def _new_tail(self, segment: Segment, *, fresh: bool = False) -> Tail:
        uses_reserve = self.config.uses_reserve

        def made() -> Tail:
            return Tail(segment, self.files.tails, fresh=fresh, uses_reserve=uses_reserve)

        space = self.files.space
        return space.with_reserve(made) if uses_reserve and space is not None else made()

    def _write(self, batch: memoryview, last_offset: int, max_timestamp: int, now_ms: int) -> LogPosition:
        segment = self._tail.segment
        if self._must_roll(segment, len(batch), last_offset, max_timestamp, now_ms):
            self.roll(now_ms)
            segment = self._tail.segment
        self._tail.write(batch)
        segment.note(last_offset, max_timestamp, len(batch), self.config)
        self.end = end = LogPosition(last_offset + 1, segment.base_offset, segment.size)
        return end

    def _must_roll(
        self, segment: Segment, size: int, last_offset: int, max_timestamp: int, now_ms: int
    ) -> bool:
        if segment.size == 0:
            return not segment.can_hold(last_offset)
        config = self.config
        first = segment.first_timestamp
        age_ms = max_timestamp - first if first >= 0 else now_ms - segment.created_ms
        return (
            segment.size + size > config.segment_bytes
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
            trace = trace_of(sequence, base_offset, delta, max_timestamp)
            self.producers.learn(producer_id, epoch, trace, transactional, now_ms)

    # Reading

    def read(
        self,
        offset: int,
        max_bytes: int,
        upto: LogPosition,
        *,
        at_least_one: bool = True,
        nowait: bool = False,
    ) -> Slice:
        """Whole batches from the one that holds `offset`, within one segment and never beyond `upto`.

        Raises OFFSET_OUT_OF_RANGE; with `nowait`, BlockingIOError when the disk would have to be waited for.
        """
        if not self.start_offset <= offset <= self.end.offset:
            raise self._out_of_range(offset)
        if offset >= upto.offset:
            return Slice(b"", offset)
        if self.damages:
            return self._read_around_damage(offset, max_bytes, upto, at_least_one, nowait)
        return self._read(offset, max_bytes, upto, at_least_one, nowait)

    def _read(
        self, offset: int, max_bytes: int, upto: LogPosition, at_least_one: bool, nowait: bool
    ) -> Slice:
        try:
            return self._reader.read(offset, max_bytes, upto, at_least_one, nowait)
        except BlockingIOError:
            raise
        except OSError:
            if offset < self.start_offset:
                raise self._out_of_range(offset) from None
            return self._looked_up(partial(self._reader.read, offset, max_bytes, upto, at_least_one, nowait))

    def _looked_up(self, look: Callable[[], Found]) -> Found:
        """Raises ApiError when the disk does not answer."""
        try:
            while True:
                segments = self._reader.segments
                try:
                    return look()
                except FileNotFoundError:
                    # Retention or compaction may have taken the file away between finding and opening it.
                    if self._reader.segments is segments:
                        raise
        except BlockingIOError:
            raise
        except OSError as error:
            raise ApiError(ErrorCode.kafka_storage_error, f"cannot read the log: {error}") from error

    def aborted_in(self, start_offset: int, upto_offset: int, *, nowait: bool = False) -> tuple[Aborted, ...]:
        """The aborted transactions with data between two offsets: producer id and first offset of each.

        Complete for offsets below the last stable one. Raises ApiError; with `nowait`, BlockingIOError when an index
        would have to be loaded.
        """
        return self._looked_up(
            partial(self._reader.aborted_in, start_offset, upto_offset, nowait, self.start_offset)
        )

    def aborted_index(self, segment: Segment) -> AbortedIndex:
        """Blocking, where it is not loaded. Raises OSError."""
        return self._reader.aborted_index(segment, self.start_offset)

    def position_of(self, offset: int) -> LogPosition:
        """Where the batch that holds an offset starts; the end of the log for an offset beyond it."""
        return self._looked_up(partial(self._position_of, offset))

    def _position_of(self, offset: int) -> LogPosition:
        end = self.end
        if self._all_damages and offset < end.offset:
            lost = damage.at_offset(self._all_damages, offset)
            if lost is not None:
                return self._before_damage(lost)
        place = self._reader.find(offset, end) if offset < end.offset else None
        if place is None:
            return end
        segment, position = place
        file = self.files.pin(segment)
        try:
            walked = next(
                walk(file.fd, position, segment.size, chunk_bytes=NEAR_BYTES, holes=segment.holes), None
            )
        finally:
            self.files.unpin(file)
        if walked is None:
            raise damaged(segment, position)
        position, header = walked
        return LogPosition(min(offset, header.base_offset), segment.base_offset, position)

    def offset_for_timestamp(self, timestamp: int, bytes_max: int | None = None) -> TimestampMatch | None:
        """The first record whose timestamp is not below the given one. Blocking: decodes a batch.

        A search that may unfold so few bytes raises MoreToUnfold where they do not suffice.
        """
        return self._looked_up(
            lambda: timestamps.first_at_or_after(self._reader.segments, timestamp, self._search(bytes_max))
        )

    def offset_of_max_timestamp(self, bytes_max: int | None = None) -> TimestampMatch | None:
        """The first record that has the largest timestamp. Blocking, as above."""
        return self._looked_up(lambda: timestamps.largest(self._reader.segments, self._search(bytes_max)))

    def _search(self, bytes_max: int | None) -> timestamps.Search:
        return timestamps.Search(
            self.files,
            self.start_offset,
            bytes_max=self.config.decoded_bytes_max if bytes_max is None else bytes_max,
            believes_headers=bytes_max is None,
        )

    def end_offset_for(self, epoch: int) -> tuple[int, int]:
        """OffsetForLeaderEpoch: the largest known epoch up to the asked one, and where it ended."""
        return self.epochs.end_offset_for(epoch, self.end.offset)

    def _out_of_range(self, offset: int) -> ApiError:
        return ApiError(
            ErrorCode.offset_out_of_range,
            f"offset {offset} is not within {self.start_offset} and {self.end.offset}",
        )

    # Damage

    def _set_damages(self, damages: Iterable[Damage]) -> None:
        self._all_damages = tuple(damages)
        #: What readers are refused, in order of offsets.
        self.damages = tuple(item for item in self._all_damages if not item.accepted)

    def _read_around_damage(
        self, offset: int, max_bytes: int, upto: LogPosition, at_least_one: bool, nowait: bool
    ) -> Slice:
        """Raises CORRUPT_MESSAGE at a damaged offset; what is read before one ends there."""
        found = damage.at_offset(self.damages, offset)
        if found is not None:
            raise ApiError(ErrorCode.corrupt_message, f"{self.directory.name} is damaged at {found}")
        piece = self._read(offset, max_bytes, upto, at_least_one, nowait)
        following = min(
            (item.start_offset for item in self.damages if item.start_offset > offset), default=None
        )
        if following is not None and following < piece.next_offset:
            return piece._replace(next_offset=following)
        return piece

    def survey(self, offset: int) -> tuple[Damage, ...]:
        """Read the segment that holds an offset, and refuse from now on what of it is damaged. Blocking.

        Returns what was not known before; it is listed durably then. Raises OSError.
        """
        end, segment = self.end, self._reader.segments.holding(offset)
        is_active = segment.next_base is None
        size = end.position if is_active and end.segment_base == segment.base_offset else segment.size
        file = self.files.pin(segment)
        try:
            found = tuple(
                damage.survey(
                    file.fd,
                    size,
                    base_offset=segment.base_offset,
                    holes=segment.holes,
                    end_offset=end.offset if is_active else segment.next_base,
                )
            )
        finally:
            self.files.unpin(file)
        if not found or segment.retired:
            return ()
        damages = sorted([*self._all_damages, *found])
        damage.save(self.directory, damages)
        segment.holes = damage.holes_of(damages, segment.base_offset)
        self._set_damages(damages)
        for item in found:
            _logger.critical(
                "log damaged: acknowledged records cannot be read",
                extra={"file": str(segment.path), "damage": str(item)},
            )
        return found

    def _before_damage(self, lost: Damage) -> LogPosition:
        if lost.segment_base != damage.NO_SEGMENT:
            return LogPosition(lost.start_offset, lost.segment_base, lost.position)
        segment = self._reader.segments.holding(lost.start_offset)
        return LogPosition(lost.start_offset, segment.base_offset, segment.size)

    def continue_at(self, offset: int, now_ms: int) -> None:
        """Files at the end have gone: what was in them is damage, and the log goes on beyond it. Blocking."""
        assert offset > self.end.offset, (self, offset)
        lost = Damage(self.end.offset, offset)
        damage.save(self.directory, [*self._all_damages, lost])
        self._set_damages([*self._all_damages, lost])
        _logger.critical(
            "log damaged: acknowledged records cannot be read",
            extra={"directory": str(self.directory), "damage": str(lost)},
        )
        self.roll(now_ms, offset)

    # Flushing

    def flush_begin(self) -> FlushTicket | None:
        """On the loop: what has to be synced for everything appended so far to be durable. One at a time."""
        return self._begin_flush() if self.needs_flush else None

    def flush_done(self, ticket: FlushTicket) -> None:
        """On the loop, once `ticket.run()` has returned."""
        for segment in self._flush.done(ticket, self.epochs):
            self.files.index_loaded(segment, *segment.loaded_indexes)

    def hold_tail(self) -> SharedFile:
        """The file being written, kept open until it is dropped again, on the loop."""
        return self._tail.opened().hold()

    def _begin_flush(self) -> FlushTicket:
        return self._flush.begin(self.directory, self.end, self._tail.opened(), self.epochs)

    # Retention and replacement

    def delete_records_before(self, offset: int) -> None:
        """Move the start of the log; the segments that this leaves behind go with retention."""
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

    def expired_segments(self, now_ms: int, below: int | None = None) -> list[Segment]:
        """What retention lets go of, up to the offset `below` (the high watermark). May read a few bytes."""
        end_offset = self.end.offset
        return retention.expired(
            self._reader.segments,
            self.config,
            self.files,
            now_ms=now_ms,
            start_offset=self.start_offset,
            end_offset=end_offset,
            below=end_offset if below is None else below,
        )

    def remove_segments(self, segments: Sequence[Segment], now_ms: int, *, end_offset: int) -> list[Path]:
        """Take the oldest segments out of the log. Returns files to unlink after `file_delete_delay_ms`.

        `end_offset` is where the log ended when this was decided: the active segment stays if it has grown since.
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
            self._flush.let_go(present)
            for segment in present:
                self.files.rename(segment, DELETED)
                self.files.forget(segment)
        self.epochs.truncate_start(self.start_offset)
        self._forget_damage_before_start()
        bases = [segment.base_offset for segment in present]
        stale = [self.directory / offset_file(base, SNAPSHOT) for base in bases]
        return [*leftovers.existing_files(present), *(path for path in stale if path.exists())]

    def _save_producers_at(self, start_offset: int | None) -> None:
        """What is left of the log will not tell who wrote before; the next flush makes this durable."""
        assert start_offset is not None
        snapshot = self._flush.starts_at(start_offset)
        if snapshot is not None:
            with suppress(OSError):
                snapshot.write(self.directory, synced=False)

    def _removable(self, segments: Sequence[Segment]) -> list[Segment]:
        """Those still there, up to the first that compaction is just about to replace."""
        with self._lock:
            busy, current = self._replacing, self._reader.segments.items
            there = set(current)
            present = [segment for segment in segments if segment in there]
        assert present == current[: len(present)], "only the oldest segments can go"
        return list(takewhile(lambda segment: segment not in busy, present))

    def replace_segments(self, old: Sequence[Segment], new: Sequence[Segment]) -> list[Path]:
        """Put finished segments of a SegmentWriter in the place of old ones. In any thread.

        Returns files to unlink after `file_delete_delay_ms`; until then reads under way may use them.
        Raises SegmentsChanged when an old segment has gone meanwhile; nothing has changed then.
        """
        assert new, "even an empty range keeps a segment"
        with self._rearranging:
            return self._replace_segments(old, new)

    def _replace_segments(self, old: Sequence[Segment], new: Sequence[Segment]) -> list[Path]:
        self._begin_replacing(old)
        try:
            leftovers.commit_swap(new, self.files)
            # A flush would write the old segments' indexes under names that now are the new ones'.
            with self._flush.gate.lock:
                with self._lock:
                    self._reader.use(self._reader.segments.replaced(old, new))
                self._flush.let_go(old)
                unlink = leftovers.finish_swap(old, new, self.files)
        finally:
            self._replacing = ()
        for segment in old:
            self.files.forget(segment)
        return unlink

    def _begin_replacing(self, old: Sequence[Segment]) -> None:
        with self._lock:
            if self.is_closed or not set(self._reader.segments.items).issuperset(old):
                raise SegmentsChanged(f"{self.directory.name}: segments to replace have gone")
            assert self._tail.segment not in old, "the active segment stays"
            self._replacing = tuple(old)

    # Truncation

    def truncate_to(self, offset: int, now_ms: int) -> None:
        """Drop every batch that reaches `offset` or beyond. Blocking, while nothing else appends.

        A log in a store is truncated by `LogStore.truncate`, and then `Cleaner.truncated` must hear of it.
        """
        if offset >= self.end.offset:
            return
        with self._rearranging:
            if offset <= self.segments[0].base_offset:
                self._restart_at(offset, now_ms)
            else:
                self._cut_to(self.position_of(offset), now_ms)

    def truncate_fully_and_start_at(self, offset: int, now_ms: int) -> None:
        """Drop everything; the next batch gets this offset. As for `truncate_to`."""
        with self._rearranging:
            self._restart_at(offset, now_ms)

    def _cut_to(self, target: LogPosition, now_ms: int) -> None:
        self._flush.gate.next_generation()
        self._flush.lower_note(target.offset)
        segments = self._reader.segments
        slot = segments.slot_of(target.segment_base)
        recovery.discard_segments(segments.items[slot + 1 :], self.files)
        self._tail.close()
        # Another segment from here on, so that who still rewrites or reads the old one notices.
        cut = segments.items[slot]
        kept = recovery.shortened(cut, target, self.aborted_index(cut), self.files, self.config)
        self._tail = self._new_tail(kept)
        self._reader.use(SegmentList([*segments.items[:slot], kept]))
        self._after_truncation(target, now_ms)

    def _restart_at(self, offset: int, now_ms: int) -> None:
        self._flush.gate.next_generation()
        self._flush.lower_note(offset)
        self._flush.let_go_of_all()
        self._tail.close()
        recovery.discard_segments(list(self.segments), self.files)
        segment = Segment(self.directory, offset, created_ms=now_ms)
        segment.start_indexing()
        self._tail = self._new_tail(segment, fresh=True)
        self._reader.use(SegmentList([segment]))
        self.start_offset = offset
        self.producers.is_complete = offset == 0
        self.epochs.clear()
        snapshots.remove(self.directory, snapshots.list_offsets(self.directory))
        self._after_truncation(LogPosition(offset, offset, 0), now_ms)

    def _after_truncation(self, end: LogPosition, now_ms: int) -> None:
        self.end = end
        self.start_offset = min(self.start_offset, end.offset)
        self._flush.cut_to(end)
        self.epochs.truncate_end(end.offset)
        snapshots.remove(
            self.directory, (o for o in snapshots.list_offsets(self.directory) if o > end.offset)
        )
        # One that came back after a power cut would tell of a sync that was taken back.
        sync_directory(self.directory)
        if self._all_damages:
            self._set_damages(item for item in self._all_damages if item.start_offset < end.offset)
            damage.save(self.directory, self._all_damages)
        replay.restore_producers(
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
        """Blocking: make everything durable and leave what a clean start needs. Raises OSError."""
        try:
            self._finish()
        finally:
            self._close_files()

    def _finish(self) -> None:
        self._flush.stop()
        self.epochs.dirty = self._flush.names_changed = True
        ticket = self._begin_flush()
        ticket.sync()
        self.flush_done(ticket)
        if not ticket.complete:
            raise OSError(ENOSPC, f"no space to close {self.directory}")
        lookup.write_indexes(self._tail.segment)
        snapshots.take(self.producers, self.end.offset).write(self.directory)

    def abandon(self) -> None:
        """Let go of the files as they are; the next start has to recover."""
        self._flush.stop()
        self._close_files()

    def moved_to(self, directory: Path) -> None:
        """The folder has another name now; reads under way may still open files in it."""
        self.directory = directory
        for segment in self.segments:
            segment.directory = directory

    def _close_files(self) -> None:
        self.is_closed = True
        self._flush.let_go_of_all()
        self._tail.close()
        for segment in self.segments:
            self.files.forget(segment)
