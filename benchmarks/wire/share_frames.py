"""ShareFetch and ShareAcknowledge (v1), packed by hand, so that saying something of a record costs a client one byte.

Outcomes of a run of records are a row of bytes, one each, as the protocol has them.
"""

import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple
from uuid import UUID

from benchmarks.wire.frames import CLIENT_ID, read_count, skip_tags
from benchmarks.wire.raw_client import BrokerError

SHARE_FETCH, SHARE_ACKNOWLEDGE = 78, 79
ACCEPT, RELEASE, REJECT = 1, 2, 3
FINAL_EPOCH = -1
_VERSION = 1
_ASK = struct.Struct(">iiiii")  # max wait, min bytes, max bytes, max records, batch size
_RANGE = struct.Struct(">qq")
_ACQUIRED = struct.Struct(">qqhx")
_PARTITION_HEAD_BYTES = 4 + 2


class Outcomes(NamedTuple):
    """What is said of the records from this offset on, a byte for each."""

    first_offset: int
    types: bytes


class Acquired(NamedTuple):
    first_offset: int
    last_offset: int


class ShareWriter:
    """The requests of one member about one topic. Each moves the session on by one."""

    def __init__(self, group: str, member: str, topic_id: UUID, *, records_max: int, wait_ms: int) -> None:
        client = struct.pack(">h", len(CLIENT_ID)) + CLIENT_ID.encode() + b"\0"
        self._names = client + _compact(group) + _compact(member)
        self._topic_id = topic_id.bytes
        self._ask = _ASK.pack(wait_ms, 1, 2**31 - 1, records_max, records_max)
        self._epoch = 0

    def fetch(self, said: Mapping[int, Sequence[Outcomes]]) -> bytes:
        """Also puts the partitions that are named into the session."""
        return self._frame(SHARE_FETCH, (self._ask, self._topics(said), b"\x01\0"))

    def acknowledge(self, said: Mapping[int, Sequence[Outcomes]], *, is_last: bool = False) -> bytes:
        if is_last:
            self._epoch = FINAL_EPOCH
        return self._frame(SHARE_ACKNOWLEDGE, (self._topics(said), b"\0"))

    def _frame(self, api_key: int, parts: Sequence[bytes]) -> bytes:
        head = struct.pack(">hhi", api_key, _VERSION, 0)
        body = b"".join((head, self._names, struct.pack(">i", self._epoch), *parts))
        self._epoch += 1
        return struct.pack(">i", len(body)) + body

    def _topics(self, said: Mapping[int, Sequence[Outcomes]]) -> bytes:
        if not said:
            return b"\x01"
        parts = [b"\x02", self._topic_id, _unsigned(len(said) + 1)]
        for partition, rows in said.items():
            parts += (struct.pack(">i", partition), _unsigned(len(rows) + 1))
            for first, types in rows:
                parts += (_RANGE.pack(first, first + len(types) - 1), _unsigned(len(types) + 1), types, b"\0")
            parts.append(b"\0")
        parts.append(b"\0")
        return b"".join(parts)


def read_share_fetch(frame: memoryview) -> dict[int, list[Acquired]]:
    """What was acquired, by partition. Raises BrokerError for whatever went wrong."""
    acquired: dict[int, list[Acquired]] = {}
    topics, at = _read_head(frame, lock_bytes=4)
    for _ in range(topics):
        partitions, at = read_count(frame, at + 16)
        for _ in range(partitions):
            (index, code), at = struct.unpack_from(">ih", frame, at), at + _PARTITION_HEAD_BYTES
            message, at = _read_text(frame, at)
            (ack_code,), at = struct.unpack_from(">h", frame, at), at + 2
            ack_message, at = _read_text(frame, at)
            if code or ack_code:
                raise BrokerError(
                    f"partition {index}: {code} {message}, acknowledging: {ack_code} {ack_message}"
                )
            size, at = read_count(frame, skip_tags(frame, at + 8))
            count, at = read_count(frame, at + size)
            end = at + count * _ACQUIRED.size
            acquired[index] = [
                Acquired(first, last) for first, last, _ in _ACQUIRED.iter_unpack(frame[at:end])
            ]
            at = skip_tags(frame, end)
        at = skip_tags(frame, at)
    return acquired


def check_share_acknowledge(frame: memoryview) -> None:
    """Raises BrokerError for whatever went wrong."""
    topics, at = _read_head(frame, lock_bytes=0)
    for _ in range(topics):
        partitions, at = read_count(frame, at + 16)
        for _ in range(partitions):
            (index, code), at = struct.unpack_from(">ih", frame, at), at + _PARTITION_HEAD_BYTES
            message, at = _read_text(frame, at)
            if code:
                raise BrokerError(f"acknowledging records of partition {index}: {code} {message}")
            at = skip_tags(frame, skip_tags(frame, at + 8))
        at = skip_tags(frame, at)


def _read_head(frame: memoryview, *, lock_bytes: int) -> tuple[int, int]:
    """The number of topics, and where they begin."""
    _, _, _, code = struct.unpack_from(">ibih", frame)
    message, at = _read_text(frame, 4 + 1 + 4 + 2)
    if code:
        raise BrokerError(f"share request: {code} {message}")
    return read_count(frame, at + lock_bytes)


def _read_text(frame: memoryview, at: int) -> tuple[str, int]:
    size, at = read_count(frame, at)
    return bytes(frame[at : at + size]).decode(), at + size


def _compact(text: str) -> bytes:
    return _unsigned(len(text) + 1) + text.encode()


def _unsigned(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
