"""The schedule in numbers: what is held where this node leads, and how it went out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from penstock.broker.exposition import Family, Timings, counter, gauge

if TYPE_CHECKING:
    from penstock.broker.schedule.service import Schedule


def schedule_families(schedule: Schedule) -> Iterator[Family]:
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
    late = Timings(tuple(counts.lateness.counts), counts.lateness.total_seconds)
    text = "How long after its time the first record of each released batch came."
    yield Family("histogram", "penstock_schedule_lateness_seconds", text, (), [((), late)])
