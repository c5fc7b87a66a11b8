"""Order per key kept through failures: later messages of a failed key follow it into the retry topics.

A message of level n (0 is the topic itself) may be handled when nothing of its key waits in a higher level; else it
follows to level n + 1, behind what went there before it. Levels are read in order, so the order of a key never changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from penstock.client.app.failing import Letter
from penstock.client.app.membership import Place
from penstock.client.letters import original_topic, retry_level

__all__ = ["KeyOrder", "ordered"]


class KeyOrder:
    """Which keys have messages waiting, by level. Pure."""

    def __init__(self, levels: int) -> None:
        self._levels = levels
        #: By topic, partition and key of where messages were first.
        self._waiting: dict[tuple[str, int, bytes], Counter[int]] = {}

    def must_follow(self, raw: Any) -> int | None:
        """The level to which it follows; None where it may be handled."""
        found = self._waiting.get(_key(raw))
        level = _level(raw)
        if found is None or not any(count > 0 for at, count in found.items() if at > level):
            return None
        return min(level + 1, self._levels)

    def moved(self, raw: Any, letter: Letter | None) -> None:
        """The message left its level: handled (no letter), dead, or waiting in another level."""
        key, level = _key(raw), _level(raw)
        waiting = self._waiting.setdefault(key, Counter())
        if level:
            waiting[level] -= 1
        if letter is not None and not letter.is_dead:
            waiting[retry_level(letter.topic) or 0] += 1
        if not any(count > 0 for count in waiting.values()):
            del self._waiting[key]

    def found(self, raw: Any) -> None:
        """Waiting when the partition was assigned."""
        self._waiting.setdefault(_key(raw), Counter())[_level(raw)] += 1

    def forget(self, places: Sequence[Place]) -> None:
        gone = {(original_topic(topic), partition) for topic, partition in places}
        self._waiting = {key: at for key, at in self._waiting.items() if key[:2] not in gone}


def ordered(
    call: Callable[[Any], Any], order: KeyOrder, follow: Callable[[Any, int], Letter]
) -> Callable[[Any], Any]:
    """A message that must follow is sent on instead of being handled."""

    def handle(raw: Any) -> Any:
        level = order.must_follow(raw) if raw.key() is not None else None
        if level is not None:
            order.moved(raw, follow(raw, level))
            return None
        result = call(raw)
        if raw.key() is not None:
            order.moved(raw, None)
        return result

    return handle


def _level(raw: Any) -> int:
    return retry_level(raw.topic()) or 0


def _key(raw: Any) -> tuple[str, int, bytes]:
    return original_topic(raw.topic()), raw.partition(), raw.key() or b""
