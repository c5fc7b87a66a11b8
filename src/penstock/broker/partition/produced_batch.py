"""What happens to a produced batch before it is appended, and after a topic has refused it.

Some topics inspect each batch, off the event loop: a compacted topic refuses records without a key, a topic with its
own codec stores every batch in that codec, and a topic with a schedule holds records back until they are due.

A refused batch may be a duplicate of one that was appended when the topic's settings were different. A duplicate gets
the reply of the first append, whatever the settings are now. Otherwise its producer would believe that the records in
the log were refused, and send them again under another sequence.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Final

from penstock.log.producer_state import increment_sequence
from penstock.log.segment import LogAppendInfo
from penstock.protocol.compression import (
    BytesLike,
    Codec,
    DecompressedTooLarge,
    announced_bytes,
    compress,
)
from penstock.protocol.errors import ApiError, ErrorCode, InvalidRecords
from penstock.protocol.record_batch import (
    BATCH_HEADER_BYTES,
    CODEC_MASK,
    RECORD_BYTES_MIN,
    BatchHeader,
    checksum,
    open_batch,
    pack_batch,
    read_header,
    scan_records,
)

if TYPE_CHECKING:
    from penstock.broker.partition.partition import Partition
    from penstock.scheduling.intake import ScheduleLimits


# A batch may hold a million records without a key; the error response names only the first ones.
NAMED_RECORDS_MAX: Final = 1000


class BatchWithHeldRecords(bytearray):
    """A batch without its held records, which are in `control` and must be appended right before it."""

    control: bytearray

    def stamped(self, now_ms: int) -> bytearray:
        """Return the control batch with the held records, stamped with the append time."""
        from penstock.scheduling.intake import stamp_append_time

        stamp_append_time(self.control, now_ms)
        return self.control


class DecompressionBudget:
    """Limits the bytes of batches that are decompressed at the same time: per node, and per owner (a connection).

    Waiting owners are served in rotation, each in the order of its own requests. One batch always fits.
    """

    def __init__(self, bytes_max: int, owner_bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._owner_bytes_max = owner_bytes_max
        self.bytes_in_use = 0
        self._of_owner: dict[object, int] = {}
        self._waiting: dict[object, deque[tuple[int, asyncio.Future[None]]]] = {}

    @property
    def waiting_count(self) -> int:
        return sum(map(len, self._waiting.values()))

    async def take(self, owner: object, size: int) -> None:
        """Wait until `size` bytes may be decompressed. The caller returns them with `give_back`."""
        if not self._waiting and self._fits(owner, size):
            self._hold(owner, size)
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append((size, granted))
        self._grant()  # earlier owners may be waiting for their own limit only
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self.give_back(owner, size)
            raise

    def give_back(self, owner: object, size: int) -> None:
        self._hold(owner, -size)
        self._grant()

    def _hold(self, owner: object, size: int) -> None:
        self.bytes_in_use += size
        held = self._of_owner.get(owner, 0) + size
        if held:
            self._of_owner[owner] = held
        else:
            self._of_owner.pop(owner, None)

    def _fits(self, owner: object, size: int) -> bool:
        return self._node_has(size) and self._owner_has(owner, size)

    def _node_has(self, size: int) -> bool:
        return not self.bytes_in_use or self.bytes_in_use + size <= self._bytes_max

    def _owner_has(self, owner: object, size: int) -> bool:
        held = self._of_owner.get(owner, 0)
        return not held or held + size <= self._owner_bytes_max

    def _grant(self) -> None:
        """Grant owner by owner while requests fit. Small ones do not overtake a large one, or it would never fit."""
        while self._waiting and self._grant_next():
            pass

    def _grant_next(self) -> bool:
        for owner, queue in self._waiting.items():
            size, granted = queue[0]
            if granted.done():  # it was cancelled
                break
            if self._owner_has(owner, size):
                if not self._node_has(size):
                    return False
                self._hold(owner, size)
                granted.set_result(None)
                break
        else:
            return False
        queue.popleft()
        # The owner moves to the end of the rotation.
        del self._waiting[owner]
        if queue:
            self._waiting[owner] = queue
        return True


def decompressed_bytes(batch: BytesLike, *, looks_inside: bool, codec: Codec | None, max_bytes: int) -> int:
    """Return the memory that `prepare` needs for a batch, as the batch announces it; 0 if it decompresses nothing."""
    if len(batch) < BATCH_HEADER_BYTES:
        return 0
    header = read_header(batch)
    number = header.attributes & CODEC_MASK
    if number not in Codec.__members__.values() or not (looks_inside or Codec(number) is not codec):
        return 0
    return announced_bytes(Codec(number), memoryview(batch)[BATCH_HEADER_BYTES:], max_bytes)


def prepare(
    batch: memoryview,
    *,
    compacted: bool,
    codec: Codec | None,
    max_bytes: int,
    stored_bytes_max: int = sys.maxsize,
    schedule: ScheduleLimits | None = None,
) -> bytearray | memoryview:
    """Return the batch to append: the same one, an equal one in the topic's codec, or a BatchWithHeldRecords.

    `codec` is None if the topic keeps the producer's codec; `schedule` is None if it holds no records back. Raises
    INVALID_RECORD for a record without a key in a compacted topic, for a record that cannot be scheduled as requested,
    and for a batch that cannot be read or decompresses to more than `max_bytes`. Raises MESSAGE_TOO_LARGE for a batch
    that would have to be stored uncompressed and is larger than `stored_bytes_max`.
    """
    # The append refuses such a batch with the right error; a new checksum here would only hide the damage.
    if not _is_valid(batch):
        return batch
    recode = codec is not None and read_header(batch).codec is not codec
    if not compacted and not recode and schedule is None:
        return batch
    try:
        header, body = open_batch(batch, max_bytes)
        if header.record_count * RECORD_BYTES_MIN > len(body):
            # In another codec the same false record count could pass the checks of the append.
            raise ApiError(
                ErrorCode.invalid_record, f"{len(body)} bytes cannot hold {header.record_count} records"
            )
        if compacted:
            _check_keys(header, body)
        if codec is not None:
            header = header._replace(attributes=(header.attributes & ~CODEC_MASK) | codec)
        if schedule is not None and (parted := _split_held(header, body, schedule)) is not None:
            return parted
    except InvalidRecords:
        raise
    except DecompressedTooLarge as error:
        raise DecompressedTooLarge(ErrorCode.invalid_record, error.message) from None
    except ApiError as error:
        # The checksum is right, so the producer has sent exactly this batch, and a retry would not help.
        raise ApiError(ErrorCode.invalid_record, error.message) from None
    if not recode:
        return batch
    if header.codec is Codec.NONE and len(body) + BATCH_HEADER_BYTES > stored_bytes_max:
        raise ApiError(
            ErrorCode.message_too_large,
            f"record batch of {len(body) + BATCH_HEADER_BYTES} bytes, the topic takes {stored_bytes_max}",
        )
    return pack_batch(header, compress(header.codec, body))


def _is_valid(batch: BytesLike) -> bool:
    if len(batch) < BATCH_HEADER_BYTES:
        return False
    header = read_header(batch)
    return (
        header.size == len(batch)
        and header.magic == 2
        and header.crc == checksum(batch)
        and header.last_offset_delta == header.record_count - 1 >= 0
        and not header.is_control
    )


def _check_keys(header: BatchHeader, body: bytes | memoryview) -> None:
    keyless = (index for index, span in enumerate(scan_records(header, body)) if span.key is None)
    if places := tuple(islice(keyless, NAMED_RECORDS_MAX)):
        raise InvalidRecords(
            f"record {places[0]} of the batch has no key, and the topic is compacted", places
        )


def _split_held(
    header: BatchHeader, body: bytes | memoryview, schedule: ScheduleLimits
) -> BatchWithHeldRecords | None:
    from penstock.scheduling.intake import split_batch

    parted = split_batch(header, body, schedule)
    if parted is None:
        return None
    batch = BatchWithHeldRecords(parted.rest)
    batch.control = parted.control
    return batch


#: Errors that depend on the settings of the topic.
_TOPIC_SETTING_ERRORS: Final = frozenset(
    {
        ErrorCode.message_too_large,
        ErrorCode.record_list_too_large,
        ErrorCode.invalid_record,
        ErrorCode.invalid_timestamp,
        ErrorCode.policy_violation,
    }
)


def duplicate_or_raise(partition: Partition, batch: memoryview, error: ApiError) -> LogAppendInfo:
    """Return the result of the first append if the batch is a duplicate. Otherwise raise `error`."""
    found = find_duplicate(partition, batch) if error.code in _TOPIC_SETTING_ERRORS else None
    if found is None:
        raise error
    return found


def find_duplicate(partition: Partition, batch: memoryview) -> LogAppendInfo | None:
    if len(batch) < BATCH_HEADER_BYTES:
        return None
    header, log = read_header(batch), partition.log
    state = log.producers.states.get(header.producer_id)
    if state is None or state.epoch != header.producer_epoch or header.crc != checksum(batch):
        return None
    sequence = header.base_sequence
    trace = state.find_duplicate(sequence, increment_sequence(sequence, header.last_offset_delta))
    if trace is None:
        return None
    append_time_ms = trace.timestamp if log.config.timestamp_type == "LogAppendTime" else -1
    return LogAppendInfo(trace.base_offset, trace.last_offset, append_time_ms, True, log.end)
