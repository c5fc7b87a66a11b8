"""Finding the records because of which a batch fails, by trying halves of its offsets. Pure: it asks, others run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from penstock.client.letters import Failure

#: Runs these offsets alone; what goes wrong, or None.
Try = Callable[[Sequence["Stretch"]], Failure | None]


class Stretch(NamedTuple):
    """Offsets of one partition: `start` and up to, but not including, `end`."""

    topic: str
    partition: int
    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}] {self.start} to {self.end - 1}"


class Isolated(NamedTuple):
    """One record, and what went wrong with it alone."""

    stretch: Stretch
    failure: Failure


class TooMany(Exception):
    """More records fail than a batch may have poison in it."""


class Unsteady(Exception):
    """What failed together does not fail alone: it is not about single records."""


def isolate(stretches: Sequence[Stretch], failure: Failure, fails: Try, *, found_max: int) -> list[Isolated]:
    """The records that fail on their own, of stretches that have failed together.

    For one among n this takes between log2(n) and 2 log2(n) tries. Raises TooMany, Unsteady.
    """
    found: list[Isolated] = []
    _search(tuple(stretches), failure, fails, found, found_max, is_tried=True)
    return found


def _search(
    stretches: tuple[Stretch, ...],
    failure: Failure,
    fails: Try,
    found: list[Isolated],
    found_max: int,
    *,
    is_tried: bool,
) -> None:
    """`is_tried`: whether these were seen to fail, rather than concluded to since their other half does not."""
    if sum(each.size for each in stretches) == 1:
        seen = failure if is_tried else fails(stretches)
        if seen is None:
            raise Unsteady
        if len(found) >= found_max:
            raise TooMany
        found.append(Isolated(stretches[0], seen))
        return
    left, right = halves(stretches)
    left_failure = fails(left)
    if left_failure is None:
        _search(right, failure, fails, found, found_max, is_tried=False)
        return
    _search(left, left_failure, fails, found, found_max, is_tried=True)
    right_failure = fails(right)
    if right_failure is not None:
        _search(right, right_failure, fails, found, found_max, is_tried=True)


def halves(stretches: Sequence[Stretch]) -> tuple[tuple[Stretch, ...], tuple[Stretch, ...]]:
    """Both have at least one offset."""
    left: list[Stretch] = []
    right: list[Stretch] = []
    room = sum(each.size for each in stretches) // 2
    assert room, f"{stretches} cannot be halved"
    for each in stretches:
        cut = each.start + min(room, each.size)
        room -= cut - each.start
        left += [each._replace(end=cut)] if cut > each.start else []
        right += [each._replace(start=cut)] if cut < each.end else []
    return tuple(left), tuple(right)
