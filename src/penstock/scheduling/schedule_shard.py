"""One shard of the schedule: its sources, how far each has been moved into the shard, and what has been released.

Held records of a source's log are cut into chunks, and the shard appends each chunk as one batch. A chunk is small,
because a release of one record reads its whole batch. Within a chunk, records are grouped into blocks by how long
they have to wait, so that compaction removes the many that are due soon without waiting for the few that are not.

Operations return records; only `replay` changes the state, both live and while loading. A source's position moves by
compare and set: a mover that sends what was already moved, or has an outdated position, gets the current position.
Everything after a source's mark is held. A plan is stored before its records are appended, and the mark moves to the
end of the plan once they are appended; until then, the leader of the shard repeats the same plan.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple, Protocol

from penstock.protocol.compression import Codec
from penstock.scheduling.intake import HeldBatch
from penstock.scheduling.schedule_log import (
    NOTHING_RELEASED,
    HeldRecord,
    ReleasePlan,
    ScheduleSource,
    SourcePosition,
    SourceState,
    block_key,
    pack_block,
    pack_state,
    pack_stored_block,
    read_state,
    read_stored_block,
    source_key,
    source_of,
)

CHUNK_BYTES: Final = 32 << 10
_HOUR_MS: Final = 3_600_000
_DAY_MS: Final = 24 * _HOUR_MS
_WAITS_MS: Final = (60_000, 600_000, _HOUR_MS, 6 * _HOUR_MS, _DAY_MS, 7 * _DAY_MS, 30 * _DAY_MS)


class FoundHeldBatch(NamedTuple):
    """The records held at one offset of a source, and the position of the source after them."""

    at: SourcePosition
    after: SourcePosition
    held: HeldBatch


class HeldChunk(NamedTuple):
    """Packed blocks, and the position of the source once they are stored."""

    codec: Codec
    blocks: tuple[bytes, ...]
    record_count: int
    position: SourcePosition

    @classmethod
    def empty(cls, position: SourcePosition) -> "HeldChunk":
        """Moves the position over records that are not held."""
        return cls(Codec.NONE, (), 0, position)


def resume_from(position: SourcePosition, found: Sequence[FoundHeldBatch]) -> list[FoundHeldBatch]:
    """Returns what is left of `found` from a position of the source on.

    If an unclean election has replaced a batch that was partly moved, all records of the new batch are left.
    """
    first = found[0]
    if first.at[:2] == position[:2]:
        first = first._replace(at=position)
    return [first, *found[1:]]


def cut_chunks(found: Iterable[FoundHeldBatch], chunk_bytes: int = CHUNK_BYTES) -> Iterator[HeldChunk]:
    """`found` is in the order of the source; its first batch may be partly moved already."""
    filling = _ChunkBuilder()
    for piece in found:
        filling.codec = max(filling.codec, piece.held.codec)
        block = piece.held.block
        starts = block.starts()
        for index in range(piece.at.taken, block.record_count):
            filling.add(block.record(index, starts[index]), piece.held.appended_ms)
            if filling.size >= chunk_bytes:
                is_last = index + 1 == block.record_count
                yield filling.cut(piece.after if is_last else piece.at._replace(taken=index + 1))
                filling.codec = piece.held.codec
        if filling.count:
            filling.position = piece.after
    if filling.count:
        assert filling.position is not None
        yield filling.cut(filling.position)


class _ChunkBuilder:
    def __init__(self) -> None:
        self.codec = Codec.NONE
        self.size = self.count = 0
        self.position: SourcePosition | None = None
        self._by_wait: dict[int, list[HeldRecord]] = {}

    def add(self, record: HeldRecord, appended_ms: int) -> None:
        wait = bisect_right(_WAITS_MS, record.due_ms - appended_ms)
        self._by_wait.setdefault(wait, []).append(record)
        self.size += record.size
        self.count += 1

    def cut(self, position: SourcePosition) -> HeldChunk:
        blocks = tuple(pack_block(records) for _, records in sorted(self._by_wait.items()))
        chunk = HeldChunk(self.codec, blocks, self.count, position)
        self.codec, self.size, self.count, self.position = Codec.NONE, 0, 0, None
        self._by_wait = {}
        return chunk


KeyValue = tuple[bytes, bytes | None]


class DueTimeIndex(Protocol):
    """Keeps the due entries of each source in order."""

    def add(self, source: ScheduleSource, dues: Sequence[bytes]) -> None: ...
    def forget(self, source: ScheduleSource) -> None: ...


class ScheduleShard:
    def __init__(self, index: DueTimeIndex) -> None:
        self.sources: dict[ScheduleSource, SourceState] = {}
        self._index = index
        self._reserved_ms: dict[ScheduleSource, int] = {}

    def __repr__(self) -> str:
        return f"<ScheduleShard of {len(self.sources)} sources, {self.held_count} held>"

    @property
    def held_count(self) -> int:
        return sum(state.held_count for state in self.sources.values())

    def position(self, source: ScheduleSource) -> SourcePosition | None:
        state = self.sources.get(source)
        return None if state is None else state.position

    def reserve(self, source: ScheduleSource, upto_ms: int) -> None:
        """Notes that releases up to this due time are being planned: records that arrive meanwhile sort after it."""
        self._reserved_ms[source] = upto_ms

    def unreserve(self, source: ScheduleSource) -> None:
        self._reserved_ms.pop(source, None)

    # -- operations: they return records to append as one batch; `take` also needs the offset of that batch ----

    def register(self, source: ScheduleSource, position: SourcePosition) -> list[KeyValue]:
        """Adds a source with no held records before this position. Does nothing if the source is known."""
        if source in self.sources:
            return []
        return [(source_key(source), pack_state(SourceState(position)))]

    def take(
        self, source: ScheduleSource, expected: SourcePosition, chunk: HeldChunk, offset: int
    ) -> list[KeyValue]:
        """Stores the chunk and moves the source to the chunk's position, but only if it is at `expected`."""
        state = self.sources.get(source)
        if state is None or state.position != expected:
            return []
        floor_ms = max(state.floor_ms, self._reserved_ms.get(source, -1))
        records: list[KeyValue] = [
            (block_key(source, offset + index), pack_stored_block(floor_ms, block))
            for index, block in enumerate(chunk.blocks)
        ]
        moved = state._replace(position=chunk.position, moved_count=state.moved_count + chunk.record_count)
        return [*records, (source_key(source), pack_state(moved))]

    def plan(
        self,
        source: ScheduleSource,
        plan: ReleasePlan | None,
        finished: Iterable[int] = (),
        *,
        is_repeat: bool = False,
    ) -> list[KeyValue]:
        """Completes the open plan, if there is one, and opens `plan`, if it is not None.

        `finished` are the offsets of blocks with no more held records. With `is_repeat` the open plan is not completed:
        nothing of it is in the partition, and `plan` replaces it.
        """
        state = self.sources[source]
        if state.plan is not None and not is_repeat:
            released_count = state.released_count + state.plan.record_count
            state = state._replace(mark=state.plan.upto, released_count=released_count)
        assert plan is None or plan.upto > state.mark, "a plan goes on where the last one ended"
        tombstones: list[KeyValue] = [(block_key(source, offset), None) for offset in finished]
        return [*tombstones, (source_key(source), pack_state(state._replace(plan=plan)))]

    def drop_blocks(self, source: ScheduleSource, offsets: Iterable[int]) -> list[KeyValue]:
        """Deletes held records of a source whose topic is deleted."""
        return [(block_key(source, offset), None) for offset in offsets]

    def drop(self, source: ScheduleSource) -> list[KeyValue]:
        """Deletes the source itself, after its blocks."""
        return [(source_key(source), None)]

    # -- replay ------------------------------------------------------------------------------------------------

    def replay(self, offset: int, key: bytes, value: bytes | None) -> None:
        """Raises ValueError for a record that no shard has written."""
        source, is_block = source_of(key)
        if not is_block:
            self._replay_state(source, value)
        elif value is not None:
            self._replay_block(source, offset, value)

    def _replay_block(self, source: ScheduleSource, offset: int, value: bytes) -> None:
        state = self.sources.get(source)
        if state is None:
            return  # the topic is deleted, and compaction removes the block
        dues = read_stored_block(value).dues(offset)
        if state.mark != NOTHING_RELEASED:
            released = state.mark.packed()
            dues = [due for due in dues if due > released]
        self._index.add(source, dues)

    def _replay_state(self, source: ScheduleSource, value: bytes | None) -> None:
        if value is None:
            self.sources.pop(source, None)
            self._index.forget(source)
        else:
            self.sources[source] = read_state(value)
