"""Handlers called in several lanes at once: threads, or tasks for async handlers. A key has one lane.

What is in the lanes is bounded; whoever feeds them stops while they are full.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from queue import SimpleQueue
from typing import Any, Final

from penstock.client.app.figures import Figures
from penstock.client.app.guarding import Stopped
from penstock.client.app.handling import NOT_HANDLED, Call
from penstock.client.app.inline import Failed, nobody_waits
from penstock.client.app.places import Place, place_of

__all__ = ["AsyncLanes", "ThreadLanes"]

_CLOSE_S: Final = 30.0


class _Lanes:
    """What is in hand, by number, and who waits for it."""

    def __init__(self, failed: Failed, figures: Figures, lanes: int, in_flight_max: int) -> None:
        self._failed = failed
        self._lanes = lanes
        self._figures = figures
        self._in_flight_max = in_flight_max
        self._numbers = count()
        self._open: dict[int, Any] = {}
        self._begun: set[int] = set()
        #: How far partitions are begun.
        self._reached: dict[Place, int] = {}
        #: Not tried, because the application ends.
        self._left: set[int] = set()
        self._error: BaseException | None = None
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        #: How many wait for a change, and for half of the room; nobody is woken for anything else.
        self._waiting = 0
        self._roomy = threading.Condition(lock)
        self._wants_room = False
        self._turn = 0

    def run(self, batch: Sequence[Any], arrived: Callable[[], None] = nobody_waits) -> None:
        self.check()
        lanes: list[list[int]] = [[] for _ in range(self._lanes)]
        with self._changed:
            for raw in batch:
                number = next(self._numbers)
                self._open[number] = raw
                lanes[self._lane_of(raw)].append(number)
        arrived()
        for lane, numbers in enumerate(lanes):
            if numbers:
                self._put(lane, numbers)

    def _lane_of(self, raw: Any) -> int:
        key = raw.key()
        if key is None:
            self._turn += 1
            return self._turn % self._lanes
        return hash((raw.topic(), raw.partition(), key)) % self._lanes

    def _put(self, lane: int, numbers: list[int]) -> None:
        raise NotImplementedError

    def _begin(self, number: int) -> Any | None:
        """None for what was taken back meanwhile, and once a handler has ended the application."""
        with self._changed:
            raw = self._open.get(number)
            if raw is not None and self._is_ending():
                self._left.add(number)
                self._tell()
                return None
            if raw is not None:
                self._begun.add(number)
                place = place_of(raw)
                self._reached[place] = max(self._reached.get(place, -1), raw.offset())
            return raw

    def _is_ending(self) -> bool:
        """A handler raised SystemExit or its like, which is no failure of a message."""
        return self._error is not None and not isinstance(self._error, Exception)

    def _end(self, number: int, *, well: bool) -> None:
        with self._changed:
            self._open.pop(number, None)
            self._begun.discard(number)
            if well:
                self._figures.handled += 1
            self._tell()

    def _tell(self) -> None:
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
            self._tell()

    def check(self) -> None:
        with self._changed:
            if self._error is not None:
                raise self._error

    def pending(self) -> list[Any]:
        with self._changed:
            return list(self._open.values())

    def begun(self) -> list[Any]:
        with self._changed:
            return [self._open[number] for number in self._begun - self._left if number in self._open]

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
            return self._take_back(lambda raw: raw.offset() > self._reached.get(place_of(raw), -1))

    def _take_back(self, chosen: Callable[[Any], bool]) -> list[Any]:
        waiting = [number for number, raw in self._open.items() if number not in self._begun and chosen(raw)]
        return [self._open.pop(number) for number in waiting]

    def interrupt(
        self, timeout_s: float, places: Sequence[Place] | None = None
    ) -> tuple[list[Any], list[Any]]:
        """What was overtaken by messages of other lanes is done too, if there is time: positions have no gaps."""

        def concerned(raw: Any) -> bool:
            return places is None or place_of(raw) in places

        with self._changed:
            rest = self.trim()
            self._wait_for(lambda: not any(map(concerned, self._in_work())), timeout_s)
            rest += self._take_back(concerned)
            rest.sort(key=lambda raw: (place_of(raw), raw.offset()))
            return rest, [raw for raw in self._in_work() if concerned(raw)]

    def _in_work(self) -> list[Any]:
        return [raw for number, raw in self._open.items() if number not in self._left]

    def drain(self) -> None:
        with self._changed:
            self._wait_for(lambda: self._open.keys() <= self._left)
        self.check()

    def forget(self) -> None:
        with self._changed:
            for number in self._left:
                self._open.pop(number, None)
                self._begun.discard(number)
            self._left.clear()
            self._error = None


class ThreadLanes(_Lanes):
    def __init__(
        self, call: Call, failed: Failed, figures: Figures, *, lanes: int, in_flight_max: int
    ) -> None:
        super().__init__(failed, figures, lanes, in_flight_max)
        self._call = call
        self._queues: list[SimpleQueue[list[int] | None]] = [SimpleQueue() for _ in range(lanes)]
        self._threads = [
            threading.Thread(target=self._work, args=(queue,), name=f"penstock-lane-{index}", daemon=True)
            for index, queue in enumerate(self._queues)
        ]
        for thread in self._threads:
            thread.start()

    def _put(self, lane: int, numbers: list[int]) -> None:
        self._queues[lane].put(numbers)

    def _work(self, queue: SimpleQueue[list[int] | None]) -> None:
        while (numbers := queue.get()) is not None:
            for number in numbers:
                raw = self._begin(number)
                if raw is not None:
                    self._handle(number, raw)

    def _handle(self, number: int, raw: Any) -> None:
        try:
            is_handled = self._call(raw) is not NOT_HANDLED
        except Stopped:
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
            thread.join(_CLOSE_S)


class AsyncLanes(_Lanes):
    """Tasks on an event loop of their own, in a thread of their own."""

    def __init__(
        self, call: Call, failed: Failed, figures: Figures, *, lanes: int, in_flight_max: int
    ) -> None:
        super().__init__(failed, figures, lanes, in_flight_max)
        self._call = call
        self._loop = asyncio.new_event_loop()
        self._queues: list[asyncio.Queue[list[int] | None]] = [asyncio.Queue() for _ in range(lanes)]
        self._thread = threading.Thread(target=self._serve, name="penstock-loop", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._all())
        except BaseException as error:  # of a task that a handler has made
            with self._changed:
                self._left.update(self._open)
                self._error = self._error or error
                self._tell()
        finally:
            self._loop.close()

    async def _all(self) -> None:
        await asyncio.gather(*(self._work(queue) for queue in self._queues))

    def _put(self, lane: int, numbers: list[int]) -> None:
        try:
            self._loop.call_soon_threadsafe(self._queues[lane].put_nowait, numbers)
        except RuntimeError:  # the loop has ended, and `check` tells why
            with self._changed:
                self._left.update(numbers)
                self._tell()

    async def _work(self, queue: asyncio.Queue[list[int] | None]) -> None:
        while (numbers := await queue.get()) is not None:
            for number in numbers:
                raw = self._begin(number)
                if raw is not None:
                    await self._handle(number, raw)

    async def _handle(self, number: int, raw: Any) -> None:
        try:
            is_handled = await self._call(raw) is not NOT_HANDLED
        except Stopped:
            self._leave(number)
        except Exception as error:
            # The letter is on its way to a broker, which other tasks need not wait for.
            await self._loop.run_in_executor(None, self._fail, number, raw, error)
        except BaseException as error:
            self._leave(number, error)
        else:
            self._end(number, well=is_handled)

    def close(self) -> None:
        with suppress(RuntimeError):  # the loop has ended
            for queue in self._queues:
                self._loop.call_soon_threadsafe(queue.put_nowait, None)
        self._thread.join(_CLOSE_S)
