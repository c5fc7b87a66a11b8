"""The coordinator runtime on a replicated partition: decide, append, replay at once, answer when committed.

One runtime carries every shard: groups, transactions, share state and the schedule. Which one lives on a partition is
told by its topic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.cluster.topic_names import CONSUMER_OFFSETS
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.record_batch import EndMarker
from simulation.disk import DiskFull

if TYPE_CHECKING:
    from penstock.log.producer_state import VerificationGuard
    from simulation.replica import Replica
    from simulation.simlog import Batch

OFFSETS_TOPIC: Final = CONSUMER_OFFSETS
#: A difference between wall clock and elapsed time that says that the clock was set.
_CLOCK_STEP_MS: Final = 1_000
#: What a producer or a transaction's coordinator has come too late for; the shard is as it was.
_OVERTAKEN: Final = frozenset(
    {
        ErrorCode.invalid_producer_epoch,
        ErrorCode.invalid_txn_state,
        ErrorCode.transaction_coordinator_fenced,
    }
)

Replies = tuple[tuple[Any, object], ...]


class Token:
    """Somebody who waits for an answer."""

    __slots__ = ("is_done", "respond")

    def __init__(self, respond: Callable[[Any], None]) -> None:
        self.respond = respond
        self.is_done = False

    def answer(self, reply: Any) -> None:
        if not self.is_done:
            self.is_done = True
            self.respond(reply)


class _End(NamedTuple):
    """The work of ending a transaction."""

    marker: EndMarker
    transaction_version: int
    replies: Replies
    records: tuple[()] = ()


class Coordinator:
    """A shard at work on the leader of its partition; a new leader loads another from the log.

    `shard` is any state machine whose operations return work: records, replies and perhaps a producer.
    """

    def __init__(self, replica: Replica, new_shard: Callable[[Replica], Any]) -> None:
        self.replica = replica
        self.node = replica.node
        self.leader_epoch = replica.require_leader().leader_epoch
        self.is_closed = False
        self._new_shard = new_shard
        self._tokens: dict[Token, None] = {}
        self._timer_ms: int | None = None
        self.shard = new_shard(replica)
        self._load()

    def submit(
        self,
        operation: Callable[[Any, Token, int], Any],
        respond: Callable[[Any], None],
        guard: VerificationGuard | None = None,
    ) -> None:
        """Answered with the reply, or with an ErrorCode where this shard cannot give one."""
        token = self._token(respond)
        self._follow_clock()
        self._do(lambda: operation(self.shard, token, self._now_ms()), guard)

    def read(self, question: Callable[[Any], Any], respond: Callable[[Any], None]) -> None:
        """The answer is of now; it is given out when everything that it can reveal is committed.

        With it goes whether it was asked of the newest coordinator: one that is deposed and does not know it yet
        may tell old news.
        """
        token = self._token(respond)
        self._release_later(((token, self.answer_to(question)),))

    def answer_to(self, question: Callable[[Any], Any]) -> tuple[bool, Any]:
        return self.node.invariants.is_newest_leader(self.replica), question(self.shard)

    def write_marker(self, marker: EndMarker, version: int, respond: Callable[[Any], None]) -> None:
        """End a producer's transaction in this shard: its records count from here on, or never will."""
        token = self._token(respond)
        self._do(lambda: _End(marker, version, ((token, ErrorCode.none),)))

    def close(self) -> None:
        """Nobody who waits here will be answered by this shard any more."""
        self.is_closed = True
        for token in tuple(self._tokens):
            token.answer(ErrorCode.not_coordinator)
        self._tokens.clear()

    # --- loading ---

    def _load(self) -> None:
        self.replay_log(self.replica.log.batches)
        self._last_end = self.replica.log.end_offset
        self._skew_ms = self._clock_skew_ms()
        self._do(lambda: self.shard.loaded(self._now_ms()))

    def replay_log(self, batches: list[Batch]) -> None:
        for batch in batches:
            self.replay_batch(batch)

    def replay_batch(self, batch: Batch) -> None:
        """The same steps, whether they were just decided on or come from the log."""
        if batch.marker is not None:
            self.shard.transaction_ended(batch.marker.producer_id, batch.marker.committed)
        elif batch.is_transactional:
            for key, value in batch.payload:
                self.shard.replay_pending(batch.producer_id, key, value)
        else:
            for key, value in batch.payload:
                self.shard.replay(key, value)

    # --- deciding ---

    def _token(self, respond: Callable[[Any], None]) -> Token:
        token = Token(respond)
        self._tokens[token] = None
        if len(self._tokens) > 64:
            self._tokens = {each: None for each in self._tokens if not each.is_done}
        return token

    def _do(self, decide: Callable[[], Any], guard: VerificationGuard | None = None) -> None:
        if self.is_closed:
            return
        work = decide()
        try:
            refusal = self._append(work, guard)
        except (ApiError, DiskFull):
            self._fail()
            return
        if refusal is None:
            self._release_later(tuple(work.replies))
        else:
            for token, _ in work.replies:
                token.answer(refusal)
        self._set_timer()

    def _append(self, work: Any, guard: VerificationGuard | None) -> ErrorCode | None:
        """Append and replay. Returns why a transaction may not go on, and then nothing has changed."""
        try:
            if isinstance(work, _End):
                self._append_marker(work)
            elif work.records:
                self._append_records(work.records, getattr(work, "producer", None), guard)
        except ApiError as error:
            if error.code not in _OVERTAKEN:
                raise
            return error.code
        return None

    def _append_records(self, records: Any, producer: Any, guard: VerificationGuard | None) -> None:
        replica, (producer_id, epoch) = self._writable(), producer or (-1, -1)
        if producer is not None:
            replica.log.producers.check_epoch(producer_id, epoch)
            if guard is not None:
                replica.log.producers.check_guard(producer_id, epoch, guard)
        replica.append(tuple(records), producer_id, epoch, is_transactional=producer is not None)
        self._replay_last()

    def _append_marker(self, end: _End) -> None:
        replica, marker = self._writable(), end.marker
        replica.append_marker(marker, end.transaction_version)
        self._last_end = replica.log.end_offset
        self.shard.transaction_ended(marker.producer_id, marker.committed)

    def _writable(self) -> Replica:
        replica = self.replica
        if replica.require_leader().is_below_min:
            raise ApiError(ErrorCode.not_enough_replicas)
        self.node.machine.disk.require_room()
        return replica

    def _replay_last(self) -> None:
        batch = self.replica.log.batches[-1]
        self._last_end = batch.next_offset
        self.replay_batch(batch)

    def _release_later(self, replies: Replies) -> None:
        if replies:
            self.replica.when_committed(self._last_end, lambda error: self._release(replies, error))

    def _release(self, replies: Replies, error: ErrorCode) -> None:
        if error is not ErrorCode.none:
            self._fail()
        if not self.is_closed:
            for token, reply in replies:
                token.answer(reply)

    def _fail(self) -> None:
        """What could not be written is forgotten with the shard; it is loaded again from the log."""
        if not self.is_closed:
            self.close()
            if self.replica.leading is not None and self.replica.coordinator is self:
                self.replica.coordinator = None
                self.node.coordinator(self.replica)

    # --- time ---

    def _now_ms(self) -> int:
        return self.node.machine.clock.wall_ms()

    def _clock_skew_ms(self) -> int:
        return self._now_ms() - self.node.now_ms()

    def _follow_clock(self) -> None:
        moved_ms = self._clock_skew_ms() - self._skew_ms
        if abs(moved_ms) > _CLOCK_STEP_MS:
            self._skew_ms += moved_ms
            self.shard.clock_moved(moved_ms)
            self._timer_ms = None

    def _set_timer(self) -> None:
        deadline_ms = self.shard.next_deadline_ms()
        if deadline_ms is not None and (self._timer_ms is None or deadline_ms < self._timer_ms):
            self._timer_ms = deadline_ms
            delay_ms = min(self.node.machine.clock.real_ms(max(0, deadline_ms - self._now_ms())), 10_000)
            self.node.after(delay_ms, self._on_timer, deadline_ms)

    def _on_timer(self, set_for_ms: int) -> None:
        if self.is_closed or self._timer_ms != set_for_ms:
            return
        self._timer_ms = None
        self._follow_clock()
        self._do(lambda: self.shard.tick(self._now_ms()))
