"""Dead letters and what share groups have lost in numbers, for a scrape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from penstock.broker.exposition import Family

if TYPE_CHECKING:
    from penstock.broker.node import Node
    from penstock.broker.share_state.dead_letters import DeadLetters

_TOTALS: Final = ("handed_out", "confirmed", "unconfirmed", "expired")


def share_total_families(node: Node) -> Iterator[Family]:
    """What is stored, of the shards that are led here: the sum over all nodes has every share partition once."""
    rows = []
    for shard in node.share_state.loaded_shards():
        for key, totals in shard.totals().items():
            topic = node.image.topics_by_id.get(key.topic_id)
            name = str(key.topic_id) if topic is None else topic.name
            labels = (key.group, name, str(key.partition))
            rows += [((*labels, event), getattr(totals, event)) for event in _TOTALS]
    yield Family(
        "gauge",
        "penstock_share_record_totals",
        "Records since the share partition was made, kept across restarts. Under at-most-once, handed_out are those "
        "that nobody else will get, and unconfirmed are those of them that may be lost; expired ones were deleted by "
        "retention before anybody got them.",
        ("group", "topic", "partition", "event"),
        rows,
    )


def dead_letter_families(letters: DeadLetters) -> Iterator[Family]:
    yield Family(
        "counter",
        "penstock_dead_letters",
        "Records that were buried in dead-letter topics by this node.",
        ("group",),
        [((group,), count) for group, count in letters.buried.items()],
    )
    yield Family(
        "counter",
        "penstock_dead_letters_lost",
        "Records that were given up and could not be buried, by reason.",
        ("group", "reason"),
        list(letters.lost.items()),
    )
    yield Family(
        "gauge",
        "penstock_dead_letters_pending",
        "Records that were given up and wait to be buried by this node.",
        ("group",),
        [((group,), count) for group, count in letters.pending().items()],
    )
    yield Family(
        "gauge",
        "penstock_dead_letter_breaker_open",
        "1 while dead letters of a group are too many and some have to wait.",
        ("group",),
        [((group,), is_open) for group, is_open in letters.open_breakers().items()],
    )
    yield Family(
        "counter",
        "penstock_dead_letter_breaker_opened",
        "How often dead letters of a group were too many.",
        ("group",),
        [((group,), count) for group, count in letters.held_back.items()],
    )
