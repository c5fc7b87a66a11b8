"""What stands in a shard's log: groups of held records, and one state for each source.

The offset of a group in the log is part of its key, and the order of what is due follows from times and offsets alone:
compaction keeps both, so any leader finds the same records in the same order.
"""

import struct
from typing import Final, NamedTuple
from uuid import UUID

from penstock.protocol.compression import BytesLike
from penstock.scheduling.held import Block, open_block

_SOURCE_KEY: Final = struct.Struct(">h16si")
_GROUP_KEY: Final = struct.Struct(">h16siq")
_SOURCE_TYPE: Final = 0
_GROUP_TYPE: Final = 1
_VERSION: Final = 0
#: version, position, mark, counts, whether a plan follows
_STATE: Final = struct.Struct(">biqi qqi qq b")
_PLAN: Final = struct.Struct(">qhi qqi i")
_GROUP: Final = struct.Struct(">bq")
_DUE: Final = struct.Struct(">qqi")
DUE_BYTES: Final = _DUE.size


class Source(NamedTuple):
    """The partition that records came from and go back to."""

    topic_id: UUID
    partition: int


class Position(NamedTuple):
    """How far a source has been taken over: everything before `offset`, and so many records held at it.

    `epoch` is the leader epoch of what stands before: a log that was cut back since does not have it there.
    """

    epoch: int
    offset: int
    taken: int = 0


class Due(NamedTuple):
    """One held record in the order of release: its time, its group's offset in the log, its place in the group."""

    due_ms: int
    offset: int
    place: int

    def packed(self) -> bytes:
        """As bytes they compare in the same order."""
        return _DUE.pack(*self)


NOTHING_RELEASED: Final = Due(-1, -1, -1)


class Plan(NamedTuple):
    """Everything after the mark up to `upto` is being released under this producer's sequence."""

    producer_id: int
    epoch: int
    sequence: int
    upto: Due
    record_count: int

    def may_begin(self, now_ms: int) -> bool:
        """It was made when all of it was due; but clocks differ, and are set back."""
        return self.upto.due_ms <= now_ms


class SourceState(NamedTuple):
    """Everything up to `mark` is released; with no plan open, nothing after it is."""

    position: Position
    mark: Due = NOTHING_RELEASED
    moved_count: int = 0
    released_count: int = 0
    plan: Plan | None = None

    @property
    def held_count(self) -> int:
        return self.moved_count - self.released_count

    @property
    def floor_ms(self) -> int:
        """What arrives now comes after all that is released or planned, however early it was due."""
        return self.mark.due_ms if self.plan is None else self.plan.upto.due_ms


class Group(NamedTuple):
    floor_ms: int
    block: Block

    def dues(self, offset: int) -> list[bytes]:
        """Packed, one for each record."""
        floor_ms, pack = self.floor_ms, _DUE.pack
        return [
            pack(time if time > floor_ms else floor_ms, offset, index)
            for index, time in enumerate(self.block.times)
        ]

    def last_due(self, offset: int) -> Due:
        times = self.block.times
        last_ms, place = max(times), len(times) - 1
        if last_ms > self.floor_ms:
            place -= times[::-1].index(last_ms)
        return Due(max(last_ms, self.floor_ms), offset, place)


def unpack_due(data: bytes) -> Due:
    return Due._make(_DUE.unpack(data))


def source_key(source: Source) -> bytes:
    return _SOURCE_KEY.pack(_SOURCE_TYPE, source.topic_id.bytes, source.partition)


def group_key(source: Source, offset: int) -> bytes:
    return _GROUP_KEY.pack(_GROUP_TYPE, source.topic_id.bytes, source.partition, offset)


def source_of(key: bytes) -> tuple[Source, bool]:
    """The source that a key belongs to, and whether it is a group's. Raises ValueError for what is no key."""
    is_group = len(key) == _GROUP_KEY.size
    if not is_group and len(key) != _SOURCE_KEY.size:
        raise ValueError(f"key of {len(key)} bytes")
    kind, topic_id, partition = _SOURCE_KEY.unpack_from(key)
    if kind != (_GROUP_TYPE if is_group else _SOURCE_TYPE):
        raise ValueError(f"key of type {kind}")
    return Source(UUID(bytes=topic_id), partition), is_group


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
    return SourceState(Position(*fields[:3]), Due(*fields[3:6]), fields[6], fields[7], plan)


def pack_group(floor_ms: int, block: BytesLike) -> bytes:
    return _GROUP.pack(_VERSION, floor_ms) + block


def read_group(value: bytes) -> Group:
    """Raises ValueError."""
    try:
        version, floor_ms = _GROUP.unpack_from(value)
    except struct.error as error:
        raise ValueError(f"group of held records: {error}") from None
    _check_version(version)
    return Group(floor_ms, open_block(value, _GROUP.size))


def _read_plan(value: bytes) -> Plan:
    producer_id, epoch, sequence, due_ms, offset, index, count = _PLAN.unpack_from(value, _STATE.size)
    return Plan(producer_id, epoch, sequence, Due(due_ms, offset, index), count)


def _check_version(version: int) -> None:
    if version != _VERSION:
        raise ValueError(f"version {version}")
