"""Handlers for messages of a share group: threads, or tasks for async handlers, that take whatever is next."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from queue import SimpleQueue
from typing import Any, Final, Protocol

from penstock.client.app.share_failures import Told
from penstock.client.app.share_member import RELEASE

__all__ = ["Job", "Pool", "TaskPool", "ThreadPool"]

_CLOSE_S: Final = 30.0


class Job:
    """A message, until when it is ours, and who wants to hear what became of it."""

    __slots__ = ("deadline_s", "is_begun", "is_withdrawn", "raw", "report", "told")

    def __init__(self, raw: Any, deadline_s: float, report: Callable[[tuple[Job, int]], None]) -> None:
        self.raw = raw
        self.deadline_s = deadline_s
        self.report = report
        self.is_begun = False
        self.is_withdrawn = False
        #: What brokers are to be told of its failure.
        self.told: Told | None = None


class Pool(Protocol):
    error: BaseException | None

    def add(self, job: Job) -> None: ...

    def begun(self) -> list[Any]:
        """Messages that handlers have now."""

    def withdraw(self, job: Job) -> bool:
        """Whether nobody has begun it; then nobody will."""

    def await_room(self, timeout_s: float) -> bool:
        """Whether more should be taken now."""

    def close(self) -> None: ...


class _Pool:
    def __init__(self, in_flight_max: int) -> None:
        self._in_flight_max = in_flight_max
        self._unfinished = 0
        self._begun: set[Job] = set()
        #: What a handler raised to end the application.
        self.error: BaseException | None = None
        self._changed = threading.Condition()

    def add(self, job: Job) -> None:
        with self._changed:
            self._unfinished += 1
        self._put(job)

    def begun(self) -> list[Any]:
        with self._changed:
            return [job.raw for job in self._begun]

    def _put(self, job: Job | None) -> None:
        raise NotImplementedError

    def withdraw(self, job: Job) -> bool:
        with self._changed:
            if job.is_begun:
                return False
            job.is_withdrawn = True
            self._finish()
            return True

    def _begin(self, job: Job) -> bool:
        with self._changed:
            job.is_begun = not job.is_withdrawn
            if job.is_begun:
                self._begun.add(job)
            return job.is_begun

    def _give_up(self, job: Job, error: BaseException) -> None:
        """Somebody else may have the message."""
        self.error = self.error or error
        self._end(job, RELEASE)

    def _end(self, job: Job, outcome: int) -> None:
        with self._changed:
            self._begun.discard(job)
            self._finish()
        job.report((job, outcome))

    def _finish(self) -> None:
        self._unfinished -= 1
        self._changed.notify_all()

    def await_room(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._unfinished < self._in_flight_max, timeout_s)


class ThreadPool(_Pool):
    def __init__(self, judge: Callable[[Job], int], *, workers: int, in_flight_max: int) -> None:
        super().__init__(in_flight_max)
        self._judge = judge
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"penstock-worker-{number}", daemon=True)
            for number in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def _put(self, job: Job | None) -> None:
        self._queue.put(job)

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            if self._begin(job):
                try:
                    outcome = self._judge(job)
                except BaseException as error:
                    self._give_up(job, error)
                else:
                    self._end(job, outcome)

    def close(self) -> None:
        for _ in self._threads:
            self._put(None)
        for thread in self._threads:
            thread.join(_CLOSE_S)


class TaskPool(_Pool):
    """On an event loop of their own, in a thread of their own."""

    def __init__(self, judge: Callable[[Job], Awaitable[int]], *, workers: int, in_flight_max: int) -> None:
        super().__init__(in_flight_max)
        self._judge = judge
        self._workers = workers
        self._loop = asyncio.new_event_loop()
        self._queue: asyncio.Queue[Job | None] = asyncio.Queue()
        self._thread = threading.Thread(target=self._serve, name="penstock-loop", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._all())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    async def _all(self) -> None:
        await asyncio.gather(*(self._work() for _ in range(self._workers)))

    async def _work(self) -> None:
        while (job := await self._queue.get()) is not None:
            if self._begin(job):
                try:
                    outcome = await self._judge(job)
                except BaseException as error:
                    self._give_up(job, error)
                else:
                    self._end(job, outcome)

    def _put(self, job: Job | None) -> None:
        self._loop.call_soon_threadsafe(self._queue.put_nowait, job)

    def close(self) -> None:
        for _ in range(self._workers):
            self._put(None)
        self._thread.join(_CLOSE_S)
