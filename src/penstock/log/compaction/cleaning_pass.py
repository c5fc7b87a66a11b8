"""One compaction pass over one log: map the dirty part, then rewrite its old segments through the rules.

Blocking, for a thread of its own. Reads batch by batch: memory holds the map, one batch and little else.
Each group of segments is swapped in by itself: a pass that ends early has done harm to nothing.
"""

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Final, NamedTuple

from penstock.log.aborted import AbortedIndex
from penstock.log.checkpoints import sync_directory
from penstock.log.compaction import BatchFilter, CompactionStats, LastRecord
from penstock.log.config import INT32_MAX, LogConfig
from penstock.log.keymap import KeyMap
from penstock.log.log import Log, SegmentsChanged
from penstock.log.lookup import modified_ms, offset_index
from penstock.log.names import CLEANED, SEGMENT_FILES, SWAP
from penstock.log.outcomes import Outcome, TransactionOutcomes
from penstock.log.segment import Segment
from penstock.log.segment_writer import SegmentWriter
from penstock.log.walk import read_batch, walk
from penstock.protocol.compression import BytesLike
from penstock.protocol.records import BatchHeader, checksum, open_batch, read_header
from penstock.protocol.scan import scan_records

#: The event loop needs the interpreter too: rest this long each time so much has been read.
REST_EVERY_BYTES: Final = 32 << 10
REST_SECONDS: Final = 0.0001


Batches = Generator[tuple[BatchHeader, bytes], None, None]


_CLOSED: Final = "the log was closed"


class CleaningCancelled(Exception):
    """Asked to stop, or the log changed under the pass. What was swapped in stays; nothing else is left."""


class DamagedSegment(Exception):
    """Bytes in an old segment that are not what was written: rewriting them would hide it."""


class DirtyRange(NamedTuple):
    first_offset: int
    upper_offset: int  # the base of the first segment that must not be touched
    stable_offset: int  # every transaction that wrote below it has ended
    high_watermark: int  # and its marker, which may lie beyond others' open ones, is below this


class Compaction:
    """`run` once. `stats` and `unlink` are right even when it raises."""

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
        self._keys = KeyMap(dedupe_buffer_bytes)
        self._is_cancelled = is_cancelled
        self._bytes_since_rest = 0
        self._outcomes = TransactionOutcomes(self._control_batches)
        self._filter = BatchFilter(
            keys=self._keys,
            outcomes=self._outcomes,
            last_records=last_records(log),
            upper_offset=dirty.upper_offset,
            now_ms=now_ms,
            delete_retention_ms=self._config.delete_retention_ms,
            body_bytes_max=self._config.decoded_bytes_max,
            taken_offset=taken_offset,
        )
        #: Files that were replaced, to be removed after `file_delete_delay_ms`.
        self.unlink: list[Path] = []

    @property
    def stats(self) -> CompactionStats:
        return self._filter.stats

    def run(self) -> int:
        """Returns the first offset that is still dirty."""
        try:
            return self._run()
        except CleaningCancelled:
            raise
        except Exception as error:
            # Files of a partition that has been moved away fail in many ways, none of which is news.
            if self._log.is_closed:
                raise CleaningCancelled(_CLOSED) from error
            is_whole = set(self._segments).issubset(self._log.segments)
            if is_whole or not isinstance(error, FileNotFoundError):
                raise
            raise CleaningCancelled("segments to compact have gone") from None

    def _run(self) -> int:
        # Closed by name: a reading left to the garbage collector may let go of its file while the pool is locked.
        with closing(TransactionOutcomes(self._control_batches)) as outcomes:
            self._map_keys(outcomes)
        end_offset = self._keys.latest_offset + 1
        mapped = [segment for segment in self._segments if segment.base_offset < end_offset]
        with closing(self._outcomes):
            for group in grouped(mapped, self._config.segment_bytes):
                self._rewrite(group)
        return max(end_offset, self._dirty.first_offset)

    # Mapping

    def _map_keys(self, outcomes: TransactionOutcomes) -> None:
        for segment in self._segments:
            assert segment.next_base is not None
            if segment.next_base <= self._dirty.first_offset:
                continue
            with closing(self._batches(segment, self._dirty.first_offset)) as batches:
                if not all(self._map_batch(header, batch, outcomes) for header, batch in batches):
                    return
            # Compaction leaves gaps, at the end of a segment too.
            self._keys.cover(segment.next_base - 1)

    def _map_batch(self, header: BatchHeader, batch: bytes, outcomes: TransactionOutcomes) -> bool:
        """False when the map is full: it then covers the log up to the last key that it took."""
        if header.is_control:
            outcomes.passed(header)
        elif not header.is_transactional or outcomes.outcome(header) is Outcome.COMMITTED:
            # What an aborted transaction wrote must not outlive, nor end, what others wrote.
            header, body = open_batch(batch, self._config.decoded_bytes_max)
            for span in scan_records(header, body):
                offset = header.base_offset + span.offset_delta
                dirty = offset >= self._dirty.first_offset and span.key is not None
                if dirty and not self._keys.put(span.key or b"", offset):
                    return False
        self._keys.cover(header.last_offset)
        return True

    # Rewriting

    def _rewrite(self, group: Sequence[Segment]) -> None:
        output = _Output(self._log.directory, group[0].base_offset, self._config)
        try:
            changed = len(group) > 1
            for segment in group:
                aborted = self._log.aborted_index(segment)
                with closing(self._batches(segment, segment.base_offset)) as batches:
                    changed = self._copy(batches, output, aborted) or changed
            if changed:
                self._swap(group, output.finish(modified_ms(group[-1])))
        finally:
            output.discard_unused(self._log.segments)

    def _copy(self, batches: Batches, output: "_Output", aborted: AbortedIndex) -> bool:
        """Whether anything was left out or changed."""
        changed = False
        for header, batch in batches:
            kept = self._filter.apply(header, batch)
            changed = changed or kept is not batch
            if kept is not None:
                output.append(kept, aborted)
        return changed

    def _swap(self, group: Sequence[Segment], new: Sequence[Segment]) -> None:
        try:
            self.unlink += self._log.replace_segments(group, new)
            self._segments = [segment for segment in self._segments if segment not in group]
        except SegmentsChanged as changed:
            raise CleaningCancelled(str(changed)) from None

    # Reading

    def _batches(self, segment: Segment, from_offset: int) -> Batches:
        """Every batch that ends at or after an offset. Raises DamagedSegment."""
        start = reached = self._position_before(segment, from_offset)
        file = self._log.files.pin(segment)
        try:
            for position, header in walk(file.fd, start, segment.size):
                reached = position + header.size
                if header.last_offset < from_offset:
                    continue
                self._rest(header.size)
                batch = read_batch(file.fd, position, header)
                if checksum(batch) != header.crc:
                    raise DamagedSegment(f"{segment.path} fails its checksum at position {position}")
                yield header, batch
            if reached != segment.size:
                raise DamagedSegment(f"{segment.path} holds no batch at position {reached}")
        finally:
            self._log.files.unpin(file)

    def _position_before(self, segment: Segment, offset: int) -> int:
        if offset <= segment.base_offset:
            return 0
        index = offset_index(segment, self._log.files)
        return index.position_at_or_below(offset - segment.base_offset)

    def _control_batches(self, from_offset: int) -> Batches:
        """From an offset on up to the high watermark, as a marker may lie beyond the dirty part."""
        files = self._log.files
        for segment in list(self._log.segments):
            if segment.next_base is not None and segment.next_base <= from_offset:
                continue
            file = files.pin(segment)
            try:
                start = self._position_before(segment, from_offset)
                for position, header in walk(file.fd, start, segment.size, holes=segment.holes):
                    self._rest(header.size)
                    if header.base_offset >= self._dirty.high_watermark:
                        return
                    if header.is_control and header.base_offset >= from_offset:
                        yield header, read_batch(file.fd, position, header)
            finally:
                files.unpin(file)

    def _rest(self, size: int) -> None:
        if self._log.is_closed:
            raise CleaningCancelled(_CLOSED)
        self._bytes_since_rest += size
        if self._bytes_since_rest >= REST_EVERY_BYTES:
            self._bytes_since_rest = 0
            if self._is_cancelled():
                raise CleaningCancelled("asked to stop")
            time.sleep(REST_SECONDS)


class _Output:
    """The segments that take a group's place: one, as a rule, and more where one cannot hold them."""

    def __init__(self, directory: Path, base_offset: int, config: LogConfig) -> None:
        self._directory = directory
        self._config = config
        self._writer: SegmentWriter | None = SegmentWriter(directory, base_offset, config)
        self._full: list[SegmentWriter] = []
        self._finished: list[Segment] = []

    def append(self, batch: BytesLike, aborted: AbortedIndex) -> None:
        """A marker takes along what the old index says of it; with the one, the other goes too.

        Who is told of an aborted transaction but never sees its marker would skip the producer's next one.
        """
        header = read_header(batch)
        assert self._writer is not None
        if not self._writer.fits(header, len(batch)):
            self._full.append(self._writer)
            self._writer = SegmentWriter(self._directory, header.base_offset, self._config)
        self._writer.append(header, batch)
        if header.is_control and header.record_count and len(aborted):
            self._writer.keep_aborted(aborted, header.base_offset)

    def finish(self, modified: int) -> list[Segment]:
        """Durable; they keep the time at which the newest of the old segments was last written."""
        assert self._writer is not None
        self._full.append(self._writer)
        self._writer = None
        while self._full:
            self._finished.append(self._full[0].finish(modified))
            del self._full[0]
        return self._finished

    def discard_unused(self, in_use: Sequence[Segment]) -> None:
        """Whatever has not become part of the log."""
        for writer in (*self._full, *((self._writer,) if self._writer else ())):
            writer.discard()
        unused = [segment for segment in self._finished if segment not in in_use]
        for segment, kind, suffix in product(unused, SEGMENT_FILES, (CLEANED, SWAP)):
            segment.file(kind, suffix).unlink(missing_ok=True)
        if unused:
            # A swap that was committed and then refused must not come back after a power cut.
            sync_directory(self._directory)


def grouped(segments: Sequence[Segment], segment_bytes: int) -> list[list[Segment]]:
    """Neighbours that fit one segment together, so that what compaction leaves does not stay in crumbs."""
    groups: list[list[Segment]] = []
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


def last_records(log: Log) -> dict[int, LastRecord]:
    """A copy, as the event loop goes on learning of producers meanwhile."""
    return {
        producer_id: LastRecord(state.batches[-1].last_offset if state.batches else None, state.epoch)
        for producer_id, state in list(log.producers.states.items())
    }
