"""What is asked of a share partition and what it answers."""

from collections.abc import Sequence
from typing import NamedTuple

from penstock.groups.share_state.values import Totals

GAP, ACCEPT, RELEASE, REJECT, RENEW = range(5)


class Acknowledgement(NamedTuple):
    """`types` has one byte for each offset, or one for all of them. Any tuple of this shape will do."""

    first_offset: int
    last_offset: int
    types: bytes


Said = tuple[int, int, bytes]


class Found(NamedTuple):
    """What a read of the log has found from `first_offset` up to, but without, `next_offset`.

    `spans` are runs of records to hand out, as (first offset, offset after the last): what lies between them are holes
    of compaction, control records, and aborted transactions. `ends` are the offsets after each batch.
    """

    first_offset: int
    next_offset: int
    spans: Sequence[tuple[int, int]]
    ends: Sequence[int]


class Appetite(NamedTuple):
    """`exact`: never more records than asked for; else whole batches, so that fewer ranges have to be told."""

    records_max: int
    batch_records: int = 1 << 31
    exact: bool = False


class Acquired(NamedTuple):
    first_offset: int
    last_offset: int
    delivery_count: int


class Write(NamedTuple):
    """`batches` are (first offset, last offset, delivery state, delivery count), in order.

    `totals` are those of the same moment, where they are not known to be stored.
    """

    start_offset: int
    delivery_complete_count: int
    batches: list[tuple[int, int, int, int]]
    totals: Totals | None = None


class Counters:
    """What members have said of records, and what has become of these, in all share partitions of a group on a node."""

    __slots__ = (
        "accepted", "acquired", "buried", "expired", "gaps", "limited", "rejected", "released", "renewed",
    )  # fmt: skip

    def __init__(self) -> None:
        self.acquired = self.accepted = self.released = self.rejected = self.renewed = self.gaps = 0
        self.expired = 0  # locks that ran out
        self.limited = 0  # records given up because they were delivered often enough
        self.buried = 0  # records on their way to a dead-letter topic
