"""How far a table has come: for each partition of its topic the offset at which the rest begins.

Ends are kept as Delta's application transactions, one for each partition. They are part of the commit that adds the
rows, they outlive the commits themselves (which are cleaned up some day), and two writers that move the same end
cannot both succeed. What a commit tells of itself repeats them for people.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

_PREFIX: Final = "penstock-archive"

#: The version of an application's last transaction.
LookUp = Callable[[str], int | None]


@dataclass(frozen=True, slots=True)
class Ends:
    offsets: Mapping[int, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.offsets)

    def of(self, partition: int) -> int:
        return self.offsets.get(partition, 0)

    def raised(self, offsets: Mapping[int, int]) -> Ends:
        """Where some have come further; ends never go back."""
        both = sorted({*self.offsets, *offsets})
        return Ends({each: max(self.of(each), offsets.get(each, 0)) for each in both})

    def transactions(self, topic: str, before: Ends) -> dict[str, int]:
        """Application -> version, of what has changed: as a commit is to contain them."""
        known = before._named(topic)
        return {name: version for name, version in self._named(topic).items() if known.get(name) != version}

    def _named(self, topic: str) -> dict[str, int]:
        found = {_end_name(topic, partition): offset for partition, offset in sorted(self.offsets.items())}
        return {**found, _count_name(topic): max(self.offsets, default=-1) + 1}

    @classmethod
    def found(cls, topic: str, look_up: LookUp) -> Ends:
        count = look_up(_count_name(topic)) or 0
        told = {partition: look_up(_end_name(topic, partition)) for partition in range(count)}
        return cls({partition: offset for partition, offset in told.items() if offset is not None})


def _end_name(topic: str, partition: int) -> str:
    return f"{_PREFIX}/{topic}/{partition}"


def _count_name(topic: str) -> str:
    return f"{_PREFIX}/{topic}/partitions"
