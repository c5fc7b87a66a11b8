"""Intake: a produced batch is parted into what is delivered at once and what is held.

What is held goes, in one control batch of our own type, right before the rest of the batch it came with. The rest keeps
its offsets, sequences and producer, as if compaction had taken records out, and is there even when it is empty: it is
what producers' retries are recognised by, and what a transaction commits or aborts. A control batch counts only when
the rest follows it directly: if a crash leaves it alone, the producer has not been answered and sends both again.
Clients skip control batches.
"""

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from penstock.protocol.compression import BytesLike, Codec, compress, decompress
from penstock.protocol.errors import ApiError, InvalidRecords
from penstock.protocol.records import (
    CODEC_MASK,
    CONTROL,
    HEADER_BYTES,
    LOG_APPEND_TIME,
    BatchHeader,
    Record,
    decode_records,
    encode_batch,
    pack_batch,
    read_header,
    wrap_int64,
)
from penstock.protocol.scan import RecordSpan, scan_records
from penstock.protocol.varint import read_varint
from penstock.scheduling.headers import DELIVER_AFTER, DELIVER_AT, PREFIX, When, parse_when
from penstock.scheduling.held import Block, HeldRecord, open_block, pack_block

#: Kafka's own control types are small numbers; clients pass over those they do not know.
_HELD_TYPE: Final = 1000
_KEY: Final = struct.pack(">hh", 0, _HELD_TYPE)
#: version, codec, producer id, epoch, base sequence, last offset delta of the batch that follows
_LINK: Final = struct.Struct(">bbqhii")
_VERSION: Final = 0
#: The key of the only record, behind its length, attributes, deltas and the key's own length.
_KEY_WITHIN_BYTES: Final = 32
#: A batch may hold a million records at fault: an answer names the first of them.
NAMED_RECORDS_MAX: Final = 1000
#: What the header `penstock-scheduled-for` and a batch of one's own add to a record when it is released.
RELEASE_OVERHEAD_BYTES: Final = 160


class Limits(NamedTuple):
    now_ms: int
    delay_ms_max: int
    record_bytes_max: int


class Parted(NamedTuple):
    """`control` is to be appended right before `rest`, stamped with the time of the append."""

    control: bytearray
    rest: bytearray
    held_count: int


class Held(NamedTuple):
    """What a control batch of held records says."""

    codec: Codec
    producer_id: int
    producer_epoch: int
    base_sequence: int
    last_offset_delta: int
    appended_ms: int
    block: Block

    def belongs_to(self, control: BatchHeader, header: BatchHeader) -> bool:
        """Whether the batch right after the control batch is the rest of the one that these were taken from."""
        return (
            header.base_offset == control.last_offset + 1
            and header.leader_epoch == control.leader_epoch
            and not header.is_control
            and header.record_count <= header.last_offset_delta
            and (header.producer_id, header.producer_epoch, header.base_sequence, header.last_offset_delta)
            == (self.producer_id, self.producer_epoch, self.base_sequence, self.last_offset_delta)
        )


def part(header: BatchHeader, body: bytes | memoryview, limits: Limits) -> Parted | None:
    """None when nothing is scheduled. Raises InvalidRecords, naming the records at fault, and CORRUPT_MESSAGE."""
    body = bytes(body)
    if PREFIX not in body:
        return None
    held: list[HeldRecord] = []
    faults: list[tuple[int, str]] = []
    kept = bytearray()
    kept_count, timestamp_max = 0, header.max_timestamp if header.attributes & LOG_APPEND_TIME else -1
    for place, span in enumerate(scan_records(header, body)):
        try:
            taken = _taken(body, span, limits)
        except ValueError as error:
            faults.append((place, str(error)))
            continue
        if taken is not None:
            held.append(taken)
            continue
        kept += body[span.start : span.end]
        kept_count += 1
        timestamp_max = max(timestamp_max, wrap_int64(header.base_timestamp + span.timestamp_delta))
    if faults:
        raise _refusal(faults)
    if not held:
        return None
    rest = header._replace(record_count=kept_count, max_timestamp=timestamp_max)
    if not kept_count:
        rest = rest._replace(max_timestamp=header.max_timestamp, attributes=header.attributes & ~CODEC_MASK)
    return Parted(_control_batch(header, held), pack_batch(rest, compress(rest.codec, kept)), len(held))


def stamp(control: bytearray, now_ms: int) -> None:
    """`deliver-after` counts from here on: the control batch's time is the append's."""
    header = read_header(control)
    restamped = header._replace(base_timestamp=now_ms, max_timestamp=now_ms)
    control[:] = pack_batch(restamped, control[HEADER_BYTES:])


def is_held(header: BatchHeader, batch: BytesLike) -> bool:
    """Whether this is a control batch of held records; looks at a few bytes only."""
    start = memoryview(batch)[HEADER_BYTES : HEADER_BYTES + _KEY_WITHIN_BYTES]
    return header.is_control and header.record_count == 1 and _KEY in bytes(start)


def read_held(batch: BytesLike, max_bytes: int) -> Held:
    """What a control batch holds, its times made absolute. Raises ValueError for damage."""
    header = read_header(batch)
    try:
        (record,) = decode_records(batch, max_bytes)
        value = record.value or b""
        version, codec, producer_id, epoch, sequence, delta = _LINK.unpack_from(value)
        if record.key != _KEY or version != _VERSION:
            raise ValueError(f"control record of version {version}")
        block = open_block(decompress(Codec(codec), memoryview(value)[_LINK.size :], max_bytes))
    except (ApiError, struct.error) as error:
        raise ValueError(f"held records at offset {header.base_offset}: {error}") from None
    times = tuple(_absolute(time, header.max_timestamp) for time in block.times)
    return Held(
        Codec(codec), producer_id, epoch, sequence, delta, header.max_timestamp, block._replace(times=times)
    )


def _control_batch(header: BatchHeader, held: list[HeldRecord]) -> bytearray:
    link = (header.producer_id, header.producer_epoch, header.base_sequence, header.last_offset_delta)
    codec = header.codec
    value = _LINK.pack(_VERSION, codec, *link) + compress(codec, pack_block(held))
    return encode_batch([Record(0, 0, _KEY, value)], attributes=CONTROL)


def _taken(body: bytes | memoryview, span: RecordSpan, limits: Limits) -> HeldRecord | None:
    """The record without its schedule header; None when it has none. Raises ValueError for one that is wrong."""
    # The offset delta follows the time; key and value follow that.
    _, start = read_varint(body, span.time_end)
    headers_at = _after_sized(body, _after_sized(body, start))
    record = bytes(body[headers_at : span.end])
    if PREFIX not in record:
        return None
    kept, count, when = bytearray(), 0, None
    for name, value, raw in _headers(record):
        if name not in (DELIVER_AT, DELIVER_AFTER):
            kept += raw
            count += 1
            continue
        if when is not None:
            raise ValueError("more than one header says when to deliver")
        when = parse_when(name, value)
    if when is None:
        return None
    _check(when, len(kept) + headers_at - start, limits)
    return HeldRecord(_relative(when), bytes(body[start:headers_at]), count, bytes(kept))


def _check(when: When, size: int, limits: Limits) -> None:
    if when.due_ms(limits.now_ms) - limits.now_ms > limits.delay_ms_max:
        raise ValueError(
            f"due in {when.due_ms(limits.now_ms) - limits.now_ms} ms, penstock.schedule.delay.max.ms is "
            f"{limits.delay_ms_max}"
        )
    if size + RELEASE_OVERHEAD_BYTES > limits.record_bytes_max:
        raise ValueError(
            f"a scheduled record of {size} bytes, uncompressed, has to fit max.message.bytes={limits.record_bytes_max}"
        )


def _relative(when: When) -> int:
    """Times from the append on are negative until it is known."""
    return -1 - when.ms if when.is_relative else when.ms


def _absolute(time: int, appended_ms: int) -> int:
    return time if time >= 0 else appended_ms - 1 - time


def _after_sized(data: bytes | memoryview, position: int) -> int:
    length, position = read_varint(data, position)
    return position + max(length, 0)


def _headers(data: bytes) -> Iterator[tuple[bytes, bytes | None, bytes]]:
    """Name, value and both as they are encoded; the scan has checked every length."""
    count, position = read_varint(data, 0)
    for _ in range(count):
        start = position
        length, position = read_varint(data, position)
        name = data[position : position + length]
        position += length
        length, position = read_varint(data, position)
        value = None if length < 0 else data[position : position + length]
        position += max(length, 0)
        yield name, value, data[start:position]


def _refusal(faults: list[tuple[int, str]]) -> InvalidRecords:
    place, reason = faults[0]
    places = tuple(place for place, _ in faults[:NAMED_RECORDS_MAX])
    return InvalidRecords(f"record {place} of the batch: {reason}", places)
