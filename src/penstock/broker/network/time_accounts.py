"""Fair queueing: no tenant gets more time of the event loop than another that wants as much.

Each tenant has an account; a user without a tenant has one too, and before the login each host. All connections of an
account share its part. These rules decide, from times that are arguments:

- Whether an account is ahead: it has lately used more than its part while others were active. Its requests then wait
  in a queue; requests of other accounts are handled as soon as they are read.
- Whose turn it is in the queue: deficit round robin over the accounts. The work of one account keeps its order.

While clients have only one account, it cannot be ahead. Only the queue measures then, because it has work of nodes too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine, Generator, Hashable
from functools import partial
from time import perf_counter
from typing import Any, Final, Generic, TypeVar

T = TypeVar("T")
#: How far ahead an account may get before its requests wait.
_BURST_S: Final = 0.002
#: How far ahead an account is remembered to be at most, so that it is soon served like all others when it slows down.
_AHEAD_S_MAX: Final = 0.05
#: Accounts count as active that used any time in this window or the one before.
_WINDOW_S: Final = 0.25
#: If less than this part of a window was used, an account may use half of the time however many others are active.
_BUSY_FRACTION: Final = 0.5
#: What one turn of the queue gives an account, and how much it may owe, as multiples of it.
_QUANTUM_S: Final = 0.00025
_OWED_QUANTA_MAX: Final = 8
#: Measuring a read costs some percent of a small request, so of an account that is well within its part, not all reads
#: are measured: as many are skipped as would take this time at the pace of the last one, but not more than this number.
#: A skipped read counts as at most so many seconds.
_SKIPPED_TOGETHER_S: Final = 0.0005
_SKIPPED_MAX: Final = 31
_SKIPPED_S_MAX: Final = 0.00003
#: How many reads of an account that is alone pass before it looks whether there are others.
_SKIPPED_ALONE: Final = 15


class TimeAccount:
    """What one tenant, user or host has used; its connections refer to it."""

    __slots__ = (
        "_accounts", "_ahead_s", "_at", "_skipped", "_window", "connections", "credit_s", "has_turn", "is_login",
        "key", "unmeasured", "waiting",
    )  # fmt: skip

    def __init__(self, accounts: TimeAccounts, key: Hashable, *, is_login: bool = False) -> None:
        self._accounts = accounts
        self.key = key
        self.is_login = is_login
        self.connections = 0
        #: How many reads the caller may handle next without measuring them. It counts them down.
        self.unmeasured = self._skipped = 0
        self._ahead_s = self._at = 0.0
        self._window = -1
        #: For `FairQueue`: what it may still use in this round, negative if it owes, and its work in order.
        self.credit_s = 0.0
        self.has_turn = False
        self.waiting: deque[object] = deque()

    def __repr__(self) -> str:
        return f"<TimeAccount {self.key}, {self._ahead_s * 1000:.1f} ms ahead>"

    async def measured(self, work: Coroutine[Any, Any, T]) -> T:
        """Await the work of a request; what it uses of the event loop until it is done counts too."""
        return await _Measured(self, work)

    def spend_sampled(self, began: float, ended: float) -> None:
        """A read took from `began` to `ended`; those before it that were not measured are taken to be alike."""
        accounts = self._accounts
        if not accounts.are_several:
            self.unmeasured = self._skipped = _SKIPPED_ALONE
            return
        took = ended - began
        self.spend(began, ended, self._skipped * min(took, _SKIPPED_S_MAX))
        # Close to its part, every read is measured.
        is_close = self._ahead_s > _BURST_S / 2
        skipped = 0 if is_close else min(int(_SKIPPED_TOGETHER_S / max(took, 1e-6)), _SKIPPED_MAX)
        self.unmeasured = self._skipped = skipped

    def spend_later(self, began: float, ended: float) -> None:
        """For a request whose reply comes later. The queue gives way to such work by as much time as it took."""
        self._accounts.later_s += ended - began
        self.spend(began, ended)

    def spend(self, began: float, ended: float, unmeasured_s: float = 0.0) -> None:
        """The account had the event loop from `began` to `ended`."""
        accounts = self._accounts
        if ended >= accounts.window_ends:
            accounts.begin_window(ended)
        if self._window != accounts.window:
            self._window = accounts.window
            if not self.is_login:
                accounts.count_active()
        took = ended - began + unmeasured_s
        accounts.spent_s += took
        ahead = self._ahead_s - (ended - self._at) * accounts.fraction
        ahead = took if ahead < 0 else ahead + took
        self._ahead_s = ahead if ahead < _AHEAD_S_MAX else _AHEAD_S_MAX
        self._at = ended

    def is_ahead(self, now: float) -> bool:
        """Whether the account has to wait because others are active and it has used more than its part."""
        accounts = self._accounts
        if accounts.active < 2 or not accounts.are_several:
            return False
        return self._ahead_s - (now - self._at) * accounts.fraction > _BURST_S

    def is_settled(self, now: float) -> bool:
        """Whether it can be forgotten: nothing would be different for it."""
        return self._ahead_s <= (now - self._at) * self._accounts.fraction


class _Measured(Generic[T]):
    """Runs a coroutine as `await` does, and measures each of its steps."""

    def __init__(self, account: TimeAccount, work: Coroutine[Any, Any, T]) -> None:
        self._account = account
        self._work = work

    def __await__(self) -> Generator[Any, Any, T]:
        step: Callable[[], Any] = partial(self._work.send, None)
        while True:
            began = perf_counter()
            try:
                waited_for = step()
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            finally:
                self._account.spend_later(began, perf_counter())
            try:
                step = partial(self._work.send, (yield waited_for))
            except BaseException as error:
                step = partial(self._work.throw, error)


class TimeAccounts:
    def __init__(self) -> None:
        self._by_key: dict[Hashable, TimeAccount] = {}
        self._left: dict[TimeAccount, None] = {}
        #: Whether there is more than one account; otherwise callers measure nothing.
        self.are_several = False
        #: Numbers windows.
        self.window = 0
        self.window_ends = 0.0
        self.spent_s = 0.0  # in this window, by all
        #: What replies that come later have used since the queue last ran.
        self.later_s = 0.0
        self.active = 1
        self._active_here = 0
        self._is_busy = False
        #: The part of the time that each active account may use.
        self.fraction = 1.0

    def join(self, key: Hashable, *, is_login: bool = False) -> TimeAccount:
        """Return the account of this tenant, user or host, which has one more connection.

        With `is_login` it is used until clients have logged in. It never counts as active beside others: a login is
        short, and the client would take part of its own time.
        """
        account = self._by_key.get(key)
        if account is None:
            account = self._by_key[key] = TimeAccount(self, key, is_login=is_login)
            self.are_several = len(self._by_key) > 1
        self._left.pop(account, None)
        account.connections += 1
        return account

    def leave(self, account: TimeAccount) -> None:
        """A connection has ended. An account without any is remembered while it is ahead: it may come back at once."""
        account.connections -= 1
        if not account.connections:
            self._left[account] = None

    def begin_window(self, now: float) -> None:
        is_next = now < self.window_ends + _WINDOW_S
        self._is_busy = is_next and self.spent_s > _BUSY_FRACTION * _WINDOW_S
        self.active = max(self._active_here if is_next else 0, 1)
        self._active_here, self.spent_s = 0, 0.0
        self.window += 1
        self.window_ends = now + _WINDOW_S
        self._share_out()
        for account in [each for each in self._left if each.is_settled(now) and not each.waiting]:
            del self._left[account], self._by_key[account.key]
        self.are_several = len(self._by_key) > 1

    def count_active(self) -> None:
        self._active_here += 1
        if self._active_here > self.active:
            self.active = self._active_here
            self._share_out()

    def _share_out(self) -> None:
        active = self.active
        self.fraction = 1 / active if self._is_busy or active < 2 else 0.5


class FairQueue(Generic[T]):
    """Work that waits, by account. An account whose work took longer than its turn lets the others catch up."""

    def __init__(self) -> None:
        self._turns: deque[TimeAccount] = deque()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push(self, work: T, account: TimeAccount) -> None:
        if not account.has_turn:
            account.has_turn = True
            self._turns.append(account)
        account.waiting.append(work)
        self._length += 1

    def pop(self) -> tuple[T, TimeAccount]:
        """Return what is next, and whose it is; call `spent` with the time that it took."""
        turns = self._turns
        while True:
            account = turns[0]
            if not account.waiting:
                # Only now, because its last work may have come back to go on in the same turn.
                turns.popleft()
                account.has_turn = False
            elif account.credit_s <= 0 and len(turns) > 1:
                account.credit_s += _QUANTUM_S
                turns.rotate(-1)
            else:
                break
        work: T = account.waiting.popleft()  # type: ignore[assignment]
        self._length -= 1
        return work, account

    def spent(self, account: TimeAccount, seconds: float) -> None:
        account.credit_s = max(account.credit_s - seconds, -_OWED_QUANTA_MAX * _QUANTUM_S)
