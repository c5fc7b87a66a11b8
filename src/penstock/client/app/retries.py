"""Records in retry topics: read when they are due, by the group that retries them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from penstock.client.app.figures import Figures
from penstock.client.app.membership import Membership
from penstock.client.app.places import Place, place_of
from penstock.client.letters import is_for

__all__ = ["DueRetries"]


class DueRetries:
    """Holds back partitions whose next record is not due yet."""

    def __init__(
        self, topics: Collection[str], group: str, figures: Figures, now_ms: Callable[[], int]
    ) -> None:
        self._topics = frozenset(topics)
        self._group = group
        self._figures = figures
        self._now_ms = now_ms
        self._due_ms: dict[Place, int] = {}

    def ready(self, batch: Sequence[Any], membership: Membership) -> Sequence[Any]:
        """Those to handle now, in their order. The rest is read again when it is due."""
        if not self._topics or self._topics.isdisjoint({raw.topic() for raw in batch}):
            return batch
        ready, back = [], {}
        for raw in batch:
            place = place_of(raw)
            if place in back:
                continue
            if place[0] not in self._topics:
                ready.append(raw)
            elif raw.timestamp()[1] > self._now_ms():
                back[place] = raw.offset()
                self._due_ms[place] = raw.timestamp()[1]
            elif is_for(raw.headers(), self._group):
                ready.append(raw)
            else:
                self._figures.skipped += 1
        if back:
            membership.pause(back)
            membership.rewind(back)
        return ready

    def resume(self, membership: Membership) -> None:
        """Whose time has come."""
        now_ms = self._now_ms()
        due = [place for place, moment_ms in self._due_ms.items() if moment_ms <= now_ms]
        for place in due:
            del self._due_ms[place]
        if due:
            membership.resume(due)

    def wait_s(self, most_s: float) -> float:
        """Until the next is due."""
        if not self._due_ms:
            return most_s
        return min(most_s, max((min(self._due_ms.values()) - self._now_ms()) / 1000, 0.001))

    @property
    def held(self) -> set[Place]:
        return set(self._due_ms)

    def forget(self, places: Sequence[Place]) -> None:
        for place in places:
            self._due_ms.pop(place, None)
