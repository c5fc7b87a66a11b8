"""ShareFailures (key 30001), v0: a worker of a share group reports the records that it failed on.

This API is our own, because ShareAcknowledge has no field for it; other clients never send it. The worker sends it
before the acknowledgement, to the leader of the partition. It carries the delay of a record that is about to be
released, and the error of a record that is about to be given up. A report applies to the delivery that it names and
to no other.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple
from uuid import UUID

from penstock.protocol.dead_letter_headers import (
    ERROR_MESSAGE_BYTES_MAX,
    ERROR_STACK_BYTES_MAX,
    truncate_text,
)
from penstock.protocol.errors import ErrorCode, MalformedFrame

__all__ = [
    "DELAY_MS_MAX",
    "GROUP_DEFAULT_DELAY",
    "SHARE_FAILURES",
    "ShareFailures",
    "WorkerError",
    "WorkerFailure",
    "encode_share_failures",
    "encode_share_failures_response",
    "parse_share_failures",
    "parse_share_failures_response",
]

SHARE_FAILURES: Final = 30_001
#: The settings of the group decide how long the record waits.
GROUP_DEFAULT_DELAY: Final = -1
#: The moment at which a delay ends must fit into 64 bits.
DELAY_MS_MAX: Final = 2**31 - 1
_CLASS_BYTES_MAX: Final = 512
_TEXTS_BYTES_MAX: Final = (_CLASS_BYTES_MAX, ERROR_MESSAGE_BYTES_MAX, ERROR_STACK_BYTES_MAX)
_FAILURES_MAX: Final = 2_000

_HEAD: Final = struct.Struct(
    ">B16siIH"
)  # for the coordinator, topic id, partition, count, length of the group id
_FAILURE: Final = struct.Struct(
    ">qhqBHHH"
)  # offset, delivery count, delay, has an error, lengths of its texts
_RESPONSE: Final = struct.Struct(">h")


class WorkerError(NamedTuple):
    name: str
    message: str
    stack: str


class WorkerFailure(NamedTuple):
    offset: int
    delivery_count: int
    delay_ms: int = GROUP_DEFAULT_DELAY
    error: WorkerError | None = None


class ShareFailures(NamedTuple):
    """`for_coordinator`: from the partition leader to the share coordinator, which keeps errors for dead letters."""

    group: str
    topic_id: UUID
    partition: int
    failures: Sequence[WorkerFailure]
    for_coordinator: bool = False


def encode_share_failures(asked: ShareFailures) -> bytes:
    group = asked.group.encode()
    parts = [
        _HEAD.pack(
            asked.for_coordinator, asked.topic_id.bytes, asked.partition, len(asked.failures), len(group)
        ),
        group,
    ]
    for offset, delivery_count, delay_ms, error in asked.failures:
        texts = [b""] * 3 if error is None else _texts(error)
        sizes = map(len, texts)
        parts += (_FAILURE.pack(offset, delivery_count, delay_ms, error is not None, *sizes), *texts)
    return b"".join(parts)


def _texts(error: WorkerError) -> list[bytes]:
    return [
        truncate_text(text, bytes_max).encode(errors="replace")
        for text, bytes_max in zip(error, _TEXTS_BYTES_MAX, strict=True)
    ]


def parse_share_failures(frame: memoryview, position: int = 0) -> ShareFailures:
    """Raises MalformedFrame."""
    try:
        for_coordinator, topic_id, partition, count, size = _HEAD.unpack_from(frame, position)
        if count > _FAILURES_MAX:
            raise ValueError(f"{count} failures")
        group, position = _text(frame, position + _HEAD.size, size)
        failures = []
        for _ in range(count):
            failure, position = _read_failure(frame, position)
            failures.append(failure)
        return ShareFailures(group, UUID(bytes=topic_id), partition, failures, bool(for_coordinator))
    except (struct.error, ValueError) as error:
        raise MalformedFrame(f"share failures: {error}") from None


def _read_failure(frame: memoryview, position: int) -> tuple[WorkerFailure, int]:
    offset, delivery_count, delay_ms, has_error, *sizes = _FAILURE.unpack_from(frame, position)
    position += _FAILURE.size
    if any(size > bytes_max for size, bytes_max in zip(sizes, _TEXTS_BYTES_MAX, strict=True)):
        raise ValueError("an error is too long")
    if offset < 0 or delivery_count < 0 or not GROUP_DEFAULT_DELAY <= delay_ms <= DELAY_MS_MAX:
        raise ValueError("a number is out of range")
    texts = []
    for size in sizes:
        text, position = _text(frame, position, size)
        texts.append(text)
    error = WorkerError(*texts) if has_error else None
    return WorkerFailure(offset, delivery_count, delay_ms, error), position


def _text(frame: memoryview, position: int, size: int) -> tuple[str, int]:
    end = position + size
    if end > len(frame):
        raise ValueError("cut short")
    return str(frame[position:end], "utf-8"), end


def encode_share_failures_response(error: ErrorCode) -> bytes:
    return _RESPONSE.pack(error.value)


def parse_share_failures_response(frame: memoryview, position: int = 0) -> ErrorCode:
    """Raises MalformedFrame."""
    try:
        return ErrorCode(_RESPONSE.unpack_from(frame, position)[0])
    except (struct.error, ValueError) as error:
        raise MalformedFrame(f"answer to share failures: {error}") from None
