"""Runners call handlers: one message after the other, in batches, or concurrently in threads or tasks.

The sequential runners work in the thread that polls messages. The concurrent ones have several workers: threads or, for
async handlers, tasks. All messages of a key go to one worker. The number of messages in the workers is bounded, and
the consumer pauses its partitions while they are full.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import count, islice
from queue import SimpleQueue
from typing import Any, Final, Protocol

from penstock.client.app.breaker import ApplicationStopping
from penstock.client.app.figures import Figures
from penstock.client.app.handler import (
    NOT_HANDLED,
    DecodedMessages,
    HandlerCall,
    HandlerLoop,
    LoopPosition,
    UnreadableMessage,
)
from penstock.client.app.message import TopicPartition, topic_partition_of
from penstock.client.tracing import set_current_message

__all__ = ("AsyncRunner", "BatchRunner", "FailureCallback", "MessageRunner", "Runner", "ThreadRunner")


#: A sequential runner has no limit: it handles all messages of a poll before the next poll.
_UNBOUNDED: Final = 1 << 31
#: Gets a message that failed, and the error.
FailureCallback = Callable[[Any, Exception], None]


def _ignore_arrival() -> None:
    """The default for `arrived`."""


class Runner(Protocol):
    """Calls the handler. Handles the messages of one key in order."""

    def run(self, batch: Sequence[Any], arrived: Callable[[], None] = ...) -> None:
        """Handles the batch or queues it for the workers; calls `arrived` once its messages count as pending."""

    def check(self) -> None:
        """Raises the error that stopped a worker, or the exception with which a handler ended the application."""

    def pending(self) -> list[Any]:
        """Messages that the runner has and that are not handled yet."""

    def in_progress(self) -> list[Any]:
        """Messages that handlers work on now."""

    def trim(self) -> list[Any]:
        """Takes back messages that were not started and are not before a started one, so that offsets have no gap."""

    def interrupt(
        self, timeout_s: float, topic_partitions: Sequence[TopicPartition] | None = None
    ) -> tuple[list[Any], list[Any]]:
        """Starts no further messages (of these partitions) and waits up to `timeout_s` for those in progress.

        Returns the messages that were not started, and those that are still in progress.
        """

    def drain(self) -> None:
        """Waits until all messages are handled, except those left untried because the application ends.

        Raises the error of a worker that prevents this.
        """

    def forget(self) -> None:
        """Forgets messages that could not be handled, because they are read again."""

    @property
    def room(self) -> int:
        """How many more messages the runner accepts."""

    def await_room(self, timeout_s: float) -> int:
        """Waits until the runner is at most half full, but no longer than `timeout_s`; returns `room`."""

    def close(self) -> None: ...


class _SequentialRunner:
    """The base of both sequential runners: handles one batch; another thread may take back its remaining messages."""

    def __init__(self) -> None:
        self._remaining: Iterator[Any] = iter(())
        self._idle = threading.Event()
        self._idle.set()
        self._batch: Sequence[Any] = ()
        self._taken_away = 0
        self._left: list[Any] = []

    def run(self, batch: Sequence[Any], arrived: Callable[[], None] = _ignore_arrival) -> None:
        self._idle.clear()
        self._batch, self._taken_away = batch, 0
        self._remaining = iter(batch)
        arrived()
        try:
            self._handle(self._remaining)
        except BaseException:
            # The message is neither handled nor published as failed, so its offset must not be committed.
            self._leave(self._unfinished())
            raise
        finally:
            self._batch = ()
            self._idle.set()

    def _handle(self, remaining: Iterator[Any]) -> None:
        raise NotImplementedError

    def _unfinished(self) -> list[Any]:
        """Returns the messages that were started and will not be finished."""
        raise NotImplementedError

    def _leave(self, raws: list[Any]) -> None:
        """Keeps messages as pending that were not tried because the application ends."""
        self._left.extend(raws)

    def check(self) -> None:
        """Does nothing: `run` raises errors itself."""

    def pending(self) -> list[Any]:
        return list(self._left)

    def in_progress(self) -> list[Any]:
        return [] if self._idle.is_set() else self._current()

    def _current(self) -> list[Any]:
        """Returns the messages that the handler works on. Another thread calls it."""
        raise NotImplementedError

    def trim(self) -> list[Any]:
        remaining = list(self._remaining)
        self._taken_away += len(remaining)
        return remaining

    def interrupt(
        self, timeout_s: float, topic_partitions: Sequence[TopicPartition] | None = None
    ) -> tuple[list[Any], list[Any]]:
        batch = self._batch
        remaining = self.trim()
        if self._idle.wait(timeout_s):
            return remaining, []
        started = len(batch) - len(remaining)
        return remaining, list(batch[started - 1 : started])

    def drain(self) -> None:
        pass

    def forget(self) -> None:
        self._left.clear()

    @property
    def room(self) -> int:
        return _UNBOUNDED

    def await_room(self, timeout_s: float) -> int:
        return self.room

    def close(self) -> None:
        pass


class MessageRunner(_SequentialRunner):
    def __init__(self, loop: HandlerLoop, failed: FailureCallback, figures: Figures) -> None:
        super().__init__()
        self._loop = loop
        self._failed = failed
        self._figures = figures
        self._position = LoopPosition()

    def _handle(self, remaining: Iterator[Any]) -> None:
        position, failures, count = self._position, 0, len(self._batch)
        position.left_out = 0
        set_current_message(position)
        while not self._is_through(remaining):
            failures += 1
        position.raw = None
        self._figures.handled += count - self._taken_away - len(self._left) - failures - position.left_out

    def _is_through(self, remaining: Iterator[Any]) -> bool:
        """Runs the loop; returns False if a message failed and the loop must continue with the others."""
        position = self._position
        try:
            self._loop(remaining, position)
        except ApplicationStopping:
            self._leave([position.raw, *remaining])
        except Exception as error:
            self._failed(position.raw, error)
            return False
        return True

    def _unfinished(self) -> list[Any]:
        raw, self._position.raw = self._position.raw, None
        return [] if raw is None else [raw]

    def _current(self) -> list[Any]:
        raw = self._position.raw
        return [] if raw is None else [raw]


class BatchRunner(_SequentialRunner):
    """Passes lists of messages to the handler. If a call fails, it bisects the list to find the failed messages.

    If no message may be handled twice (`isolates` is false), all messages of the list fail together.
    """

    def __init__(
        self,
        call: Callable[[DecodedMessages], Any],
        decode: Callable[[Any], Any],
        failed: FailureCallback,
        figures: Figures,
        *,
        count_max: int,
        isolates: bool,
    ) -> None:
        super().__init__()
        self._call = call
        self._decode = decode
        self._failed = failed
        self._figures = figures
        self._count_max = count_max
        self._isolates = isolates
        self._chunk: list[Any] = []

    def _handle(self, remaining: Iterator[Any]) -> None:
        while chunk := list(islice(remaining, self._count_max)):
            self._chunk = chunk
            self._call_with(self._readable(chunk))
        self._chunk = []

    def _unfinished(self) -> list[Any]:
        return list(self._chunk)

    _current = _unfinished

    def _readable(self, chunk: Sequence[Any]) -> list[tuple[Any, Any]]:
        good = []
        for raw in chunk:
            try:
                good.append((raw, self._decode(raw)))
            except UnreadableMessage as error:
                self._failed(raw, error)
        return good

    def _call_with(self, pairs: DecodedMessages) -> None:
        if not pairs:
            return
        try:
            self._call(pairs)
        except ApplicationStopping:
            self._leave([raw for raw, _ in pairs])
        except Exception as error:
            if len(pairs) == 1 or not self._isolates:
                for raw, _ in pairs:
                    self._failed(raw, error)
                return
            middle = len(pairs) // 2
            self._call_with(pairs[:middle])
            self._call_with(pairs[middle:])
        else:
            self._figures.handled += len(pairs)


_CLOSE_TIMEOUT_S: Final = 30.0


class _ConcurrentRunner:
    """The base of both concurrent runners: keeps the messages in progress, by number."""

    def __init__(
        self,
        call: HandlerCall,
        failed: FailureCallback,
        figures: Figures,
        *,
        workers: int,
        in_flight_max: int,
    ) -> None:
        self._call = call
        self._failed = failed
        self._workers = workers
        self._figures = figures
        self._in_flight_max = in_flight_max
        self._numbers = count()
        self._open: dict[int, Any] = {}
        self._started: set[int] = set()
        #: The highest started offset of each partition.
        self._reached: dict[TopicPartition, int] = {}
        #: Numbers of messages that were not tried because the application ends, or whose failure was not published.
        self._left: set[int] = set()
        self._error: BaseException | None = None
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        #: How many threads wait for a change. `_roomy` wakes the thread that waits for half of the room. Both avoid
        #: needless wake-ups.
        self._waiting = 0
        self._roomy = threading.Condition(lock)
        self._wants_room = False
        self._next_worker = 0
        self._start_workers(workers)

    def _start_workers(self, count: int) -> None:
        raise NotImplementedError

    def run(self, batch: Sequence[Any], arrived: Callable[[], None] = _ignore_arrival) -> None:
        self.check()
        workers: list[list[int]] = [[] for _ in range(self._workers)]
        with self._changed:
            for raw in batch:
                number = next(self._numbers)
                self._open[number] = raw
                workers[self._worker_of(raw)].append(number)
        arrived()
        for worker, numbers in enumerate(workers):
            if numbers:
                self._put(worker, numbers)

    def _worker_of(self, raw: Any) -> int:
        key = raw.key()
        if key is None:
            self._next_worker += 1
            return self._next_worker % self._workers
        return hash((raw.topic(), raw.partition(), key)) % self._workers

    def _put(self, worker: int, numbers: list[int]) -> None:
        raise NotImplementedError

    def _start(self, number: int) -> Any | None:
        """Returns the message; None if it was taken back meanwhile or a handler has ended the application."""
        with self._changed:
            raw = self._open.get(number)
            if raw is not None and self._is_ending():
                self._left.add(number)
                self._notify()
                return None
            if raw is not None:
                self._started.add(number)
                topic_partition = topic_partition_of(raw)
                self._reached[topic_partition] = max(self._reached.get(topic_partition, -1), raw.offset())
            return raw

    def _is_ending(self) -> bool:
        """Whether a handler raised SystemExit or the like, which ends the application and does not fail the message."""
        return self._error is not None and not isinstance(self._error, Exception)

    def _end(self, number: int, *, well: bool) -> None:
        with self._changed:
            self._open.pop(number, None)
            self._started.discard(number)
            if well:
                self._figures.handled += 1
            self._notify()

    def _notify(self) -> None:
        if self._waiting:
            self._changed.notify_all()
        if self._wants_room and self._is_roomy():
            self._wants_room = False
            self._roomy.notify_all()

    def _is_roomy(self) -> bool:
        return 2 * len(self._open) <= self._in_flight_max

    def _wait_for(self, happened: Callable[[], bool], timeout_s: float | None = None) -> None:
        self._waiting += 1
        try:
            self._changed.wait_for(happened, timeout_s)
        finally:
            self._waiting -= 1

    def _fail(self, number: int, raw: Any, error: Exception) -> None:
        try:
            self._failed(raw, error)
        except BaseException as flaw:
            self._leave(number, flaw)
        else:
            self._end(number, well=False)

    def _leave(self, number: int, error: BaseException | None = None) -> None:
        with self._changed:
            self._left.add(number)
            self._error = self._error or error
            self._notify()

    def check(self) -> None:
        with self._changed:
            if self._error is not None:
                raise self._error

    def pending(self) -> list[Any]:
        with self._changed:
            return list(self._open.values())

    def in_progress(self) -> list[Any]:
        with self._changed:
            return [self._open[number] for number in self._started - self._left if number in self._open]

    @property
    def room(self) -> int:
        return self._in_flight_max - len(self._open)

    def await_room(self, timeout_s: float) -> int:
        with self._changed:
            self._wants_room = True
            self._roomy.wait_for(self._is_roomy, timeout_s)
            self._wants_room = False
            return self.room

    def trim(self) -> list[Any]:
        with self._changed:
            return self._take_back(lambda raw: raw.offset() > self._reached.get(topic_partition_of(raw), -1))

    def _take_back(self, chosen: Callable[[Any], bool]) -> list[Any]:
        waiting = [
            number for number, raw in self._open.items() if number not in self._started and chosen(raw)
        ]
        return [self._open.pop(number) for number in waiting]

    def interrupt(
        self, timeout_s: float, topic_partitions: Sequence[TopicPartition] | None = None
    ) -> tuple[list[Any], list[Any]]:
        """Also waits for messages that another worker has overtaken, if there is time, so that offsets have no gaps."""

        def concerned(raw: Any) -> bool:
            return topic_partitions is None or topic_partition_of(raw) in topic_partitions

        with self._changed:
            remaining = self.trim()
            self._wait_for(lambda: not any(map(concerned, self._in_workers())), timeout_s)
            remaining += self._take_back(concerned)
            remaining.sort(key=lambda raw: (topic_partition_of(raw), raw.offset()))
            return remaining, [raw for raw in self._in_workers() if concerned(raw)]

    def _in_workers(self) -> list[Any]:
        return [raw for number, raw in self._open.items() if number not in self._left]

    def drain(self) -> None:
        with self._changed:
            self._wait_for(lambda: self._open.keys() <= self._left)
        self.check()

    def forget(self) -> None:
        with self._changed:
            for number in self._left:
                self._open.pop(number, None)
                self._started.discard(number)
            self._left.clear()
            self._error = None


class ThreadRunner(_ConcurrentRunner):
    def _start_workers(self, count: int) -> None:
        self._queues: list[SimpleQueue[list[int] | None]] = [SimpleQueue() for _ in range(count)]
        self._threads = [
            threading.Thread(target=self._work, args=(queue,), name=f"penstock-worker-{index}", daemon=True)
            for index, queue in enumerate(self._queues)
        ]
        for thread in self._threads:
            thread.start()

    def _put(self, worker: int, numbers: list[int]) -> None:
        self._queues[worker].put(numbers)

    def _work(self, queue: SimpleQueue[list[int] | None]) -> None:
        while (numbers := queue.get()) is not None:
            for number in numbers:
                raw = self._start(number)
                if raw is not None:
                    self._handle(number, raw)

    def _handle(self, number: int, raw: Any) -> None:
        try:
            is_handled = self._call(raw) is not NOT_HANDLED
        except ApplicationStopping:
            self._leave(number)
        except Exception as error:
            self._fail(number, raw, error)
        except BaseException as error:
            self._leave(number, error)
        else:
            self._end(number, well=is_handled)

    def close(self) -> None:
        for queue in self._queues:
            queue.put(None)
        for thread in self._threads:
            thread.join(_CLOSE_TIMEOUT_S)


class AsyncRunner(_ConcurrentRunner):
    """Runs an async handler in tasks, on an event loop in a thread of its own."""

    def _start_workers(self, count: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._queues: list[asyncio.Queue[list[int] | None]] = [asyncio.Queue() for _ in range(count)]
        self._thread = threading.Thread(target=self._serve, name="penstock-loop", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._all())
        except BaseException as error:  # raised by a task that a handler has started
            with self._changed:
                self._left.update(self._open)
                self._error = self._error or error
                self._notify()
        finally:
            self._loop.close()

    async def _all(self) -> None:
        await asyncio.gather(*(self._work(queue) for queue in self._queues))

    def _put(self, worker: int, numbers: list[int]) -> None:
        try:
            self._loop.call_soon_threadsafe(self._queues[worker].put_nowait, numbers)
        except RuntimeError:  # the loop has ended; `check` raises why
            with self._changed:
                self._left.update(numbers)
                self._notify()

    async def _work(self, queue: asyncio.Queue[list[int] | None]) -> None:
        while (numbers := await queue.get()) is not None:
            for number in numbers:
                raw = self._start(number)
                if raw is not None:
                    await self._handle(number, raw)

    async def _handle(self, number: int, raw: Any) -> None:
        try:
            is_handled = await self._call(raw) is not NOT_HANDLED
        except ApplicationStopping:
            self._leave(number)
        except Exception as error:
            # Publish the failure record in another thread, so that other tasks need not wait for the broker.
            await self._loop.run_in_executor(None, self._fail, number, raw, error)
        except BaseException as error:
            self._leave(number, error)
        else:
            self._end(number, well=is_handled)

    def close(self) -> None:
        with suppress(RuntimeError):  # the loop has ended
            for queue in self._queues:
                self._loop.call_soon_threadsafe(queue.put_nowait, None)
        self._thread.join(_CLOSE_TIMEOUT_S)
