"""What a leader does with a batch that its topic has no room for, and which topics are shed under pressure.

The owner of a topic declares it (`penstock.overflow`, `penstock.shed.priority`). Every dropped record is counted by
what dropped it and why, so that what was produced is what was kept plus what was dropped. This module decides;
`broker.partition.overflow` measures, acts and counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import Enum, StrEnum
from typing import Final, NamedTuple


class OverflowPolicy(StrEnum):
    BLOCK = "block"
    REJECT = "reject"
    DROP_OLDEST = "drop-oldest"
    DROP_NEWEST = "drop-newest"


class DroppedBy(StrEnum):
    """What drops records: one of the two lossy overflow policies, or the shedding of topics of little value."""

    DROP_OLDEST = "drop-oldest"
    DROP_NEWEST = "drop-newest"
    SHED = "shed"


class DropReason(StrEnum):
    """Why there was no room."""

    BYTES = "bytes"  # penstock.overflow.bytes
    RECORDS = "records"  # penstock.overflow.records
    TENANT = "tenant"  # the storage bound of the tenant that owns the topic
    DISK = "disk"  # the disk of this node is full, or nearly full


#: How many records of a partition were dropped. A partition has one, which it keeps through changes of role.
DropCounts = Counter[tuple[DroppedBy, DropReason]]


#: As a bound: none. As a priority: never shed.
NONE: Final = -1
#: Shed last.
PRIORITY_MAX: Final = 9
#: A bounded topic starts a new segment after this share of its bytes, because only whole segments are deleted.
SEGMENTS_PER_BOUND: Final = 8


class OverflowRules(NamedTuple):
    """The settings of a topic. Bounds are those of one partition."""

    policy: OverflowPolicy = OverflowPolicy.BLOCK
    bytes_max: int = NONE
    records_max: int = NONE
    shed_priority: int = NONE
    #: The share of the records that is kept while the topic is shed.
    shed_sample: float = 0.0


DEFAULT_RULES: Final = OverflowRules()


class ShedLevels(NamedTuple):
    """The free share of a disk, or of what a tenant may store, where shedding starts and where it is at its highest."""

    start: float
    all: float

    def level(self, free: float) -> float:
        """Return from 0 to 10: topics are shed whose priority is below it."""
        if free >= self.start:
            return 0.0
        if free <= self.all:
            return PRIORITY_MAX + 1.0
        return (PRIORITY_MAX + 1) * (self.start - free) / (self.start - self.all)


class Fill(NamedTuple):
    """What a partition holds before an append, and how much room there is besides. Uncommitted records must stay."""

    bytes: int = 0
    records: int = 0
    uncommitted_bytes: int = 0
    uncommitted_records: int = 0
    #: Free shares of what the tenant may store and of the disk.
    tenant_free: float = 1.0
    disk_free: float = 1.0
    is_tenant_full: bool = False
    is_disk_full: bool = False


class IncomingBatch(NamedTuple):
    bytes: int
    records: int
    #: A transaction is never stored in part.
    is_transactional: bool = False
    #: The cluster itself moves these records, and has acknowledged them before: a released or a dead-lettered record.
    is_planned: bool = False


class Verdict(Enum):
    ADMIT = "admit"
    TRIM = "trim"  # append it, and make room by deleting the oldest records
    WAIT = "wait"  # its producer has to send it again
    REFUSE = "refuse"  # for good
    TOO_LARGE = "too large"  # for an empty partition
    DROP = "drop"
    SHED = "shed"  # drop it, unless the sample keeps it


class Decision(NamedTuple):
    verdict: Verdict
    reason: DropReason | None = None


_ADMITTED: Final = Decision(Verdict.ADMIT)


def decide(rules: OverflowRules, fill: Fill, batch: IncomingBatch, levels: ShedLevels) -> Decision:
    """Decide on a batch. Shedding comes first: it is what prevents that there is no room."""
    if rules.shed_priority >= 0 and not (batch.is_transactional or batch.is_planned):
        reason = shed_reason(rules.shed_priority, fill, levels)
        if reason is not None:
            return Decision(Verdict.SHED, reason)
    return decide_overflow(rules, fill, batch)


def decide_overflow(rules: OverflowRules, fill: Fill, batch: IncomingBatch) -> Decision:
    reason = _shortage(rules, fill, batch)
    if reason is None:
        return _ADMITTED
    if batch.is_planned:
        return Decision(Verdict.WAIT, reason)
    match rules.policy:
        case OverflowPolicy.DROP_NEWEST:
            return Decision(Verdict.REFUSE if batch.is_transactional else Verdict.DROP, reason)
        case OverflowPolicy.REJECT:
            verdict = Verdict.REFUSE
        case OverflowPolicy.BLOCK:
            verdict = Verdict.WAIT
        case OverflowPolicy.DROP_OLDEST:
            # What is not committed cannot be deleted, so it would grow beyond the bound.
            uncommitted = _exceeds(rules, fill.uncommitted_bytes, fill.uncommitted_records, batch)
            verdict = Verdict.TRIM if uncommitted is None else Verdict.WAIT
    if _exceeds(rules, 0, 0, batch) is not None:
        verdict = Verdict.TOO_LARGE
    return Decision(verdict, reason)


def shed_reason(priority: int, fill: Fill, levels: ShedLevels) -> DropReason | None:
    """Return what is so short that topics of this priority are shed; None if nothing is."""
    tenant, disk = levels.level(fill.tenant_free), levels.level(fill.disk_free)
    if max(tenant, disk) <= priority:
        return None
    return DropReason.TENANT if tenant > disk else DropReason.DISK


def _shortage(rules: OverflowRules, fill: Fill, batch: IncomingBatch) -> DropReason | None:
    exceeded = _exceeds(rules, fill.bytes, fill.records, batch)
    if exceeded is not None:
        return exceeded
    if fill.is_tenant_full:
        return DropReason.TENANT
    return DropReason.DISK if fill.is_disk_full else None


def _exceeds(
    rules: OverflowRules, held_bytes: int, held_records: int, batch: IncomingBatch
) -> DropReason | None:
    if 0 <= rules.bytes_max < held_bytes + batch.bytes:
        return DropReason.BYTES
    if 0 <= rules.records_max < held_records + batch.records:
        return DropReason.RECORDS
    return None


# -- drop-oldest -----------------------------------------------------------------------------------------


class ClosedSegment(NamedTuple):
    """A segment that is not written any more, without what was deleted of it before."""

    size_bytes: int
    next_offset: int


class Trim(NamedTuple):
    """The new start of a log, and what of its move is due to which reason."""

    start_offset: int
    dropped: Counter[DropReason]
    #: How much of the owed bytes has been deleted.
    paid_bytes: int


class TrimmableLog(NamedTuple):
    start_offset: int
    end_offset: int
    high_watermark: int
    size_bytes: int
    #: The closed segments, oldest first; may stop anywhere.
    closed: Sequence[ClosedSegment]


def trim(rules: OverflowRules, log: TrimmableLog, *, owed_bytes: int, owed_for: DropReason) -> Trim:
    """Return what of a drop-oldest log to delete.

    Whole segments until the rest is within its bytes, single records until it is within its count, and whole segments
    for the bytes that it owes, because others have no room while it grows.
    """
    start, size, place = log.start_offset, log.size_bytes, 0
    dropped: Counter[DropReason] = Counter()

    def move_to(offset: int, reason: DropReason) -> None:
        nonlocal start
        if offset > start:
            dropped[reason] += offset - start
            start = offset

    committed = [segment for segment in log.closed if segment.next_offset <= log.high_watermark]
    while 0 <= rules.bytes_max < size and place < len(committed):
        move_to(committed[place].next_offset, DropReason.BYTES)
        size -= committed[place].size_bytes
        place += 1
    if rules.records_max >= 0:
        move_to(min(log.end_offset - rules.records_max, log.high_watermark), DropReason.RECORDS)
    paid = 0
    while place < len(committed) and 0 < committed[place].size_bytes <= owed_bytes - paid:
        move_to(committed[place].next_offset, owed_for)
        paid += committed[place].size_bytes
        place += 1
    return Trim(start, dropped, paid)


# -- shedding --------------------------------------------------------------------------------------------


#: Sums of shares are not exact: ten times a tenth is below 1.
_ROUNDING: Final = 1e-6


class Sampler:
    """Keeps a share of the records, batch by batch, without randomness: the same batches give the same choice."""

    __slots__ = ("_credit", "share")

    def __init__(self, share: float) -> None:
        self.share = share
        self._credit = 0.0

    def keeps(self, records: int) -> bool:
        """Decide on the next batch."""
        self._credit += self.share * records
        if self._credit + _ROUNDING < records:
            return False
        self._credit -= records
        return True
