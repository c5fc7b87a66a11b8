"""A coordinator shard on the log of its partition: how it is loaded, and how it runs.

`replay_log` loads a shard: it replays the records of the log in the order in which they were appended.
`ActiveShard` runs a loaded shard: it appends and replays the records of each operation, and replies when they are
committed. All of this happens on the event loop without waiting, so the order of the log is the order of the
operations. `CommitStallDetector` follows the replies that wait for a commit, oldest first, and reports a stall when
the oldest has waited for too long.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, Protocol, TypeVar

from penstock.log.validation import read_validated
from penstock.protocol.compression import BytesLike
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.record_batch import (
    TRANSACTIONAL,
    BatchHeader,
    EndMarker,
    decode_records,
    encode_coordinator_batch,
    iter_batches,
    parse_end_marker,
)

if TYPE_CHECKING:
    from penstock.log.producer_state import VerificationGuard


#: Small, because replaying one chunk blocks the event loop for some milliseconds.
LOAD_CHUNK_BYTES: Final = 1 << 16
#: Coordinators write uncompressed batches; this limits the decompressed size of a batch from another writer.
_DECODED_BYTES_MAX: Final = 1 << 30


class TransactionalShard(Protocol):
    """The additional methods of a shard if producers may write to its log in transactions."""

    def replay_pending(self, producer_id: int, key: bytes, value: bytes | None) -> None:
        """Replay a record that takes effect only if the producer's transaction is committed."""

    def transaction_ended(self, producer_id: int, committed: bool) -> None: ...


class Replayable(Protocol):
    @property
    def transactional(self) -> TransactionalShard | None:
        """The shard itself if producers may write to its log in transactions, otherwise None."""

    def replay(self, key: bytes, value: bytes | None) -> None: ...


class CoordinatorLog(Protocol):
    @property
    def start_offset(self) -> int: ...
    @property
    def end(self) -> Any: ...
    @property
    def producers(self) -> Any: ...
    def read(self, offset: int, max_bytes: int, upto: Any) -> Any: ...


async def replay_log(
    shard: Replayable, log: CoordinatorLog, end: Any, in_thread: Callable[..., Awaitable[Any]]
) -> None:
    """Replay the log in chunks, and read each chunk in a thread, so that a large shard does not block the others.

    Raises ApiError for a log that cannot be read, or that is damaged.
    """
    offset = log.start_offset
    while offset < end.offset:
        # A record whose bytes have changed on disk must not become part of a shard.
        piece = await in_thread(read_validated, log, offset, LOAD_CHUNK_BYTES, end)
        assert piece.next_offset > offset, f"nothing to read at {offset} of {end.offset}"
        for header, batch in iter_batches(piece.data):
            _replay_batch(shard, header, batch)
        offset = piece.next_offset


def _replay_batch(shard: Replayable, header: BatchHeader, batch: BytesLike) -> None:
    if header.is_control:
        marker = parse_end_marker(batch)
        if marker is not None:
            _transactional(shard).transaction_ended(marker.producer_id, marker.committed)
        return
    for record in decode_records(batch, _DECODED_BYTES_MAX):
        assert record.key is not None
        if header.is_transactional:
            _transactional(shard).replay_pending(header.producer_id, record.key, record.value)
        else:
            shard.replay(record.key, record.value)


def _transactional(shard: Replayable) -> TransactionalShard:
    transactional = shard.transactional
    assert transactional is not None, f"a record of a transaction in the log of {shard!r}"
    return transactional


class CommitStallDetector:
    """A stall begins when the oldest pending reply has waited for too long, and ends when all replies are committed.

    There is only one timer, and only while a reply is pending, so commits that are in time cost next to nothing.
    """

    __slots__ = ("_began", "_loop", "_on_stall", "_timeout_s", "_timer", "is_stalled")

    def __init__(self, timeout_s: float, on_stall: Callable[[], None]) -> None:
        self._timeout_s = timeout_s
        self._on_stall = on_stall
        self._loop = asyncio.get_running_loop()
        self._began: deque[float] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self.is_stalled = False

    def begin(self) -> None:
        now = self._loop.time()
        self._began.append(now)
        if self._timer is None and not self.is_stalled:
            self._timer = self._loop.call_at(now + self._timeout_s, self._look)

    def end(self) -> float:
        """Note that the oldest is committed. Returns the duration in seconds of a stall that this ends, or 0."""
        began = self._began.popleft()
        if not self.is_stalled or self._began:
            return 0.0
        self.is_stalled = False
        return self._loop.time() - began

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        if not self._began:
            return
        due = self._began[0] + self._timeout_s
        if due > self._loop.time():
            self._timer = self._loop.call_at(due, self._look)
        else:
            self.is_stalled = True
            self._on_stall()


logger = logging.getLogger("penstock.coordinator")

#: A larger difference between wall clock and elapsed time means that the clock was set, not that the loop was busy.
_CLOCK_STEP_MS: Final = 1_000
#: asyncio limits the delay of a timer; one needless wake-up per hour costs nothing.
_TIMER_MAX_S: Final = 3_600.0
#: A producer or transaction coordinator was too late. The append fails, but the shard is unchanged and stays.
_PRODUCER_ERRORS: Final = frozenset(
    {
        ErrorCode.invalid_producer_epoch,
        ErrorCode.producer_fenced,
        ErrorCode.invalid_txn_state,
        ErrorCode.transaction_coordinator_fenced,
    }
)


class CoordinatorResult(Protocol):
    """What an operation of any shard returns: records to append and replay, and the replies once they are committed."""

    @property
    def producer(self) -> tuple[int, int] | None:
        """Id and epoch of the producer of the transaction to which the records belong, if they belong to one."""

    @property
    def records(self) -> Sequence[tuple[bytes, bytes | None]]: ...
    @property
    def replies(self) -> Iterable[tuple[Any, object]]: ...


class CoordinatorShard(Replayable, Protocol):
    """What the runtime needs of a state machine. The operations themselves are not part of it."""

    def loaded(self, now_ms: int) -> CoordinatorResult: ...
    def tick(self, now_ms: int) -> CoordinatorResult: ...
    def next_deadline_ms(self) -> int | None: ...
    def clock_moved(self, by_ms: int) -> None: ...


class CoordinatorPartition(Protocol):
    @property
    def log(self) -> CoordinatorLog: ...
    @property
    def leader_epoch(self) -> int: ...
    def append_internal(self, batch: bytearray, now_ms: int, *, leader_epoch: int) -> int: ...
    def append_marker(
        self, marker: EndMarker, now_ms: int, *, leader_epoch: int | None = None, transaction_version: int = 0
    ) -> int: ...
    def when_committed(self, offset: int, call: Callable[[ApiError | None], None]) -> None: ...


class _EndTransaction(NamedTuple):
    """The result of ending a transaction."""

    marker: EndMarker
    transaction_version: int
    replies: tuple[tuple[Any, object], ...]
    records: tuple[()] = ()
    producer: None = None


ShardT = TypeVar("ShardT", bound=CoordinatorShard)
Result = TypeVar("Result")
Token = asyncio.Future[Any]


class Clock(Protocol):
    def __call__(self) -> int: ...


class ActiveShard(Generic[ShardT]):
    def __init__(
        self,
        shard: ShardT,
        partition: CoordinatorPartition,
        *,
        leader_epoch: int,
        last_offset: int,
        now_ms: Clock,
        on_failure: Callable[[ActiveShard[ShardT]], None],
        commit_timeout_s: float,
    ) -> None:
        self.shard = shard
        self.partition = partition
        self.leader_epoch = leader_epoch
        self._loop = asyncio.get_running_loop()
        self._last_offset = last_offset
        self._now_ms = now_ms
        self._on_failure = on_failure
        self._tokens: dict[Token, None] = {}  # they fail in the order of their requests
        self._timer: asyncio.TimerHandle | None = None
        self._timer_deadline_ms = 0
        self.is_closed = False
        self._skew_ms = self._clock_skew_ms()
        self._commits = CommitStallDetector(commit_timeout_s, self._on_commit_stall)
        self._execute(lambda: shard.loaded(now_ms()))

    def __repr__(self) -> str:
        return f"<ActiveShard {self.shard!r} at {self._last_offset}, {len(self._tokens)} waiting>"

    def submit(
        self, operation: Callable[[ShardT, Token], CoordinatorResult], guard: VerificationGuard | None = None
    ) -> Token:
        """Run the operation. It completes the token or, if the request has to wait, a later operation does.

        `guard` comes from the verification of the producer's transaction, if it had to be verified.
        Raises ApiError while commits are stalled, and when the shard is closed.
        """
        token = self._new_token()
        self._detect_clock_step()
        self._execute(partial(operation, self.shard, token), token, guard)
        return token

    def read(self, question: Callable[[ShardT], Result]) -> asyncio.Future[Result]:
        """Read the state at once, but return the answer only when everything that it can reveal is committed.

        Raises ApiError while commits are stalled, and when the shard is closed.
        """
        token = self._new_token()
        self._reply_when_committed(((token, question(self.shard)),))
        return token

    def write_marker(self, marker: EndMarker, transaction_version: int = 0) -> Token:
        """End a producer's transaction in this shard: its pending records take effect now, or are dropped.

        Raises ApiError while commits are stalled, and when the shard is closed.
        """
        token = self._new_token()
        self._execute(lambda: _EndTransaction(marker, transaction_version, ((token, None),)), token)
        return token

    def close(self, code: ErrorCode) -> None:
        """Fail all pending requests with `code`; this shard answers no more."""
        self.is_closed = True
        self._commits.close()
        self._fail_pending(code)

    def _new_token(self) -> Token:
        if self.is_closed:
            raise ApiError(ErrorCode.not_coordinator)
        if self._commits.is_stalled:
            raise ApiError(ErrorCode.coordinator_not_available)
        token: Token = self._loop.create_future()
        self._tokens[token] = None
        token.add_done_callback(self._tokens.pop)
        return token

    def _fail_pending(self, code: ErrorCode) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for token in tuple(self._tokens):
            _fail_token(token, ApiError(code))

    def _on_commit_stall(self) -> None:
        logger.warning("nothing is committed; failing %d requests: %r", len(self._tokens), self)
        self._fail_pending(ErrorCode.coordinator_not_available)

    def _on_commit_resume(self, after_s: float) -> None:
        logger.info("committed again after %.1f s: %r", after_s, self)
        self.shard.clock_moved(int(after_s * 1000))
        self._set_timer()

    def _execute(
        self,
        decide: Callable[[], CoordinatorResult],
        token: Token | None = None,
        guard: VerificationGuard | None = None,
    ) -> None:
        if self.is_closed:
            return
        try:
            work = decide()
            refusal = self._append(work, guard)
        except ApiError as error:
            # The log already reports a failed disk once; a warning here would repeat with every request.
            level = logging.DEBUG if error.code is ErrorCode.kafka_storage_error else logging.WARNING
            logger.log(level, "discarding a shard that could not be written: %r", error)
            self._fail(_coordinator_error(error.code))
        except Exception:
            logger.exception("discarding a shard after a failed operation")
            if token is not None:
                _fail_token(token, ApiError(ErrorCode.unknown_server_error))
            self._fail(ErrorCode.not_coordinator)
        else:
            if refusal is None:
                self._reply_when_committed(work.replies)
            else:
                for refused, _ in work.replies:
                    _fail_token(refused, refusal)
            if not self.is_closed:
                self._set_timer()

    def _append(self, work: CoordinatorResult, guard: VerificationGuard | None) -> ApiError | None:
        """Append and replay. Returns an error if the producer's transaction may not go on; then nothing has changed."""
        try:
            if isinstance(work, _EndTransaction):
                self._append_marker(work)
            elif work.producer is not None:
                self._append_pending(work, *work.producer, guard)
            elif work.records:
                self._append_batch(encode_coordinator_batch(work.records, self._now_ms()))
                for key, value in work.records:
                    self.shard.replay(key, value)
        except ApiError as error:
            if error.code not in _PRODUCER_ERRORS:
                raise
            return error
        return None

    def _append_pending(
        self, work: CoordinatorResult, producer_id: int, epoch: int, guard: VerificationGuard | None
    ) -> None:
        if not work.records:
            return
        if guard is not None:
            self.partition.log.producers.check_guard(producer_id, epoch, guard)
        batch = encode_coordinator_batch(
            work.records,
            self._now_ms(),
            attributes=TRANSACTIONAL,
            producer_id=producer_id,
            producer_epoch=epoch,
        )
        self._append_batch(batch)
        for key, value in work.records:
            _transactional(self.shard).replay_pending(producer_id, key, value)

    def _append_marker(self, end: _EndTransaction) -> None:
        self._last_offset = self.partition.append_marker(
            end.marker,
            self._now_ms(),
            leader_epoch=self.leader_epoch,
            transaction_version=end.transaction_version,
        )
        _transactional(self.shard).transaction_ended(end.marker.producer_id, end.marker.committed)

    def _append_batch(self, batch: bytearray) -> None:
        self._last_offset = self.partition.append_internal(
            batch, self._now_ms(), leader_epoch=self.leader_epoch
        )

    def _reply_when_committed(self, replies: Iterable[tuple[Token, object]]) -> None:
        if replies:
            self._commits.begin()
            self.partition.when_committed(self._last_offset, partial(self._release, replies))

    def _release(self, replies: Iterable[tuple[Token, object]], error: ApiError | None) -> None:
        if error is not None:
            self._fail(_coordinator_error(error.code))
        if self.is_closed:
            return
        stalled_s = self._commits.end()
        if stalled_s:
            self._on_commit_resume(stalled_s)
        for token, reply in replies:
            # The requester may have gone away in the meantime.
            if not token.done():
                token.set_result(reply)

    def _fail(self, code: ErrorCode) -> None:
        if not self.is_closed:
            self.close(code)
            self._on_failure(self)

    def _set_timer(self) -> None:
        """Leave a timer that is set too early: one needless wake-up is cheaper than to move it at every operation."""
        deadline_ms = self.shard.next_deadline_ms()
        if deadline_ms is None:
            return
        if self._timer is not None:
            if self._timer_deadline_ms <= deadline_ms:
                return
            self._timer.cancel()
        delay_s = max(deadline_ms - self._now_ms(), 0) / 1000
        self._timer = self._loop.call_later(min(delay_s, _TIMER_MAX_S), self._on_timer)
        self._timer_deadline_ms = deadline_ms

    def _on_timer(self) -> None:
        self._timer = None
        self._detect_clock_step()
        self._execute(lambda: self.shard.tick(self._now_ms()))

    def _clock_skew_ms(self) -> int:
        return self._now_ms() - time.monotonic_ns() // 1_000_000

    def _detect_clock_step(self) -> None:
        skew_ms = self._clock_skew_ms()
        moved_ms = skew_ms - self._skew_ms
        if abs(moved_ms) > _CLOCK_STEP_MS:
            self._skew_ms = skew_ms
            self.shard.clock_moved(moved_ms)


def _fail_token(token: Token, error: ApiError) -> None:
    if not token.done():
        token.set_exception(error)
        # Marks it as retrieved: asyncio must not complain if a task is cancelled before it sees the exception.
        token.exception()


def _coordinator_error(code: ErrorCode) -> ErrorCode:
    """The error for a client when our own append failed: look for the coordinator again, or just retry."""
    match code:
        case (
            ErrorCode.unknown_topic_or_partition
            | ErrorCode.not_enough_replicas
            | ErrorCode.not_enough_replicas_after_append
            | ErrorCode.request_timed_out
        ):
            return ErrorCode.coordinator_not_available
        case ErrorCode.message_too_large | ErrorCode.record_list_too_large:
            return ErrorCode.unknown_server_error
        case _:
            return ErrorCode.not_coordinator
