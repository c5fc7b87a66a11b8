"""One shard of the schedule: which sources it looks after, how far each has been taken over, and what it has released.

Operations decide on records; only `replay` changes anything, live and on load alike. A source's position moves by
compare and set: whoever sends what was taken over already, or sends from an older view, is told the position instead.
Everything after a source's mark is held. A plan is stored before its records are appended, and the mark moves to the
plan's end once they are there; until then whoever leads the shard repeats the same plan.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

from penstock.scheduling.moving import Chunk
from penstock.scheduling.records import (
    NOTHING_RELEASED,
    Plan,
    Position,
    Source,
    SourceState,
    group_key,
    pack_group,
    pack_state,
    read_group,
    read_state,
    source_key,
    source_of,
)

KeyValue = tuple[bytes, bytes | None]


class Index(Protocol):
    """Where due times are kept in order, one order for each source."""

    def add(self, source: Source, dues: Sequence[bytes]) -> None: ...
    def forget(self, source: Source) -> None: ...


class ScheduleShard:
    def __init__(self, index: Index) -> None:
        self.sources: dict[Source, SourceState] = {}
        self._index = index
        self._reserved_ms: dict[Source, int] = {}

    def __repr__(self) -> str:
        return f"<ScheduleShard of {len(self.sources)} sources, {self.held_count} held>"

    @property
    def held_count(self) -> int:
        return sum(state.held_count for state in self.sources.values())

    def position(self, source: Source) -> Position | None:
        state = self.sources.get(source)
        return None if state is None else state.position

    def reserve(self, source: Source, upto_ms: int) -> None:
        """Plans for what is due up to this time are being made: what arrives meanwhile comes after that."""
        self._reserved_ms[source] = upto_ms

    def unreserve(self, source: Source) -> None:
        self._reserved_ms.pop(source, None)

    # -- operations: they return records to be appended as one batch, at `offset` where that matters -----------

    def register(self, source: Source, position: Position) -> list[KeyValue]:
        """Nothing is held at the source before this position. A source that is known stays where it is."""
        if source in self.sources:
            return []
        return [(source_key(source), pack_state(SourceState(position)))]

    def take(self, source: Source, expected: Position, chunk: Chunk, offset: int) -> list[KeyValue]:
        """Take over what stands between two positions of the source; nothing, if it is not at the first."""
        state = self.sources.get(source)
        if state is None or state.position != expected:
            return []
        floor_ms = max(state.floor_ms, self._reserved_ms.get(source, -1))
        records: list[KeyValue] = [
            (group_key(source, offset + place), pack_group(floor_ms, block))
            for place, block in enumerate(chunk.blocks)
        ]
        moved = state._replace(position=chunk.position, moved_count=state.moved_count + chunk.record_count)
        return [*records, (source_key(source), pack_state(moved))]

    def plan(
        self, source: Source, plan: Plan | None, finished: Iterable[int] = (), *, is_repeat: bool = False
    ) -> list[KeyValue]:
        """The open plan is done, if there is one, and the next one begins, if there is one.

        `finished` are the offsets of groups of which nothing is held any more. With `is_repeat` the open plan is not
        done: nothing of it is in the log, and the next one replaces it.
        """
        state = self.sources[source]
        if state.plan is not None and not is_repeat:
            released_count = state.released_count + state.plan.record_count
            state = state._replace(mark=state.plan.upto, released_count=released_count)
        assert plan is None or plan.upto > state.mark, "a plan goes on where the last one ended"
        tombstones: list[KeyValue] = [(group_key(source, offset), None) for offset in finished]
        return [*tombstones, (source_key(source), pack_state(state._replace(plan=plan)))]

    def drop_groups(self, source: Source, offsets: Iterable[int]) -> list[KeyValue]:
        """The source's topic is gone, and so is what is held of it."""
        return [(group_key(source, offset), None) for offset in offsets]

    def drop(self, source: Source) -> list[KeyValue]:
        """The source itself, once its groups are gone."""
        return [(source_key(source), None)]

    # -- replay ------------------------------------------------------------------------------------------------

    def replay(self, offset: int, key: bytes, value: bytes | None) -> None:
        """Raises ValueError for what no shard has written."""
        source, is_group = source_of(key)
        if not is_group:
            self._replay_state(source, value)
        elif value is not None:
            self._replay_group(source, offset, value)

    def _replay_group(self, source: Source, offset: int, value: bytes) -> None:
        state = self.sources.get(source)
        if state is None:
            return  # of a topic that is gone: compaction takes it
        dues = read_group(value).dues(offset)
        if state.mark != NOTHING_RELEASED:
            released = state.mark.packed()
            dues = [due for due in dues if due > released]
        self._index.add(source, dues)

    def _replay_state(self, source: Source, value: bytes | None) -> None:
        if value is None:
            self.sources.pop(source, None)
            self._index.forget(source)
        else:
            self.sources[source] = read_state(value)
