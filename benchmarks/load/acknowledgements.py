"""Random outcomes, the same for every broker: drawn once from a seed, then only cut into pieces."""

import random
from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.wire.raw_client import BrokerError
from benchmarks.wire.share_frames import ACCEPT, REJECT, RELEASE

_DRAWN = 1 << 20
#: Accepted and rejected records are done with; released ones come again.
_IS_FINAL = bytes(kind in (ACCEPT, REJECT) for kind in range(256))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """In per cent; the rest is accepted."""

    released: int
    rejected: int


class Dice:
    def __init__(self, mix: Mix, seed: int) -> None:
        weights = (100 - mix.released - mix.rejected, mix.released, mix.rejected)
        drawn = random.Random(seed).choices((ACCEPT, RELEASE, REJECT), weights, k=_DRAWN)
        self._drawn = bytes(drawn)
        self._at = 0

    def throw(self, count: int) -> bytes:
        if self._at + count > _DRAWN:
            self._at = 0
        self._at += count
        return self._drawn[self._at - count : self._at]


def final_count(types: bytes) -> int:
    return len(types) - types.count(RELEASE)


def check_once(said: Iterable[tuple[int, int, bytes]], ends: dict[int, int]) -> int:
    """No record was done with twice. `said` is (partition, first offset, outcomes); returns how many are done with."""
    marks = {partition: bytearray(end) for partition, end in ends.items()}
    for partition, first, types in said:
        final = int.from_bytes(types.translate(_IS_FINAL), "big")
        row = marks[partition]
        until = first + len(types)
        before = int.from_bytes(row[first:until], "big")
        if before & final:
            raise BrokerError(
                f"records {first} to {until - 1} of partition {partition}: one was given out again"
            )
        row[first:until] = (before | final).to_bytes(len(types), "big")
    return sum(row.count(1) for row in marks.values())
