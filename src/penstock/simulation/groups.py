"""The coordinator runtime on a replicated partition: decide, append, replay at once, answer when committed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from penstock.groups.settings import GroupSettings
from penstock.groups.shard import GroupShard
from penstock.groups.work import Work
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.simulation.disk import DiskFull

if TYPE_CHECKING:
    from penstock.simulation.replica import Replica

OFFSETS_TOPIC: Final = "__consumer_offsets"
SETTINGS: Final = GroupSettings(
    session_timeout_min_ms=50, initial_rebalance_delay_ms=20, new_member_join_timeout_ms=1_000
)
#: A difference between wall clock and elapsed time that says that the clock was set.
_CLOCK_STEP_MS: Final = 1_000


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


class Groups:
    """A shard at work on the leader of its partition; a new leader loads another from the log."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.node = replica.node
        self.is_closed = False
        self._tokens: dict[Token, None] = {}
        self._timer_ms: int | None = None
        self.shard = GroupShard(SETTINGS)
        self._load()

    def submit(
        self, operation: Callable[[GroupShard, Token, int], Work], respond: Callable[[Any], None]
    ) -> None:
        token = self._token(respond)
        self._follow_clock()
        self._do(lambda: operation(self.shard, token, self._now_ms()))

    def read(self, question: Callable[[GroupShard], Any], respond: Callable[[Any], None]) -> None:
        """The answer is of now; it is given out when everything that it can reveal is committed.

        With it goes whether it was asked of the newest coordinator: one that is deposed and does not know it yet
        may tell old news.
        """
        token = self._token(respond)
        self._release_later(((token, self.answer_to(question)),))

    def answer_to(self, question: Callable[[GroupShard], Any]) -> tuple[bool, Any]:
        return self.node.invariants.is_newest_leader(self.replica), question(self.shard)

    def close(self) -> None:
        """Nobody who waits here will be answered by this shard any more."""
        self.is_closed = True
        for token in tuple(self._tokens):
            token.answer(ErrorCode.not_coordinator)
        self._tokens.clear()

    def _load(self) -> None:
        for batch in self.replica.log.batches:
            for key, value in batch.payload:
                self.shard.replay(key, value)
        self._last_end = self.replica.log.end_offset
        self._skew_ms = self._clock_skew_ms()
        self._do(lambda: self.shard.loaded(self._now_ms()))

    def _token(self, respond: Callable[[Any], None]) -> Token:
        token = Token(respond)
        self._tokens[token] = None
        if len(self._tokens) > 64:
            self._tokens = {each: None for each in self._tokens if not each.is_done}
        return token

    def _do(self, decide: Callable[[], Work]) -> None:
        if self.is_closed:
            return
        work = decide()
        try:
            self._append(work)
        except (ApiError, DiskFull):
            self._fail()
            return
        self._release_later(work.replies)
        self._set_timer()

    def _append(self, work: Work) -> None:
        if work.records:
            replica = self.replica
            if replica.require_leader().is_below_min:
                raise ApiError(ErrorCode.not_enough_replicas)
            self.node.machine.disk.require_room()
            self._last_end = replica.append(tuple(work.records)) + len(work.records)
            for key, value in work.records:
                self.shard.replay(key, value)

    def _release_later(self, replies: tuple[tuple[Any, object], ...]) -> None:
        if replies:
            self.replica.when_committed(self._last_end, lambda error: self._release(replies, error))

    def _release(self, replies: tuple[tuple[Any, object], ...], error: ErrorCode) -> None:
        if error is not ErrorCode.none:
            self._fail()
        if not self.is_closed:
            for token, reply in replies:
                token.answer(reply)

    def _fail(self) -> None:
        """What could not be written is forgotten with the shard; it is loaded again from the log."""
        if not self.is_closed:
            self.close()
            if self.replica.leading is not None and self.replica.groups is self:
                self.replica.groups = Groups(self.replica)

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
