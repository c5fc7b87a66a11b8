"""What the components of a node use of their process: its clock, its tasks, its threads and its syncs.

Components depend on the protocols, never on the node. `ProcessEnvironment` is what a running node gives them; tests and
the simulator give them virtual ones.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Generic, ParamSpec, Protocol, TypeVar

if TYPE_CHECKING:
    from penstock.broker.partition.partition import Partition
    from penstock.cluster.image import ClusterImage
    from penstock.log.flush import FlushJob
    from penstock.log.log import Log
    from penstock.protocol.errors import ApiError

logger = logging.getLogger("penstock.process")

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Component = TypeVar("Component", covariant=True)

#: The pause before a sync that found no free descriptor is retried.
_SYNC_RETRY_SECONDS: Final = 0.1


def end_process(error: Exception, what: str = "fsync failed") -> None:
    """End the process: after a failed fsync the page cache may differ from the disk, so no reply can be trusted."""
    logger.critical(f"{what}; ending the process so that nothing unsafe is acknowledged", exc_info=error)
    logging.shutdown()
    os._exit(1)


class StartFailed(Exception):
    """The node cannot start; the message says why, and the hint says what the user can do."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class Clock(Protocol):
    def now_ms(self) -> int:
        """Return the wall clock's time, which may jump."""


class Tasks(Protocol):
    def spawn(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Start a task that is not lost if nothing awaits it, and that is cancelled when the node stops."""


class Threads(Protocol):
    def in_thread(
        self, call: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> asyncio.Future[Result]:
        """Run a blocking call beside the event loop."""


class Syncs(Protocol):
    async def sync(self, log: Log) -> None:
        """Make everything appended to the log so far durable. A failure ends the process."""


class ImageView(Protocol):
    @property
    def image(self) -> ClusterImage:
        """The metadata image that is published now; it never changes, a new one replaces it."""


class Partitions(Protocol):
    """The partitions with a replica on this node; `partition.replica_manager.ReplicaManager` documents them."""

    def __iter__(self) -> Iterator[Partition]: ...
    def get(self, topic: str, index: int) -> Partition | None: ...
    def led(self, topic: str, index: int) -> Partition | None: ...
    def find(self, topic: str, index: int, leader_epoch: int = -1) -> Partition: ...
    def handle_read_error(self, partition: Partition, error: ApiError) -> ApiError: ...


class PeerCalls(Protocol):
    """Requests to other nodes; `network.peers.Peers` documents them."""

    async def call(
        self,
        where: int | tuple[str, int],
        api_key: int,
        request: Any,
        *,
        version: int | None = None,
        timeout_s: float,
        purpose: str = ...,
    ) -> Any: ...

    async def fetch(
        self, where: int | tuple[str, int], body: Any, *, version: int, timeout_s: float, purpose: str = ...
    ) -> memoryview: ...

    async def raw(
        self, where: int | tuple[str, int], frame: Any, *, timeout_s: float, purpose: str = ...
    ) -> memoryview: ...


class StorageBudgets(Protocol):
    """What tenants may store; the overflow policies of their topics decide what happens above it."""

    def excess_bytes(self, topic: str) -> int:
        """Return how many bytes the tenant that owns this topic is above its storage bound; 0 where there is none."""

    def free_share(self, topic: str) -> float:
        """Return from 0 to 1 how much of its storage bound that tenant has left; 1 where there is none."""

    def is_bounded(self, topic: str) -> bool:
        """Return whether the topic belongs to a tenant with a storage bound."""


class NoStorageBudgets:
    """The budgets of a cluster without tenants."""

    def excess_bytes(self, topic: str) -> int:
        return 0

    def free_share(self, topic: str) -> float:
        return 1.0

    def is_bounded(self, topic: str) -> bool:
        return False


class Environment(Clock, Tasks, Threads, Syncs, Protocol):
    """All of them, for components that use most."""


class ProcessEnvironment:
    """The real clock, the running event loop, and two pools of threads."""

    def __init__(self, *, io_threads: int, sync_threads: int) -> None:
        self._executor = ThreadPoolExecutor(io_threads, "penstock-io")
        #: A separate pool, so that an acknowledgement never waits behind a cold read.
        self.sync_executor = ThreadPoolExecutor(sync_threads, "penstock-sync")
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._thread_futures: set[Future[Any]] = set()

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def spawn(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return task

    def in_thread(
        self, call: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> asyncio.Future[Result]:
        return self._watched(self._executor.submit(call, *args, **kwargs))

    def _watched(self, future: Future[Result]) -> asyncio.Future[Result]:
        self._thread_futures.add(future)
        future.add_done_callback(self._thread_futures.discard)
        return asyncio.wrap_future(future)

    async def sync(self, log: Log) -> None:
        while True:
            try:
                flush_job = log.flush_begin()
            except OSError:
                pass  # no free descriptor: idle files are closed below, and the sync is retried
            else:
                if flush_job is None or await self._synced(log, flush_job):
                    return
            log.files.close_idle()
            await asyncio.sleep(_SYNC_RETRY_SECONDS)

    async def _synced(self, log: Log, flush_job: FlushJob) -> bool:
        """Return False if there was no free descriptor for the sync."""
        try:
            await self._watched(self.sync_executor.submit(flush_job.run))
        except OSError as error:
            end_process(error)
        log.flush_done(flush_job)
        return not flush_job.postponed

    async def cancel_tasks(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def wait_for_threads(self) -> None:
        """Wait for calls in threads: a cancelled start may still be opening files."""
        while self._thread_futures:
            under_way = map(asyncio.wrap_future, tuple(self._thread_futures))
            await asyncio.gather(*under_way, return_exceptions=True)

    def close(self) -> None:
        self.sync_executor.shutdown(wait=True)
        self._executor.shutdown(wait=True)


async def in_daemon_thread(call: Callable[[], Result], name: str) -> Result:
    """Run a call that may wait for another host in a thread of its own, which the end of the process does not await."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Result] = loop.create_future()

    def finish(outcome: Future[Result]) -> None:
        if done.cancelled():
            return
        if (error := outcome.exception()) is not None:
            done.set_exception(error)
        else:
            done.set_result(outcome.result())

    def run() -> None:
        outcome: Future[Result] = Future()
        try:
            outcome.set_result(call())
        except Exception as error:
            outcome.set_exception(error)
        with suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(finish, outcome)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await done


class Lazy(Generic[Component]):
    """A component that is built when it is first needed, so that a node which never needs it pays nothing for it."""

    __slots__ = ("_build", "_component")

    def __init__(self, build: Callable[[], Component]) -> None:
        self._build = build
        self._component: Component | None = None

    def __call__(self) -> Component:
        if self._component is None:
            self._component = self._build()
        return self._component

    @property
    def existing(self) -> Component | None:
        """The component, or None if nothing has needed it yet."""
        return self._component
