"""What a produced batch goes through where the topic must look inside, off the loop and before the append.

A compacted topic takes no record without a key; a topic with its own codec stores every batch in that codec; a topic
with a schedule holds records back until they are due.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Final

from penstock.protocol.compression import (
    BytesLike,
    Codec,
    DecompressedTooLarge,
    announced_bytes,
    compress,
)
from penstock.protocol.errors import ApiError, ErrorCode, InvalidRecords
from penstock.protocol.records import (
    CODEC_MASK,
    HEADER_BYTES,
    RECORD_BYTES_MIN,
    BatchHeader,
    checksum,
    open_batch,
    pack_batch,
    read_header,
)
from penstock.protocol.scan import scan_records

if TYPE_CHECKING:
    from penstock.scheduling.intake import Limits

# A batch may hold a million records without a key: an answer names the first of them.
NAMED_RECORDS_MAX: Final = 1000


class WithHeld(bytearray):
    """A batch that some records were taken out of, to be held: they are to be appended right before it."""

    control: bytearray

    def stamped(self, now_ms: int) -> bytearray:
        """The control batch that holds them, appended now."""
        from penstock.scheduling.intake import stamp

        stamp(self.control, now_ms)
        return self.control


class DecompressionBudget:
    """Bytes that batches may unfold to at the same time: on the node, and for one owner, which is a connection.

    Owners that wait get their turns one after the other, each in the order in which it asked. One batch always fits.
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
        """Returns when so much may be unfolded; `give_back` ends it."""
        if not self._waiting and self._fits(owner, size):
            self._hold(owner, size)
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append((size, granted))
        self._grant()  # those before it may wait for something else
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
        """Owner by owner, to as many as fit; a large one is not overtaken by small ones, or it would never fit."""
        while self._waiting and self._grant_next():
            pass

    def _grant_next(self) -> bool:
        for owner, queue in self._waiting.items():
            size, granted = queue[0]
            if granted.done():  # it has been given up
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
        # Behind those that have not had a turn since.
        del self._waiting[owner]
        if queue:
            self._waiting[owner] = queue
        return True


def unfolded_bytes(batch: BytesLike, *, looks_inside: bool, codec: Codec | None, max_bytes: int) -> int:
    """How much memory `prepare` takes for a batch, as that announces it; 0 if it does not look inside."""
    if len(batch) < HEADER_BYTES:
        return 0
    header = read_header(batch)
    number = header.attributes & CODEC_MASK
    if number not in Codec.__members__.values() or not (looks_inside or Codec(number) is not codec):
        return 0
    return announced_bytes(Codec(number), memoryview(batch)[HEADER_BYTES:], max_bytes)


def prepare(
    batch: memoryview,
    *,
    compacted: bool,
    codec: Codec | None,
    max_bytes: int,
    stored_bytes_max: int = sys.maxsize,
    schedule: Limits | None = None,
) -> bytearray | memoryview:
    """The batch to append: the same one, one in the topic's codec that is otherwise equal, or a WithHeld.

    `codec` is None where the topic keeps what producers send, `schedule` where it holds no records back. Raises
    INVALID_RECORD for a record without a key in a compacted topic, for one that cannot be scheduled as it asks, and
    for what cannot be read or unfolds to more than `max_bytes`; MESSAGE_TOO_LARGE for what would have to be stored
    uncompressed and is larger than `stored_bytes_max`.
    """
    # The append refuses such a batch with the right error; a new checksum here would only hide the damage.
    if not _is_sound(batch):
        return batch
    recode = codec is not None and read_header(batch).codec is not codec
    if not compacted and not recode and schedule is None:
        return batch
    try:
        header, body = open_batch(batch, max_bytes)
        if header.record_count * RECORD_BYTES_MIN > len(body):
            # In another codec the same claim could pass.
            raise ApiError(
                ErrorCode.invalid_record, f"{len(body)} bytes cannot hold {header.record_count} records"
            )
        if compacted:
            _refuse_keyless(header, body)
        if codec is not None:
            header = header._replace(attributes=(header.attributes & ~CODEC_MASK) | codec)
        if schedule is not None and (parted := _parted(header, body, schedule)) is not None:
            return parted
    except InvalidRecords:
        raise
    except DecompressedTooLarge as error:
        raise DecompressedTooLarge(ErrorCode.invalid_record, error.message) from None
    except ApiError as error:
        # The checksum is right, so this is what was meant to be sent: trying again would not help.
        raise ApiError(ErrorCode.invalid_record, error.message) from None
    if not recode:
        return batch
    if header.codec is Codec.NONE and len(body) + HEADER_BYTES > stored_bytes_max:
        raise ApiError(
            ErrorCode.message_too_large,
            f"record batch of {len(body) + HEADER_BYTES} bytes, the topic takes {stored_bytes_max}",
        )
    return pack_batch(header, compress(header.codec, body))


def _is_sound(batch: BytesLike) -> bool:
    if len(batch) < HEADER_BYTES:
        return False
    header = read_header(batch)
    return (
        header.size == len(batch)
        and header.magic == 2
        and header.crc == checksum(batch)
        and header.last_offset_delta == header.record_count - 1 >= 0
        and not header.is_control
    )


def _refuse_keyless(header: BatchHeader, body: bytes | memoryview) -> None:
    keyless = (index for index, span in enumerate(scan_records(header, body)) if span.key is None)
    if places := tuple(islice(keyless, NAMED_RECORDS_MAX)):
        raise InvalidRecords(
            f"record {places[0]} of the batch has no key, and the topic is compacted", places
        )


def _parted(header: BatchHeader, body: bytes | memoryview, schedule: Limits) -> WithHeld | None:
    from penstock.scheduling.intake import part

    parted = part(header, body, schedule)
    if parted is None:
        return None
    batch = WithHeld(parted.rest)
    batch.control = parted.control
    return batch
