"""Dead letters in numbers, for a scrape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from penstock.broker.exposition import Family

if TYPE_CHECKING:
    from penstock.broker.share_state.dead_letters import DeadLetters


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
