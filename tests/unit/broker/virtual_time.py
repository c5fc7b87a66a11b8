"""An event loop whose clock jumps to the next timer, so that waiting takes no time and load does not matter."""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any


class _JumpingSelector:
    """Instead of waiting for a timer it moves the clock to it."""

    def __init__(self, selector: Any) -> None:
        self._selector = selector
        self.now = 1000.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._selector, name)

    def select(self, timeout: float | None = None) -> Any:
        events = self._selector.select(0)
        if not events:
            assert timeout is not None, "everything waits for something that nothing will bring about"
            self.now += max(timeout, 0)
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        super().__init__()
        self._selector: Any = _JumpingSelector(self._selector)

    def time(self) -> float:
        return self._selector.now  # type: ignore[no-any-return]

    def stand_still(self, seconds: float) -> None:
        """As if the process had been stopped: time goes on, nothing is done."""
        self._selector.now += seconds


def in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(test(*args, **kwargs))

    return run
