"""Opens a log.

After a clean shutdown nothing is read; after a crash, everything that may not be on disk is checked.

A bad batch is either a torn tail or damage. Only a torn tail is truncated: bytes beyond the last known sync that a
crash can explain. Damage stays on disk (see `damage_file.py` and decision 26).
"""

import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple
from uuid import uuid4

from penstock.log import damage_file, producer_snapshots
from penstock.log import leader_epochs as epoch_files
from penstock.log.checkpoints import CorruptCheckpoint
from penstock.log.config import INT32_MAX, LogConfig
from penstock.log.damage_file import Damage
from penstock.log.data_directory import (
    COMPACTED_MARKER_FILE,
    LEADER_EPOCH_CHECKPOINT_FILE,
    LOG_SUFFIX,
    OFFSET_INDEX_SUFFIX,
    PARTITION_METADATA_FILE,
    TIME_INDEX_SUFFIX,
    TRANSACTION_INDEX_SUFFIX,
    parse_offset_file_name,
)
from penstock.log.index_files import (
    first_timestamp,
    offset_index,
    time_index,
    transaction_index,
    write_indexes,
)
from penstock.log.indexes import CorruptIndex, OffsetIndex, TimeIndex, TransactionIndex
from penstock.log.leader_epochs import LeaderEpochCache
from penstock.log.producer_snapshots import (
    prune_snapshots,
    rebuild_transaction_indexes,
    restore_producer_state,
)
from penstock.log.producer_state import ProducerStateManager
from penstock.log.segment import (
    DamagedRange,
    LogOffsetMetadata,
    LogSegment,
    LogSegments,
    checksum_holds,
    iter_batch_headers,
    skip_damaged_ranges,
)
from penstock.log.segment_files import FilePool, existing_files, finish_interrupted_swap
from penstock.protocol.durable_files import sync_directory, write_synced
from penstock.protocol.record_batch import BatchHeader

_logger = logging.getLogger("penstock.log")


class CorruptLog(Exception):
    """Damage in the synced part of a log, which held acknowledged records: it must not be truncated."""


class LoadedLog(NamedTuple):
    segments: LogSegments
    start_offset: int
    end_offset: int
    producers: ProducerStateManager
    epochs: LeaderEpochCache
    #: Whether segments before the first one are missing, although nothing deleted them.
    lost_first_segments: bool = False
    damages: tuple[Damage, ...] = ()


class CrashEvidence(NamedTuple):
    """What is known about the end of the last run."""

    #: The log was certainly synced up to this offset.
    durable_offset: int = 0
    #: Whether the machine has not restarted since, so that everything written is still there.
    same_boot: bool = False


#: Nothing is known.
NO_CRASH_EVIDENCE: Final = CrashEvidence()


def load_log(
    directory: Path,
    config: LogConfig,
    *,
    files: FilePool,
    clean: bool,
    recovery_point: int,
    start_offset: int,
    now_ms: int,
    producer_expiry_ms: int,
    crash: CrashEvidence,
) -> LoadedLog:
    """Raises OSError if something cannot be read."""
    directory.mkdir(parents=True, exist_ok=True)
    deleted = finish_interrupted_swap(directory)
    listed, orphans = _list_segments(directory, now_ms)
    segments = LogSegments(listed)
    epochs = epoch_files.load(directory / LEADER_EPOCH_CHECKPOINT_FILE)
    # The producer snapshot at a segment's end is written only after the segment has been synced.
    snapshot_offset = max(producer_snapshots.list_snapshot_offsets(directory), default=0)
    crash = crash._replace(durable_offset=max(crash.durable_offset, recovery_point, snapshot_offset))
    if not segments.items:
        _unlink_files(orphans)
        if damage_file.clear_given_up(directory):
            # Offsets that were assigned once are never assigned to other records.
            start_offset = max(start_offset, crash.durable_offset)
        _warn_if_short(directory, start_offset, crash.durable_offset)
        producers = ProducerStateManager(producer_expiry_ms)
        producers.is_complete = start_offset == crash.durable_offset == 0
        return _create_empty_log(directory, start_offset, now_ms, producers, epochs or LeaderEpochCache())
    damages = _known_damage(directory, segments)
    damages = _add_missing_segments(damages, directory, segments, orphans, files, config, start_offset)
    _unlink_files(orphans)
    if epochs is None:
        # Recovery itself finds the epochs of the segments that it checks.
        known = segments.items if clean else segments.items[: segments.slot_of(recovery_point)]
        epochs = _rebuild_leader_epochs(known, files)
    end_offset = _resume_last_segment(segments.last, files, config) if clean else None
    if end_offset is None:
        recovery = _LogRecovery(directory, segments, epochs, files, config, recovery_point, crash, damages)
        end_offset = recovery.run(start_offset)
        segments, damages = recovery.segments, recovery.damages
    _warn_if_short(directory, end_offset, crash.durable_offset)
    producers = ProducerStateManager(producer_expiry_ms)
    if start_offset > end_offset:
        return _restart_at_start_offset(directory, segments, start_offset, now_ms, producers, epochs)
    first = segments.first.base_offset
    lost_first_segments = first > start_offset and not any(base < first for base in deleted)
    found = damage_file.at_offset(damages, start_offset)
    if found is None or found.accepted:
        if lost_first_segments and found is None:
            extra = {"directory": str(directory), "start_offset": start_offset, "first_offset": first}
            _logger.error("log starts later than before: segments are missing", extra=extra)
        start_offset = max(start_offset, first)
    epochs.truncate_end(end_offset)
    epochs.truncate_start(start_offset)
    # The producer state of a replica that is younger than the expiry time cannot have expired.
    is_young = now_ms - _created_ms(directory) < producer_expiry_ms
    producers.is_complete = start_offset == 0 and is_young and not config.cleanup_compact and not damages
    restore_producer_state(producers, directory, segments, files, start_offset, end_offset, now_ms)
    prune_snapshots(directory, segments, end_offset)
    kept = tuple(item for item in damages if item.end_offset > start_offset)
    return LoadedLog(segments, start_offset, end_offset, producers, epochs, lost_first_segments, kept)


def _created_ms(directory: Path) -> int:
    """Returns when this replica was created; 0 if unknown."""
    try:
        return os.stat(directory / PARTITION_METADATA_FILE).st_mtime_ns // 1_000_000
    except FileNotFoundError:
        return 0


def resume_indexing(segment: LogSegment, files: FilePool, config: LogConfig, end: int) -> int | None:
    """Resumes a segment for writing where its indexes end; returns None if the batches do not reach `end`.

    Raises CorruptIndex for its transaction index.
    """
    offsets, times = offset_index(segment, files), time_index(segment, files)
    aborted = transaction_index(segment, files) if segment.has_aborted else None
    files.keep_index(segment)
    segment.offsets, segment.times, segment.aborted = offsets, times, aborted
    segment.size = offsets.positions[-1] if len(offsets) else 0
    timestamp, relative = times.last_entry()
    segment.max_timestamp, segment.max_timestamp_offset = timestamp, segment.base_offset + relative
    segment.bytes_since_entry = 0
    end_offset = segment.base_offset
    indexed_offset = end_offset + offsets.offsets[-1] if len(offsets) else None
    file = files.pin(segment)
    try:
        for position, header in iter_batch_headers(
            file.fd, segment.size, end, damaged_ranges=segment.damaged_ranges
        ):
            if header.base_offset < end_offset or indexed_offset not in (None, header.last_offset):
                return None
            indexed_offset = None
            segment.size = position
            segment.note(header.last_offset, header.max_timestamp, header.size, config)
            end_offset = header.last_offset + 1
    finally:
        files.unpin(file)
    segment.size = skip_damaged_ranges(segment.size, segment.damaged_ranges)
    first_timestamp(segment, files)
    return _end_after_damage(segment, end_offset) if segment.size == end else None


def _end_after_damage(segment: LogSegment, offset: int) -> int:
    """Offsets in a damaged range at the end of a segment were assigned, too."""
    return max(
        [
            offset,
            *(
                damaged_range.end_offset
                for damaged_range in segment.damaged_ranges
                if damaged_range.end <= segment.size
            ),
        ]
    )


def discard_segments(segments: list[LogSegment], files: FilePool) -> None:
    """Unlinks segments at once and durably, the last first, so that a crash in between leaves a log without a gap."""
    for segment in reversed(segments):
        files.forget(segment)
        for path in reversed(existing_files([segment])):
            path.unlink(missing_ok=True)
    if segments:
        sync_directory(segments[0].directory)


def _list_segments(directory: Path, now_ms: int) -> tuple[list[LogSegment], dict[Path, int]]:
    """Returns the segments in order, and the index files without a log file by the base offset in their names."""
    found: dict[int, LogSegment] = {}
    companions: list[tuple[int, Path]] = []
    with os.scandir(directory) as entries:
        for entry in entries:
            parsed = parse_offset_file_name(entry.name)
            if parsed is None or parsed[2]:
                continue
            if parsed[1] == LOG_SUFFIX:
                size = entry.stat().st_size
                found[parsed[0]] = LogSegment(directory, parsed[0], size=size, created_ms=now_ms)
            elif parsed[1] in (OFFSET_INDEX_SUFFIX, TIME_INDEX_SUFFIX, TRANSACTION_INDEX_SUFFIX):
                companions.append((parsed[0], Path(entry.path)))
    orphans: dict[Path, int] = {}
    for base_offset, path in companions:
        if base_offset not in found:
            orphans[path] = base_offset
        elif path.suffix == TRANSACTION_INDEX_SUFFIX:
            found[base_offset].has_aborted = path.stat().st_size > 0
    return [found[base_offset] for base_offset in sorted(found)], orphans


def _unlink_files(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink()


def _create_empty_log(
    directory: Path, offset: int, now_ms: int, producers: ProducerStateManager, epochs: LeaderEpochCache
) -> LoadedLog:
    segment = LogSegment(directory, offset, created_ms=now_ms)
    segment.start_indexing()
    with open(segment.path, "wb"):
        pass
    sync_directory(directory)
    producer_snapshots.remove_snapshots(directory, producer_snapshots.list_snapshot_offsets(directory))
    epochs.clear()
    return LoadedLog(LogSegments([segment]), offset, offset, producers, epochs)


def _restart_at_start_offset(
    directory: Path,
    segments: LogSegments,
    start_offset: int,
    now_ms: int,
    producers: ProducerStateManager,
    epochs: LeaderEpochCache,
) -> LoadedLog:
    """Everything that is left is below the log start offset."""
    _logger.warning(
        "log restarted at its start offset", extra={"directory": str(directory), "offset": start_offset}
    )
    producers.is_complete = False
    for segment in reversed(segments.items):
        for path in existing_files([segment]):
            path.unlink()
    return _create_empty_log(directory, start_offset, now_ms, producers, epochs)


def _resume_last_segment(segment: LogSegment, files: FilePool, config: LogConfig) -> int | None:
    end = segment.size
    try:
        end_offset = resume_indexing(segment, files, config, end)
    except CorruptIndex:
        end_offset = None
    if end_offset is None:
        # The index may be wrong; recovery reads only the log.
        segment.size = end
        _logger.warning("clean log is inconsistent; recovering it", extra={"file": str(segment.path)})
    return end_offset


def _warn_if_short(directory: Path, end_offset: int, recovery_point: int) -> None:
    """Files are missing that were once on disk. There is nothing left to refuse, so it only logs a warning."""
    if end_offset < recovery_point:
        extra = {"directory": str(directory), "end": end_offset, "recovery_point": recovery_point}
        _logger.warning("log ends below its recovery point", extra=extra)


def _known_damage(directory: Path, segments: LogSegments) -> list[Damage]:
    """Returns the damage that earlier starts found, and sets the byte ranges that the segments skip."""
    try:
        known = damage_file.load(directory)
    except CorruptCheckpoint as error:
        _logger.error("damage list discarded", extra={"directory": str(directory), "reason": str(error)})
        return []
    for segment in segments:
        segment.damaged_ranges = tuple(
            damaged_range
            for damaged_range in damage_file.ranges_in_segment(known, segment.base_offset)
            if damaged_range.end <= segment.size
        )
    return known


def _add_missing_segments(
    known: list[Damage],
    directory: Path,
    segments: LogSegments,
    orphans: dict[Path, int],
    files: FilePool,
    config: LogConfig,
    start_offset: int,
) -> list[Damage]:
    """Adds segments that are missing before or between others to the known damage.

    Whatever removes a segment removes its indexes first, or renames all its files. So an index file without its log
    file shows that the log file was lost. In a log that was never compacted, a producer snapshot at an offset that no
    segment reaches shows that all files of a segment were lost.
    """
    bases = segments.bases
    is_compacted = _is_compacted(directory, config)
    traces = {base for base in orphans.values() if start_offset <= base < bases[-1]}
    if not is_compacted:
        traces |= {
            offset
            for offset in producer_snapshots.list_snapshot_offsets(directory)
            if bases[0] < offset < bases[-1]
        }
    found: dict[int, Damage] = {}
    for offset in sorted(traces.difference(bases)):
        if offset < bases[0]:
            found[start_offset] = Damage(start_offset, bases[0])
            continue
        before = segments.holding(offset)
        assert before.next_base is not None
        end_offset = _end_offset_up_to(before, offset, files)
        if end_offset is not None and before.next_base > start_offset:
            first = offset if is_compacted else end_offset
            found.setdefault(before.next_base, Damage(first, before.next_base))
    new = [item for item in found.values() if damage_file.at_offset(known, item.start_offset) is None]
    if not new:
        return known
    damage_file.save(directory, damages := sorted([*known, *new]))
    for item in new:
        _logger.critical(
            "log damaged: acknowledged records cannot be read",
            extra={"directory": str(directory), "damage": str(item)},
        )
    return damages


def _is_compacted(directory: Path, config: LogConfig) -> bool:
    """Whether offsets may be missing without any loss."""
    return config.cleanup_compact or (directory / COMPACTED_MARKER_FILE).exists()


def _end_offset_up_to(segment: LogSegment, offset: int, files: FilePool) -> int | None:
    """Returns where a closed segment ends, if that is at or before an offset; None if it ends later, or is damaged."""
    index = offset_index(segment, files)
    if len(index) and segment.base_offset + index.offsets[-1] >= offset:
        return None
    position, end_offset = index.positions[-1] if len(index) else 0, segment.base_offset
    file = files.pin(segment)
    try:
        for at, header in iter_batch_headers(
            file.fd, position, segment.size, damaged_ranges=segment.damaged_ranges
        ):
            position, end_offset = at + header.size, header.last_offset + 1
    finally:
        files.unpin(file)
    is_whole = skip_damaged_ranges(position, segment.damaged_ranges) >= segment.size
    end_offset = _end_after_damage(segment, end_offset)
    return end_offset if is_whole and end_offset <= offset else None


class _LogRecovery:
    """Checks every batch from the recovery point's segment on, and distinguishes a torn tail from damage."""

    def __init__(
        self,
        directory: Path,
        segments: LogSegments,
        epochs: LeaderEpochCache,
        files: FilePool,
        config: LogConfig,
        recovery_point: int,
        crash: CrashEvidence,
        damages: list[Damage],
    ) -> None:
        self.segments = segments
        self.damages = damages
        self._directory = directory
        self._epochs = epochs
        self._files = files
        self._config = config
        self._recovery_point = recovery_point
        self._crash = crash
        self._is_compacted = _is_compacted(directory, config)
        self._found: list[Damage] = []
        self._last_epoch = -1
        self._marked: list[LogSegment] = []  # may contain transaction markers

    def run(self, start_offset: int) -> int:
        """Returns the end of the log. Raises OSError."""
        items = self.segments.items
        first = self.segments.slot_of(self._recovery_point)
        if first > 0 and items[first].base_offset == self._recovery_point:
            # The segment before it was rolled there. Its index files may be from an earlier clean shutdown, or missing.
            first -= 1
        expected = items[first].base_offset
        for slot in range(first, len(items)):
            expected, is_whole = self._check(slot, max(expected, items[slot].base_offset))
            if not is_whole:
                self.segments = LogSegments(items[: slot + 1])
                break
        if self._marked:
            rebuild_transaction_indexes(self.segments, self.segments.items[first:], self._files, start_offset)
        _make_durable(self.segments.items[first:])
        if self._found:
            self.damages = sorted([*self.damages, *self._found])
            damage_file.save(self._directory, self.damages)
        return expected

    def _check(self, slot: int, expected: int) -> tuple[int, bool]:
        """Rebuilds the index of a segment. Returns its end offset, and False if a torn tail was truncated."""
        segment = self.segments.items[slot]
        file_bytes = segment.size
        self._files.keep_index(segment)
        segment.start_indexing()
        file = self._files.pin(segment)
        position = 0
        try:
            while True:
                expected, position = self._index(file.fd, segment, position, file_bytes, expected)
                if position >= file_bytes:
                    self._note_cut_short(segment, expected)
                    return expected, True
                found = damage_file.find_next_batch(
                    file.fd,
                    position,
                    file_bytes,
                    base_offset=segment.base_offset,
                    expected=expected,
                    next_base=segment.next_base,
                )
                has_more = found is not None or any(item.size for item in self.segments.items[slot + 1 :])
                if not self._is_damage(expected, has_more):
                    break
                position, expected = self._pass_over(segment, position, found, file_bytes, expected)
        finally:
            self._files.unpin(file)
        self._cut(slot, position, file_bytes, expected, keep=has_more)
        return expected, False

    def _note_cut_short(self, segment: LogSegment, expected: int) -> None:
        """A closed segment that ends at a batch boundary, but before offsets in its own indexes, has lost its end."""
        following = segment.next_base
        if following is None or expected >= following or not self._is_damage(expected, has_more=True):
            return
        if damage_file.at_offset(self.damages, expected) is None and _indexed_end(segment) > expected:
            self._add(Damage(expected, following), segment)

    def _add(self, item: Damage, segment: LogSegment) -> None:
        self._found.append(item)
        _logger.critical(
            "log damaged: acknowledged records cannot be read",
            extra={"file": str(segment.path), "damage": str(item)},
        )

    def _index(self, fd: int, segment: LogSegment, position: int, end: int, expected: int) -> tuple[int, int]:
        """Indexes up to the first invalid batch. Returns the offset and the position there."""
        segment.size = position
        for at, header in iter_batch_headers(fd, position, end, damaged_ranges=segment.damaged_ranges):
            if not self._holds(fd, at, end, header, segment, expected):
                return expected, at
            if header.leader_epoch > self._epochs.latest:
                self._epochs.assign(header.leader_epoch, header.base_offset)
            segment.size = at
            segment.note(header.last_offset, header.max_timestamp, header.size, self._config)
            expected, self._last_epoch = header.last_offset + 1, header.leader_epoch
            if header.is_control and segment not in self._marked:
                self._marked.append(segment)
        segment.size = skip_damaged_ranges(segment.size, segment.damaged_ranges)
        return _end_after_damage(segment, expected), segment.size

    def _holds(
        self, fd: int, position: int, end: int, header: BatchHeader, segment: LogSegment, expected: int
    ) -> bool:
        if (
            header.base_offset < expected
            or header.last_offset_delta < 0
            or not segment.can_hold(header.last_offset)
        ):
            return False
        if header.last_offset >= self._recovery_point and not checksum_holds(fd, position, header):
            return False
        if header.base_offset == expected and header.leader_epoch == self._last_epoch:
            return True
        return self._is_believable(fd, position + header.size, end, header, segment, expected)

    def _is_believable(
        self, fd: int, next_position: int, end: int, header: BatchHeader, segment: LogSegment, expected: int
    ) -> bool:
        """Whether offset and leader epoch, which the checksum does not cover, fit the batch that follows.

        A batch may follow a gap that compaction left, and may start an epoch. The next batch shows whether it did.
        """
        skips = header.base_offset != expected
        if skips and not self._is_compacted and expected < self._crash.durable_offset <= header.last_offset:
            return False  # a sync ended inside the gap or this batch, but syncs end at the end of a batch
        if segment.next_base is not None and header.last_offset >= segment.next_base:
            return False
        following = self._batch_after(fd, next_position, end, segment, expected)
        if following is None:
            return True
        # A batch that starts where the last one ended has the right offset, whatever the next one says.
        fits = not skips or following.base_offset > header.last_offset
        return fits and not self._last_epoch <= following.leader_epoch < header.leader_epoch

    def _batch_after(
        self, fd: int, position: int, end: int, segment: LogSegment, expected: int
    ) -> BatchHeader | None:
        """Returns the header of the batch there, or, at the end of the segment, of the first batch in the next one."""
        if position < end or segment.next_base is None:
            return damage_file.batch_at(fd, position, end, segment.base_offset, expected)
        following = self.segments.items[self.segments.slot_of(segment.next_base)]
        base = following.base_offset
        file = self._files.pin(following)
        try:
            return damage_file.batch_at(file.fd, 0, following.size, base, base)
        finally:
            self._files.unpin(file)

    def _is_damage(self, expected: int, has_more: bool) -> bool:
        """Whether a bad batch is damage, not a torn tail.

        A crash leaves no bad batch below the synced offset. Beyond it, a killed process can leave only its last write
        unfinished; a machine that goes down can leave any write since the sync unfinished.
        """
        return expected < self._crash.durable_offset or (self._crash.same_boot and has_more)

    def _pass_over(
        self,
        segment: LogSegment,
        position: int,
        found: tuple[int, BatchHeader] | None,
        file_bytes: int,
        expected: int,
    ) -> tuple[int, int]:
        """Records the damage. Returns the position and the offset after it."""
        if found is not None:
            end_position, end_offset = found[0], found[1].base_offset
        else:
            end_position, end_offset = file_bytes, max(expected, self._crash.durable_offset)
            if segment.next_base is not None:
                end_offset = max(expected, segment.next_base)
        self._add(Damage(expected, end_offset, segment.base_offset, position, end_position), segment)
        segment.damaged_ranges = tuple(
            sorted([*segment.damaged_ranges, DamagedRange(position, end_position, expected, end_offset)])
        )
        return end_position, end_offset

    def _cut(self, slot: int, position: int, file_bytes: int, end_offset: int, *, keep: bool) -> None:
        """Truncates what was never acknowledged under flush policy `ack`. Keeps copies of batches that look whole."""
        segment, dropped = self.segments.items[slot], self.segments.items[slot + 1 :]
        segment.size = position
        kept_as = self._keep_aside(segment, dropped) if keep else None
        extra = {
            "file": str(segment.path),
            "bytes_cut": file_bytes - position,
            "segments_dropped": [item.path.name for item in dropped],
            "end_offset": end_offset,
        }
        _logger.warning("torn tail cut", extra=extra if kept_as is None else {**extra, "kept_as": kept_as})
        discard_segments(dropped, self._files)
        os.truncate(segment.path, position)

    def _keep_aside(self, segment: LogSegment, dropped: list[LogSegment]) -> str:
        """Copies what is about to be truncated, for an operator to inspect and remove."""
        suffix = f".{uuid4().hex[:8]}-cut"
        with open(segment.path, "rb") as file:
            file.seek(segment.size)
            write_synced(segment.path.with_name(segment.path.name + suffix), file.read())
        for item in dropped:
            os.link(item.path, item.path.with_name(item.path.name + suffix))
        sync_directory(self._directory)
        return f"*{suffix}"


def _indexed_end(segment: LogSegment) -> int:
    """Returns the offset after the last one in the index files of a closed segment; its base offset if there is
    none."""
    index_path, time_path = segment.index_files
    try:
        offsets = OffsetIndex.decode(index_path.read_bytes(), INT32_MAX).offsets
        times = TimeIndex.decode(time_path.read_bytes())
    except (FileNotFoundError, CorruptIndex):
        return segment.base_offset
    last_time = times.last_entry()[1] if len(times) else -1
    return segment.base_offset + max([last_time, *offsets[-1:]]) + 1


def _make_durable(segments: list[LogSegment]) -> None:
    """Recovered data may be only in the page cache; from here on it counts as synced."""
    for segment in segments:
        fd = os.open(segment.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.fdatasync(fd)
        finally:
            os.close(fd)
        if segment is not segments[-1]:
            write_indexes(segment)
    sync_directory(segments[0].directory)


def _rebuild_leader_epochs(segments: list[LogSegment], files: FilePool) -> LeaderEpochCache:
    epochs = LeaderEpochCache()
    end_offset = 0
    for segment in segments:
        file = files.pin(segment)
        try:
            for _, header in iter_batch_headers(
                file.fd, 0, segment.size, damaged_ranges=segment.damaged_ranges
            ):
                if header.leader_epoch > epochs.latest and header.base_offset >= end_offset:
                    epochs.assign(header.leader_epoch, header.base_offset)
                end_offset = header.last_offset + 1
        finally:
            files.unpin(file)
    return epochs


def truncate_segment(
    segment: LogSegment, end: LogOffsetMetadata, aborted: TransactionIndex, files: FilePool, config: LogConfig
) -> LogSegment:
    """Truncates the file durably, keeps the index entries of the rest, and finds its end."""
    offsets, times = offset_index(segment, files), time_index(segment, files)
    files.forget(segment)
    fd = os.open(segment.path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.ftruncate(fd, end.position)
        os.fdatasync(fd)
    finally:
        os.close(fd)
    offsets.truncate(end.position)
    times.truncate(max(end.offset - segment.base_offset, 0))
    aborted.truncate(end.offset)
    kept = LogSegment(segment.directory, segment.base_offset, created_ms=segment.created_ms)
    kept.offsets, kept.times, kept.aborted = offsets, times, aborted
    kept.has_aborted = len(aborted) > 0
    kept.damaged_ranges = tuple(
        damaged_range for damaged_range in segment.damaged_ranges if damaged_range.end <= end.position
    )
    reached = resume_indexing(kept, files, config, end.position)
    assert reached is not None, (segment, end)
    return kept
