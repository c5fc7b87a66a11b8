"""What a dead letter looks like: the record as it was, and headers that say where it is from and why it is here.

The headers that KIP-1191 names are `__dlq.errors.*`; ours begin with `penstock.dlq.`. All values are text.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from penstock.groups.share_state.ranges import Range
from penstock.groups.share_state.values import BURIED_LIMIT, BURIED_LOCK_EXPIRED, BURIED_REJECTED, Key
from penstock.protocol.records import Record

TOPIC: Final = "__dlq.errors.topic"
PARTITION: Final = "__dlq.errors.partition"
OFFSET: Final = "__dlq.errors.offset"
GROUP: Final = "__dlq.errors.group"
DELIVERY_COUNT: Final = "__dlq.errors.delivery.count"
MESSAGE: Final = "__dlq.errors.message"
TIMESTAMP: Final = "penstock.dlq.timestamp"
REASON: Final = "penstock.dlq.reason"
#: Only where the record itself could not be brought along: why.
WITHOUT_RECORD: Final = "penstock.dlq.without.record"

_REASONS: Final = {
    BURIED_LIMIT: ("limit", "delivered as often as the group allows"),
    BURIED_REJECTED: ("rejected", "rejected by a consumer"),
    BURIED_LOCK_EXPIRED: ("lock expired", "delivered as often as the group allows, the last time unanswered"),
}


def dead_letter(
    key: Key,
    topic: str,
    offset: int,
    fate: tuple[int, int],
    record: Record | None,
    *,
    now_ms: int,
    copies_record: bool = True,
    without: str = "",
) -> Record:
    """`fate` is the reason, as it was written, and the delivery count. Without a record, `without` says why."""
    reason, explanation = _REASONS[fate[0]]
    headers: tuple[tuple[str, bytes | None], ...] = (
        (TOPIC, topic.encode()),
        (PARTITION, b"%d" % key.partition),
        (OFFSET, b"%d" % offset),
        (GROUP, key.group.encode()),
        (DELIVERY_COUNT, b"%d" % fate[1]),
        (MESSAGE, explanation.encode()),
        (REASON, reason.encode()),
    )
    if record is None:
        return Record(offset, now_ms, None, None, (*headers, (WITHOUT_RECORD, without.encode())))
    headers += ((TIMESTAMP, b"%d" % record.timestamp),)
    if not copies_record:
        return Record(offset, now_ms, None, None, headers)
    return Record(offset, now_ms, record.key, record.value, (*record.headers, *headers))


def fates(
    pending: Sequence[Range], offsets: Iterable[tuple[int, int]]
) -> Iterator[tuple[int, tuple[int, int]]]:
    """Each of these offsets with its reason and delivery count. Both are sorted, and all of them are pending."""
    place = 0
    for first, last in offsets:
        for offset in range(first, last + 1):
            while pending[place][1] < offset:
                place += 1
            _, _, reason, count = pending[place]
            yield offset, (reason, count)
