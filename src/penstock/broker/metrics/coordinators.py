"""Metrics of transactions, share groups, dead letters and the schedule, collected for a scrape.

A broker reports what it leads or coordinates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from penstock.broker.metrics.exposition import HistogramSnapshot, MetricFamily, counter, gauge

if TYPE_CHECKING:
    from penstock.broker.coordinators.schedule.coordinator import ScheduleCoordinator
    from penstock.broker.coordinators.share.dead_letters import DeadLetterManager
    from penstock.broker.coordinators.share.partitions import SharePartitionManager
    from penstock.broker.coordinators.transactions.coordinator import TransactionCoordinator
    from penstock.broker.node import Node


def transaction_families(coordinator: TransactionCoordinator) -> Iterator[MetricFamily]:
    shards = coordinator.loaded_shards()
    states: Counter[str] = Counter()
    for shard in shards:
        states.update({state.title: count for state, count in shard.count_by_state.items()})
    yield MetricFamily(
        "gauge",
        "penstock_transactions",
        "Transactional ids by state: Ongoing is open, what begins with Prepare is decided and waits for its markers.",
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
        "Partitions that the end of a transaction has yet to be written to.",
        sum(shard.markers_waiting for shard in shards),
    )


_LABELS: Final = ("group", "topic", "partition")


def share_families(shares: SharePartitionManager) -> Iterator[MetricFamily]:
    from penstock.broker.metrics.exposition import MetricFamily, gauge

    yield gauge("penstock_share_sessions", "Share sessions.", len(shares.sessions))
    events = [
        ((group, event), getattr(counters, event))
        for group, counters in shares.counters.items()
        for event in counters.__slots__
    ]
    text = "What has happened to records of share groups on this node since its start."
    yield MetricFamily("counter", "penstock_share_records", text, ("group", "event"), events)
    led = [
        ((one.group, one.partition.topic, str(one.partition.index)), one.rules)
        for one in shares
        if one.rules is not None
    ]
    locked = [(labels, rules.locked_count) for labels, rules in led]
    yield MetricFamily("gauge", "penstock_share_locked_records", "Records with members.", _LABELS, locked)
    opened = [(labels, rules.open_count) for labels, rules in led]
    text = "Records between the start and the end offset that are not final."
    yield MetricFamily("gauge", "penstock_share_open_records", text, _LABELS, opened)
    starts = [(labels, rules.start_offset) for labels, rules in led]
    text = "The oldest offset that a share group is not done with."
    yield MetricFamily("gauge", "penstock_share_start_offset", text, _LABELS, starts)
    ends = [(labels, rules.end_offset) for labels, rules in led]
    yield MetricFamily("gauge", "penstock_share_end_offset", "The next offset to hand out.", _LABELS, ends)


_TOTALS: Final = ("handed_out", "confirmed", "unconfirmed", "expired")


def share_total_families(node: Node) -> Iterator[MetricFamily]:
    """Report the stored totals of the shards led here: the sum over all nodes counts every share partition once."""
    rows = []
    for shard in node.share_state.loaded_shards():
        for key, totals in shard.totals().items():
            topic = node.image.topics_by_id.get(key.topic_id)
            name = str(key.topic_id) if topic is None else topic.name
            labels = (key.group, name, str(key.partition))
            rows += [((*labels, event), getattr(totals, event)) for event in _TOTALS]
    yield MetricFamily(
        "gauge",
        "penstock_share_record_totals",
        "Records since the share partition was made, kept across restarts. Under at-most-once, handed_out are those "
        "that nobody else will get, and unconfirmed are those of them that may be lost; expired ones were deleted by "
        "retention before anybody got them.",
        ("group", "topic", "partition", "event"),
        rows,
    )


def dead_letter_families(letters: DeadLetterManager) -> Iterator[MetricFamily]:
    yield MetricFamily(
        "counter",
        "penstock_dead_letters",
        "Records that were buried in dead-letter topics by this node.",
        ("group",),
        [((group,), count) for group, count in letters.written_by_group.items()],
    )
    yield MetricFamily(
        "counter",
        "penstock_dead_letters_lost",
        "Records that were given up and could not be buried, by reason.",
        ("group", "reason"),
        list(letters.lost.items()),
    )
    yield MetricFamily(
        "gauge",
        "penstock_dead_letters_pending",
        "Records that were given up and wait to be buried by this node.",
        ("group",),
        [((group,), count) for group, count in letters.pending().items()],
    )
    yield MetricFamily(
        "gauge",
        "penstock_dead_letter_breaker_open",
        "1 while dead letters of a group are too many and some have to wait.",
        ("group",),
        [((group,), is_open) for group, is_open in letters.open_breakers().items()],
    )
    yield MetricFamily(
        "counter",
        "penstock_dead_letter_breaker_opened",
        "How often dead letters of a group were too many.",
        ("group",),
        [((group,), count) for group, count in letters.held_back.items()],
    )


def schedule_families(schedule: ScheduleCoordinator) -> Iterator[MetricFamily]:
    counts, hosts = schedule.counts, [host for host in schedule.hosts.values() if host.is_loaded]
    held = sum(host.shard.held_count for host in hosts)
    yield gauge("penstock_schedule_held", "Records that are held until they are due.", held)
    loading = len(schedule.hosts) - len(hosts)
    yield gauge("penstock_schedule_loading", "Parts of the schedule that are being loaded.", loading)
    firsts = [first_ms for host in hosts if (first_ms := host.earliest_due_ms()) is not None]
    overdue_s = max(schedule.node.now_ms() - min(firsts), 0) / 1000 if firsts else 0.0
    text = "How long the record that has been due for the longest time waits."
    yield gauge("penstock_schedule_overdue_seconds", text, overdue_s)
    waiting = sum(host.releaser.waiting_count for host in hosts)
    text = "Partitions that do not take the records which are due for them."
    yield gauge("penstock_schedule_waiting_partitions", text, waiting)
    yield counter("penstock_schedule_released", "Records that were released.", counts.released_count)
    text = "Records that were dropped because their topic was deleted."
    yield counter("penstock_schedule_dropped", text, counts.dropped_count)
    late = HistogramSnapshot(tuple(counts.lateness.counts), counts.lateness.total_seconds)
    text = "How long after its time the first record of each released batch came."
    yield MetricFamily("histogram", "penstock_schedule_lateness_seconds", text, (), [((), late)])
