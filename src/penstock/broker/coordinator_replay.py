"""Loading a shard from its log: the same steps in the same order as when they were taken."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol, cast

from penstock.protocol.compression import BytesLike
from penstock.protocol.records import BatchHeader, decode_records, iter_batches, parse_end_marker

#: Small, because replaying it holds up the loop for some milliseconds.
LOAD_CHUNK_BYTES: Final = 1 << 16
#: Our own batches are not compressed; this bounds what a foreign one may become.
_DECODED_BYTES_MAX: Final = 1 << 30


class Replayed(Protocol):
    def replay(self, key: bytes, value: bytes | None) -> None: ...


class TransactionalShard(Protocol):
    """What a shard has besides if producers may write to its log in transactions."""

    def replay_pending(self, producer_id: int, key: bytes, value: bytes | None) -> None:
        """A record that counts only if the producer's transaction is committed."""

    def transaction_ended(self, producer_id: int, committed: bool) -> None: ...


class Log(Protocol):
    @property
    def start_offset(self) -> int: ...
    @property
    def end(self) -> Any: ...
    @property
    def producers(self) -> Any: ...
    def read(self, offset: int, max_bytes: int, upto: Any) -> Any: ...


async def replay_log(shard: Replayed, log: Log, end: Any, in_thread: Callable[..., Awaitable[Any]]) -> None:
    """In pieces, each read in a thread, so that a large shard does not hold up the others."""
    offset = log.start_offset
    while offset < end.offset:
        piece = await in_thread(log.read, offset, LOAD_CHUNK_BYTES, end)
        assert piece.next_offset > offset, f"nothing to read at {offset} of {end.offset}"
        for header, batch in iter_batches(piece.data):
            _replay_batch(shard, header, batch)
        offset = piece.next_offset


def _replay_batch(shard: Replayed, header: BatchHeader, batch: BytesLike) -> None:
    if header.is_control:
        marker = parse_end_marker(batch)
        if marker is not None:
            transactional(shard).transaction_ended(marker.producer_id, marker.committed)
        return
    for record in decode_records(batch, _DECODED_BYTES_MAX):
        assert record.key is not None
        if header.is_transactional:
            transactional(shard).replay_pending(header.producer_id, record.key, record.value)
        else:
            shard.replay(record.key, record.value)


def transactional(shard: object) -> TransactionalShard:
    assert hasattr(shard, "replay_pending"), f"{shard!r} knows no transactions"
    return cast(TransactionalShard, shard)
