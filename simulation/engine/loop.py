"""An event loop in virtual time that runs several processes, each of which can be suspended or killed.

A callback belongs to the process in whose context it was scheduled. Tasks and callbacks inherit the context of their
creator, so everything that a node starts belongs to the node's process.
"""

from __future__ import annotations

import asyncio
import heapq
import traceback
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from random import Random
from typing import Any, Final
from zlib import crc32

#: How many of the latest notes a failure shows.
_NOTES_MAX: Final = 120
_FIRST_SECOND: Final = 1000.0

Note = tuple[int, str, tuple[Any, ...]]


class Violation(Exception):
    """A promise is broken."""

    def __init__(self, invariant: str, story: str) -> None:
        super().__init__(f"{invariant}: {story}")
        self.invariant = invariant
        self.story = story


class ProcessEnded(BaseException):
    """Raised where a process ends itself, so that the rest of its call does not run."""


class Process:
    """One run of a program on one machine."""

    def __init__(self, name: str, machine: Any = None) -> None:
        self.name = name
        self.machine = machine
        self.is_over = False
        self.is_suspended = False
        #: Called when the process ends itself.
        self.on_exit: Callable[[], None] = lambda: None
        #: File descriptors that it has open. The kernel closes them when the process ends.
        self.descriptors: set[int] = set()
        self.suspended: list[asyncio.Handle] = []
        #: When it was suspended and resumed, in milliseconds of the loop.
        self.pauses_ms: list[tuple[int, int]] = []
        self.suspended_ms = 0
        self.context = copy_context()
        self.context.run(CURRENT.set, self)

    def __repr__(self) -> str:
        return f"<Process {self.name}{' over' if self.is_over else ''}>"


CURRENT: ContextVar[Process | None] = ContextVar("process", default=None)

#: The context of what belongs to no process: the network, operators and supervisors.
OUTSIDE: Final = Context()


class VirtualLoop(asyncio.BaseEventLoop):
    """Time jumps to the next timer when nothing else is left to do."""

    def __init__(self, seed: int, *, on_note: Callable[[str], None] | None = None) -> None:
        super().__init__()
        self.random = Random(seed)
        self.now = _FIRST_SECOND
        self.steps = 0
        self.notes: deque[Note] = deque(maxlen=_NOTES_MAX)
        #: The folder of the disks. Notes omit it, because its name differs from run to run.
        self.folder = ""
        #: Why the run has failed: a broken promise, or an error that no code has handled.
        self.failure: Violation | None = None
        self.digest = 0
        self._on_note = on_note
        #: Callbacks and tasks of processes that are over. If they were collected, their `finally` blocks would run.
        self._dead: list[object] = []
        self.set_exception_handler(self._handle_error)

    # -- time ------------------------------------------------------------------------------------------

    def time(self) -> float:
        return self.now

    @property
    def now_ms(self) -> int:
        return int((self.now - _FIRST_SECOND) * 1000)

    def run_for(self, seconds: float, is_done: Callable[[], bool] | None = None) -> bool:
        """Run everything that happens within a time; return True as soon as `is_done` does."""
        asyncio._set_running_loop(self)
        try:
            return self._run_until(self.now + seconds, is_done)
        finally:
            asyncio._set_running_loop(None)

    def _run_until(self, end: float, is_done: Callable[[], bool] | None) -> bool:
        ready: deque[asyncio.Handle] = self._ready  # type: ignore[attr-defined]
        scheduled: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]
        while True:
            while ready:
                self._step(ready.popleft())
                if self.failure is not None:
                    raise self.failure
            if is_done is not None and is_done():
                return True
            while scheduled and scheduled[0]._cancelled:
                self._pop_timer(scheduled)
            if not scheduled or scheduled[0].when() > end:
                self.now = max(self.now, end)
                return False
            self.now = max(self.now, scheduled[0].when())
            while scheduled and scheduled[0].when() <= self.now:
                handle = self._pop_timer(scheduled)
                if not handle.cancelled():
                    ready.append(handle)

    @staticmethod
    def _pop_timer(scheduled: list[asyncio.TimerHandle]) -> asyncio.TimerHandle:
        handle = heapq.heappop(scheduled)
        handle._scheduled = False  # type: ignore[attr-defined]
        return handle

    def _step(self, handle: asyncio.Handle) -> None:
        if handle.cancelled():
            return
        process: Process | None = handle._context.get(CURRENT)  # type: ignore[attr-defined]
        if process is not None:
            if process.is_over:
                self._dead.append(handle)
                return
            if process.is_suspended:
                process.suspended.append(handle)
                return
        self.steps += 1
        handle._run()

    # -- chance ----------------------------------------------------------------------------------------

    def draw(self, below: int) -> int:
        """Return a number from 0 to below - 1."""
        return int(self.random.random() * below)

    def between(self, least: float, most: float) -> float:
        return least + self.random.random() * (most - least)

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    # -- processes -------------------------------------------------------------------------------------

    def spawn(self, process: Process, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a task of a process."""
        return self.create_task(work, context=process.context.copy())

    def after(self, seconds: float, process: Process, call: Callable[..., Any], *args: Any) -> None:
        self.call_later(seconds, call, *args, context=process.context)

    def suspend(self, process: Process) -> None:
        if not process.is_suspended:
            process.suspended_ms = self.now_ms
        process.is_suspended = True

    def resume(self, process: Process) -> None:
        if process.is_suspended:
            process.pauses_ms.append((process.suspended_ms, self.now_ms))
        process.is_suspended = False
        suspended, process.suspended = process.suspended, []
        ready: deque[asyncio.Handle] = self._ready  # type: ignore[attr-defined]
        ready.extend(suspended)

    def end(self, process: Process) -> None:
        """End a process at once: none of its callbacks runs again."""
        process.is_over = True
        self._dead += asyncio.all_tasks(self)
        self._dead += process.suspended
        process.suspended = []

    # -- the story -------------------------------------------------------------------------------------

    def note(self, what: str, *details: Any) -> None:
        """Record an event of the run. It is formatted only if the run fails or is traced."""
        self.notes.append((self.now_ms, what, details))
        self.digest = crc32(f"{self.now} {self.steps} {what}".encode(), self.digest)
        if self._on_note is not None:
            self._on_note(self.format_note(self.notes[-1]))

    def format_note(self, note: Note) -> str:
        at_ms, what, details = note
        text = f"{at_ms:>7} ms  {what} {' '.join(str(detail) for detail in details)}"
        return text.replace(self.folder, "") if self.folder else text

    def fail(self, invariant: str, story: str) -> Violation:
        """Fail the run. The caller may raise what this returns; the run ends even if other code catches it."""
        process = CURRENT.get()
        violation = Violation(invariant, story if process is None else f"{story} ({process.name})")
        if self.failure is None:
            self.failure = violation
        return violation

    def _handle_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error, process = context.get("exception"), CURRENT.get()
        if isinstance(error, ProcessEnded) or (process is not None and process.is_over):
            return
        where = "" if error is None else "".join(traceback.format_exception(error)[-8:])
        self.fail("every error is handled", f"{context.get('message')}: {error!r} {where}")

    # -- what BaseEventLoop asks of a loop -------------------------------------------------------------

    def _process_events(self, events: Any) -> None: ...

    def _write_to_self(self) -> None: ...
