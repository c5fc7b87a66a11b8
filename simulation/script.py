"""Parties that do one thing after the other, written as such: a script yields what it waits for.

A script that has to wait for an answer yields a `Call`, an `Ask` or a `Local` and is given the answer; it yields a
number of milliseconds to rest. It ends with the life of who tells it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from simulation.network import OnReply

if TYPE_CHECKING:
    from simulation.cluster import Cluster
    from simulation.replica import Key


class Call(NamedTuple):
    """Of a process by its id. Answered with None when nothing came back."""

    target: int
    kind: str
    request: Any


class Ask(NamedTuple):
    """Of whoever leads a partition, as far as anybody knows."""

    key: Key
    kind: str
    request: Any


class Local(NamedTuple):
    """`begin` is called with what to call with the answer."""

    begin: Callable[[Callable[[Any], None]], None]


Steps = Generator[Call | Ask | Local | int, Any, Any]


class Teller(Protocol):
    cluster: Cluster

    def after(self, delay_ms: int, call: Callable[..., None], *args: Any) -> None: ...
    def call(self, target: int, kind: str, request: Any, on_reply: OnReply) -> None: ...


def play(teller: Teller, steps: Steps, then: Callable[[Any], None] | None = None) -> None:
    """Begin a script; `then` is called with what it returns."""
    _go_on(teller, steps, then, None)


def _go_on(teller: Teller, steps: Steps, then: Callable[[Any], None] | None, answer: Any) -> None:
    try:
        step = steps.send(answer)
    except StopIteration as end:
        if then is not None:
            then(end.value)
        return

    def answered(reply: Any) -> None:
        _go_on(teller, steps, then, reply)

    match step:
        case int():
            teller.after(step, answered, None)
        case Local(begin):
            # Never at once: a script is not told while it speaks.
            begin(lambda reply: teller.after(0, answered, reply))
        case Call(target, kind, request):
            teller.call(target, kind, request, lambda reply, _: answered(reply))
        case Ask(key, kind, request):
            leader = teller.cluster.leader_hint(key)
            if leader < 0:
                teller.after(teller.cluster.timings.backoff_ms, answered, None)
            else:
                teller.call(leader, kind, request, lambda reply, _: answered(reply))
