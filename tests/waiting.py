"""The one way that tests wait for other processes: check again until a deadline."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

PAUSE_S = 0.02
#: For what hangs, not for what is slow: other work may leave a test a tenth of a core.
PATIENCE_S = 60.0


def eventually(check: Callable[[], T], *, within_s: float = PATIENCE_S, what: str = "") -> T:
    """Return the first truthy answer of `check`; an AssertionError inside it means "not yet"."""
    deadline = time.monotonic() + within_s
    while True:
        answer, problem = _ask(check)
        if answer:
            return answer
        if time.monotonic() >= deadline:
            raise AssertionError(_late(what, within_s, answer)) from problem
        time.sleep(PAUSE_S)


async def eventually_async(
    check: Callable[[], Awaitable[T]], *, within_s: float = PATIENCE_S, what: str = ""
) -> T:
    """The same for a coroutine function, without blocking its loop."""
    deadline = time.monotonic() + within_s
    while True:
        problem, answer = None, None
        try:
            answer = await check()
        except AssertionError as error:
            problem = error
        if answer:
            return answer
        if time.monotonic() >= deadline:
            raise AssertionError(_late(what, within_s, answer)) from problem
        await asyncio.sleep(PAUSE_S)


def _ask(check: Callable[[], T]) -> tuple[T | None, AssertionError | None]:
    try:
        return check(), None
    except AssertionError as error:
        return None, error


def _late(what: str, within_s: float, answer: object) -> str:
    return f"{what or 'it'} did not happen within {within_s:g} s (last answer: {answer!r})"
