"""Time slices: work that takes long is done in steps, so that no client holds the event loop for long.

All that has to wait shares one slice per event loop iteration: the pipelined frames of connections, and requests of
many parts. Such a request is a generator that yields after each part. It runs at once for as long as the slice lasts,
so that a small request pays for one generator; the rest of a large one takes turns with everything else that waits.
While several tenants or users are active, the slice is shorter, and each of them gets its turn (`time_accounts.py`).
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Any, Final, Generic, Protocol, TypeVar

from penstock.broker.network.time_accounts import FairQueue, TimeAccount, TimeAccounts
from penstock.protocol.steps import Steps

T = TypeVar("T")
#: The part of a time slice that a connection still gets for its frames if others have used up the slice.
_LATE_SLICE_FRACTION: Final = 1 / 8
#: The part of a time slice that an iteration has while several tenants or users are active. They wait for less then,
#: and there are more iterations, each of which costs time.
_SHARED_SLICE_FRACTION: Final = 1 / 4


class Queued(Protocol):
    def run_queued(self) -> None: ...


class Requester(Protocol):
    """The connection of a request in steps. It handles no later requests while steps are left."""

    @property
    def is_open(self) -> bool: ...
    @property
    def account(self) -> TimeAccount | None: ...
    def abort_if_peer_closed(self) -> bool: ...
    def hold(self) -> None: ...
    def release(self) -> None: ...


class UntilDone:
    """The requester of work that is done even if its client goes, as for one that waits for no reply."""

    is_open = True

    def __init__(self, requester: Requester) -> None:
        self.account = requester.account
        self.hold = requester.hold
        self.release = requester.release

    def abort_if_peer_closed(self) -> bool:
        return False


class TimeSlices:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.accounts = TimeAccounts()
        #: Of work that belongs to no client, or to a node.
        self._own_account = TimeAccount(self.accounts, None)
        self.waiting: FairQueue[Queued] = FairQueue()
        self._iteration_deadline = 0.0
        self._iteration_seconds = seconds
        self._is_iteration_open = False
        self._is_scheduled = False

    def deadline(self) -> float:
        """Return until when more may be done in this event loop iteration."""
        now = perf_counter()
        if not self._is_iteration_open:
            self._begin_iteration(now)
        return max(self._iteration_deadline, now + self._iteration_seconds * _LATE_SLICE_FRACTION)

    def _begin_iteration(self, now: float) -> None:
        self._is_iteration_open = True
        is_shared = self.accounts.are_several and self.accounts.active > 1
        self._iteration_seconds = self.seconds * _SHARED_SLICE_FRACTION if is_shared else self.seconds
        self._iteration_deadline = now + self._iteration_seconds
        asyncio.get_running_loop().call_soon(self._end_iteration)

    def _end_iteration(self) -> None:
        self._is_iteration_open = False

    def queue(self, queued: Queued, account: TimeAccount | None) -> None:
        """Run it in a later iteration, in turn with all that waits; `account` is that of its client."""
        self.waiting.push(queued, account or self._own_account)
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._run_queue)

    def _run_queue(self) -> None:
        self._is_scheduled = False
        waiting, are_several = self.waiting, self.accounts.are_several
        began = perf_counter()
        if not self._is_iteration_open:
            self._begin_iteration(began)
        deadline = self._iteration_deadline
        if are_several:
            deadline -= self.accounts.later_s
            self.accounts.later_s = 0.0
        for _ in range(len(waiting)):
            queued, account = waiting.pop()
            queued.run_queued()
            ended = perf_counter()
            # Also with one account of clients: the work of nodes and of the node itself takes turns with it.
            waiting.spent(account, ended - began)
            if are_several:
                account.spend(began, ended)
            if ended >= deadline:
                break
            began = ended
        if waiting and not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._run_queue)

    async def pause(self) -> None:
        """For a task of many parts: wait for a later iteration once this one's slice is used up."""
        now = perf_counter()
        if not self._is_iteration_open:
            self._begin_iteration(now)
        elif now >= self._iteration_deadline:
            turn = _Turn()
            self.queue(turn, None)
            await turn.has_come

    def run(
        self, steps: Steps[T], requester: Requester | None, spent: Callable[[float], object] | None = None
    ) -> T | Awaitable[T]:
        """Return the result if one slice is enough for it; otherwise an awaitable of it, and `spent` gets the time.

        The requester, if there is one, is held meanwhile, so that its requests take effect in their order. If it goes,
        the rest is not done, and the awaitable is cancelled.
        """
        deadline = self.deadline()
        try:
            while True:
                next(steps)
                if perf_counter() >= deadline:
                    break
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        return _SlicedWork(self, steps, requester, spent).result()


class _Turn:
    """That of a task which waits for it."""

    def __init__(self) -> None:
        self.has_come: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def run_queued(self) -> None:
        if not self.has_come.done():
            self.has_come.set_result(None)


class _SlicedWork(Generic[T]):
    """The steps that are left."""

    def __init__(
        self,
        slices: TimeSlices,
        steps: Steps[T],
        requester: Requester | None,
        spent: Callable[[float], object] | None,
    ) -> None:
        self._slices = slices
        self._steps = steps
        self._requester = requester
        self._spent = spent
        self._done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if requester is not None:
            requester.hold()
        self._queue()

    def _queue(self) -> None:
        self._slices.queue(self, None if self._requester is None else self._requester.account)

    async def result(self) -> T:
        """What comes next may begin with something else to wait for, such as a write."""
        result = await self._done
        return await result if inspect.isawaitable(result) else result  # type: ignore[no-any-return]

    def run_queued(self) -> None:
        requester = self._requester
        if self._done.done() or (
            requester is not None and (not requester.is_open or requester.abort_if_peer_closed())
        ):
            self._steps.close()
            self._done.cancel()
            self._release()
            return
        began = perf_counter()
        deadline = self._slices.deadline()
        is_finished = self._run(deadline)
        if self._spent is not None:
            self._spent(perf_counter() - began)
        if is_finished:
            # Not at once: what waits for the result goes on first.
            asyncio.get_running_loop().call_soon(self._release)
        else:
            self._queue()

    def _release(self) -> None:
        if self._requester is not None:
            self._requester.release()

    def _run(self, deadline: float) -> bool:
        """Return whether no steps are left."""
        try:
            while True:
                next(self._steps)
                if perf_counter() >= deadline:
                    return False
        except StopIteration as end:
            self._done.set_result(end.value)
        except Exception as error:
            self._done.set_exception(error)
        return True
