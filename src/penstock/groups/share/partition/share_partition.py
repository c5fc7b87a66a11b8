"""A share partition: a group's view of one partition, on the partition's leader.

Only what is stored may be seen: an acknowledgement is answered, and a released record available again, when the write
that says so has arrived. The shell takes one write after the other (`take_write`), tells how it went (`written`,
`write_failed`), and calls `tick` when `next_deadline_ms` has come. What a fenced leader knows is thrown away.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.groups.share_partition import acknowledging, acquiring, timing, writing
from penstock.groups.share_partition.core import Core, load
from penstock.groups.share_partition.messages import (
    Acquired,
    Appetite,
    Counters,
    Found,
    Said,
    Write,
)
from penstock.groups.share_partition.policy import Policy
from penstock.groups.share_partition.states import (
    ACQUIRED,
    AVAILABLE,
    BUSY,
    DELAYED,
    HANDED,
    IN_HANDS,
    WAITING,
)
from penstock.groups.share_state.values import NO_TOTALS, Totals


class SharePartition:
    __slots__ = ("_core", "policy")

    def __init__(
        self,
        start_offset: int,
        batches: Sequence[tuple[int, int, int, int]],
        policy: Policy,
        counters: Counters,
        totals: Totals = NO_TOTALS,
        *,
        now_ms: int,
        chance: float,
    ) -> None:
        """`batches` and `totals` as they are stored; `policy` may be replaced at any time."""
        self.policy = policy
        self._core: Core = load(start_offset, batches, counters, policy, totals, now_ms=now_ms, chance=chance)

    def __repr__(self) -> str:
        return f"<SharePartition {self.start_offset}..{self.end_offset} {bytes(self._core.window.states)!r}>"

    # -- what it says --------------------------------------------------------------------------------

    @property
    def start_offset(self) -> int:
        """The oldest offset that is not final."""
        return self._core.window.start

    @property
    def end_offset(self) -> int:
        """The first offset that was never handed out."""
        return self._core.window.end

    @property
    def next_offset(self) -> int | None:
        """Where to read what can be handed out next; None while nothing can be."""
        return acquiring.next_offset(self._core, self.policy)

    def reach(self, records_max: int) -> int:
        """How many offsets to read from there to find that many records."""
        return acquiring.reach(self._core, records_max, self.policy)

    @property
    def next_deadline_ms(self) -> int | None:
        return self._core.timers[0][0] if self._core.timers else None

    @property
    def locked_count(self) -> int:
        states = self._core.window.states
        return states.count(ACQUIRED) + states.count(HANDED)

    @property
    def open_count(self) -> int:
        """Records in flight that are not final yet."""
        return self._core.window.open_count

    @property
    def totals(self) -> Totals:
        """Of now, whether they are stored or not."""
        return self._core.totals

    @property
    def has_writes(self) -> bool:
        core = self._core
        return bool(core.queued) or core.owes_totals or core.launched is not None

    @property
    def is_idle(self) -> bool:
        """Nothing would be lost if it were forgotten and loaded again."""
        if self.has_writes or BUSY.search(self._core.window.states) is not None:
            return False
        # A group's delay begins again when it is loaded; a record's own would be lost.
        return not self._rests_as_asked()

    def _rests_as_asked(self) -> bool:
        core, window = self._core, self._core.window
        core.delays_kept = {
            offset
            for offset in core.delays_kept
            if window.start <= offset < window.end and window.states[offset - window.start] == DELAYED
        }
        return bool(core.delays_kept)

    # -- what is done to it --------------------------------------------------------------------------

    def acquire(self, member: str, found: Found, appetite: Appetite, *, now_ms: int) -> list[Acquired]:
        return acquiring.acquire(self._core, member, found, appetite, self.policy, now_ms=now_ms)

    def reserve(self, found: Found, appetite: Appetite) -> int:
        """At most once: how many records have to be written before `acquire` hands any of them out."""
        return acquiring.reserve(self._core, found, appetite, self.policy)

    def acknowledge(self, member: str, batches: Sequence[Said], *, now_ms: int, chance: float) -> bool:
        """Returns whether a write has to be waited for. Raises ApiError, and then nothing has changed."""
        return acknowledging.acknowledge(
            self._core, member, batches, self.policy, now_ms=now_ms, chance=chance
        )

    def is_held(self, offset: int, delivery_count: int) -> bool:
        """Whether somebody has the record from this delivery."""
        return acknowledging.is_held(self._core, offset, delivery_count)

    def ask_delay(self, offset: int, delivery_count: int, delay_ms: int) -> bool:
        """How long a record rests if it is released from this delivery, whatever the group's settings say.

        False where nobody has it from this delivery. Not stored, as no delay is: another leader takes the group's.
        """
        return acknowledging.ask_delay(self._core, offset, delivery_count, delay_ms)

    def release(self, member: str, *, now_ms: int, chance: float, with_delay: bool) -> bool:
        """A member has gone, and what it holds is free again. Returns whether something has to be written."""
        policy = self.policy if with_delay else self.policy._replace(backoff=None)
        return timing.release(self._core, member, policy, now_ms=now_ms, chance=chance)

    def tick(self, *, now_ms: int, chance: float) -> None:
        timing.tick(self._core, self.policy, now_ms=now_ms, chance=chance)

    def log_start_moved(self, log_start: int) -> None:
        """What the log has deleted is waited for no more; what is being written of it is, until it is stored.

        What has expired is stored with the next write, as the new start is: who loads what is stored counts it again.
        """
        core, window = self._core, self._core.window
        core.deleted_upto = max(core.deleted_upto, log_start)
        low, high = window.clip(window.start, log_start)
        waiting = WAITING.search(window.states, low, high)
        if waiting is not None:
            log_start = window.start + waiting.start()
        expired = self._let_go_of(min(log_start, window.end))
        if log_start > window.end:
            expired += log_start - window.end
            window.start = log_start  # nothing is left in it
        if expired:
            core.totals = core.totals._replace(expired=core.totals.expired + expired)
        core.drop_done()

    def _let_go_of(self, offset: int) -> int:
        """How many of them nobody has ever had."""
        core, window = self._core, self._core.window
        _, high = window.clip(window.start, offset)
        for held in IN_HANDS.finditer(window.states, 0, high):
            for place in range(*held.span()):
                core.members.give_back(window.owners[place], 1)
        pairs = zip(window.states[:high], window.counts, strict=False)
        never = sum(state == AVAILABLE and not count for state, count in pairs)
        window.drop_below(offset)
        return never

    # -- what is stored ------------------------------------------------------------------------------

    def take_write(self) -> Write | None:
        """None while one is under way, or nothing is to be written."""
        return None if self._core.launched is not None else writing.take_write(self._core)

    def written(self) -> None:
        writing.written(self._core)

    def write_failed(self) -> None:
        writing.write_failed(self._core)
