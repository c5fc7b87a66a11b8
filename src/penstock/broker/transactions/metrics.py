"""Transactions in numbers, for a scrape: those of the transactional ids that this node coordinates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from penstock.broker.exposition import Family, gauge

if TYPE_CHECKING:
    from penstock.broker.transactions.coordinator import TransactionCoordinator


def transaction_families(coordinator: TransactionCoordinator) -> Iterator[Family]:
    shards = coordinator.loaded_shards()
    states: Counter[str] = Counter()
    for shard in shards:
        states.update({state.title: count for state, count in shard.count_by_state.items()})
    yield Family(
        "gauge",
        "penstock_transactions",
        "Transactional ids by state: Ongoing is open, what begins with Prepare is decided and waits for its markers.",
        ("state",),
        [((state,), count) for state, count in states.items()],
    )
    yield Family(
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
