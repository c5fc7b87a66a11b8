"""Intake: splits a produced batch into records to deliver at once and records to hold until their delivery time.

Two headers give a record's delivery time. Held records go into one control batch of our own type, right before the
rest of their batch. The rest keeps its offsets, sequences and producer, as if compaction had removed records. It is
appended even when it is empty: the producer's retries are recognised by it, and a transaction commits or aborts
it. A control batch counts only if the rest follows it directly: if a crash leaves the control batch alone, the
producer has no reply and sends both again. Clients skip control batches.
"""

import re
import struct
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

from penstock.protocol.compression import BytesLike, Codec, compress, decompress
from penstock.protocol.errors import ApiError, InvalidRecords
from penstock.protocol.record_batch import (
    BATCH_HEADER_BYTES,
    CODEC_MASK,
    CONTROL,
    LOG_APPEND_TIME,
    BatchHeader,
    Record,
    RecordSpan,
    decode_records,
    encode_batch,
    pack_batch,
    read_header,
    scan_records,
    wrap_int64,
)
from penstock.protocol.wire import read_varint
from penstock.scheduling.schedule_log import HeldBlock, HeldRecord, open_block, pack_block

#: All schedule headers begin with this prefix, so a batch without these bytes has none.
SCHEDULE_HEADER_PREFIX: Final = b"penstock-deliver-"
DELIVER_AT: Final = b"penstock-deliver-at"
DELIVER_AFTER: Final = b"penstock-deliver-after"
#: The header of a released record that replaces the schedule header: the time when it was due, in milliseconds.
SCHEDULED_FOR: Final = b"penstock-scheduled-for"

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)
_DIGITS: Final = re.compile(rb"[0-9]{1,18}")
#: Months and years have no fixed length, so they are not accepted.
_DURATION: Final = re.compile(
    r"P(?=.)(?:(\d{1,9})W)?(?:(\d{1,9})D)?(?:T(?=.)(?:(\d{1,9})H)?(?:(\d{1,9})M)?(?:(\d{1,9})(?:[.,](\d{1,9}))?S)?)?"
)
_TEXT_BYTES_MAX: Final = 64


class DeliveryTime(NamedTuple):
    """A time in milliseconds since 1970, or a delay in milliseconds that starts with the append."""

    ms: int
    is_relative: bool

    def due_ms(self, appended_ms: int) -> int:
        return appended_ms + self.ms if self.is_relative else self.ms


def parse_delivery_time(name: bytes, value: bytes | None) -> DeliveryTime:
    """Raises ValueError; its message says what is expected."""
    if name == DELIVER_AT:
        return DeliveryTime(_timestamp_ms(value), False)
    assert name == DELIVER_AFTER
    return DeliveryTime(_delay_ms(value), True)


def _timestamp_ms(value: bytes | None) -> int:
    text = _text(value)
    if text is not None and _DIGITS.fullmatch(text):
        return int(text)
    try:
        moment = datetime.fromisoformat((text or b"").decode())
        if moment.tzinfo is None:
            raise ValueError
        # Rounded up, because a record must not be delivered early.
        return max(-((_EPOCH - moment) // _MILLISECOND), 0)
    except (ValueError, OverflowError):
        raise ValueError(
            f"{DELIVER_AT.decode()} {_quoted(value)} is neither milliseconds since 1970 nor ISO 8601 with a zone"
        ) from None


def _delay_ms(value: bytes | None) -> int:
    text = _text(value)
    if text is not None and _DIGITS.fullmatch(text):
        return int(text)
    found = None if text is None else _DURATION.fullmatch(text.decode())
    if found is None:
        raise ValueError(
            f"{DELIVER_AFTER.decode()} {_quoted(value)} is neither milliseconds nor an ISO 8601 duration of "
            "weeks, days, hours, minutes and seconds"
        )
    weeks, days, hours, minutes, seconds = (int(part or 0) for part in found.groups()[:5])
    fraction = (found[6] or "").ljust(9, "0")
    whole_s = ((weeks * 7 + days) * 24 + hours) * 3600 + minutes * 60 + seconds
    return whole_s * 1000 + -(-int(fraction) // 1_000_000)


def _text(value: bytes | None) -> bytes | None:
    """Returns None for a value that cannot be a time."""
    return value if value is not None and value.isascii() and len(value) <= _TEXT_BYTES_MAX else None


def _quoted(value: bytes | None) -> str:
    return "null" if value is None else repr(value[:_TEXT_BYTES_MAX].decode("ascii", "backslashreplace"))


#: Kafka's own control types are small numbers; clients ignore unknown types.
_HELD_CONTROL_TYPE: Final = 1000
_CONTROL_KEY: Final = struct.pack(">hh", 0, _HELD_CONTROL_TYPE)
#: version, codec, producer id, epoch, base sequence, last offset delta of the batch that follows
_LINK: Final = struct.Struct(">bbqhii")
_VERSION: Final = 0
#: The key of the only record lies within this many bytes: length, attributes, deltas and key length come first.
_KEY_WITHIN_BYTES: Final = 32
#: A batch may contain a million invalid records; an error lists at most this many of them.
NAMED_RECORDS_MAX: Final = 1000
#: What the header `penstock-scheduled-for` and a separate batch add to the size of a released record.
RELEASE_OVERHEAD_BYTES: Final = 160


class ScheduleLimits(NamedTuple):
    now_ms: int
    delay_ms_max: int
    record_bytes_max: int


class SplitBatch(NamedTuple):
    """`control` is appended right before `rest`, and is stamped with the append time."""

    control: bytearray
    rest: bytearray
    held_count: int


class HeldBatch(NamedTuple):
    """The decoded contents of a control batch of held records."""

    codec: Codec
    producer_id: int
    producer_epoch: int
    base_sequence: int
    last_offset_delta: int
    appended_ms: int
    block: HeldBlock

    def belongs_to(self, control: BatchHeader, header: BatchHeader) -> bool:
        """Whether the batch right after the control batch is the rest of the batch that the records were taken from."""
        return (
            header.base_offset == control.last_offset + 1
            and header.leader_epoch == control.leader_epoch
            and not header.is_control
            and header.record_count <= header.last_offset_delta
            and (header.producer_id, header.producer_epoch, header.base_sequence, header.last_offset_delta)
            == (self.producer_id, self.producer_epoch, self.base_sequence, self.last_offset_delta)
        )


def split_batch(header: BatchHeader, body: bytes | memoryview, limits: ScheduleLimits) -> SplitBatch | None:
    """Returns None if no record is scheduled. Raises InvalidRecords, which lists the records, and CORRUPT_MESSAGE."""
    body = bytes(body)
    if SCHEDULE_HEADER_PREFIX not in body:
        return None
    held: list[HeldRecord] = []
    faults: list[tuple[int, str]] = []
    kept = bytearray()
    kept_count, timestamp_max = 0, header.max_timestamp if header.attributes & LOG_APPEND_TIME else -1
    for index, span in enumerate(scan_records(header, body)):
        try:
            taken = _held_record(body, span, limits)
        except ValueError as error:
            faults.append((index, str(error)))
            continue
        if taken is not None:
            held.append(taken)
            continue
        kept += body[span.start : span.end]
        kept_count += 1
        timestamp_max = max(timestamp_max, wrap_int64(header.base_timestamp + span.timestamp_delta))
    if faults:
        raise _invalid_records(faults)
    if not held:
        return None
    rest = header._replace(record_count=kept_count, max_timestamp=timestamp_max)
    if not kept_count:
        rest = rest._replace(max_timestamp=header.max_timestamp, attributes=header.attributes & ~CODEC_MASK)
    return SplitBatch(_control_batch(header, held), pack_batch(rest, compress(rest.codec, kept)), len(held))


def stamp_append_time(control: bytearray, now_ms: int) -> None:
    """Sets the timestamp of the control batch to the append time, from which `deliver-after` counts."""
    header = read_header(control)
    restamped = header._replace(base_timestamp=now_ms, max_timestamp=now_ms)
    control[:] = pack_batch(restamped, control[BATCH_HEADER_BYTES:])


def is_held_batch(header: BatchHeader, batch: BytesLike) -> bool:
    """Whether this is a control batch of held records; reads only a few bytes."""
    start = memoryview(batch)[BATCH_HEADER_BYTES : BATCH_HEADER_BYTES + _KEY_WITHIN_BYTES]
    return header.is_control and header.record_count == 1 and _CONTROL_KEY in bytes(start)


def read_held_batch(batch: BytesLike, max_bytes: int) -> HeldBatch:
    """Decodes a control batch and makes its times absolute. Raises ValueError if it is damaged."""
    header = read_header(batch)
    try:
        (record,) = decode_records(batch, max_bytes)
        value = record.value or b""
        version, codec, producer_id, epoch, sequence, delta = _LINK.unpack_from(value)
        if record.key != _CONTROL_KEY or version != _VERSION:
            raise ValueError(f"control record of version {version}")
        block = open_block(decompress(Codec(codec), memoryview(value)[_LINK.size :], max_bytes))
    except (ApiError, struct.error) as error:
        raise ValueError(f"held records at offset {header.base_offset}: {error}") from None
    times = tuple(_absolute_time_ms(time, header.max_timestamp) for time in block.times)
    return HeldBatch(
        Codec(codec), producer_id, epoch, sequence, delta, header.max_timestamp, block._replace(times=times)
    )


def _control_batch(header: BatchHeader, held: list[HeldRecord]) -> bytearray:
    link = (header.producer_id, header.producer_epoch, header.base_sequence, header.last_offset_delta)
    codec = header.codec
    value = _LINK.pack(_VERSION, codec, *link) + compress(codec, pack_block(held))
    return encode_batch([Record(0, 0, _CONTROL_KEY, value)], attributes=CONTROL)


def _held_record(body: bytes | memoryview, span: RecordSpan, limits: ScheduleLimits) -> HeldRecord | None:
    """Returns the record without its schedule header, or None if it has none. Raises ValueError if it is invalid."""
    # The offset delta follows the time; key and value follow that.
    _, start = read_varint(body, span.time_end)
    headers_at = _after_sized(body, _after_sized(body, start))
    record = bytes(body[headers_at : span.end])
    if SCHEDULE_HEADER_PREFIX not in record:
        return None
    kept, count, when = bytearray(), 0, None
    for name, value, raw in _headers(record):
        if name not in (DELIVER_AT, DELIVER_AFTER):
            kept += raw
            count += 1
            continue
        if when is not None:
            raise ValueError("more than one header sets the delivery time")
        when = parse_delivery_time(name, value)
    if when is None:
        return None
    _check_limits(when, len(kept) + headers_at - start, limits)
    return HeldRecord(_encode_time(when), bytes(body[start:headers_at]), count, bytes(kept))


def _check_limits(when: DeliveryTime, size: int, limits: ScheduleLimits) -> None:
    if when.due_ms(limits.now_ms) - limits.now_ms > limits.delay_ms_max:
        raise ValueError(
            f"due in {when.due_ms(limits.now_ms) - limits.now_ms} ms, penstock.schedule.delay.max.ms is "
            f"{limits.delay_ms_max}"
        )
    if size + RELEASE_OVERHEAD_BYTES > limits.record_bytes_max:
        raise ValueError(
            f"a scheduled record of {size} bytes, uncompressed, has to fit max.message.bytes={limits.record_bytes_max}"
        )


def _encode_time(when: DeliveryTime) -> int:
    """Encodes delays as negative numbers, because the append time is not known yet."""
    return -1 - when.ms if when.is_relative else when.ms


def _absolute_time_ms(time: int, appended_ms: int) -> int:
    return time if time >= 0 else appended_ms - 1 - time


def _after_sized(data: bytes | memoryview, position: int) -> int:
    length, position = read_varint(data, position)
    return position + max(length, 0)


def _headers(data: bytes) -> Iterator[tuple[bytes, bytes | None, bytes]]:
    """Yields the name, the value and the encoded header; `scan_records` has checked every length."""
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


def _invalid_records(faults: list[tuple[int, str]]) -> InvalidRecords:
    position, reason = faults[0]
    positions = tuple(position for position, _ in faults[:NAMED_RECORDS_MAX])
    return InvalidRecords(f"record {position} of the batch: {reason}", positions)
