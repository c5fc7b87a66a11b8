"""The log of a schedule shard: blocks of held records, and one state record for each source.

The offset of a block in the log is part of its key, and the release order follows from due times and offsets alone.
Compaction keeps both, so any leader finds the same records in the same order.

A block stores times, sizes and contents in separate columns, so that many times are read at once and no record is
decoded before it is released. The contents of a record are its key and value as a batch encodes them, then its other
headers: everything that is left of the record once its batch is deleted.
"""

import struct
from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import add
from typing import Final, NamedTuple
from uuid import UUID

from penstock.protocol.compression import BytesLike

_COUNT: Final = struct.Struct(">I")
_TIME_BYTES: Final = 8
_SIZES: Final = 3  # bytes of key and value, number of headers, bytes of the headers
_SIZES_BYTES: Final = 4 * _SIZES


class HeldRecord(NamedTuple):
    due_ms: int
    key_value: bytes
    header_count: int
    headers: bytes

    @property
    def size(self) -> int:
        return len(self.key_value) + len(self.headers)


class HeldBlock(NamedTuple):
    """A block whose records are not decoded. Times may be relative until the batch is appended: see `intake`."""

    times: tuple[int, ...]
    sizes: tuple[int, ...]  # three for each record
    contents: memoryview

    @property
    def record_count(self) -> int:
        return len(self.times)

    def starts(self) -> list[int]:
        """Where the contents of each record begin, and where the last record ends."""
        return list(accumulate(map(add, self.sizes[::3], self.sizes[2::3]), initial=0))

    def start(self, index: int) -> int:
        """Like `starts`, but for one record; cheaper if only a few are needed."""
        before = _SIZES * index
        return sum(self.sizes[:before:_SIZES]) + sum(self.sizes[2:before:_SIZES])

    def record(self, index: int, start: int) -> HeldRecord:
        key_value_bytes, header_count, headers_bytes = self.sizes[_SIZES * index : _SIZES * index + _SIZES]
        middle = start + key_value_bytes
        return HeldRecord(
            self.times[index],
            bytes(self.contents[start:middle]),
            header_count,
            bytes(self.contents[middle : middle + headers_bytes]),
        )

    def part(self, indices: Sequence[int], starts: Sequence[int]) -> bytes:
        """Packs some of the records as a separate block."""
        sizes: list[int] = []
        for index in indices:
            sizes += self.sizes[_SIZES * index : _SIZES * index + _SIZES]
        contents = [self.contents[starts[index] : starts[index + 1]] for index in indices]
        return _pack_columns([self.times[index] for index in indices], sizes, contents)


def pack_block(records: Iterable[HeldRecord]) -> bytes:
    times: list[int] = []
    sizes: list[int] = []
    contents: list[bytes] = []
    for due_ms, key_value, header_count, headers in records:
        times.append(due_ms)
        sizes += (len(key_value), header_count, len(headers))
        contents += (key_value, headers)
    return _pack_columns(times, sizes, contents)


def open_block(data: BytesLike, position: int = 0) -> HeldBlock:
    """Reads the block from `position` to the end of the data. Raises ValueError if it is damaged."""
    view = memoryview(data)
    try:
        (count,) = _COUNT.unpack_from(view, position)
        position += _COUNT.size
        if count * (_TIME_BYTES + _SIZES_BYTES) > len(view) - position:
            raise ValueError(f"block of {count} held records in {len(view)} bytes")
        times = struct.unpack_from(f">{count}q", view, position)
        position += count * _TIME_BYTES
        sizes = struct.unpack_from(f">{_SIZES * count}I", view, position)
    except struct.error as error:
        raise ValueError(f"block of held records: {error}") from None
    contents = view[position + count * _SIZES_BYTES :]
    if sum(sizes[::3]) + sum(sizes[2::3]) != len(contents):
        raise ValueError(f"block of held records with {len(contents)} bytes of contents")
    return HeldBlock(times, sizes, contents)


def _pack_columns(times: Sequence[int], sizes: Sequence[int], contents: Iterable[BytesLike]) -> bytes:
    return b"".join(
        (
            _COUNT.pack(len(times)),
            struct.pack(f">{len(times)}q", *times),
            struct.pack(f">{len(sizes)}I", *sizes),
            *contents,
        )
    )


_SOURCE_KEY: Final = struct.Struct(">h16si")
_BLOCK_KEY: Final = struct.Struct(">h16siq")
_SOURCE_KEY_TYPE: Final = 0
_BLOCK_KEY_TYPE: Final = 1
_VERSION: Final = 0
#: version, position, mark, counts, whether a plan follows
_STATE: Final = struct.Struct(">biqi qqi qq b")
_PLAN: Final = struct.Struct(">qhi qqi i")
_STORED_BLOCK: Final = struct.Struct(">bq")
_DUE: Final = struct.Struct(">qqi")
DUE_BYTES: Final = _DUE.size


class ScheduleSource(NamedTuple):
    """The partition that records come from and are released to."""

    topic_id: UUID
    partition: int


class SourcePosition(NamedTuple):
    """How far a source is moved: everything before `offset`, and the first `taken` records held at `offset`.

    `epoch` is the leader epoch of the batch before `offset`. It shows whether the log was truncated since.
    """

    epoch: int
    offset: int
    taken: int = 0


class DueEntry(NamedTuple):
    """One held record in release order: due time, offset of its stored block in the log, index in the block."""

    due_ms: int
    offset: int
    record_index: int

    def packed(self) -> bytes:
        """Packed entries compare in the same order."""
        return _DUE.pack(*self)


NOTHING_RELEASED: Final = DueEntry(-1, -1, -1)


class ReleasePlan(NamedTuple):
    """Everything after the mark up to `upto` is being released with this producer id and sequence."""

    producer_id: int
    epoch: int
    sequence: int
    upto: DueEntry
    record_count: int

    def may_begin(self, now_ms: int) -> bool:
        """All records were due when the plan was made, but clocks of brokers differ and may be set back."""
        return self.upto.due_ms <= now_ms


class SourceState(NamedTuple):
    """Everything up to `mark` is released. Without an open plan, nothing after it is."""

    position: SourcePosition
    mark: DueEntry = NOTHING_RELEASED
    moved_count: int = 0
    released_count: int = 0
    plan: ReleasePlan | None = None

    @property
    def held_count(self) -> int:
        return self.moved_count - self.released_count

    @property
    def floor_ms(self) -> int:
        """Records that arrive now sort after everything that is released or planned, even if they were due earlier."""
        return self.mark.due_ms if self.plan is None else self.plan.upto.due_ms


class StoredBlock(NamedTuple):
    floor_ms: int
    block: HeldBlock

    def dues(self, offset: int) -> list[bytes]:
        """Packed due entries, one for each record."""
        floor_ms, pack = self.floor_ms, _DUE.pack
        return [
            pack(time if time > floor_ms else floor_ms, offset, index)
            for index, time in enumerate(self.block.times)
        ]

    def last_due(self, offset: int) -> DueEntry:
        times = self.block.times
        last_ms, position = max(times), len(times) - 1
        if last_ms > self.floor_ms:
            position -= times[::-1].index(last_ms)
        return DueEntry(max(last_ms, self.floor_ms), offset, position)


def unpack_due(data: bytes) -> DueEntry:
    return DueEntry._make(_DUE.unpack(data))


def source_key(source: ScheduleSource) -> bytes:
    return _SOURCE_KEY.pack(_SOURCE_KEY_TYPE, source.topic_id.bytes, source.partition)


def block_key(source: ScheduleSource, offset: int) -> bytes:
    return _BLOCK_KEY.pack(_BLOCK_KEY_TYPE, source.topic_id.bytes, source.partition, offset)


def source_of(key: bytes) -> tuple[ScheduleSource, bool]:
    """Returns the source of a key, and whether it is the key of a block. Raises ValueError for an invalid key."""
    is_block = len(key) == _BLOCK_KEY.size
    if not is_block and len(key) != _SOURCE_KEY.size:
        raise ValueError(f"key of {len(key)} bytes")
    kind, topic_id, partition = _SOURCE_KEY.unpack_from(key)
    if kind != (_BLOCK_KEY_TYPE if is_block else _SOURCE_KEY_TYPE):
        raise ValueError(f"key of type {kind}")
    return ScheduleSource(UUID(bytes=topic_id), partition), is_block


def pack_state(state: SourceState) -> bytes:
    plan = state.plan
    packed = _STATE.pack(
        _VERSION, *state.position, *state.mark, state.moved_count, state.released_count, plan is not None
    )
    if plan is None:
        return packed
    return packed + _PLAN.pack(plan.producer_id, plan.epoch, plan.sequence, *plan.upto, plan.record_count)


def read_state(value: bytes) -> SourceState:
    """Raises ValueError."""
    try:
        version, *fields, has_plan = _STATE.unpack_from(value)
        _check_version(version)
        plan = _read_plan(value) if has_plan else None
    except struct.error as error:
        raise ValueError(f"state of a source: {error}") from None
    return SourceState(SourcePosition(*fields[:3]), DueEntry(*fields[3:6]), fields[6], fields[7], plan)


def pack_stored_block(floor_ms: int, block: BytesLike) -> bytes:
    return _STORED_BLOCK.pack(_VERSION, floor_ms) + block


def read_stored_block(value: bytes) -> StoredBlock:
    """Raises ValueError."""
    try:
        version, floor_ms = _STORED_BLOCK.unpack_from(value)
    except struct.error as error:
        raise ValueError(f"group of held records: {error}") from None
    _check_version(version)
    return StoredBlock(floor_ms, open_block(value, _STORED_BLOCK.size))


def _read_plan(value: bytes) -> ReleasePlan:
    producer_id, epoch, sequence, due_ms, offset, index, count = _PLAN.unpack_from(value, _STATE.size)
    return ReleasePlan(producer_id, epoch, sequence, DueEntry(due_ms, offset, index), count)


def _check_version(version: int) -> None:
    if version != _VERSION:
        raise ValueError(f"version {version}")
