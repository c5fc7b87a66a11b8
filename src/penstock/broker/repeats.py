"""A batch that is refused may be one that was appended before, when the settings of its topic were others.

A repeat gets the answer of the first time, whatever the topic would say of it today: its producer, or who carries out a
plan, would otherwise take what is in the log for refused, and bring it again under another sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.log.positions import Appended
from penstock.log.producers import advance_sequence
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.records import HEADER_BYTES, checksum, read_header

if TYPE_CHECKING:
    from penstock.broker.partition import Partition

#: What a topic finds wrong with a batch by its settings.
_BY_SETTINGS: Final = frozenset(
    {
        ErrorCode.message_too_large,
        ErrorCode.record_list_too_large,
        ErrorCode.invalid_record,
        ErrorCode.invalid_timestamp,
        ErrorCode.policy_violation,
    }
)


def repeated(partition: Partition, batch: memoryview, error: ApiError) -> Appended:
    """What the batch came to when it was appended. Raises the error where it was not."""
    found = find_repeat(partition, batch) if error.code in _BY_SETTINGS else None
    if found is None:
        raise error
    return found


def find_repeat(partition: Partition, batch: memoryview) -> Appended | None:
    if len(batch) < HEADER_BYTES:
        return None
    header, log = read_header(batch), partition.log
    state = log.producers.states.get(header.producer_id)
    if state is None or state.epoch != header.producer_epoch or header.crc != checksum(batch):
        return None
    sequence = header.base_sequence
    trace = state.repeat_of(sequence, advance_sequence(sequence, header.last_offset_delta))
    if trace is None:
        return None
    append_time_ms = trace.timestamp if log.config.timestamp_type == "LogAppendTime" else -1
    return Appended(trace.base_offset, trace.last_offset, append_time_ms, True, log.end)
