"""Damage in a log: bytes that were durable once and are not what was written.

Damaged bytes stay where they are. Readers are refused the offsets that were in them, and everything before and after
is served. `penstock-damage` in the partition's folder lists the ranges, because a clean start reads no old segment. An
operator may accept the loss of a range: readers then pass over it, as they pass over what compaction has removed.
"""

import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from penstock.log.checkpoints import DamagedCheckpoint, read_checkpoint, replace_durably, write_checkpoint
from penstock.log.config import INT32_MAX
from penstock.log.walk import CHUNK_BYTES, Hole, checksum_holds, past_holes, walk
from penstock.protocol.records import HEADER_BYTES, BatchHeader, read_header

DAMAGE: Final = "penstock-damage"
#: In the folder of a log that an operator gives up: it begins again where it was last synced.
GIVEN_UP: Final = "penstock-given-up"
#: The segment of a range that no file holds any more.
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
    """Raises DamagedCheckpoint."""
    try:
        return [_parse(row) for row in read_checkpoint(directory / DAMAGE)]
    except ValueError as error:
        raise DamagedCheckpoint(f"{directory / DAMAGE} cannot be understood: {error}") from None


def _parse(row: str) -> Damage:
    start_offset, end_offset, segment_base, position, end_position, accepted = map(int, row.split(" "))
    return Damage(start_offset, end_offset, segment_base, position, end_position, bool(accepted))


def save(directory: Path, damages: Iterable[Damage]) -> None:
    """Durable when it returns. Raises OSError."""
    rows = [" ".join(str(int(field)) for field in damage) for damage in damages]
    if rows or (directory / DAMAGE).exists():
        write_checkpoint(directory / DAMAGE, rows)


def give_up(directory: Path) -> None:
    """Durable when it returns. Raises OSError."""
    replace_durably(directory / GIVEN_UP, b"")


def take_given_up(directory: Path) -> bool:
    """Whether the log was given up. Asked once: it has begun again then. Raises OSError."""
    try:
        (directory / GIVEN_UP).unlink()
    except FileNotFoundError:
        return False
    return True


def holes_of(damages: Iterable[Damage], segment_base: int) -> tuple[Hole, ...]:
    """What to pass over when a segment is read."""
    found = (item for item in damages if item.segment_base == segment_base)
    return tuple(
        sorted(Hole(item.position, item.end_position, item.start_offset, item.end_offset) for item in found)
    )


def at_offset(damages: Sequence[Damage], offset: int) -> Damage | None:
    return next((damage for damage in damages if damage.start_offset <= offset < damage.end_offset), None)


def survey(
    fd: int, end: int, *, base_offset: int, holes: Sequence[Hole], end_offset: int | None = None
) -> Iterator[Damage]:
    """Read every batch of a segment, and yield the damage that is not among the holes. Blocking.

    `end_offset` is the offset after its last record; where it is unknown, that of the last whole batch stands for it.
    """
    position, expected = 0, base_offset
    while True:
        for at, header in walk(fd, position, end, holes=holes):
            position = at
            if header.base_offset < expected or not checksum_holds(fd, at, header):
                break
            following = None
            if header.base_offset != expected:  # which the checksum does not cover: the next one tells
                following = batch_at(fd, at + header.size, end, base_offset, expected)
            if following is not None and following.base_offset <= header.last_offset:
                break
            position, expected = at + header.size, header.last_offset + 1
        position = past_holes(position, holes)
        if position >= end:
            return
        found = next_batch(fd, position, end, base_offset=base_offset, expected=expected)
        if found is None:
            last = max(expected, end_offset or 0)
            yield Damage(expected, last, base_offset, position, end)
            return
        yield Damage(expected, found[1].base_offset, base_offset, position, found[0])
        position, expected = found[0], found[1].base_offset


def next_batch(
    fd: int, position: int, end: int, *, base_offset: int, expected: int, next_base: int | None = None
) -> tuple[int, BatchHeader] | None:
    """The first whole batch after a bad place whose offsets lie from `expected` on, and before `next_base`. Blocking.

    The checksum does not cover the offset: one that does not fit what follows it is damage as well. Headers that look
    sound are followed by their lengths first. Only where they lead nowhere are the bytes searched, since the payload of
    a record could hold bytes that look like a batch.
    """

    def fitting_at(place: int) -> BatchHeader | None:
        header = batch_at(fd, place, end, base_offset, expected)
        if header is None or (next_base is not None and header.last_offset >= next_base):
            return None
        after = batch_at(fd, place + header.size, end, base_offset, expected)
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
    for candidate in _candidates(fd, position + 1, end, base_offset, expected):
        found = fitting_at(candidate)
        if found is not None:
            return candidate, found
    return None


def _header_at(fd: int, position: int, end: int) -> BatchHeader | None:
    if position + HEADER_BYTES > end:
        return None
    data = os.pread(fd, HEADER_BYTES, position)
    return read_header(data) if len(data) == HEADER_BYTES else None


def _is_plausible(header: BatchHeader, position: int, end: int, base_offset: int, expected: int) -> bool:
    return (
        header.magic == 2
        and header.size >= HEADER_BYTES
        and position + header.size <= end
        and header.base_offset >= expected
        and header.last_offset_delta >= 0
        and header.last_offset - base_offset <= INT32_MAX
    )


def batch_at(fd: int, position: int, end: int, base_offset: int, expected: int) -> BatchHeader | None:
    """The header of a whole batch whose offset may follow `expected`; None for anything else."""
    header = _header_at(fd, position, end)
    if header is None or not _is_plausible(header, position, end, base_offset, expected):
        return None
    return header if checksum_holds(fd, position, header) else None


def _candidates(fd: int, position: int, end: int, base_offset: int, expected: int) -> Iterable[int]:
    """Where a batch header could stand: the upper half of its offset is known, and its magic."""
    upper = {value >> 32 for value in (expected, base_offset + INT32_MAX)}
    prefixes = b"|".join(re.escape(value.to_bytes(4, "big")) for value in sorted(upper))
    header = re.compile(b"(?=(?:" + prefixes + rb").{4}[\x00-\x7f].{3}[\x00-\x7f\xff].{3}\x02)", re.DOTALL)
    while position + HEADER_BYTES <= end:
        chunk = os.pread(fd, min(CHUNK_BYTES, end - position), position)
        if len(chunk) < HEADER_BYTES:
            return
        for match in header.finditer(chunk):
            yield position + match.start()
        # A header may begin at the end of this piece and go on in the next.
        position += len(chunk) - HEADER_BYTES + 1
