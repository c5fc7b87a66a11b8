"""Damage in a log: bytes that were durable once and are not what was written.

Damaged bytes stay where they are. Reads of the offsets that were in them are refused; everything before and after
is served. `penstock-damage` in the partition's directory lists the damaged ranges, because a clean start reads no
old segment. An operator may accept the loss of a range: reads then skip it, as they skip offsets that compaction
has removed.
"""

import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from penstock.log.checkpoints import CorruptCheckpoint, read_checkpoint, write_checkpoint
from penstock.log.config import INT32_MAX
from penstock.log.segment import (
    READ_CHUNK_BYTES,
    DamagedRange,
    checksum_holds,
    iter_batch_headers,
    skip_damaged_ranges,
)
from penstock.protocol.durable_files import replace_durably
from penstock.protocol.record_batch import BATCH_HEADER_BYTES, BatchHeader, read_header

DAMAGE_FILE: Final = "penstock-damage"
#: In the folder of a log that an operator abandoned: the log starts over at its last synced offset.
GIVEN_UP_FILE: Final = "penstock-given-up"
#: The segment of a range whose bytes are no longer in any file.
NO_SEGMENT: Final = -1

_logger = logging.getLogger("penstock.log")


class Damage(NamedTuple):
    """Offsets that cannot be served, and the bytes of one segment file in which they were."""

    start_offset: int
    end_offset: int
    segment_base: int = NO_SEGMENT
    position: int = 0
    end_position: int = 0
    accepted: bool = False

    def __str__(self) -> str:
        where = f"bytes {self.position} to {self.end_position} of segment {self.segment_base}"
        if self.segment_base == NO_SEGMENT:
            where = "in no file"
        return f"offsets {self.start_offset} to {self.end_offset - 1}, {where}"


def load(directory: Path) -> list[Damage]:
    """Raises CorruptCheckpoint."""
    try:
        return [_parse_row(row) for row in read_checkpoint(directory / DAMAGE_FILE)]
    except ValueError as error:
        raise CorruptCheckpoint(f"{directory / DAMAGE_FILE} cannot be understood: {error}") from None


def _parse_row(row: str) -> Damage:
    start_offset, end_offset, segment_base, position, end_position, accepted = map(int, row.split(" "))
    return Damage(start_offset, end_offset, segment_base, position, end_position, bool(accepted))


def save(directory: Path, damages: Iterable[Damage]) -> None:
    """Durable when it returns. Raises OSError."""
    rows = [" ".join(str(int(field)) for field in damage) for damage in damages]
    if rows or (directory / DAMAGE_FILE).exists():
        write_checkpoint(directory / DAMAGE_FILE, rows)


def mark_given_up(directory: Path) -> None:
    """Durable when it returns. Raises OSError."""
    replace_durably(directory / GIVEN_UP_FILE, b"")


def clear_given_up(directory: Path) -> bool:
    """Returns whether the log was abandoned, and removes the mark: the log starts over once. Raises OSError."""
    try:
        (directory / GIVEN_UP_FILE).unlink()
    except FileNotFoundError:
        return False
    return True


def ranges_in_segment(damages: Iterable[Damage], segment_base: int) -> tuple[DamagedRange, ...]:
    """Returns the byte ranges to skip when the segment is read."""
    found = (item for item in damages if item.segment_base == segment_base)
    return tuple(
        sorted(
            DamagedRange(item.position, item.end_position, item.start_offset, item.end_offset)
            for item in found
        )
    )


def at_offset(damages: Sequence[Damage], offset: int) -> Damage | None:
    return next((damage for damage in damages if damage.start_offset <= offset < damage.end_offset), None)


def scan_for_damage(
    fd: int,
    end: int,
    *,
    base_offset: int,
    damaged_ranges: Sequence[DamagedRange],
    end_offset: int | None = None,
) -> Iterator[Damage]:
    """Reads every batch of a segment, and yields the damage that is not in `damaged_ranges`. Blocking.

    `end_offset` is the offset after the segment's last record; if it is unknown, the end of the last whole batch is
    used.
    """
    position, expected = 0, base_offset
    while True:
        for at, header in iter_batch_headers(fd, position, end, damaged_ranges=damaged_ranges):
            position = at
            if header.base_offset < expected or not checksum_holds(fd, at, header):
                break
            following = None
            if header.base_offset != expected:  # not covered by the checksum: check it against the next batch
                following = batch_at(fd, at + header.size, end, base_offset, expected)
            if following is not None and following.base_offset <= header.last_offset:
                break
            position, expected = at + header.size, header.last_offset + 1
        position = skip_damaged_ranges(position, damaged_ranges)
        if position >= end:
            return
        found = find_next_batch(fd, position, end, base_offset=base_offset, expected=expected)
        if found is None:
            last = max(expected, end_offset or 0)
            yield Damage(expected, last, base_offset, position, end)
            return
        yield Damage(expected, found[1].base_offset, base_offset, position, found[0])
        position, expected = found[0], found[1].base_offset


def find_next_batch(
    fd: int, position: int, end: int, *, base_offset: int, expected: int, next_base: int | None = None
) -> tuple[int, BatchHeader] | None:
    """Finds the first whole batch after a damaged position, with offsets from `expected` on and before `next_base`.

    Blocking. The checksum does not cover the offset, so an offset that does not fit the next batch is damage as well.
    The lengths in plausible headers are followed first. The bytes are searched only if that leads to no batch, because
    the payload of a record could contain bytes that look like a batch.
    """

    def fitting_at(candidate: int) -> BatchHeader | None:
        header = batch_at(fd, candidate, end, base_offset, expected)
        if header is None or (next_base is not None and header.last_offset >= next_base):
            return None
        after = batch_at(fd, candidate + header.size, end, base_offset, expected)
        return header if after is None or after.base_offset > header.last_offset else None

    following = position
    while (header := _header_at(fd, following, end)) is not None:
        if not _is_plausible(header, following, end, base_offset, expected):
            break
        following += header.size
        if following == end:
            return None
        found = fitting_at(following)
        if found is not None:
            return following, found
    for candidate in _candidate_positions(fd, position + 1, end, base_offset, expected):
        found = fitting_at(candidate)
        if found is not None:
            return candidate, found
    return None


def _header_at(fd: int, position: int, end: int) -> BatchHeader | None:
    if position + BATCH_HEADER_BYTES > end:
        return None
    data = os.pread(fd, BATCH_HEADER_BYTES, position)
    return read_header(data) if len(data) == BATCH_HEADER_BYTES else None


def _is_plausible(header: BatchHeader, position: int, end: int, base_offset: int, expected: int) -> bool:
    return (
        header.magic == 2
        and header.size >= BATCH_HEADER_BYTES
        and position + header.size <= end
        and header.base_offset >= expected
        and header.last_offset_delta >= 0
        and header.last_offset - base_offset <= INT32_MAX
    )


def batch_at(fd: int, position: int, end: int, base_offset: int, expected: int) -> BatchHeader | None:
    """Returns the header of a whole batch whose offset may follow `expected`; None for anything else."""
    header = _header_at(fd, position, end)
    if header is None or not _is_plausible(header, position, end, base_offset, expected):
        return None
    return header if checksum_holds(fd, position, header) else None


def _candidate_positions(fd: int, position: int, end: int, base_offset: int, expected: int) -> Iterable[int]:
    """Yields where a batch header could start: the upper half of its offset and its magic are known."""
    upper = {value >> 32 for value in (expected, base_offset + INT32_MAX)}
    prefixes = b"|".join(re.escape(value.to_bytes(4, "big")) for value in sorted(upper))
    header = re.compile(b"(?=(?:" + prefixes + rb").{4}[\x00-\x7f].{3}[\x00-\x7f\xff].{3}\x02)", re.DOTALL)
    while position + BATCH_HEADER_BYTES <= end:
        chunk = os.pread(fd, min(READ_CHUNK_BYTES, end - position), position)
        if len(chunk) < BATCH_HEADER_BYTES:
            return
        for match in header.finditer(chunk):
            yield position + match.start()
        # A header may start at the end of this chunk and continue in the next one.
        position += len(chunk) - BATCH_HEADER_BYTES + 1
