"""A ladder queue of due times: holds millions of them in bounded memory, and sorts only those that are due next.

The next entries are in a sorted list, the head. The others lie unsorted in runs; each run covers a range of keys and
keeps its entries in blocks outside of memory. When the head is used up, the next run becomes the head. A run that is
too large is first split into smaller runs, at keys sampled from it. An entry is moved a few times and sorted once.
"""

from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Protocol

from penstock.scheduling.schedule_log import DUE_BYTES

#: Entries that are sorted at a time. Each is an object of some 70 bytes, and there may be thousands of sources.
HEAD_MAX: Final = 1024
BLOCK_ENTRIES: Final = 512
_PARTS: Final = 16
_FIRST: Final = b""
_BEYOND_ALL: Final = b"\xff" * (DUE_BYTES + 1)


class BlockStore(Protocol):
    """Stores blocks outside of memory."""

    def write(self, block: bytes) -> int: ...
    def read(self, block_id: int) -> bytes: ...
    def free(self, block_id: int) -> None: ...


class _Run:
    """The entries from `start` up to the start of the next run."""

    __slots__ = ("blocks", "count", "samples", "start", "tail")

    def __init__(self, start: bytes) -> None:
        self.start = start
        self.blocks: list[int] = []
        self.samples: list[bytes] = []  # one key of each block
        self.tail = bytearray()
        self.count = 0

    def add(self, key: bytes, blocks: BlockStore, block_bytes: int) -> None:
        self.tail += key
        self.count += 1
        if len(self.tail) >= block_bytes:
            self.samples.append(bytes(self.tail[:DUE_BYTES]))
            self.blocks.append(blocks.write(bytes(self.tail)))
            self.tail.clear()

    def drain(self, blocks: BlockStore) -> Iterator[bytes]:
        for block_id in self.blocks:
            yield from _keys(blocks.read(block_id))
            blocks.free(block_id)
        yield from _keys(self.tail)

    def sampled(self) -> list[bytes]:
        return sorted([*self.samples, *_keys(self.tail)])


class LadderQueue:
    def __init__(
        self, blocks: BlockStore, *, head_max: int = HEAD_MAX, block_entries: int = BLOCK_ENTRIES
    ) -> None:
        assert head_max >= 2 * block_entries, "a run is parted at keys of different blocks"
        self._blocks = blocks
        self._head_max = head_max
        self._block_bytes = block_entries * DUE_BYTES
        self._head: list[bytes] = []
        self._taken = 0  # entries of the head that are used up; they are removed from the list now and then
        self._runs = [_Run(_FIRST)]
        self._starts = [_FIRST]
        self._bound = _FIRST  # all entries before this key are in the head
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        return f"<Ladder of {self._count}, {len(self._head) - self._taken} sorted, {len(self._runs)} runs>"

    def add(self, keys: Iterable[bytes]) -> None:
        """Add packed due entries; no entry may be added twice."""
        for key in keys:
            self._count += 1
            if key < self._bound:
                insort(self._head, key, lo=self._taken)
            else:
                self._runs[bisect_right(self._starts, key) - 1].add(key, self._blocks, self._block_bytes)
        if len(self._head) - self._taken > 2 * self._head_max:
            self._lay_aside()

    def first(self) -> bytes | None:
        """The next entry. May read and write blocks."""
        self._fill(1)
        return self._head[self._taken] if self._count else None

    def peek(self, limit: int) -> Sequence[bytes]:
        """The next entries in order, at most `limit`."""
        self._fill(limit)
        return self._head[self._taken : self._taken + limit]

    def drop_upto(self, key: bytes) -> int:
        """Remove this entry and all before it; returns how many."""
        dropped = 0
        while self._count:
            self._fill(1)
            end = bisect_right(self._head, key, lo=self._taken)
            dropped += end - self._taken
            self._count -= end - self._taken
            self._taken = end
            if end < len(self._head):
                break
        if self._taken > self._head_max:
            del self._head[: self._taken]
            self._taken = 0
        return dropped

    def _fill(self, wanted: int) -> None:
        """Make sure that the head has `wanted` entries, or all that there are."""
        wanted = min(wanted, self._count)
        if self._taken == len(self._head):
            self._head.clear()
            self._taken = 0
        while len(self._head) - self._taken < wanted:
            run = self._runs.pop(0)
            del self._starts[0]
            if run.count > self._head_max:
                self._part(run)
                continue
            self._head += sorted(run.drain(self._blocks))
            if not self._runs:
                self._insert([_Run(_BEYOND_ALL)])
            self._bound = self._starts[0]

    def _part(self, run: _Run) -> None:
        samples = run.sampled()
        step = max(len(samples) // _PARTS, 1)
        parts = [_Run(run.start), *(_Run(start) for start in samples[step::step])]
        starts = [part.start for part in parts]
        for key in run.drain(self._blocks):
            parts[bisect_right(starts, key) - 1].add(key, self._blocks, self._block_bytes)
        self._insert(parts)

    def _insert(self, runs: list[_Run]) -> None:
        self._runs[:0] = runs
        self._starts[:0] = [run.start for run in runs]

    def _lay_aside(self) -> None:
        """Turn the later half of the head into a run again, because too many entries were inserted into the head."""
        middle = self._taken + self._head_max
        later = self._head[middle:]
        del self._head[middle:]
        run = _Run(later[0])
        for key in later:
            run.add(key, self._blocks, self._block_bytes)
        self._bound = run.start
        self._insert([run])


def _keys(data: bytes | bytearray) -> Iterator[bytes]:
    return (bytes(data[at : at + DUE_BYTES]) for at in range(0, len(data), DUE_BYTES))
