"""Metrics of transactions, share groups, dead letters and the schedule, collected for a scrape.

A broker reports what it leads or coordinates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from penstock.broker.metrics.counters import MetricFamily, counter, gauge, histogram_snapshot

if TYPE_CHECKING:
    from penstock.broker.coordinators.schedule.coordinator import ScheduleCoordinator
    from penstock.broker.coordinators.share.coordinator import ShareCoordinator
    from penstock.broker.coordinators.share.dead_letters import DeadLetterManager
    from penstock.broker.coordinators.share.partitions import SharePartitionManager
    from penstock.broker.coordinators.transactions.coordinator import TransactionCoordinator


def coordinator_families(
    *,
    transactions: TransactionCoordinator | None,
    share_state: ShareCoordinator | None,
    share: SharePartitionManager | None,
    schedule: ScheduleCoordinator | None,
) -> Iterator[MetricFamily]:
    """The families of the coordinators that exist."""
    if transactions is not None:
        yield from transaction_families(transactions)
    if share_state is not None:
        yield from dead_letter_families(share_state.dead_letters)
        yield from share_total_families(share_state)
    if share is not None:
        yield from share_families(share)
    if schedule is not None:
        yield from schedule_families(schedule)


def transaction_families(coordinator: TransactionCoordinator) -> Iterator[MetricFamily]:
    shards = coordinator.loaded_shards()
    states: Counter[str] = Counter()
    for shard in shards:
        states.update({state.title: count for state, count in shard.count_by_state.items()})
    yield MetricFamily(
        "gauge",
        "penstock_transactions",
        "Transactional ids by state. Ongoing: open. Prepare...: decided, and waiting for markers.",
        ("state",),
        [((state,), count) for state, count in states.items()],
    )
    yield MetricFamily(
        "counter",
        "penstock_transactions_ended",
        "Transactions decided on here: committed or aborted by their producer, fenced by another, or timed out.",
        ("outcome",),
        [((outcome,), count) for outcome, count in coordinator.ended.items()],
    )
    yield gauge(
        "penstock_transaction_markers_waiting",
        "Partitions that wait for the marker of an ended transaction.",
        sum(shard.markers_waiting for shard in shards),
    )


_LABELS: Final = ("group", "topic", "partition")


def share_families(shares: SharePartitionManager) -> Iterator[MetricFamily]:
    yield gauge("penstock_share_sessions", "Share sessions.", len(shares.sessions))
    events = [
        ((group, event), getattr(counters, event))
        for group, counters in shares.counters.items()
        for event in counters.__slots__
    ]
    text = "What has happened to records of share groups on this node since it started."
    yield MetricFamily("counter", "penstock_share_records", text, ("group", "event"), events)
    led = [
        ((one.group, one.partition.topic, str(one.partition.index)), one.rules)
        for one in shares
        if one.rules is not None
    ]
    locked = [(labels, rules.locked_count) for labels, rules in led]
    yield MetricFamily(
        "gauge", "penstock_share_locked_records", "Records that members have acquired.", _LABELS, locked
    )
    opened = [(labels, rules.open_count) for labels, rules in led]
    text = "Records between the start and the end offset that are not final."
    yield MetricFamily("gauge", "penstock_share_open_records", text, _LABELS, opened)
    starts = [(labels, rules.start_offset) for labels, rules in led]
    text = "The oldest offset that a share group has not finished."
    yield MetricFamily("gauge", "penstock_share_start_offset", text, _LABELS, starts)
    ends = [(labels, rules.end_offset) for labels, rules in led]
    yield MetricFamily("gauge", "penstock_share_end_offset", "The next offset to deliver.", _LABELS, ends)


_TOTALS: Final = ("handed_out", "confirmed", "unconfirmed", "expired")


def share_total_families(coordinator: ShareCoordinator) -> Iterator[MetricFamily]:
    """Report the stored totals of the shards led here: the sum over all nodes counts every share partition once."""
    rows = []
    for shard in coordinator.loaded_shards():
        for key, totals in shard.totals().items():
            labels = (key.group, coordinator.topic_name(key.topic_id), str(key.partition))
            rows += [((*labels, event), getattr(totals, event)) for event in _TOTALS]
    yield MetricFamily(
        "gauge",
        "penstock_share_record_totals",
        "Records since the share partition was created, kept across restarts. Under at-most-once delivery, handed_out "
        "records are never delivered again, and unconfirmed ones of them may be lost; retention deleted expired ones "
        "before they were delivered.",
        ("group", "topic", "partition", "event"),
        rows,
    )


def dead_letter_families(letters: DeadLetterManager) -> Iterator[MetricFamily]:
    yield MetricFamily(
        "counter",
        "penstock_dead_letters",
        "Records that this node wrote to dead-letter topics.",
        ("group",),
        [((group,), count) for group, count in letters.written_by_group.items()],
    )
    yield MetricFamily(
        "counter",
        "penstock_dead_letters_lost",
        "Archived records that could not be written to a dead-letter topic, by reason.",
        ("group", "reason"),
        list(letters.lost.items()),
    )
    yield MetricFamily(
        "gauge",
        "penstock_dead_letters_pending",
        "Archived records that this node has yet to write to a dead-letter topic.",
        ("group",),
        [((group,), count) for group, count in letters.pending().items()],
    )
    yield MetricFamily(
        "gauge",
        "penstock_dead_letter_breaker_open",
        "1 while a group has too many dead letters and some of them have to wait.",
        ("group",),
        [((group,), is_open) for group, is_open in letters.open_breakers().items()],
    )
    yield MetricFamily(
        "counter",
        "penstock_dead_letter_breaker_opened",
        "How often a group had too many dead letters.",
        ("group",),
        [((group,), count) for group, count in letters.held_back.items()],
    )


def schedule_families(schedule: ScheduleCoordinator) -> Iterator[MetricFamily]:
    counts, hosts = schedule.counts, [host for host in schedule.hosts.values() if host.is_loaded]
    held = sum(host.shard.held_count for host in hosts)
    yield gauge("penstock_schedule_held", "Records that are held until they are due.", held)
    loading = len(schedule.hosts) - len(hosts)
    yield gauge("penstock_schedule_loading", "Shards of the schedule that are being loaded.", loading)
    firsts = [first_ms for host in hosts if (first_ms := host.earliest_due_ms()) is not None]
    overdue_s = max(schedule.now_ms() - min(firsts), 0) / 1000 if firsts else 0.0
    text = "How long the record that has been due for the longest time waits."
    yield gauge("penstock_schedule_overdue_seconds", text, overdue_s)
    waiting = sum(host.releaser.waiting_count for host in hosts)
    text = "Partitions that do not accept the records that are due for them."
    yield gauge("penstock_schedule_waiting_partitions", text, waiting)
    yield counter("penstock_schedule_released", "Records that were released.", counts.released_count)
    text = "Records that were dropped because their topic was deleted."
    yield counter("penstock_schedule_dropped", text, counts.dropped_count)
    late = histogram_snapshot(counts.lateness)
    text = "How late the first record of each released batch was."
    yield MetricFamily("histogram", "penstock_schedule_lateness_seconds", text, (), [((), late)])
