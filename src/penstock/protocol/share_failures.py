"""ShareFailures (key 30001), v0: what a worker of a share group says of records that it failed on.

Our own: ShareAcknowledge has no field for it, and clients of others never send it. It goes ahead of the
acknowledgement, to the leader of the partition: how long a record that is about to be released rests, and which error a
record that is about to be given up died of. It counts for the delivery that it names, and for no other.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple
from uuid import UUID

from penstock.protocol.errors import ErrorCode, MalformedFrame
from penstock.protocol.letters import MESSAGE_BYTES_MAX, STACK_BYTES_MAX, cut

__all__ = [
    "DELAY_MS_MAX",
    "GROUPS_DELAY",
    "SHARE_FAILURES",
    "ShareFailures",
    "WorkerError",
    "WorkerFailure",
    "pack_answer",
    "pack_share_failures",
    "read_answer",
    "read_share_failures",
]

SHARE_FAILURES: Final = 30_001
#: The record rests as long as its group's settings say.
GROUPS_DELAY: Final = -1
#: The moment at which a delay ends must fit into 64 bits.
DELAY_MS_MAX: Final = 2**31 - 1
_CLASS_BYTES_MAX: Final = 512
_TEXTS_BYTES_MAX: Final = (_CLASS_BYTES_MAX, MESSAGE_BYTES_MAX, STACK_BYTES_MAX)
_FAILURES_MAX: Final = 2_000

_HEAD: Final = struct.Struct(
    ">B16siIH"
)  # for the coordinator, topic id, partition, count, length of the group id
_FAILURE: Final = struct.Struct(
    ">qhqBHHH"
)  # offset, delivery count, delay, has an error, lengths of its texts
_ANSWER: Final = struct.Struct(">h")


class WorkerError(NamedTuple):
    name: str
    message: str
    stack: str


class WorkerFailure(NamedTuple):
    offset: int
    delivery_count: int
    delay_ms: int = GROUPS_DELAY
    error: WorkerError | None = None


class ShareFailures(NamedTuple):
    """`for_coordinator`: from the partition's leader to whoever keeps the errors until the dead letters are written."""

    group: str
    topic_id: UUID
    partition: int
    failures: Sequence[WorkerFailure]
    for_coordinator: bool = False


def pack_share_failures(asked: ShareFailures) -> bytes:
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
        cut(text, bytes_max).encode(errors="replace")
        for text, bytes_max in zip(error, _TEXTS_BYTES_MAX, strict=True)
    ]


def read_share_failures(frame: memoryview, position: int = 0) -> ShareFailures:
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
    if offset < 0 or delivery_count < 0 or not GROUPS_DELAY <= delay_ms <= DELAY_MS_MAX:
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


def pack_answer(error: ErrorCode) -> bytes:
    return _ANSWER.pack(error.value)


def read_answer(frame: memoryview, position: int = 0) -> ErrorCode:
    """Raises MalformedFrame."""
    try:
        return ErrorCode(_ANSWER.unpack_from(frame, position)[0])
    except (struct.error, ValueError) as error:
        raise MalformedFrame(f"answer to share failures: {error}") from None
