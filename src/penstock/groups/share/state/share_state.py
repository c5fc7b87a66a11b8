"""The state of share partitions as values: requests to the share coordinator, replies, and state ranges.

All of them are independent of the wire version. A state range is a tuple (first offset, last offset, state, delivery
count). A normalized list of them is sorted, has no overlap, and never has two ranges where one would do. Where two
ranges meet, the one with more deliveries wins, and with equal deliveries the higher state, as in Apache Kafka. So
neither the order in which ranges are combined matters, nor how often.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from operator import lt
from typing import Final, NamedTuple
from uuid import UUID

from penstock.protocol.errors import ErrorCode
from penstock.protocol.share_failures import WorkerFailure

#: Delivery states as they are stored.
AVAILABLE: Final = 0
ACKNOWLEDGED: Final = 2
ARCHIVED: Final = 4
#: Delivery states of write requests only: archive the record and write a dead letter for it. Readers see ARCHIVED.
DEAD_LETTER_LIMIT: Final = 32  # the delivery count has reached the limit
DEAD_LETTER_REJECTED: Final = 33  # a consumer has rejected the record
DEAD_LETTER_LOCK_EXPIRED: Final = 34  # the delivery count has reached the limit, and the last lock expired
#: The three above, in order.
DEAD_LETTER_STATES: Final = (DEAD_LETTER_LIMIT, DEAD_LETTER_REJECTED, DEAD_LETTER_LOCK_EXPIRED)

#: Not delivery states. The wire format has no fields for the totals of a share partition, so batches with these states
#: carry them in place of offsets: (handed out, confirmed) and (expired, 0).
TOTALS_ON_WIRE: Final = 40
EXPIRED_TOTAL_ON_WIRE: Final = 41
#: A batch with this state carries the delay of one record: (offset, due_ms) and the delivery count.
DELAY_ON_WIRE: Final = 42

#: A start offset or count that is not being written, or not known yet.
UNSET: Final = -1


class StateBatch(NamedTuple):
    """Any 4-tuple of this shape is accepted, because writes are on the hot path."""

    first_offset: int
    last_offset: int
    delivery_state: int
    delivery_count: int


class DeliveryTotals(NamedTuple):
    """Counts since the share partition was created. They never decrease, so writing the same totals again is harmless.

    Under at-most-once delivery a record is final when a member acquires it: `handed_out` counts these records, and
    `confirmed` those that a member has acknowledged; the others may be lost. `expired` counts offsets that retention
    deleted before any member acquired them.
    """

    handed_out: int = 0
    confirmed: int = 0
    expired: int = 0

    @property
    def unconfirmed(self) -> int:
        return self.handed_out - self.confirmed

    def at_least(self, other: "DeliveryTotals") -> "DeliveryTotals":
        return DeliveryTotals(*map(max, self, other))


NO_DELIVERY_TOTALS: Final = DeliveryTotals()


class RecordDelay(NamedTuple):
    """A record that was released from this delivery is not delivered again before `due_ms`.

    Only for records whose delay the consumer chose: the group's own delays are not stored.
    """

    offset: int
    delivery_count: int
    due_ms: int


class SharePartitionKey(NamedTuple):
    """Identifies a share partition: a group's view of one partition of a topic."""

    group: str
    topic_id: UUID
    partition: int


class ShareState(NamedTuple):
    """`start_offset` is UNSET until a leader has set it; `batches` are sorted and do not overlap."""

    state_epoch: int
    start_offset: int
    batches: tuple[StateBatch, ...] = ()
    totals: DeliveryTotals = NO_DELIVERY_TOTALS
    delays: tuple[RecordDelay, ...] = ()


class ShareStateSummary(NamedTuple):
    """`delivery_complete_count` counts the final offsets from the start offset on; UNSET if unknown."""

    state_epoch: int
    leader_epoch: int
    start_offset: int
    delivery_complete_count: int


class InitializeState(NamedTuple):
    """With the start offset UNSET only a missing state is initialized; otherwise an existing one is reset too."""

    key: SharePartitionKey
    state_epoch: int
    start_offset: int
    #: Refuse a start offset before records that were already acquired.
    only_forward: bool = False


class ReadState(NamedTuple):
    key: SharePartitionKey
    leader_epoch: int


class WriteState(NamedTuple):
    """Batches need not be sorted. Where they overlap, or meet stored ones, the higher delivery count wins, then the
    higher state.
    """

    key: SharePartitionKey
    state_epoch: int
    leader_epoch: int
    start_offset: int
    delivery_complete_count: int
    batches: Sequence[tuple[int, int, int, int]]
    totals: DeliveryTotals | None = None  # the current totals; None if they have not changed
    delays: tuple[RecordDelay, ...] = ()  # for records in the batches


class DeleteState(NamedTuple):
    """A state that was initialized at a later epoch is not deleted. UNSET deletes a state of any epoch."""

    key: SharePartitionKey
    state_epoch: int = UNSET


class ReadStateSummary(NamedTuple):
    key: SharePartitionKey
    leader_epoch: int


class StoreWorkerErrors(NamedTuple):
    """Errors of records that workers are about to reject or release. A repeated request is harmless."""

    key: SharePartitionKey
    failures: tuple[WorkerFailure, ...]


ShareStateRequest = (
    InitializeState | ReadState | WriteState | DeleteState | ReadStateSummary | StoreWorkerErrors
)


class ShareStateReply(NamedTuple):
    error: ErrorCode = ErrorCode.none
    message: str | None = None
    state: ShareState | None = None  # the reply to ReadState
    summary: ShareStateSummary | None = None  # the reply to ReadStateSummary


StateRange = tuple[int, int, int, int]


def normalize(ranges: Sequence[StateRange]) -> Sequence[StateRange]:
    """Return any ranges as a normalized list. A list that is normalized already is returned as it is."""
    last_before, state_before, count_before = -2, -1, -1
    for first, last, state, count in ranges:
        if first <= last_before or (
            first == last_before + 1 and state == state_before and count == count_before
        ):
            return _overlay_all(ranges)
        last_before, state_before, count_before = last, state, count
    return ranges


def _overlay_all(ranges: Sequence[StateRange]) -> list[StateRange]:
    if len(ranges) < 2:
        return list(ranges)
    middle = len(ranges) // 2
    return overlay(_overlay_all(ranges[:middle]), _overlay_all(ranges[middle:]))


def is_sorted(ranges: Sequence[StateRange]) -> bool:
    """Whether the ranges are sorted and do not overlap."""
    columns = tuple(zip(*ranges, strict=True))
    return not columns or all(map(lt, columns[1], columns[0][1:]))


def merge_into(ranges: list[StateRange], new: Sequence[StateRange]) -> None:
    """Merge normalized ranges into a normalized list. Only the part that the new ranges cover is changed."""
    if not ranges:
        ranges.extend(new)
        return
    behind = bisect_left(new, (ranges[-1][1] + 1,))
    if behind:
        _merge_among(ranges, new[:behind] if behind < len(new) else new)
    if behind < len(new):
        # Most updates are for offsets that are not in the state yet.
        _append_merged(ranges, new[behind])
        ranges.extend(new[behind + 1 :])


def _merge_among(ranges: list[StateRange], new: Sequence[StateRange]) -> None:
    # From the last range that begins before the new ones, which may overlap them, to the first that begins after.
    low = max(bisect_left(ranges, (new[0][0],)) - 1, 0)
    high = bisect_left(ranges, (new[-1][1] + 2,))
    ranges[low:high] = overlay(ranges[low:high], new)


def overlay(left: Sequence[StateRange], right: Sequence[StateRange]) -> list[StateRange]:
    """Merge two normalized lists into one. Ranges of `left` between two ranges of `right` are copied as a slice."""
    out: list[StateRange] = []
    rights = iter(right)
    index, count = 1, len(left)  # the next range of `left`
    a, b = left[0] if left else None, next(rights, None)
    while a is not None and b is not None:
        if a[1] < b[0]:
            _append_merged(out, a)
            if index < count and left[index][1] < b[0]:
                before, index = index, bisect_left(left, (b[0],), index)
                index -= left[index - 1][1] >= b[0]
                out.extend(left[before:index])
            a, index = left[index] if index < count else None, index + 1
        elif b[1] < a[0]:
            _append_merged(out, b)
            b = next(rights, None)
        elif a[0] < b[0]:
            _append_merged(out, (a[0], b[0] - 1, a[2], a[3]))
            a = (b[0], a[1], a[2], a[3])
        elif b[0] < a[0]:
            _append_merged(out, (b[0], a[0] - 1, b[2], b[3]))
            b = (a[0], b[1], b[2], b[3])
        else:
            last = min(a[1], b[1])
            winner = a if (a[3], a[2]) > (b[3], b[2]) else b
            _append_merged(out, (a[0], last, winner[2], winner[3]))
            if a[1] > last:
                a = (last + 1, a[1], a[2], a[3])
            else:
                a, index = left[index] if index < count else None, index + 1
            b = (last + 1, b[1], b[2], b[3]) if b[1] > last else next(rights, None)
    if a is not None:
        _append_merged(out, a)
        out.extend(left[index:])
    if b is not None:
        _append_merged(out, b)
        out.extend(rights)
    return out


def _append_merged(out: list[StateRange], new: StateRange) -> None:
    if out:
        before = out[-1]
        if before[1] + 1 == new[0] and before[2] == new[2] and before[3] == new[3]:
            out[-1] = (before[0], new[1], new[2], new[3])
            return
    out.append(new)


def drop_before(ranges: list[StateRange], offset: int) -> None:
    """Remove everything before an offset."""
    if not ranges or ranges[0][0] >= offset:
        return
    behind = bisect_left(ranges, (offset,))
    _, last, state, count = ranges[behind - 1]
    if last >= offset:
        ranges[:behind] = [(offset, last, state, count)]
    else:
        del ranges[:behind]


def subtract(ranges: Iterable[StateRange], taken: Sequence[tuple[int, ...]]) -> list[StateRange]:
    """Return the parts of normalized ranges outside `taken`: sorted tuples that begin with first and last offset."""
    out: list[StateRange] = []
    index = 0
    for first, last, state, count in ranges:
        while index < len(taken) and taken[index][1] < first:
            index += 1
        ahead = index
        while ahead < len(taken) and taken[ahead][0] <= last:
            if taken[ahead][0] > first:
                out.append((first, taken[ahead][0] - 1, state, count))
            first = max(first, taken[ahead][1] + 1)
            ahead += 1
        if first <= last:
            out.append((first, last, state, count))
    return out


def overlapping_slice(ranges: Sequence[StateRange], others: Sequence[tuple[int, ...]]) -> tuple[int, int]:
    """Return the indexes (low, high) of the ranges that may overlap `others`. Both lists are sorted."""
    if not others:
        return 0, 0
    low = max(bisect_left(ranges, (others[0][0],)) - 1, 0)
    return low, bisect_left(ranges, (others[-1][1] + 1,))


def offset_count(ranges: Iterable[tuple[int, ...]]) -> int:
    """Return how many offsets the ranges contain."""
    columns = tuple(zip(*ranges, strict=True))
    return sum(columns[1]) - sum(columns[0]) + len(columns[0]) if columns else 0


def first_offsets(ranges: Sequence[StateRange], offsets_max: int) -> list[StateRange]:
    """Return the first `offsets_max` offsets of the ranges."""
    out: list[StateRange] = []
    for first, last, state, count in ranges:
        if offsets_max <= 0:
            break
        last = min(last, first + offsets_max - 1)
        out.append((first, last, state, count))
        offsets_max -= last - first + 1
    return out
