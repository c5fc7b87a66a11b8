"""Order per key kept through failures: later messages of a failed key follow it into the retry topics.

A message may be handled when nothing of its key that came before it waits; else it follows to where that waits, behind
it. What comes before is told by where messages were first, and not by levels: a message that has followed another one
and fails then goes to the level of its own attempts, which may be a lower one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from penstock.client.app.failing import Letter
from penstock.client.app.handling import NOT_HANDLED
from penstock.client.app.places import Place
from penstock.client.letters import origin_of, original_topic, retry_level

__all__ = ["KeyOrder", "ordered"]


class KeyOrder:
    """Which messages wait, by key, by the offset that each had first, and by level. Pure."""

    def __init__(self) -> None:
        #: By topic, partition and key of where messages were first.
        self._waiting: dict[tuple[str, int, bytes], dict[int, Counter[int]]] = {}

    def must_follow(self, raw: Any) -> int | None:
        """The level to which it follows; None where it may be handled."""
        found = self._waiting.get(_key(raw)) if self._waiting else None
        if found is None:
            return None
        offset = _first_offset(raw)
        return max((level for other, at in found.items() if other < offset for level in at), default=None)

    def moved(self, raw: Any, letter: Letter | None) -> None:
        """The message left its level: handled (no letter), dead, or waiting in another level."""
        key, level = _key(raw), _level(raw)
        if level:
            self._left(key, _first_offset(raw), level)
        if letter is not None and not letter.is_dead:
            self._came(key, _first_offset(raw), retry_level(letter.topic) or 0)

    def found(self, raw: Any) -> None:
        """Waiting when the partition was assigned."""
        self._came(_key(raw), _first_offset(raw), _level(raw))

    def forget(self, places: Sequence[Place]) -> None:
        gone = {(original_topic(topic), partition) for topic, partition in places}
        self._waiting = {key: at for key, at in self._waiting.items() if key[:2] not in gone}

    def _came(self, key: tuple[str, int, bytes], offset: int, level: int) -> None:
        self._waiting.setdefault(key, {}).setdefault(offset, Counter())[level] += 1

    def _left(self, key: tuple[str, int, bytes], offset: int, level: int) -> None:
        found = self._waiting.get(key, {})
        at = found.get(offset, Counter())
        at[level] -= 1
        if at[level] <= 0:
            del at[level]
        if not at:
            found.pop(offset, None)
        if not found:
            self._waiting.pop(key, None)


def ordered(
    call: Callable[[Any], Any], order: KeyOrder, follow: Callable[[Any, int], Letter]
) -> Callable[[Any], Any]:
    """A message that must follow is sent on instead of being handled."""

    def handle(raw: Any) -> Any:
        level = order.must_follow(raw) if raw.key() is not None else None
        if level is not None:
            order.moved(raw, follow(raw, level))
            return NOT_HANDLED
        result = call(raw)
        if raw.key() is not None:
            order.moved(raw, None)
        return result

    return handle


def _level(raw: Any) -> int:
    return retry_level(raw.topic()) or 0


def _key(raw: Any) -> tuple[str, int, bytes]:
    return original_topic(raw.topic()), raw.partition(), raw.key() or b""


def _first_offset(raw: Any) -> int:
    """Of the topic in which it was first."""
    if not _level(raw):
        return int(raw.offset())
    return origin_of(
        raw.headers(), topic=raw.topic(), partition=raw.partition(), offset=raw.offset(), timestamp_ms=0
    ).offset
