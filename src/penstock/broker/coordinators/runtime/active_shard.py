"""A loaded shard at work: its decisions are appended and replayed, and answered when they are committed.

Everything here happens on the loop, without waiting: so the order of the log is the order of the decisions.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, Protocol, TypeVar

from penstock.broker.commit_wait import CommitWait
from penstock.broker.coordinator_replay import Log, transactional
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.records import TRANSACTIONAL, EndMarker, encode_entries

if TYPE_CHECKING:
    from penstock.log.transactions import VerificationGuard

logger = logging.getLogger("penstock.coordinator")

#: A difference between wall clock and elapsed time that says that the clock was set, not that we were busy.
_CLOCK_STEP_MS: Final = 1_000
#: asyncio cannot sleep for arbitrarily long; waking up for nothing once an hour costs nothing.
_TIMER_MAX_S: Final = 3_600.0
#: What a producer or a transaction's coordinator has come too late for; the shard is as it was.
_OVERTAKEN: Final = frozenset(
    {
        ErrorCode.invalid_producer_epoch,
        ErrorCode.producer_fenced,
        ErrorCode.invalid_txn_state,
        ErrorCode.transaction_coordinator_fenced,
    }
)


class Work(Protocol):
    """It may have a `producer` too, with id and epoch: its records are then part of that producer's transaction."""

    @property
    def records(self) -> Sequence[tuple[bytes, bytes | None]]: ...
    @property
    def replies(self) -> Iterable[tuple[Any, object]]: ...


class Shard(Protocol):
    """What the runtime needs of a state machine; its operations are its own affair."""

    def replay(self, key: bytes, value: bytes | None) -> None: ...
    def loaded(self, now_ms: int) -> Work: ...
    def tick(self, now_ms: int) -> Work: ...
    def next_deadline_ms(self) -> int | None: ...
    def clock_moved(self, by_ms: int) -> None: ...


class Partition(Protocol):
    @property
    def log(self) -> Log: ...
    @property
    def leader_epoch(self) -> int: ...
    def append_internal(self, batch: bytearray, now_ms: int, *, leader_epoch: int) -> int: ...
    def append_marker(
        self, marker: EndMarker, now_ms: int, *, leader_epoch: int | None = None, transaction_version: int = 0
    ) -> int: ...
    def when_committed(self, offset: int, call: Callable[[ApiError | None], None]) -> None: ...


class _End(NamedTuple):
    """The work of ending a transaction."""

    marker: EndMarker
    transaction_version: int
    replies: tuple[tuple[Any, object], ...]
    records: tuple[()] = ()


ShardT = TypeVar("ShardT", bound=Shard)
Result = TypeVar("Result")
Token = asyncio.Future[Any]


class Clock(Protocol):
    def __call__(self) -> int: ...


class ActiveShard(Generic[ShardT]):
    def __init__(
        self,
        shard: ShardT,
        partition: Partition,
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
        self._tokens: set[Token] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_deadline_ms = 0
        self.is_closed = False
        self._skew_ms = self._clock_skew_ms()
        self._commits = CommitWait(commit_timeout_s, self._stalled)
        self._do(lambda: shard.loaded(now_ms()))

    def __repr__(self) -> str:
        return f"<ActiveShard {self.shard!r} at {self._last_offset}, {len(self._tokens)} waiting>"

    def submit(
        self, operation: Callable[[ShardT, Token], Work], guard: VerificationGuard | None = None
    ) -> Token:
        """The token is answered by this operation or, if it has to wait, by a later one.

        `guard` is of the verification that the producer of the work has gone through, if it had to.
        Raises ApiError while nothing is committed, and when it is closed.
        """
        token = self._new_token()
        self._follow_clock()
        self._do(partial(operation, self.shard, token), token, guard)
        return token

    def read(self, question: Callable[[ShardT], Result]) -> asyncio.Future[Result]:
        """The answer is of now; it is given out when everything that it can reveal is committed.

        Raises ApiError while nothing is committed, and when it is closed.
        """
        token = self._new_token()
        self._release_later(((token, question(self.shard)),))
        return token

    def write_marker(self, marker: EndMarker, transaction_version: int = 0) -> Token:
        """End a producer's transaction in this shard; its records count from here on, or never will.

        Raises ApiError while nothing is committed.
        """
        token = self._new_token()
        self._do(lambda: _End(marker, transaction_version, ((token, None),)), token)
        return token

    def close(self, code: ErrorCode) -> None:
        """Nobody who waits here will be answered by this shard any more."""
        self.is_closed = True
        self._commits.close()
        self._send_away(code)

    def _new_token(self) -> Token:
        if self.is_closed:
            raise ApiError(ErrorCode.not_coordinator)
        if self._commits.is_stalled:
            raise ApiError(ErrorCode.coordinator_not_available)
        token: Token = self._loop.create_future()
        self._tokens.add(token)
        token.add_done_callback(self._tokens.discard)
        return token

    def _send_away(self, code: ErrorCode) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for token in tuple(self._tokens):
            _refuse(token, ApiError(code))

    def _stalled(self) -> None:
        logger.warning("nothing is committed; sending %d requests away: %r", len(self._tokens), self)
        self._send_away(ErrorCode.coordinator_not_available)

    def _resumed(self, after_s: float) -> None:
        logger.info("committed again after %.1f s: %r", after_s, self)
        self.shard.clock_moved(int(after_s * 1000))
        self._set_timer()

    def _do(
        self,
        decide: Callable[[], Work],
        token: Token | None = None,
        guard: VerificationGuard | None = None,
    ) -> None:
        if self.is_closed:
            return
        try:
            work = decide()
            refusal = self._append(work, guard)
        except ApiError as error:
            # Of its own trouble the disk has told already, once; this would come with every request.
            level = logging.DEBUG if error.code is ErrorCode.kafka_storage_error else logging.WARNING
            logger.log(level, "discarding a shard that could not be written: %r", error)
            self._fail(_coordinator_error(error.code))
        except Exception:
            logger.exception("discarding a shard after a failed operation")
            if token is not None:
                _refuse(token, ApiError(ErrorCode.unknown_server_error))
            self._fail(ErrorCode.not_coordinator)
        else:
            if refusal is None:
                self._release_later(work.replies)
            else:
                for refused, _ in work.replies:
                    _refuse(refused, refusal)
            if not self.is_closed:
                self._set_timer()

    def _append(self, work: Work, guard: VerificationGuard | None) -> ApiError | None:
        """Append and replay. Returns why a transaction may not go on, and then nothing has changed."""
        try:
            if isinstance(work, _End):
                self._append_marker(work)
            elif getattr(work, "producer", None) is not None:
                self._append_pending(work, guard)
            elif work.records:
                self._append_batch(encode_entries(work.records, self._now_ms()))
                for key, value in work.records:
                    self.shard.replay(key, value)
        except ApiError as error:
            if error.code not in _OVERTAKEN:
                raise
            return error
        return None

    def _append_pending(self, work: Any, guard: VerificationGuard | None) -> None:
        if not work.records:
            return
        producer_id, epoch = work.producer
        if guard is not None:
            self.partition.log.producers.check_guard(producer_id, epoch, guard)
        batch = encode_entries(
            work.records,
            self._now_ms(),
            attributes=TRANSACTIONAL,
            producer_id=producer_id,
            producer_epoch=epoch,
        )
        self._append_batch(batch)
        for key, value in work.records:
            transactional(self.shard).replay_pending(producer_id, key, value)

    def _append_marker(self, end: _End) -> None:
        self._last_offset = self.partition.append_marker(
            end.marker,
            self._now_ms(),
            leader_epoch=self.leader_epoch,
            transaction_version=end.transaction_version,
        )
        transactional(self.shard).transaction_ended(end.marker.producer_id, end.marker.committed)

    def _append_batch(self, batch: bytearray) -> None:
        self._last_offset = self.partition.append_internal(
            batch, self._now_ms(), leader_epoch=self.leader_epoch
        )

    def _release_later(self, replies: Iterable[tuple[Token, object]]) -> None:
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
            self._resumed(stalled_s)
        for token, reply in replies:
            # The one who asked may have gone away meanwhile.
            if not token.done():
                token.set_result(reply)

    def _fail(self, code: ErrorCode) -> None:
        if not self.is_closed:
            self.close(code)
            self._on_failure(self)

    def _set_timer(self) -> None:
        """One that is set too early stays: to look for nothing once is cheaper than to move it at every step."""
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
        self._follow_clock()
        self._do(lambda: self.shard.tick(self._now_ms()))

    def _clock_skew_ms(self) -> int:
        return self._now_ms() - time.monotonic_ns() // 1_000_000

    def _follow_clock(self) -> None:
        skew_ms = self._clock_skew_ms()
        moved_ms = skew_ms - self._skew_ms
        if abs(moved_ms) > _CLOCK_STEP_MS:
            self._skew_ms = skew_ms
            self.shard.clock_moved(moved_ms)


def _refuse(token: Token, error: ApiError) -> None:
    if not token.done():
        token.set_exception(error)
        # Marks it as retrieved: a task that is cancelled before it sees the answer must not make asyncio complain.
        token.exception()


def _coordinator_error(code: ErrorCode) -> ErrorCode:
    """What a member is told when our own append failed: whether to look for us again or just to retry."""
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
