"""Faults to inject into an embedded broker: requests that are dropped, delayed, refused, or lose their answer.

>>> from penstock.testing import EmbeddedBroker, ErrorCode
>>> with EmbeddedBroker() as broker:
...     broker.faults.fail("produce", ErrorCode.not_leader_or_follower, times=2)
...     broker.faults.delay("fetch", seconds=0.5, when=lambda request: request.client_id == "slow")
...     with broker.faults.drop("heartbeat") as fault:
...         pass  # while we are in here, members are missed
...     broker.faults.clear()
Fault(fail produce with not_leader_or_follower, 0 hits, 2 left)
Fault(delay fetch by 0.5 s, 0 hits)
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from penstock.broker.apis import APIS, Api
from penstock.protocol.errors import ErrorCode
from penstock.testing.requests import FaultyRequest, disown, refuse, serve, serve_unheard

if TYPE_CHECKING:
    from penstock.broker.connection import Connection
    from penstock.broker.context import RequestContext
    from penstock.broker.dispatch import Dispatcher

When = Callable[[FaultyRequest], bool]
#: What a fault does to a request; the hook is where it may be held back.
Action = Callable[["FaultHook", FaultyRequest], None]


class Fault:
    """One injected fault. It ends when it has struck as often as asked, by `remove`, or with its `with` block."""

    def __init__(
        self, faults: Faults, what: str, api: Api, act: Action, times: int | None, when: When | None
    ) -> None:
        if times is not None and times < 1:
            raise ValueError(f"times must be at least 1, or None for no end, not {times}")
        self.hits = 0
        self._faults = faults
        self._what = what
        self._api_key = api.key
        self._act = act
        self._left = times
        self._when = when

    def __repr__(self) -> str:
        left = "" if self._left is None else f", {self._left} left"
        return f"Fault({self._what}, {self.hits} hits{left})"

    def __enter__(self) -> Fault:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    @property
    def is_spent(self) -> bool:
        return self._left == 0

    def remove(self) -> None:
        self._faults._remove(self)

    def _matches(self, request: FaultyRequest) -> bool:
        return request.context.api_key == self._api_key and (self._when is None or self._when(request))

    def _count(self) -> None:
        self.hits += 1
        if self._left is not None:
            self._left -= 1

    def _strike(self, hook: FaultHook, request: FaultyRequest) -> None:
        self._act(hook, request)


class Faults:
    """The faults of one broker; they survive its restarts. Usable from any thread.

    `api` is the name of a request: "produce", "OffsetCommit", "find_coordinator". `times` bounds how often the
    fault strikes, `when` chooses among requests (see FaultyRequest); it runs in the broker's thread and must be
    quick. Of several faults that fit a request, the one added first strikes.
    """

    def __init__(self) -> None:
        self._active: list[Fault] = []
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<Faults {self._active}>"

    def drop(self, api: str, *, times: int | None = None, when: When | None = None) -> Fault:
        """The request is thrown away and the connection closed: nothing has happened, no answer comes."""
        return self._add("drop", api, lambda _, request: request.connection.abort(), times, when)

    def lose_answer(self, api: str, *, times: int | None = None, when: When | None = None) -> Fault:
        """The request is carried out, and then the connection closed in place of an answer.

        This is how a retry makes a duplicate, unless the producer is idempotent.
        """
        return self._add("lose the answer to", api, lambda _, request: serve_unheard(request), times, when)

    def delay(self, api: str, seconds: float, *, times: int | None = None, when: When | None = None) -> Fault:
        """The request is served that much later; what follows on the same connection waits behind it."""
        if seconds < 0:
            raise ValueError(f"seconds must not be negative, and {seconds} is")
        what = f"by {seconds:g} s"
        return self._add("delay", api, lambda hook, request: hook.hold(request, seconds), times, when, what)

    def fail(
        self, api: str, error: ErrorCode | str, *, times: int | None = None, when: When | None = None
    ) -> Fault:
        """The request is not carried out, and answered with this error for everything that it asks.

        Where there is no answer (acks=0), or nothing to be told an error of, the connection is closed.
        """
        code = _error(error)
        return self._add(
            "fail", api, lambda _, request: refuse(request, code), times, when, f"with {code.name}"
        )

    def disown(
        self, api: str, error: ErrorCode | str, *, times: int | None = None, when: When | None = None
    ) -> Fault:
        """The request is carried out, and answered with this error all the same.

        So answers a leader that has written a batch and loses its place before the others have it.
        """
        code = _error(error)
        return self._add(
            "disown", api, lambda _, request: disown(request, code), times, when, f"with {code.name}"
        )

    def clear(self) -> None:
        """End all faults. What is delayed already stays delayed."""
        with self._lock:
            self._active.clear()

    def hook(self) -> FaultHook:
        """What a node's dispatch asks about each request; one for each node that is started."""
        return FaultHook(self)

    def _add(
        self, verb: str, api: str, act: Action, times: int | None, when: When | None, how: str = ""
    ) -> Fault:
        found = _api(api)
        fault = Fault(self, f"{verb} {found.name} {how}".rstrip(), found, act, times, when)
        with self._lock:
            self._active.append(fault)
        return fault

    def _remove(self, fault: Fault) -> None:
        with self._lock:
            if fault in self._active:
                self._active.remove(fault)

    def _claim(self, request: FaultyRequest) -> Fault | None:
        """The fault that strikes this request, counted."""
        if not self._active:
            return None
        with self._lock:
            fault = next((each for each in self._active if each._matches(request)), None)
            if fault is not None:
                fault._count()
                if fault.is_spent:
                    self._active.remove(fault)
        return fault


class FaultHook:
    """Lives on the event loop of one node."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._held: dict[Connection, list[bytearray]] = {}

    def __call__(
        self, context: RequestContext, connection: Connection, frame: memoryview, dispatcher: Dispatcher
    ) -> bool:
        """True when the request has been dealt with here."""
        waiting = self._held.get(connection)
        if waiting is not None:
            waiting.append(bytearray(frame))
            return True
        request = FaultyRequest(context, connection, frame, dispatcher)
        fault = self._faults._claim(request)
        if fault is None:
            return False
        fault._strike(self, request)
        return True

    def hold(self, request: FaultyRequest, seconds: float) -> None:
        # The bytes are copied because the buffer they came in is used again.
        held = request.on_frame(memoryview(bytearray(request.frame)))
        self._held[request.connection] = []
        asyncio.get_running_loop().call_later(seconds, partial(self._release, held))

    def _release(self, request: FaultyRequest) -> None:
        connection = request.connection
        waiting = self._held.pop(connection)
        if connection.is_open:
            serve(request)
        for frame in waiting:
            if connection.is_open:
                connection.handle(memoryview(frame))


def _api(name: str) -> Api:
    known = {api.name.replace("_", ""): api for api in APIS.values()}
    api = known.get(name.lower().replace("_", "").replace("-", ""))
    if api is None:
        names = ", ".join(sorted(api.name for api in APIS.values()))
        raise ValueError(f"no request is called {name!r}; there are {names}")
    return api


def _error(error: ErrorCode | str) -> ErrorCode:
    if isinstance(error, str):
        if error.lower() not in ErrorCode.__members__:
            raise ValueError(f"no error is called {error!r}")
        error = ErrorCode[error.lower()]
    if error is ErrorCode.none:
        raise ValueError("ErrorCode.none is no error")
    return error
