"""Offsets that open transactions have staged: nobody sees them until the transaction is committed.

Of several commits to one partition the last in the log counts, whenever the transaction that it is part of ends: that
is what compaction leaves of them. So a staged offset is overtaken by each later one that is committed.
"""

from collections.abc import Iterator
from typing import NamedTuple

from penstock.groups.records import CommittedOffset


class Place(NamedTuple):
    group: str
    topic: str
    partition: int


#: By producer, in the order of the log. None is one that was overtaken: it still awaits its transaction's end.
Staged = dict[int, CommittedOffset | None]


class StagedOffsets:
    """Only replay writes here."""

    __slots__ = ("_groups", "_places", "_producers", "_transactions")

    def __init__(self) -> None:
        self._places: dict[Place, Staged] = {}
        #: The places of each producer's open transaction.
        self._producers: dict[int, dict[Place, None]] = {}
        #: The producers that have a transaction open in a group, also if nothing of it is left; and the reverse.
        self._transactions: dict[str, dict[int, None]] = {}
        self._groups: dict[int, dict[str, None]] = {}

    def __repr__(self) -> str:
        return f"<StagedOffsets of {len(self._producers)} transactions in {len(self._places)} places>"

    def __contains__(self, place: Place) -> bool:
        return place in self._places

    def has_transaction(self, group_id: str) -> bool:
        return group_id in self._transactions

    def groups_of(self, producer_id: int) -> tuple[str, ...]:
        return tuple(self._groups.get(producer_id, ()))

    def of_group(self, group_id: str) -> Iterator[Place]:
        places = (
            place
            for producer_id in self._transactions.get(group_id, ())
            for place in self._producers.get(producer_id, ())
            if place.group == group_id
        )
        yield from dict.fromkeys(places)

    def of_topic(self, topic: str) -> Iterator[Place]:
        yield from (place for place in self._places if place.topic == topic)

    def stage(self, producer_id: int, place: Place, offset: CommittedOffset) -> None:
        staged = self._places.setdefault(place, {})
        staged.pop(producer_id, None)
        staged[producer_id] = offset
        self._producers.setdefault(producer_id, {})[place] = None
        self._transactions.setdefault(place.group, {})[producer_id] = None
        self._groups.setdefault(producer_id, {})[place.group] = None

    def overtake(self, place: Place) -> None:
        """A plain commit stands behind all that are staged here."""
        staged = self._places.get(place)
        if staged:
            self._places[place] = dict.fromkeys(staged)

    def drop(self, place: Place) -> None:
        """The offset was deleted, and what was staged before with it."""
        for producer_id in self._places.pop(place, ()):
            del self._producers[producer_id][place]

    def end(self, producer_id: int, *, committed: bool) -> tuple[tuple[Place, CommittedOffset], ...]:
        """The offsets that are committed now; those staged before them, by others, can no longer be."""
        ended = []
        for place in self._producers.pop(producer_id, ()):
            staged = self._places[place]
            offset = self._overtaking(staged, producer_id) if committed else staged.pop(producer_id)
            if not staged:
                del self._places[place]
            if committed and offset is not None:
                ended.append((place, offset))
        for group_id in self._groups.pop(producer_id, ()):
            del self._transactions[group_id][producer_id]
            if not self._transactions[group_id]:
                del self._transactions[group_id]
        return tuple(ended)

    def snapshot(self) -> dict[Place, tuple[tuple[int, CommittedOffset | None], ...]]:
        return {place: tuple(staged.items()) for place, staged in sorted(self._places.items())}

    @staticmethod
    def _overtaking(staged: Staged, producer_id: int) -> CommittedOffset | None:
        for earlier in staged:
            if earlier == producer_id:
                break
            staged[earlier] = None
        return staged.pop(producer_id)
