"""Share partitions as metrics: what has become of records, and what is in flight."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from penstock.broker.exposition import Family
    from penstock.broker.share.table import SharePartitions

_LABELS: Final = ("group", "topic", "partition")


def share_families(shares: SharePartitions) -> Iterator[Family]:
    from penstock.broker.exposition import Family, gauge

    yield gauge("penstock_share_sessions", "Share sessions.", len(shares.sessions))
    events = [
        ((group, event), getattr(counters, event))
        for group, counters in shares.counters.items()
        for event in counters.__slots__
    ]
    text = "What has happened to records of share groups on this node since its start."
    yield Family("counter", "penstock_share_records", text, ("group", "event"), events)
    led = [
        ((one.group, one.partition.topic, str(one.partition.index)), one.rules)
        for one in shares
        if one.rules is not None
    ]
    locked = [(labels, rules.locked_count) for labels, rules in led]
    yield Family("gauge", "penstock_share_locked_records", "Records with members.", _LABELS, locked)
    opened = [(labels, rules.open_count) for labels, rules in led]
    text = "Records between the start and the end offset that are not final."
    yield Family("gauge", "penstock_share_open_records", text, _LABELS, opened)
    starts = [(labels, rules.start_offset) for labels, rules in led]
    text = "The oldest offset that a share group is not done with."
    yield Family("gauge", "penstock_share_start_offset", text, _LABELS, starts)
    ends = [(labels, rules.end_offset) for labels, rules in led]
    yield Family("gauge", "penstock_share_end_offset", "The next offset to hand out.", _LABELS, ends)
