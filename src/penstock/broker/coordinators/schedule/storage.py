"""The due times of a shard: one ladder for each source, changed in threads; what arrives meanwhile waits beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from penstock.broker.schedule.blocks import BlockFile
from penstock.scheduling.ladder import Ladder
from penstock.scheduling.records import NOTHING_RELEASED, Due, Source, SourceState, unpack_due

#: Due times in memory that are not sorted in yet.
_ARRIVED_MAX: Final = 2048


class SourceIndex:
    def __init__(self, blocks: BlockFile) -> None:
        self.ladder = Ladder(blocks)
        self.ladder_first_ms: int | None = None
        self._arrived: list[bytes] = []
        self._arrived_first_ms: int | None = None

    @property
    def first_due_ms(self) -> int | None:
        """Nothing comes due earlier; None when nothing is held."""
        firsts = [ms for ms in (self.ladder_first_ms, self._arrived_first_ms) if ms is not None]
        return min(firsts, default=None)

    def take_in(self, dues: Sequence[bytes]) -> None:
        """On the loop."""
        self._arrived += dues
        first_ms = unpack_due(min(dues)).due_ms
        if self._arrived_first_ms is None or first_ms < self._arrived_first_ms:
            self._arrived_first_ms = first_ms

    @property
    def arrived_count(self) -> int:
        return len(self._arrived)

    def taken_in(self) -> list[bytes]:
        """On the loop, before a thread works on the ladder: what it has to add first."""
        self.ladder_first_ms = self.first_due_ms  # also when the thread fails before it knows better
        arrived, self._arrived = self._arrived, []
        self._arrived_first_ms = None
        return arrived

    def settle(self, arrived: list[bytes]) -> int | None:
        """Blocking: add them; returns when the first of all is due."""
        self.ladder.add(arrived)
        first = self.ladder.first()
        return None if first is None else unpack_due(first).due_ms

    def next_dues(
        self, arrived: list[bytes], state: SourceState, now_ms: int, limit: int
    ) -> tuple[list[Due], int | None]:
        """Blocking: the next that are due after the open plan, and when the first of all that are left is.

        What is planned stays in the ladder until it is known to be done.
        """
        planned = state.plan.record_count if state.plan is not None else 0
        keys = self._after_mark(arrived, state, limit + planned)[planned:]
        dues = list(map(unpack_due, keys))
        return [due for due in dues if due.due_ms <= now_ms], dues[0].due_ms if dues else None

    def planned_dues(self, arrived: list[bytes], state: SourceState) -> list[Due]:
        """Blocking: those of the open plan."""
        assert state.plan is not None
        return list(map(unpack_due, self._after_mark(arrived, state, state.plan.record_count)))

    def _after_mark(self, arrived: list[bytes], state: SourceState, limit: int) -> Sequence[bytes]:
        self.ladder.add(arrived)
        if state.mark != NOTHING_RELEASED:
            self.ladder.drop_upto(state.mark.packed())
        return self.ladder.peek(limit)

    def groups(self, arrived: list[bytes], limit: int) -> list[int]:
        """Blocking: the offsets of groups of the next ones, which are dropped from here."""
        self.ladder.add(arrived)
        keys = self.ladder.peek(limit)
        if keys:
            self.ladder.drop_upto(keys[-1])
        return sorted({unpack_due(key).offset for key in keys})


class Indexes:
    """The index that a shard replays into. `is_live` once the shard is loaded: then on the loop, before in a thread."""

    def __init__(self, blocks: BlockFile) -> None:
        self._blocks = blocks
        self.by_source: dict[Source, SourceIndex] = {}
        self.is_live = False

    def add(self, source: Source, dues: Sequence[bytes]) -> None:
        if not dues:
            return
        index = self.by_source.get(source)
        if index is None:
            index = self.by_source[source] = SourceIndex(self._blocks)
        if self.is_live:
            index.take_in(dues)
        else:
            index.ladder.add(dues)

    def is_crowded(self, source: Source) -> bool:
        """Too much has arrived to be kept beside the ladder."""
        index = self.by_source.get(source)
        return index is not None and index.arrived_count > _ARRIVED_MAX

    def forget(self, source: Source) -> None:
        self.by_source.pop(source, None)

    def begin(self) -> None:
        """Blocking: all is loaded."""
        for index in self.by_source.values():
            index.ladder_first_ms = index.settle([])
        self.is_live = True
