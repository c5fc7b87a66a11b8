"""A replay in numbered pieces: the same ranges are always cut in the same way. Pure.

Offsets of a partition go out in their order, piece after piece, and all partitions come to their end together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from penstock.spark.offsets import OffsetRange

#: Without a rate: large enough that what each piece costs by itself does not matter.
OFFSETS_DEFAULT: Final = 200_000
#: With one: a piece goes out as fast as it can, so it holds what is allowed in this time.
_BURST_S: Final = 2.0


def offsets_for(rate_per_s: float | None) -> int:
    """How many offsets a piece has."""
    if rate_per_s is None:
        return OFFSETS_DEFAULT
    return max(1, min(OFFSETS_DEFAULT, int(rate_per_s * _BURST_S)))


def total(ranges: Iterable[OffsetRange]) -> int:
    """In offsets."""
    return sum(each.size for each in ranges)


def count(ranges: Sequence[OffsetRange], offsets_max: int) -> int:
    assert offsets_max > 0
    return -(-total(ranges) // offsets_max)


def chunk(ranges: Sequence[OffsetRange], offsets_max: int, index: int) -> list[OffsetRange]:
    """The piece with this number, from 0: of each range a share in proportion to its size."""
    pieces = count(ranges, offsets_max)
    assert 0 <= index < pieces, f"there are {pieces} pieces, and none has the number {index}"
    # Each rounds at another place, lest all partitions round up in the same pieces.
    shifts = [number * pieces // len(ranges) for number in range(len(ranges))]
    cut = (
        each._replace(
            start=each.start + (each.size * index + shift) // pieces,
            end=each.start + (each.size * (index + 1) + shift) // pieces,
        )
        for each, shift in zip(ranges, shifts, strict=True)
    )
    return [each for each in cut if each.size]


def chunks(ranges: Sequence[OffsetRange], offsets_max: int, first: int = 0) -> Iterator[list[OffsetRange]]:
    """From the one with this number on."""
    for index in range(first, count(ranges, offsets_max)):
        yield chunk(ranges, offsets_max, index)
