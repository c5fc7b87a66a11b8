"""Moving: held records from a source's log, cut into chunks that a shard appends as one batch each.

A chunk is small, because a record that comes due alone is read with all of its batch. Within a chunk records are
grouped by how long they have to wait, so that compaction gets rid of the many that are due soon without waiting for the
few that are not.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from penstock.protocol.compression import Codec
from penstock.scheduling.held import HeldRecord, pack_block
from penstock.scheduling.intake import Held
from penstock.scheduling.records import Position

CHUNK_BYTES: Final = 32 << 10
_HOUR_MS: Final = 3_600_000
_DAY_MS: Final = 24 * _HOUR_MS
_WAITS_MS: Final = (60_000, 600_000, _HOUR_MS, 6 * _HOUR_MS, _DAY_MS, 7 * _DAY_MS, 30 * _DAY_MS)


class Found(NamedTuple):
    """The records held at one offset of a source, and where the source goes on after them."""

    at: Position
    after: Position
    held: Held


class Chunk(NamedTuple):
    """Packed blocks, and the source's position once they are taken over."""

    codec: Codec
    blocks: tuple[bytes, ...]
    record_count: int
    position: Position

    @classmethod
    def empty(cls, position: Position) -> "Chunk":
        """Nothing is held up to this position."""
        return cls(Codec.NONE, (), 0, position)


def continued(position: Position, found: Sequence[Found]) -> list[Found]:
    """What is left of them, from a position of the source on.

    Where an unclean election has put another batch in the place of one that was taken in part, all of it is left.
    """
    first = found[0]
    if first.at[:2] == position[:2]:
        first = first._replace(at=position)
    return [first, *found[1:]]


def chunks_of(found: Iterable[Found], chunk_bytes: int = CHUNK_BYTES) -> Iterator[Chunk]:
    """`found` in the order of the source; the first may be taken in part already."""
    filling = _Filling()
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


class _Filling:
    def __init__(self) -> None:
        self.codec = Codec.NONE
        self.size = self.count = 0
        self.position: Position | None = None
        self._by_wait: dict[int, list[HeldRecord]] = {}

    def add(self, record: HeldRecord, appended_ms: int) -> None:
        wait = bisect_right(_WAITS_MS, record.due_ms - appended_ms)
        self._by_wait.setdefault(wait, []).append(record)
        self.size += record.size
        self.count += 1

    def cut(self, position: Position) -> Chunk:
        blocks = tuple(pack_block(records) for _, records in sorted(self._by_wait.items()))
        chunk = Chunk(self.codec, blocks, self.count, position)
        self.codec, self.size, self.count, self.position = Codec.NONE, 0, 0, None
        self._by_wait = {}
        return chunk
