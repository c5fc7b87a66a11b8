"""How much of what waits goes into a batch, and how a batch is spread over tasks. Pure and deterministic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise

from penstock.client.metadata import Place
from penstock.spark.offsets import OffsetRange


def waiting(begins: Mapping[Place, int], available: Mapping[Place, int]) -> dict[Place, int]:
    """How many offsets lie between, for every partition that has some."""
    sizes = {place: end - begins[place] for place, end in available.items()}
    return {place: size for place, size in sizes.items() if size > 0}


def limit(begins: Mapping[Place, int], available: Mapping[Place, int], offsets_max: int) -> dict[Place, int]:
    """The ends of a batch of at most `offsets_max` offsets, shared out in proportion to what waits.

    What is left over by rounding goes first to partitions that would get nothing, so that none starves.
    """
    sizes = waiting(begins, available)
    total = sum(sizes.values())
    if total <= offsets_max:
        return dict(available)
    shares = {place: size * offsets_max // total for place, size in sizes.items()}
    rest = offsets_max - sum(shares.values())

    def urgency(place: Place) -> tuple[bool, int, Place]:
        return shares[place] > 0, -(sizes[place] * offsets_max % total), place

    for place in sorted(sizes, key=urgency)[:rest]:
        shares[place] += 1
    return {
        place: begins[place] + shares[place] if place in shares else end for place, end in available.items()
    }


def is_enough(total: int, offsets_min: int | None, waited_ms: float, delay_ms_max: int) -> bool:
    """Whether to make a batch of `total` offsets now, or to let more come together."""
    return offsets_min is None or total >= offsets_min or waited_ms >= delay_ms_max


def split(
    ranges: Iterable[OffsetRange], *, partitions_min: int | None = None, records_max: int | None = None
) -> list[OffsetRange]:
    """Ranges for tasks: none longer than `records_max`, and `partitions_min` of them where there are as many offsets.

    Large ranges are cut into more pieces than small ones, each into pieces of nearly the same size.
    """
    whole = [each for each in ranges if each.size]
    pieces = [-(-each.size // records_max) if records_max else 1 for each in whole]
    if partitions_min is not None:
        pieces = _more_pieces(whole, pieces, partitions_min)
    return [piece for each, count in zip(whole, pieces, strict=True) for piece in _cut(each, count)]


def _more_pieces(ranges: list[OffsetRange], pieces: list[int], wanted: int) -> list[int]:
    """Until there are as many as wanted: one more for the range whose pieces are the longest."""
    total = sum(each.size for each in ranges)
    wanted = min(wanted, total)
    # In proportion first, so that the loop only has to do what rounding left.
    grown = [max(count, each.size * wanted // total) for each, count in zip(ranges, pieces, strict=True)]
    while sum(grown) < wanted:
        longest = max(range(len(ranges)), key=lambda index: (ranges[index].size / grown[index], -index))
        grown[longest] += 1
    return grown


def _cut(whole: OffsetRange, count: int) -> Iterable[OffsetRange]:
    cuts = [whole.start + whole.size * index // count for index in range(count + 1)]
    return [whole._replace(start=start, end=end) for start, end in pairwise(cuts)]
