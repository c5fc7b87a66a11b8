"""Opening a log: nothing is read after a clean end; after any other, what may not be on disk is checked.

A bad batch is a torn tail or damage. Only a torn tail is cut: what lies beyond the last sync that is known of, and can
be explained by a crash. Damage stays on disk (see `damage.py` and decision 26).
"""

import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple
from uuid import uuid4

from penstock.log import damage, snapshots
from penstock.log import epochs as epoch_files
from penstock.log.aborted import AbortedIndex
from penstock.log.checkpoints import DamagedCheckpoint, sync_directory, write_synced
from penstock.log.config import INT32_MAX, LogConfig
from penstock.log.damage import Damage
from penstock.log.epochs import EpochCache
from penstock.log.files import FilePool
from penstock.log.index import DamagedIndex, OffsetIndex, TimeIndex
from penstock.log.leftovers import existing_files, finish_interrupted_work
from penstock.log.lookup import (
    aborted_index,
    first_timestamp,
    offset_index,
    time_index,
    write_indexes,
)
from penstock.log.names import (
    COMPACTED,
    EPOCH_CHECKPOINT,
    INDEX,
    LOG,
    PARTITION_METADATA,
    TIME_INDEX,
    TRANSACTION_INDEX,
    parse_offset_file,
)
from penstock.log.positions import LogPosition
from penstock.log.producers import Producers
from penstock.log.replay import prune_snapshots, reindex_aborted, restore_producers
from penstock.log.segment import Segment
from penstock.log.segments import SegmentList
from penstock.log.walk import Hole, checksum_holds, past_holes, walk
from penstock.protocol.records import BatchHeader

_logger = logging.getLogger("penstock.log")


class CorruptLog(Exception):
    """Damage in the part of a log that was synced: not ours to cut, as it held acknowledged records."""


class Loaded(NamedTuple):
    segments: SegmentList
    start_offset: int
    end_offset: int
    producers: Producers
    epochs: EpochCache
    #: Segments from before its first one have gone, and nobody has deleted them.
    is_beheaded: bool = False
    damages: tuple[Damage, ...] = ()


class Crash(NamedTuple):
    """What is known of how the last run ended."""

    #: Up to here the log was synced for sure.
    durable_offset: int = 0
    #: The machine has not been restarted since, so whatever was written is still there.
    same_boot: bool = False


#: Nothing is known.
UNKNOWN_CRASH: Final = Crash()


def load(
    directory: Path,
    config: LogConfig,
    *,
    files: FilePool,
    clean: bool,
    recovery_point: int,
    start_offset: int,
    now_ms: int,
    producer_expiry_ms: int,
    crash: Crash,
) -> Loaded:
    """Raises OSError for what cannot be read."""
    directory.mkdir(parents=True, exist_ok=True)
    deleted = finish_interrupted_work(directory)
    listed, orphans = _list_segments(directory, now_ms)
    segments = SegmentList(listed)
    epochs = epoch_files.load(directory / EPOCH_CHECKPOINT)
    crash = crash._replace(durable_offset=max(crash.durable_offset, recovery_point, _rolled_at(directory)))
    if not segments.items:
        _unlink(orphans)
        if damage.take_given_up(directory):
            # Offsets that were given out once stay with the records that had them.
            start_offset = max(start_offset, crash.durable_offset)
        _warn_if_short(directory, start_offset, crash.durable_offset)
        producers = Producers(producer_expiry_ms)
        producers.is_complete = start_offset == crash.durable_offset == 0
        return _start_at(directory, start_offset, now_ms, producers, epochs or EpochCache())
    damages = _known_damage(directory, segments)
    damages = _with_gone(damages, directory, segments, orphans, files, config, start_offset)
    _unlink(orphans)
    if epochs is None:
        # Of what recovery checks, it learns the epochs itself.
        known = segments.items if clean else segments.items[: segments.slot_of(recovery_point)]
        epochs = _rebuilt_epochs(known, files)
    end_offset = _resume(segments.last, files, config) if clean else None
    if end_offset is None:
        recovery = _Recovery(directory, segments, epochs, files, config, recovery_point, crash, damages)
        end_offset = recovery.run(start_offset)
        segments, damages = recovery.segments, recovery.damages
    _warn_if_short(directory, end_offset, crash.durable_offset)
    producers = Producers(producer_expiry_ms)
    if start_offset > end_offset:
        return _restart_beyond_end(directory, segments, start_offset, now_ms, producers, epochs)
    first = segments.first.base_offset
    is_beheaded = first > start_offset and not any(base < first for base in deleted)
    found = damage.at_offset(damages, start_offset)
    if found is None or found.accepted:
        if is_beheaded and found is None:
            extra = {"directory": str(directory), "start_offset": start_offset, "first_offset": first}
            _logger.error("log begins later than it did: segments have gone", extra=extra)
        start_offset = max(start_offset, first)
    epochs.truncate_end(end_offset)
    epochs.truncate_start(start_offset)
    # What a replica has learned since it was made cannot have expired before it is as old as that takes.
    is_young = now_ms - _made_ms(directory) < producer_expiry_ms
    producers.is_complete = start_offset == 0 and is_young and not config.cleanup_compact and not damages
    restore_producers(producers, directory, segments, files, start_offset, end_offset, now_ms)
    prune_snapshots(directory, segments, end_offset)
    kept = tuple(item for item in damages if item.end_offset > start_offset)
    return Loaded(segments, start_offset, end_offset, producers, epochs, is_beheaded, kept)


def _made_ms(directory: Path) -> int:
    """When this replica was made; long ago where nothing tells."""
    try:
        return os.stat(directory / PARTITION_METADATA).st_mtime_ns // 1_000_000
    except FileNotFoundError:
        return 0


def resume_indexing(segment: Segment, files: FilePool, config: LogConfig, end: int) -> int | None:
    """Take up a segment for writing where its indexes leave off; None when the batches do not reach `end`.

    Raises DamagedIndex for its transactions.
    """
    offsets, times = offset_index(segment, files), time_index(segment, files)
    aborted = aborted_index(segment, files) if segment.has_aborted else None
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
        for position, header in walk(file.fd, segment.size, end, holes=segment.holes):
            if header.base_offset < end_offset or indexed_offset not in (None, header.last_offset):
                return None
            indexed_offset = None
            segment.size = position
            segment.note(header.last_offset, header.max_timestamp, header.size, config)
            end_offset = header.last_offset + 1
    finally:
        files.unpin(file)
    segment.size = past_holes(segment.size, segment.holes)
    first_timestamp(segment, files)
    return _past_lost_offsets(segment, end_offset) if segment.size == end else None


def _past_lost_offsets(segment: Segment, offset: int) -> int:
    """The offsets of a hole at the end of a segment were given out, too."""
    return max([offset, *(hole.end_offset for hole in segment.holes if hole.end <= segment.size)])


def discard_segments(segments: list[Segment], files: FilePool) -> None:
    """Unlink at once and durably, the last first, so that a crash on the way leaves a log without a hole."""
    for segment in reversed(segments):
        files.forget(segment)
        for path in reversed(existing_files([segment])):
            path.unlink(missing_ok=True)
    if segments:
        sync_directory(segments[0].directory)


def _list_segments(directory: Path, now_ms: int) -> tuple[list[Segment], dict[Path, int]]:
    """In order; and index files without a log, by the base offset in their names."""
    found: dict[int, Segment] = {}
    companions: list[tuple[int, Path]] = []
    with os.scandir(directory) as entries:
        for entry in entries:
            parsed = parse_offset_file(entry.name)
            if parsed is None or parsed[2]:
                continue
            if parsed[1] == LOG:
                size = entry.stat().st_size
                found[parsed[0]] = Segment(directory, parsed[0], size=size, created_ms=now_ms)
            elif parsed[1] in (INDEX, TIME_INDEX, TRANSACTION_INDEX):
                companions.append((parsed[0], Path(entry.path)))
    orphans: dict[Path, int] = {}
    for base_offset, path in companions:
        if base_offset not in found:
            orphans[path] = base_offset
        elif path.suffix == TRANSACTION_INDEX:
            found[base_offset].has_aborted = path.stat().st_size > 0
    return [found[base_offset] for base_offset in sorted(found)], orphans


def _unlink(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink()


def _start_at(directory: Path, offset: int, now_ms: int, producers: Producers, epochs: EpochCache) -> Loaded:
    segment = Segment(directory, offset, created_ms=now_ms)
    segment.start_indexing()
    with open(segment.path, "wb"):
        pass
    sync_directory(directory)
    snapshots.remove(directory, snapshots.list_offsets(directory))
    epochs.clear()
    return Loaded(SegmentList([segment]), offset, offset, producers, epochs)


def _restart_beyond_end(
    directory: Path,
    segments: SegmentList,
    start_offset: int,
    now_ms: int,
    producers: Producers,
    epochs: EpochCache,
) -> Loaded:
    """Everything that is left lies below the start of the log."""
    _logger.warning(
        "log restarted at its start offset", extra={"directory": str(directory), "offset": start_offset}
    )
    producers.is_complete = False
    for segment in reversed(segments.items):
        for path in existing_files([segment]):
            path.unlink()
    return _start_at(directory, start_offset, now_ms, producers, epochs)


def _resume(segment: Segment, files: FilePool, config: LogConfig) -> int | None:
    end = segment.size
    try:
        end_offset = resume_indexing(segment, files, config, end)
    except DamagedIndex:
        end_offset = None
    if end_offset is None:
        # The index may be what is wrong; recovery reads the log alone and knows.
        segment.size = end
        _logger.warning("clean log does not add up, recovering", extra={"file": str(segment.path)})
    return end_offset


def _warn_if_short(directory: Path, end_offset: int, recovery_point: int) -> None:
    """Files have gone that were on disk once. There is nothing left to refuse, but somebody should know."""
    if end_offset < recovery_point:
        extra = {"directory": str(directory), "end": end_offset, "recovery_point": recovery_point}
        _logger.warning("log ends below its recovery point", extra=extra)


def _rolled_at(directory: Path) -> int:
    """A segment's end is written down with its producers only after the segment was synced."""
    return max(snapshots.list_offsets(directory), default=0)


def _known_damage(directory: Path, segments: SegmentList) -> list[Damage]:
    """What earlier starts have found; the segments learn what to pass over."""
    try:
        known = damage.load(directory)
    except DamagedCheckpoint as error:
        _logger.error("list of damage dropped", extra={"directory": str(directory), "reason": str(error)})
        return []
    for segment in segments:
        segment.holes = tuple(
            hole for hole in damage.holes_of(known, segment.base_offset) if hole.end <= segment.size
        )
    return known


def _with_gone(
    known: list[Damage],
    directory: Path,
    segments: SegmentList,
    orphans: dict[Path, int],
    files: FilePool,
    config: LogConfig,
    start_offset: int,
) -> list[Damage]:
    """The known damage, and segments that have gone from before or between others: what was in them is damage too.

    Whatever takes a segment away takes its indexes first, or names all its files anew; so an index that is left alone
    tells of a log file that has gone. In a log that was never compacted, producers saved at an offset that no
    segment reaches tell of one whose files have all gone.
    """
    bases = segments.bases
    is_compacted = _is_compacted(directory, config)
    traces = {base for base in orphans.values() if start_offset <= base < bases[-1]}
    if not is_compacted:
        traces |= {offset for offset in snapshots.list_offsets(directory) if bases[0] < offset < bases[-1]}
    found: dict[int, Damage] = {}
    for offset in sorted(traces.difference(bases)):
        if offset < bases[0]:
            found[start_offset] = Damage(start_offset, bases[0])
            continue
        before = segments.holding(offset)
        assert before.next_base is not None
        end_offset = _reached(before, offset, files)
        if end_offset is not None and before.next_base > start_offset:
            first = offset if is_compacted else end_offset
            found.setdefault(before.next_base, Damage(first, before.next_base))
    new = [item for item in found.values() if damage.at_offset(known, item.start_offset) is None]
    if not new:
        return known
    damage.save(directory, damages := sorted([*known, *new]))
    for item in new:
        _logger.critical(
            "log damaged: acknowledged records cannot be read",
            extra={"directory": str(directory), "damage": str(item)},
        )
    return damages


def _is_compacted(directory: Path, config: LogConfig) -> bool:
    """Whether offsets may be missing that nothing has lost."""
    return config.cleanup_compact or (directory / COMPACTED).exists()


def _reached(segment: Segment, offset: int, files: FilePool) -> int | None:
    """Where a closed segment ends, if it ends at or before an offset; None where it reaches further, or is damaged."""
    index = offset_index(segment, files)
    if len(index) and segment.base_offset + index.offsets[-1] >= offset:
        return None
    position, end_offset = index.positions[-1] if len(index) else 0, segment.base_offset
    file = files.pin(segment)
    try:
        for at, header in walk(file.fd, position, segment.size, holes=segment.holes):
            position, end_offset = at + header.size, header.last_offset + 1
    finally:
        files.unpin(file)
    is_whole = past_holes(position, segment.holes) >= segment.size
    end_offset = _past_lost_offsets(segment, end_offset)
    return end_offset if is_whole and end_offset <= offset else None


class _Recovery:
    """Checks every batch from the recovery point's segment on, and tells a torn tail from damage."""

    def __init__(
        self,
        directory: Path,
        segments: SegmentList,
        epochs: EpochCache,
        files: FilePool,
        config: LogConfig,
        recovery_point: int,
        crash: Crash,
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
        self._marked: list[Segment] = []  # may hold markers of transactions

    def run(self, start_offset: int) -> int:
        """Returns the end of the log. Raises OSError."""
        items = self.segments.items
        first = self.segments.slot_of(self._recovery_point)
        if first > 0 and items[first].base_offset == self._recovery_point:
            # The one before was rolled right there. Its index files may be of an earlier clean stop, or missing.
            first -= 1
        expected = items[first].base_offset
        for slot in range(first, len(items)):
            expected, is_whole = self._check(slot, max(expected, items[slot].base_offset))
            if not is_whole:
                self.segments = SegmentList(items[: slot + 1])
                break
        if self._marked:
            reindex_aborted(self.segments, self.segments.items[first:], self._files, start_offset)
        _make_durable(self.segments.items[first:])
        if self._found:
            self.damages = sorted([*self.damages, *self._found])
            damage.save(self._directory, self.damages)
        return expected

    def _check(self, slot: int, expected: int) -> tuple[int, bool]:
        """Index a segment again. Returns the offset at its end, and False where a torn tail was cut from it."""
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
                found = damage.next_batch(
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

    def _note_cut_short(self, segment: Segment, expected: int) -> None:
        """A closed segment that ends between two batches, and before what its own indexes tell of, has lost its end."""
        following = segment.next_base
        if following is None or expected >= following or not self._is_damage(expected, has_more=True):
            return
        if damage.at_offset(self.damages, expected) is None and _indexed_end(segment) > expected:
            self._add(Damage(expected, following), segment)

    def _add(self, item: Damage, segment: Segment) -> None:
        self._found.append(item)
        _logger.critical(
            "log damaged: acknowledged records cannot be read",
            extra={"file": str(segment.path), "damage": str(item)},
        )

    def _index(self, fd: int, segment: Segment, position: int, end: int, expected: int) -> tuple[int, int]:
        """Up to the first batch that does not hold. Returns the offset and the position there."""
        segment.size = position
        for at, header in walk(fd, position, end, holes=segment.holes):
            if not self._holds(fd, at, end, header, segment, expected):
                return expected, at
            if header.leader_epoch > self._epochs.latest:
                self._epochs.assign(header.leader_epoch, header.base_offset)
            segment.size = at
            segment.note(header.last_offset, header.max_timestamp, header.size, self._config)
            expected, self._last_epoch = header.last_offset + 1, header.leader_epoch
            if header.is_control and segment not in self._marked:
                self._marked.append(segment)
        segment.size = past_holes(segment.size, segment.holes)
        return _past_lost_offsets(segment, expected), segment.size

    def _holds(
        self, fd: int, position: int, end: int, header: BatchHeader, segment: Segment, expected: int
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
        self, fd: int, next_position: int, end: int, header: BatchHeader, segment: Segment, expected: int
    ) -> bool:
        """Whether offset and leader epoch, which the checksum does not cover, fit what follows.

        A batch may leave a gap before it, where compaction has been, and may begin an epoch. The next one shows
        whether it did.
        """
        skips = header.base_offset != expected
        if skips and not self._is_compacted and expected < self._crash.durable_offset <= header.last_offset:
            return False  # a sync ended within what is skipped, where no batch ends
        if segment.next_base is not None and header.last_offset >= segment.next_base:
            return False
        following = damage.batch_at(fd, next_position, end, segment.base_offset, expected)
        if following is None:
            return True
        # One that goes on where the last one ended has the right offset, whatever the next one says.
        fits = not skips or following.base_offset > header.last_offset
        return fits and not self._last_epoch <= following.leader_epoch < header.leader_epoch

    def _is_damage(self, expected: int, has_more: bool) -> bool:
        """A crash leaves nothing bad below what was synced. Beyond that, a process that is killed can leave only its
        last write unfinished; a machine that goes down can leave any of the writes since the sync."""
        return expected < self._crash.durable_offset or (self._crash.same_boot and has_more)

    def _pass_over(
        self,
        segment: Segment,
        position: int,
        found: tuple[int, BatchHeader] | None,
        file_bytes: int,
        expected: int,
    ) -> tuple[int, int]:
        """Note the damage. Returns the position and the offset after it."""
        if found is not None:
            end_position, end_offset = found[0], found[1].base_offset
        else:
            end_position, end_offset = file_bytes, max(expected, self._crash.durable_offset)
            if segment.next_base is not None:
                end_offset = max(expected, segment.next_base)
        self._add(Damage(expected, end_offset, segment.base_offset, position, end_position), segment)
        segment.holes = tuple(sorted([*segment.holes, Hole(position, end_position, expected, end_offset)]))
        return end_position, end_offset

    def _cut(self, slot: int, position: int, file_bytes: int, end_offset: int, *, keep: bool) -> None:
        """Nothing that was acknowledged under flush policy `ack` is here. Batches that look whole are kept aside."""
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

    def _keep_aside(self, segment: Segment, dropped: list[Segment]) -> str:
        """Copies of what is about to be cut, for an operator to look at and remove."""
        suffix = f".{uuid4().hex[:8]}-cut"
        with open(segment.path, "rb") as file:
            file.seek(segment.size)
            write_synced(segment.path.with_name(segment.path.name + suffix), file.read())
        for item in dropped:
            os.link(item.path, item.path.with_name(item.path.name + suffix))
        sync_directory(self._directory)
        return f"*{suffix}"


def _indexed_end(segment: Segment) -> int:
    """The offset after the last one that the index files of a closed segment name; its base where they name none."""
    index_path, time_path = segment.index_files
    try:
        offsets = OffsetIndex.decode(index_path.read_bytes(), INT32_MAX).offsets
        times = TimeIndex.decode(time_path.read_bytes())
    except (FileNotFoundError, DamagedIndex):
        return segment.base_offset
    last_time = times.last_entry()[1] if len(times) else -1
    return segment.base_offset + max([last_time, *offsets[-1:]]) + 1


def _make_durable(segments: list[Segment]) -> None:
    """What was recovered may be in the page cache only; from here on it counts as synced."""
    for segment in segments:
        fd = os.open(segment.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.fdatasync(fd)
        finally:
            os.close(fd)
        if segment is not segments[-1]:
            write_indexes(segment)
    sync_directory(segments[0].directory)


def _rebuilt_epochs(segments: list[Segment], files: FilePool) -> EpochCache:
    epochs = EpochCache()
    end_offset = 0
    for segment in segments:
        file = files.pin(segment)
        try:
            for _, header in walk(file.fd, 0, segment.size, holes=segment.holes):
                if header.leader_epoch > epochs.latest and header.base_offset >= end_offset:
                    epochs.assign(header.leader_epoch, header.base_offset)
                end_offset = header.last_offset + 1
        finally:
            files.unpin(file)
    return epochs


def shortened(
    segment: Segment, end: LogPosition, aborted: AbortedIndex, files: FilePool, config: LogConfig
) -> Segment:
    """Cut the file durably, keep what the indexes say of the rest, and learn its end."""
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
    kept = Segment(segment.directory, segment.base_offset, created_ms=segment.created_ms)
    kept.offsets, kept.times, kept.aborted = offsets, times, aborted
    kept.has_aborted = len(aborted) > 0
    kept.holes = tuple(hole for hole in segment.holes if hole.end <= end.position)
    reached = resume_indexing(kept, files, config, end.position)
    assert reached is not None, (segment, end)
    return kept
