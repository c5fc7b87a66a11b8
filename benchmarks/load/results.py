"""The results of load generators at the end of a run."""

from array import array
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    Int64s = array[int]
else:
    Int64s = array


def int64s() -> Int64s:
    return array("q")


class Timeline(NamedTuple):
    """Three numbers per batch, one after the other: partition, base offset, time in nanoseconds."""

    events: Int64s

    def by_offset(self) -> dict[tuple[int, int], int]:
        flat = iter(self.events)
        return {(partition, offset): at for partition, offset, at in zip(flat, flat, flat, strict=True)}


class Produced(NamedTuple):
    """Records acknowledged in the whole run; latencies and due times only of what was measured and paced."""

    records: int
    latencies_ns: Int64s
    due: Timeline


class Consumed(NamedTuple):
    records: int
    arrivals: Timeline
