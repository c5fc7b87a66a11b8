"""Writes a segment beside the log, for who replaces segments: nothing counts until `Log.replace_segments`."""

import os
from pathlib import Path

from penstock.log.aborted import AbortedIndex
from penstock.log.config import LogConfig
from penstock.log.lookup import write_indexes
from penstock.log.names import CLEANED
from penstock.log.segment import Segment
from penstock.protocol.compression import BytesLike
from penstock.protocol.records import BatchHeader


class SegmentWriter:
    """`append` batches in offset order, then `finish` once, or `discard`."""

    def __init__(self, directory: Path, base_offset: int, config: LogConfig) -> None:
        self.segment = Segment(directory, base_offset, suffix=CLEANED)
        self.segment.start_indexing()
        self.segment.cleaned = True
        self._config = config
        self._fd = os.open(self.segment.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)

    def fits(self, header: BatchHeader, size: int) -> bool:
        """Whether a batch still belongs into this segment; an empty segment takes any."""
        segment = self.segment
        if segment.size == 0:
            return True
        in_bytes = segment.size + size <= self._config.segment_bytes
        return in_bytes and not segment.index_full and segment.can_hold(header.last_offset)

    def keep_aborted(self, source: AbortedIndex, marker_offset: int) -> None:
        """The marker was appended: what the old index says of it goes with it."""
        segment = self.segment
        if segment.aborted is None:
            segment.aborted = AbortedIndex()
        segment.aborted.copy_entry(source, marker_offset)
        segment.has_aborted = len(segment.aborted) > 0

    def append(self, header: BatchHeader, batch: BytesLike) -> None:
        """Raises OSError when the disk is full; `discard` then leaves nothing behind."""
        view, position = memoryview(batch), self.segment.size
        while view:
            written = os.pwrite(self._fd, view, position)
            view, position = view[written:], position + written
        self.segment.note(header.last_offset, header.max_timestamp, len(batch), self._config)

    def finish(self, modified_ms: int) -> Segment:
        """Durable, indexed and dated as the segments it stands for."""
        os.fsync(self._fd)
        write_indexes(self.segment)
        for path in self._files:
            if path.exists():
                os.utime(path, ns=(modified_ms * 1_000_000,) * 2)
        # Last, so that `discard` is right after anything above has failed.
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
