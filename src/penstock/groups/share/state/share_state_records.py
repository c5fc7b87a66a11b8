"""Records of `__share_group_state`: Kafka's ShareSnapshot and ShareUpdate, and our own records of dead letters.

They are packed by hand, because every acknowledgement passes here. Keys begin with an int16 that names the record
type; types from 100 on are our own, and Kafka's tools skip them. Values begin with an int16 version.
"""

import struct
from collections.abc import Iterable, Sequence
from itertools import chain, starmap
from typing import Final, NamedTuple
from uuid import UUID

from penstock.groups.share.state.share_state import (
    UNSET,
    DeliveryTotals,
    RecordDelay,
    SharePartitionKey,
    StateRange,
)
from penstock.protocol.share_failures import (
    ShareFailures,
    WorkerFailure,
    encode_share_failures,
    parse_share_failures,
)
from penstock.protocol.stored_records import UnknownVersion, value_version
from penstock.protocol.wire import WireCursor, encode_uvarint, read_uvarint, skip_tags

SHARE_SNAPSHOT: Final = 0
SHARE_UPDATE: Final = 1
#: Records that need a dead letter.
DEAD_LETTERS_PENDING: Final = 100
#: The dead letters that are being written: to which partition, and with which producer id and sequence.
DEAD_LETTER_PLAN: Final = 101
#: The plan has ended, written or abandoned, and these offsets are no longer pending.
DEAD_LETTER_PLAN_SETTLED: Final = 102
#: The dead-letter counts and producer of a share partition; pending offsets and the plan have their own records.
DEAD_LETTER_SNAPSHOT: Final = 103
#: The delivery totals of a share partition.
DELIVERY_TOTALS: Final = 104
#: The errors with which workers failed.
WORKER_ERRORS: Final = 105
#: The delays of released records, as consumers requested them.
RECORD_DELAYS: Final = 106

_VERSION: Final = 0
_KEY_HEAD = struct.Struct(">hh")
_KEY_TAIL = struct.Struct(">16si")
_SNAPSHOT = struct.Struct(
    ">hiiiqqq"
)  # version, snapshot, state and leader epoch, start offset, created, written
_UPDATE = struct.Struct(">hiiq")  # version, snapshot and leader epoch, start offset
_BATCH = struct.Struct(">qqbhx")  # first and last offset, state, delivery count, no tagged fields
_COMPLETE_COUNT = struct.Struct(">BBBi")  # one tagged field, number 0, of 4 bytes
_PLAN = struct.Struct(">hqhi16siiiH")  # version, producer id, epoch, sequence, topic id, partition, counts
_SETTLED = struct.Struct(">hBii")  # version, flags, lost count, range count
_DEAD_LETTER_SNAPSHOT = struct.Struct(
    ">hqqqhi16siB"
)  # version, written, lost, producer id, epoch, sequence, target, has producer
_TOTALS = struct.Struct(">hqqq")  # version, handed out, confirmed, expired
_DELAY_COUNT = struct.Struct(">hi")  # version, delay count
_DELAY = struct.Struct(">qhq")
_OFFSET_INTERVAL = struct.Struct(">qq")
_INT16 = struct.Struct(">h")
_NO_TAGS: Final = b"\x00"

OffsetInterval = tuple[int, int]


class ShareSnapshot(NamedTuple):
    snapshot_epoch: int
    state_epoch: int
    leader_epoch: int
    start_offset: int
    create_timestamp_ms: int
    write_timestamp_ms: int
    delivery_complete_count: int
    batches: Sequence[StateRange]


class ShareUpdate(NamedTuple):
    snapshot_epoch: int
    leader_epoch: int
    start_offset: int
    delivery_complete_count: int
    batches: Sequence[StateRange]


class DeadLetterTarget(NamedTuple):
    """A partition of a dead-letter topic."""

    topic_id: UUID
    partition: int


class DeadLetterProducer(NamedTuple):
    """The next plan continues the sequence of this producer if it has the same target."""

    id: int
    epoch: int
    next_sequence: int
    target: DeadLetterTarget


class DeadLetterPlan(NamedTuple):
    """Append one dead letter for each of `offsets`, in this order; after that, `resolved` is no longer pending."""

    producer_id: int
    epoch: int
    sequence: int
    topic: str
    target: DeadLetterTarget
    resolved: tuple[OffsetInterval, ...]
    offsets: tuple[OffsetInterval, ...]


class SettledPlan(NamedTuple):
    """With `as_planned` the offsets that the open plan resolves are resolved too, and are not stored again."""

    keeps_producer: bool
    lost: int
    resolved: tuple[OffsetInterval, ...]
    as_planned: bool = False


class DeadLetterSnapshot(NamedTuple):
    written: int
    lost: int
    producer: DeadLetterProducer | None


def encode_key(kind: int, key: SharePartitionKey) -> bytes:
    group = key.group.encode()
    return _KEY_HEAD.pack(kind, len(group)) + group + _KEY_TAIL.pack(key.topic_id.bytes, key.partition)


def decode_key(key: bytes) -> SharePartitionKey:
    _, size = _KEY_HEAD.unpack_from(key)
    end = _KEY_HEAD.size + size
    topic_id, partition = _KEY_TAIL.unpack_from(key, end)
    return SharePartitionKey(str(key[_KEY_HEAD.size : end], "utf-8"), UUID(bytes=topic_id), partition)


def encode_snapshot(value: ShareSnapshot) -> bytes:
    fixed = _SNAPSHOT.pack(
        _VERSION,
        value.snapshot_epoch,
        value.state_epoch,
        value.leader_epoch,
        value.start_offset,
        value.create_timestamp_ms,
        value.write_timestamp_ms,
    )
    return fixed + _encode_batches(value.batches) + _encode_complete_count(value.delivery_complete_count)


def encode_update(value: ShareUpdate) -> bytes:
    fixed = _UPDATE.pack(_VERSION, value.snapshot_epoch, value.leader_epoch, value.start_offset)
    return fixed + _encode_batches(value.batches) + _encode_complete_count(value.delivery_complete_count)


def decode_snapshot(value: bytes) -> ShareSnapshot:
    _check_version(value)
    _, epoch, state_epoch, leader_epoch, start, created, written = _SNAPSHOT.unpack_from(value)
    batches, position = _decode_batches(value, _SNAPSHOT.size)
    count = _decode_complete_count(value, position)
    return ShareSnapshot(epoch, state_epoch, leader_epoch, start, created, written, count, batches)


def decode_update(value: bytes) -> ShareUpdate:
    _check_version(value)
    _, epoch, leader_epoch, start = _UPDATE.unpack_from(value)
    batches, position = _decode_batches(value, _UPDATE.size)
    return ShareUpdate(epoch, leader_epoch, start, _decode_complete_count(value, position), batches)


def encode_pending(entries: Sequence[StateRange]) -> bytes:
    return _INT16.pack(_VERSION) + _encode_batches(entries) + _NO_TAGS


def decode_pending(value: bytes) -> Sequence[StateRange]:
    _check_version(value)
    return _decode_batches(value, _INT16.size)[0]


def encode_plan(plan: DeadLetterPlan) -> bytes:
    topic = plan.topic.encode()
    # Usually every pending offset has a record: then both lists are equal, and one is enough.
    offsets = () if plan.offsets == plan.resolved else plan.offsets
    fixed = _PLAN.pack(
        _VERSION,
        plan.producer_id,
        plan.epoch,
        plan.sequence,
        plan.target.topic_id.bytes,
        plan.target.partition,
        len(plan.resolved),
        len(offsets),
        len(topic),
    )
    return b"".join(
        (fixed, topic, _encode_offset_intervals(plan.resolved), _encode_offset_intervals(offsets))
    )


def decode_plan(value: bytes) -> DeadLetterPlan:
    _check_version(value)
    fields = _PLAN.unpack_from(value)
    _, producer_id, epoch, sequence, topic_id, partition, resolved_count, offsets_count, topic_bytes = fields
    position = _PLAN.size + topic_bytes
    topic = str(value[_PLAN.size : position], "utf-8")
    resolved, position = _decode_offset_intervals(value, position, resolved_count)
    offsets, _ = _decode_offset_intervals(value, position, offsets_count)
    target = DeadLetterTarget(UUID(bytes=topic_id), partition)
    return DeadLetterPlan(producer_id, epoch, sequence, topic, target, resolved, offsets or resolved)


def encode_settled(settled: SettledPlan) -> bytes:
    flags = settled.keeps_producer | settled.as_planned << 1
    fixed = _SETTLED.pack(_VERSION, flags, settled.lost, len(settled.resolved))
    return fixed + _encode_offset_intervals(settled.resolved)


def decode_settled(value: bytes) -> SettledPlan:
    _check_version(value)
    _, flags, lost, count = _SETTLED.unpack_from(value)
    resolved = _decode_offset_intervals(value, _SETTLED.size, count)[0]
    return SettledPlan(bool(flags & 1), lost, resolved, bool(flags & 2))


def encode_dead_letter_snapshot(snapshot: DeadLetterSnapshot) -> bytes:
    producer = snapshot.producer or DeadLetterProducer(
        UNSET, UNSET, UNSET, DeadLetterTarget(UUID(int=0), UNSET)
    )
    return _DEAD_LETTER_SNAPSHOT.pack(
        _VERSION,
        snapshot.written,
        snapshot.lost,
        producer.id,
        producer.epoch,
        producer.next_sequence,
        producer.target.topic_id.bytes,
        producer.target.partition,
        snapshot.producer is not None,
    )


def decode_dead_letter_snapshot(value: bytes) -> DeadLetterSnapshot:
    _check_version(value)
    fields = _DEAD_LETTER_SNAPSHOT.unpack_from(value)
    _, written, lost, producer_id, epoch, sequence, topic_id, partition, has_producer = fields
    target = DeadLetterTarget(UUID(bytes=topic_id), partition)
    return DeadLetterSnapshot(
        written, lost, DeadLetterProducer(producer_id, epoch, sequence, target) if has_producer else None
    )


def encode_errors(key: SharePartitionKey, failures: Sequence[WorkerFailure]) -> bytes:
    message = ShareFailures(key.group, key.topic_id, key.partition, failures, for_coordinator=True)
    return _INT16.pack(_VERSION) + encode_share_failures(message)


def decode_errors(value: bytes) -> Sequence[WorkerFailure]:
    _check_version(value)
    return parse_share_failures(memoryview(value), _INT16.size).failures


def encode_totals(totals: DeliveryTotals) -> bytes:
    return _TOTALS.pack(_VERSION, *totals)


def decode_totals(value: bytes) -> DeliveryTotals:
    _check_version(value)
    return DeliveryTotals(*_TOTALS.unpack_from(value)[1:])


def encode_delays(delays: Sequence[RecordDelay]) -> bytes:
    return _DELAY_COUNT.pack(_VERSION, len(delays)) + b"".join(starmap(_DELAY.pack, delays))


def decode_delays(value: bytes) -> list[RecordDelay]:
    _check_version(value)
    _, count = _DELAY_COUNT.unpack_from(value)
    end = _DELAY_COUNT.size + count * _DELAY.size
    return [RecordDelay._make(one) for one in _DELAY.iter_unpack(value[_DELAY_COUNT.size : end])]


def _check_version(value: bytes) -> None:
    if value_version(value) != _VERSION:
        raise UnknownVersion(f"record value of version {value_version(value)}")


def _encode_batches(batches: Sequence[StateRange]) -> bytes:
    return encode_uvarint(len(batches) + 1) + b"".join(starmap(_BATCH.pack, batches))


def _decode_batches(value: bytes, position: int) -> tuple[list[StateRange], int]:
    view = memoryview(value)
    count, position = read_uvarint(view, position, len(view))
    end = position + (count - 1) * _BATCH.size
    if end > len(value) or any(value[position + _BATCH.size - 1 : end : _BATCH.size]):
        return _decode_tagged_batches(view, position, count - 1)
    return list(_BATCH.iter_unpack(view[position:end])), end


def _decode_tagged_batches(view: memoryview, position: int, count: int) -> tuple[list[StateRange], int]:
    """Batches with fields that a later Kafka may have added."""
    batches: list[StateRange] = []
    for _ in range(count):
        batches.append(_BATCH.unpack_from(view, position))
        position = skip_tags(view, position + _BATCH.size - 1, len(view))
    return batches, position


def _encode_complete_count(count: int) -> bytes:
    return _NO_TAGS if count == UNSET else _COMPLETE_COUNT.pack(1, 0, 4, count)


def _decode_complete_count(value: bytes, position: int) -> int:
    for tag, data in WireCursor(memoryview(value), position).tags():
        if tag == 0:
            return int.from_bytes(data, "big", signed=True)
    return UNSET


def _encode_offset_intervals(ranges: Sequence[OffsetInterval]) -> bytes:
    return struct.pack(f">{2 * len(ranges)}q", *chain.from_iterable(ranges))


def _decode_offset_intervals(
    value: bytes, position: int, count: int
) -> tuple[tuple[OffsetInterval, ...], int]:
    end = position + count * _OFFSET_INTERVAL.size
    return tuple(_OFFSET_INTERVAL.iter_unpack(memoryview(value)[position:end])), end


def offset_intervals(ranges: Iterable[tuple[int, ...]]) -> tuple[OffsetInterval, ...]:
    """Return the offsets of the ranges, without state and delivery count."""
    return tuple((one[0], one[1]) for one in ranges)
