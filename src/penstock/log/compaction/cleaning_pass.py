"""One compaction pass over one log: map the keys of the dirty part, then rewrite the old segments through the batch
filter.

A pass blocks and runs in its own thread. It reads batch by batch: memory holds little more than the offset map and one
batch. New segments are written beside the log and take effect only when `Log.replace_segments` swaps them in. Each
group of segments is swapped in separately, so a pass that ends early leaves a correct log.
"""

import os
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Final, NamedTuple

from penstock.log.compaction.batch_filter import (
    BatchFilter,
    CleanerStats,
    LastRecord,
    OffsetMap,
    TransactionLookahead,
    TransactionOutcome,
)
from penstock.log.config import INT32_MAX, LogConfig
from penstock.log.data_directory import CLEANED_SUFFIX, SEGMENT_FILE_SUFFIXES, SWAP_SUFFIX
from penstock.log.index_files import modified_ms, offset_index, write_indexes
from penstock.log.indexes import TransactionIndex
from penstock.log.log import Log, SegmentsChanged
from penstock.log.producer_state import ProducerStateEntry
from penstock.log.reader import damaged_read
from penstock.log.segment import LogSegment, iter_batch_headers, read_batch
from penstock.protocol.compression import BytesLike
from penstock.protocol.durable_files import sync_directory
from penstock.protocol.record_batch import BatchHeader, checksum, open_batch, read_header, scan_records


class CleanedSegmentWriter:
    """`append` batches in offset order, then `finish` once, or `discard`."""

    def __init__(self, directory: Path, base_offset: int, config: LogConfig) -> None:
        self.segment = LogSegment(directory, base_offset, suffix=CLEANED_SUFFIX)
        self.segment.start_indexing()
        self.segment.cleaned = True
        self._config = config
        self._fd = os.open(self.segment.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)

    def fits(self, header: BatchHeader, size: int) -> bool:
        """Whether a batch still fits into this segment; an empty segment accepts any batch."""
        segment = self.segment
        if segment.size == 0:
            return True
        in_bytes = segment.size + size <= self._config.segment_bytes
        return in_bytes and not segment.index_full and segment.can_hold(header.last_offset)

    def copy_aborted_transaction(self, source: TransactionIndex, marker_offset: int) -> None:
        """Copies the old index entry of a marker that was appended."""
        segment = self.segment
        if segment.aborted is None:
            segment.aborted = TransactionIndex()
        segment.aborted.copy_entry(source, marker_offset)
        segment.has_aborted = len(segment.aborted) > 0

    def append(self, header: BatchHeader, batch: BytesLike) -> None:
        """Raises OSError when the disk is full; `discard` then leaves nothing behind."""
        view, position = memoryview(batch), self.segment.size
        while view:
            written = os.pwrite(self._fd, view, position)
            view, position = view[written:], position + written
        self.segment.note(header.last_offset, header.max_timestamp, len(batch), self._config)

    def finish(self, modified_ms: int) -> LogSegment:
        """Syncs and indexes the segment, and gives it the modification time of the segments that it replaces."""
        os.fsync(self._fd)
        write_indexes(self.segment)
        for path in self._files:
            if path.exists():
                os.utime(path, ns=(modified_ms * 1_000_000,) * 2)
        # Last, so that `discard` works after any failure above.
        os.close(self._fd)
        return self.segment

    def discard(self) -> None:
        os.close(self._fd)
        for path in self._files:
            path.unlink(missing_ok=True)

    @property
    def _files(self) -> tuple[Path, ...]:
        segment = self.segment
        return segment.path, *segment.index_files, segment.transaction_index_file


#: A pass pauses for PAUSE_SECONDS after every so many bytes, because the event loop needs the interpreter too.
PAUSE_EVERY_BYTES: Final = 32 << 10
PAUSE_SECONDS: Final = 0.0001


BatchStream = Generator[tuple[BatchHeader, bytes], None, None]


_LOG_CLOSED: Final = "the log was closed"


class CleaningAborted(Exception):
    """Cancelled, or the log changed during the pass. Segments already swapped in stay; nothing else is left behind."""


class DirtyRange(NamedTuple):
    first_offset: int
    upper_offset: int  # the base offset of the first segment that must not be touched
    stable_offset: int  # every transaction that wrote below it has ended
    high_watermark: int  # their markers are below this, although perhaps beyond open transactions of others


class CleaningPass:
    """Call `run` once. `stats` and `unlink` are valid even if it raises."""

    def __init__(
        self,
        log: Log,
        dirty: DirtyRange,
        *,
        now_ms: int,
        dedupe_buffer_bytes: int,
        is_cancelled: Callable[[], bool] = lambda: False,
        taken_offset: int = 0,
    ) -> None:
        assert dirty.upper_offset <= log.active_segment.base_offset, "the active segment is never touched"
        assert dirty.upper_offset <= dirty.stable_offset, "nothing unstable is ever touched"
        self._log = log
        self._config: LogConfig = log.config
        self._dirty = dirty
        self._segments = [segment for segment in log.segments if segment.base_offset < dirty.upper_offset]
        self._keys = OffsetMap(dedupe_buffer_bytes)
        self._is_cancelled = is_cancelled
        self._bytes_since_rest = 0
        self._outcomes = TransactionLookahead(self._control_batches)
        self._filter = BatchFilter(
            keys=self._keys,
            outcomes=self._outcomes,
            last_records=last_records_of_active_producers(log),
            upper_offset=dirty.upper_offset,
            now_ms=now_ms,
            delete_retention_ms=self._config.delete_retention_ms,
            body_bytes_max=self._config.decoded_bytes_max,
            taken_offset=taken_offset,
        )
        #: Files that were replaced, to be removed after `file_delete_delay_ms`.
        self.unlink: list[Path] = []

    @property
    def stats(self) -> CleanerStats:
        return self._filter.stats

    def run(self) -> int:
        """Returns the first offset that is still dirty."""
        try:
            return self._run()
        except CleaningAborted:
            raise
        except Exception as error:
            # Reading a partition that has been moved away fails in many ways, all of them expected.
            if self._log.is_closed:
                raise CleaningAborted(_LOG_CLOSED) from error
            is_whole = set(self._segments).issubset(self._log.segments)
            if is_whole or not isinstance(error, FileNotFoundError):
                raise
            raise CleaningAborted("segments to compact are gone") from None

    def _run(self) -> int:
        # Closed explicitly: the garbage collector might release a reader's file while the file pool is locked.
        with closing(TransactionLookahead(self._control_batches)) as outcomes:
            self._map_keys(outcomes)
        end_offset = self._keys.latest_offset + 1
        mapped = [segment for segment in self._segments if segment.base_offset < end_offset]
        with closing(self._outcomes):
            for group in group_segments_by_size(mapped, self._config.segment_bytes):
                self._rewrite(group)
        return max(end_offset, self._dirty.first_offset)

    # Mapping

    def _map_keys(self, outcomes: TransactionLookahead) -> None:
        for segment in self._segments:
            assert segment.next_base is not None
            if segment.next_base <= self._dirty.first_offset:
                continue
            with closing(self._batches(segment, self._dirty.first_offset)) as batches:
                if not all(self._map_batch(header, batch, outcomes) for header, batch in batches):
                    return
            # Compaction leaves gaps, also at the end of a segment.
            self._keys.cover(segment.next_base - 1)

    def _map_batch(self, header: BatchHeader, batch: bytes, outcomes: TransactionLookahead) -> bool:
        """Returns False if the map is full: it then covers the log up to the last key that it accepted."""
        if header.is_control:
            outcomes.passed(header)
        elif not header.is_transactional or outcomes.outcome(header) is TransactionOutcome.COMMITTED:
            # Records of an aborted transaction must neither survive nor supersede other records.
            header, body = open_batch(batch, self._config.decoded_bytes_max)
            for span in scan_records(header, body):
                offset = header.base_offset + span.offset_delta
                dirty = offset >= self._dirty.first_offset and span.key is not None
                if dirty and not self._keys.put(span.key or b"", offset):
                    return False
        self._keys.cover(header.last_offset)
        return True

    # Rewriting

    def _rewrite(self, group: Sequence[LogSegment]) -> None:
        output = _CompactedSegments(self._log.directory, group[0].base_offset, self._config)
        try:
            changed = len(group) > 1
            for segment in group:
                aborted = self._log.transaction_index(segment)
                with closing(self._batches(segment, segment.base_offset)) as batches:
                    changed = self._copy(batches, output, aborted) or changed
            if changed:
                self._swap(group, output.finish(modified_ms(group[-1])))
        finally:
            output.discard_unused(self._log.segments)

    def _copy(self, batches: BatchStream, output: "_CompactedSegments", aborted: TransactionIndex) -> bool:
        """Returns whether anything was removed or changed."""
        changed = False
        for header, batch in batches:
            kept = self._filter.apply(header, batch)
            changed = changed or kept is not batch
            if kept is not None:
                output.append(kept, aborted)
        return changed

    def _swap(self, group: Sequence[LogSegment], new: Sequence[LogSegment]) -> None:
        try:
            self.unlink += self._log.replace_segments(group, new)
            self._segments = [segment for segment in self._segments if segment not in group]
        except SegmentsChanged as changed:
            raise CleaningAborted(str(changed)) from None

    # Reading

    def _batches(self, segment: LogSegment, from_offset: int) -> BatchStream:
        """Yields every batch that ends at or after an offset. Raises DamagedRead: rewriting damage would hide it."""
        start = reached = self._position_before(segment, from_offset)
        file = self._log.files.pin(segment)
        try:
            for position, header in iter_batch_headers(file.fd, start, segment.size):
                reached = position + header.size
                if header.last_offset < from_offset:
                    continue
                self._pause(header.size)
                batch = read_batch(file.fd, position, header)
                if checksum(batch) != header.crc:
                    raise damaged_read(segment, position)
                yield header, batch
            if reached != segment.size:
                raise damaged_read(segment, reached)
        finally:
            self._log.files.unpin(file)

    def _position_before(self, segment: LogSegment, offset: int) -> int:
        if offset <= segment.base_offset:
            return 0
        index = offset_index(segment, self._log.files)
        return index.position_at_or_below(offset - segment.base_offset)

    def _control_batches(self, from_offset: int) -> BatchStream:
        """Reads from an offset to the high watermark, because a marker may lie beyond the dirty part."""
        files = self._log.files
        for segment in list(self._log.segments):
            if segment.next_base is not None and segment.next_base <= from_offset:
                continue
            file = files.pin(segment)
            try:
                start = self._position_before(segment, from_offset)
                for position, header in iter_batch_headers(
                    file.fd, start, segment.size, damaged_ranges=segment.damaged_ranges
                ):
                    self._pause(header.size)
                    if header.base_offset >= self._dirty.high_watermark:
                        return
                    if header.is_control and header.base_offset >= from_offset:
                        yield header, read_batch(file.fd, position, header)
            finally:
                files.unpin(file)

    def _pause(self, size: int) -> None:
        if self._log.is_closed:
            raise CleaningAborted(_LOG_CLOSED)
        self._bytes_since_rest += size
        if self._bytes_since_rest >= PAUSE_EVERY_BYTES:
            self._bytes_since_rest = 0
            if self._is_cancelled():
                raise CleaningAborted("asked to stop")
            time.sleep(PAUSE_SECONDS)


class _CompactedSegments:
    """The segments that replace a group: usually one, more if one cannot hold all batches."""

    def __init__(self, directory: Path, base_offset: int, config: LogConfig) -> None:
        self._directory = directory
        self._config = config
        self._writer: CleanedSegmentWriter | None = CleanedSegmentWriter(directory, base_offset, config)
        self._full: list[CleanedSegmentWriter] = []
        self._finished: list[LogSegment] = []

    def append(self, batch: BytesLike, aborted: TransactionIndex) -> None:
        """Copies the old index entry of a marker together with the marker; without the marker the entry is dropped.

        A consumer that gets the entry of an aborted transaction but never reads its marker would skip the producer's
        next transaction.
        """
        header = read_header(batch)
        assert self._writer is not None
        if not self._writer.fits(header, len(batch)):
            self._full.append(self._writer)
            self._writer = CleanedSegmentWriter(self._directory, header.base_offset, self._config)
        self._writer.append(header, batch)
        if header.is_control and header.record_count and len(aborted):
            self._writer.copy_aborted_transaction(aborted, header.base_offset)

    def finish(self, modified: int) -> list[LogSegment]:
        """Makes the segments durable; they keep the modification time of the newest old segment."""
        assert self._writer is not None
        self._full.append(self._writer)
        self._writer = None
        while self._full:
            self._finished.append(self._full[0].finish(modified))
            del self._full[0]
        return self._finished

    def discard_unused(self, in_use: Sequence[LogSegment]) -> None:
        """Deletes everything that has not become part of the log."""
        for writer in (*self._full, *((self._writer,) if self._writer else ())):
            writer.discard()
        unused = [segment for segment in self._finished if segment not in in_use]
        for segment, kind, suffix in product(unused, SEGMENT_FILE_SUFFIXES, (CLEANED_SUFFIX, SWAP_SUFFIX)):
            segment.file(kind, suffix).unlink(missing_ok=True)
        if unused:
            # A swap that was committed and then refused must not reappear after a power failure.
            sync_directory(self._directory)


def group_segments_by_size(segments: Sequence[LogSegment], segment_bytes: int) -> list[list[LogSegment]]:
    """Groups neighbours that fit into one segment, so that compaction does not leave many small segments."""
    groups: list[list[LogSegment]] = []
    group_bytes = 0
    for segment in segments:
        assert segment.next_base is not None
        fits = groups and segment.next_base - 1 - groups[-1][0].base_offset <= INT32_MAX
        if fits and group_bytes + segment.size <= segment_bytes:
            groups[-1].append(segment)
            group_bytes += segment.size
        else:
            groups.append([segment])
            group_bytes = segment.size
    return groups


def last_records_of_active_producers(log: Log) -> dict[int, LastRecord]:
    """Returns a copy, because the event loop changes the producer states meanwhile."""
    return {
        producer_id: LastRecord(_last_stored_offset(state), state.epoch)
        for producer_id, state in list(log.producers.states.items())
    }


def _last_stored_offset(state: ProducerStateEntry) -> int | None:
    return next(
        (trace.last_offset for trace in reversed(tuple(state.batches)) if trace.last_offset >= 0), None
    )
