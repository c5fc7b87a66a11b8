"""What a produced batch goes through where the topic must look inside, off the loop and before the append.

A compacted topic takes no record without a key; a topic with its own codec stores every batch in that codec; a topic
with a schedule holds records back until they are due.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

from penstock.protocol.compression import BytesLike, Codec, compress
from penstock.protocol.errors import ApiError, ErrorCode, InvalidRecords
from penstock.protocol.records import (
    CODEC_MASK,
    HEADER_BYTES,
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


def prepare(
    batch: memoryview,
    *,
    compacted: bool,
    codec: Codec | None,
    max_bytes: int,
    schedule: Limits | None = None,
) -> bytearray | memoryview:
    """The batch to append: the same one, one in the topic's codec that is otherwise equal, or a WithHeld.

    `codec` is None where the topic keeps what producers send, `schedule` where it holds no records back. Raises
    INVALID_RECORD for a record without a key in a compacted topic, for one that cannot be scheduled as it asks, and
    for what cannot be read or unfolds to more than `max_bytes`.
    """
    # The append refuses such a batch with the right error; a new checksum here would only hide the damage.
    if not _is_sound(batch):
        return batch
    recode = codec is not None and read_header(batch).codec is not codec
    if not compacted and not recode and schedule is None:
        return batch
    try:
        header, body = open_batch(batch, max_bytes)
        if compacted:
            _refuse_keyless(header, body)
        if codec is not None:
            header = header._replace(attributes=(header.attributes & ~CODEC_MASK) | codec)
        if schedule is not None and (parted := _parted(header, body, schedule)) is not None:
            return parted
    except InvalidRecords:
        raise
    except ApiError as error:
        # The checksum is right, so this is what was meant to be sent: trying again would not help.
        raise ApiError(ErrorCode.invalid_record, error.message) from None
    return pack_batch(header, compress(header.codec, body)) if recode else batch


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
