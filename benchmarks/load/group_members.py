"""Members of a group as a client library would have them, a hundred in one process, over a connection each."""

import select
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from kio.serial import entity_reader

from benchmarks.wire.frames import request_frame
from benchmarks.wire.raw_client import Address, BrokerError, Connection

#: The coordinator is loading, or not there yet.
RETRIABLE = frozenset((14, 15, 16))
RETRY_S = 0.05
_QUIET_S = 0.05


class Member(Protocol):
    """One member: what it sends next, and what it makes of the answer."""

    link: "Link"
    #: When it wants to send something.
    due_s: float

    def request(self) -> Any: ...
    def receive(self, response: Any, now_s: float) -> bool:
        """Whether what it holds has changed."""


class Link:
    """A connection with one request in flight at most."""

    def __init__(self, address: Address) -> None:
        self.connection = Connection(address)
        self.fd = self.connection.socket.fileno()
        self._awaited: type[Any] | None = None

    @property
    def is_idle(self) -> bool:
        return self._awaited is None

    def send(self, request: Any, response_class: type[Any]) -> None:
        self.connection.send(request_frame(request))
        self._awaited = response_class

    def read(self) -> Any:
        response_class = self._awaited
        assert response_class is not None, "nothing was asked"
        self._awaited = None
        frame = bytes(self.connection.read_frame())
        _, size = entity_reader(response_class.__header_schema__)(frame, 0)
        response, _ = entity_reader(response_class)(frame, size)
        return response

    def close(self) -> None:
        self.connection.socket.close()


class Troop:
    """Keeps members going: each sends when it is due, and hears what comes."""

    def __init__(self, response_class: Callable[[Any], type[Any]]) -> None:
        self._response_class = response_class
        self._poller = select.epoll()
        self.members: dict[int, Member] = {}
        self.requests = 0

    def add(self, member: Member) -> None:
        self.members[member.link.fd] = member
        self._poller.register(member.link.fd, select.EPOLLIN)

    def remove(self, member: Member) -> None:
        """Without a word."""
        self._poller.unregister(member.link.fd)
        del self.members[member.link.fd]
        member.link.close()

    def run_until(self, is_done: Callable[[Iterable[Member]], bool], timeout_s: float, what: str) -> float:
        """The moment it was done. It is asked whenever a member holds something else."""
        deadline = time.monotonic() + timeout_s
        while True:
            if self._turn() and is_done(self.members.values()):
                return time.monotonic()
            if time.monotonic() > deadline:
                raise BrokerError(f"{what}: not done after {timeout_s:.0f} s")

    def run_for(self, duration_s: float) -> None:
        end = time.monotonic() + duration_s
        while time.monotonic() < end:
            self._turn()

    def _turn(self) -> bool:
        now_s = time.monotonic()
        next_s = now_s + _QUIET_S
        for member in self.members.values():
            if member.link.is_idle:
                if member.due_s <= now_s:
                    self._send(member)
                else:
                    next_s = min(next_s, member.due_s)
        has_changed = False
        for fd, _ in self._poller.poll(max(next_s - time.monotonic(), 0)):
            member = self.members[fd]
            if member.receive(member.link.read(), time.monotonic()):
                has_changed = True
        return has_changed

    def _send(self, member: Member) -> None:
        request = member.request()
        member.link.send(request, self._response_class(request))
        self.requests += 1
