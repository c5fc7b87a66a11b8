"""Kafka's protocol for replacing segments by their compacted selves, and what a crash may leave of it.

`.cleaned` files are still being made and go; `.swap` files are complete and take their place; `.deleted`
files were waiting to be removed. The step from `.cleaned` to `.swap` goes from the highest base offset down,
so that any `.cleaned` file left shows that the swaps at or above it are not all there.
"""

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from penstock.log.checkpoints import sync_directory
from penstock.log.files import FilePool
from penstock.log.names import (
    CLEANED,
    COMPACTED,
    DELETED,
    LOG,
    SEGMENT_FILES,
    SWAP,
    offset_file,
    parse_offset_file,
)
from penstock.log.segment import Segment
from penstock.log.walk import walk

_logger = logging.getLogger("penstock.log")


def commit_swap(new: Sequence[Segment], files: FilePool) -> None:
    """After this, a crash ends with the new segments in place; before, with the old ones. Raises OSError."""
    try:
        (new[0].directory / COMPACTED).touch()
        for segment in sorted(new, key=lambda s: s.base_offset, reverse=True):
            assert segment.suffix == CLEANED, segment
            files.rename(segment, SWAP)
        sync_directory(new[0].directory)
    except OSError:
        _withdraw(new)
        raise


def _withdraw(new: Sequence[Segment]) -> None:
    """Swaps first: one that is left alone would take its place at the next start."""
    for suffix in (SWAP, CLEANED):
        for segment in new:
            for kind in SEGMENT_FILES:
                segment.file(kind, suffix).unlink(missing_ok=True)


def finish_swap(old: Sequence[Segment], new: Sequence[Segment], files: FilePool) -> list[Path]:
    """Put the new files where the old ones were. Returns what is left to unlink."""
    for segment in old:
        files.rename(segment, DELETED)
    for segment in new:
        files.rename(segment, "")
    sync_directory(new[0].directory)
    return existing_files(old)


def existing_files(segments: Sequence[Segment]) -> list[Path]:
    paths = (segment.file(kind) for segment in segments for kind in SEGMENT_FILES)
    return [path for path in paths if path.exists()]


def finish_interrupted_work(directory: Path) -> list[int]:
    """Bring a folder back to plain segment files before it is loaded. Returns where deleted segments began."""
    leftover = _leftovers(directory)
    if not leftover:
        return []
    first_cleaned = min((offset for offset, _, suffix in leftover if suffix == CLEANED), default=None)
    for offset, kind, suffix in leftover:
        incomplete = suffix == SWAP and first_cleaned is not None and offset >= first_cleaned
        if suffix != SWAP or incomplete:
            _logger.info("leftover removed", extra={"file": offset_file(offset, kind, suffix)})
            (directory / offset_file(offset, kind, suffix)).unlink()
    _swap_in(directory)
    sync_directory(directory)
    return [offset for offset, kind, suffix in leftover if (kind, suffix) == (LOG, DELETED)]


def _swap_in(directory: Path) -> None:
    swaps = [item for item in _leftovers(directory) if item[2] == SWAP]
    if not swaps:
        return
    first = min(offset for offset, _, _ in swaps)
    end = max((_next_offset(directory, offset) for offset, kind, _ in swaps if kind == LOG), default=first)
    for offset, kind, suffix in _offset_files(directory):
        if suffix == "" and kind in SEGMENT_FILES and first <= offset < end:
            (directory / offset_file(offset, kind)).unlink()
    for offset, kind, _ in sorted(swaps, key=lambda item: SEGMENT_FILES.index(item[1])):
        _logger.info("interrupted swap finished", extra={"file": offset_file(offset, kind)})
        os.replace(directory / offset_file(offset, kind, SWAP), directory / offset_file(offset, kind))


def _next_offset(directory: Path, base_offset: int) -> int:
    path = directory / offset_file(base_offset, LOG, SWAP)
    fd = os.open(path, os.O_RDONLY)
    try:
        last = base_offset - 1
        for _, header in walk(fd, 0, os.fstat(fd).st_size):
            last = header.last_offset
        # Even an empty segment takes the place of the one with its name.
        return max(last, base_offset) + 1
    finally:
        os.close(fd)


def _leftovers(directory: Path) -> list[tuple[int, str, str]]:
    return [item for item in _offset_files(directory) if item[2] in (DELETED, CLEANED, SWAP)]


def _offset_files(directory: Path) -> list[tuple[int, str, str]]:
    parsed = (parse_offset_file(name) for name in os.listdir(directory))
    return [item for item in parsed if item is not None]
