"""Work in steps: a generator that yields after each part of it and returns the result.

The caller decides how many steps to run at once. On a node's event loop, `broker.network.slices` runs them in slices.
"""

from collections.abc import Awaitable, Callable, Generator, Iterable
from typing import Protocol, TypeVar

T = TypeVar("T")
Item = TypeVar("Item")
Steps = Generator[None, None, T]


class RunSteps(Protocol):
    def __call__(self, steps: Steps[T], /) -> T | Awaitable[T]: ...


def map_in_steps(function: Callable[[Item], T], items: Iterable[Item]) -> Steps[tuple[T, ...]]:
    """Call the function with each of the items, one in each step."""
    results = []
    for item in items:
        results.append(function(item))
        yield
    return tuple(results)


def finish(steps: Steps[T]) -> T:
    """Do all steps at once."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
