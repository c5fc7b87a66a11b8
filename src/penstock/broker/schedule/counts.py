"""What a node's schedule counts."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.broker.metrics import Histogram
from penstock.scheduling.records import Due


class Counts:
    def __init__(self) -> None:
        self.released_count = self.dropped_count = 0
        self.lateness = Histogram()

    def released(self, dues: Sequence[Due], now_ms: int) -> None:
        """One measurement for all that are released together: the longest wait of them."""
        self.released_count += len(dues)
        self.lateness.observe(max(now_ms - dues[0].due_ms, 0) / 1000)
