"""What an application waits for, reported within two seconds: brokers that do not answer, partitions of other members.

A subscription that waits says nothing by itself: it is inside a call of a client library. So one thread of the
application looks at all subscriptions, and asks the cluster why a member has no partitions yet.
"""

from __future__ import annotations

import errno
import logging
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from penstock.client.cluster import Coordinates
from penstock.client.connection import Connection
from penstock.client.errors import ClientError, check
from penstock.client.retrying import Deadline
from penstock.client.settings import Address
from penstock.protocol.schemas import schema_class

if TYPE_CHECKING:
    from penstock.client.app.resources import Resources

__all__ = ["Phase", "PlainCall", "PlainWait", "Stage", "WaitReporter", "unreachable"]

_LOG: Final = logging.getLogger("penstock.client")
_LOOK_S: Final = 0.25
#: With the time that the cluster takes to answer, a wait is reported within two seconds.
_REPORT_AFTER_S: Final = 1.2
_REPEAT_S: Final = 10.0
#: A broker that has not answered the simplest request by then is taken to be gone: the end of an application waits no
#: longer than a second for it.
_ANSWER_S: Final = 0.7
#: ApiVersions, version 0: every broker answers it, also before a client has authenticated.
_QUESTION: Final = struct.pack(">ihhih", 10, 18, 0, 0, -1)
_DESCRIBE_MS: Final = 5_000
#: What librdkafka has where nothing is set.
_POLL_INTERVAL_MS: Final = 300_000
_NAMED_MAX: Final = 3


class Phase(Enum):
    #: Topics are looked up, and those for retries and dead letters created.
    CONNECTING = auto()
    #: A member of the group, without partitions so far.
    JOINING = auto()
    RUNNING = auto()
    #: It failed, said why, and waits before it starts again.
    RESTING = auto()


#: What is waited for in the others is reported.
_QUIET: Final = (Phase.RUNNING, Phase.RESTING)


@dataclass(frozen=True, slots=True)
class Stage:
    """What a subscription is at, and since when."""

    phase: Phase
    since_s: float
    #: Of the member, while it joins.
    settings: dict[str, Any] | None = None
    member_id: str = ""


class Member(NamedTuple):
    member_id: str
    host: str


class WaitReporter(threading.Thread):
    def __init__(self, waiters: Sequence[Any], resources: Resources) -> None:
        super().__init__(name="penstock-waits", daemon=True)
        self._waiters = waiters
        self._resources = resources
        self._ended = threading.Event()
        self._said: dict[int, tuple[Stage, float]] = {}

    def end(self) -> None:
        self._ended.set()

    def run(self) -> None:
        while not self._ended.wait(_LOOK_S):
            for number, waiter in enumerate(self._waiters):
                self._look(number, waiter)

    def _look(self, number: int, waiter: Any) -> None:
        stage: Stage = waiter.stage
        now_s = time.monotonic()
        said, said_s = self._said.get(number, (None, 0.0))
        is_new = said is None or said.since_s != stage.since_s
        due_s = stage.since_s + _REPORT_AFTER_S if is_new else said_s + _REPEAT_S
        if stage.phase in _QUIET or now_s < due_s or not waiter.is_alive:
            return
        self._said[number] = stage, now_s
        sentence = self._sentence(waiter.subscription, stage)
        # It may have got what it waited for while the cluster was asked.
        if waiter.stage.since_s == stage.since_s and not self._ended.is_set():
            _LOG.warning("%s", sentence)

    def _sentence(self, subscription: Waiting, stage: Stage) -> str:
        reason = self._resources.unreachable()
        if reason is not None:
            return f"{subscription.name} waits for a broker: {reason}; trying again"
        topics = ", ".join(subscription.topics)
        if stage.phase is Phase.CONNECTING or stage.settings is None:
            return f"{subscription.name} waits for the brokers to answer about {topics}"
        protocol = str(stage.settings.get("group.protocol", "classic"))
        found = members_of(self._resources, subscription.group, protocol=protocol)
        if found is None:
            return f"waiting for partitions of {topics}: the coordinator of group {subscription.group} does not answer"
        waited_s = time.monotonic() - stage.since_s
        return waiting_for(subscription, found, stage, waited_s)


class Waiting(Protocol):
    """Who waits, in the words of a report."""

    @property
    def name(self) -> str: ...

    @property
    def topics(self) -> Sequence[str]: ...

    @property
    def group(self) -> str: ...


class PlainCall(NamedTuple):
    """A call of the user that waits for brokers."""

    name: str
    topics: Sequence[str]
    group: str = ""


class PlainWait:
    """What a plain consumer or call waits for, from its beginning to its end: its thread is the user's own."""

    def __init__(self, subscription: Waiting, resources: Resources) -> None:
        self.subscription = subscription
        self.stage = Stage(Phase.CONNECTING, time.monotonic())
        self.is_alive = True
        self._reporter = WaitReporter([self], resources)
        self._reporter.start()

    def note_joining(self, settings: dict[str, Any], member_id: str) -> None:
        """The user asks for messages, and the member has no partitions so far."""
        is_new = self.stage.phase is not Phase.JOINING
        since_s = time.monotonic() if is_new else self.stage.since_s
        self.stage = Stage(Phase.JOINING, since_s, settings, member_id)

    def note_running(self) -> None:
        if self.stage.phase is not Phase.RUNNING:
            self.stage = Stage(Phase.RUNNING, time.monotonic())

    def end(self) -> None:
        self._reporter.end()


def members_of(resources: Resources, group: str, *, protocol: str) -> list[Member] | None:
    """As the group's coordinator describes them; None where that cannot be had.

    Not by the admin client of librdkafka, which may end the process when it is closed while a request is under way.
    """
    if protocol == "consumer":
        name = "consumer_group_describe.v0.request:ConsumerGroupDescribeRequest"
        request = schema_class(name)(group_ids=(group,), include_authorized_operations=False)
    else:
        name = "describe_groups.v5.request:DescribeGroupsRequest"
        request = schema_class(name)(groups=(group,), include_authorized_operations=False)

    def ask(connection: Connection) -> list[Member]:
        (found,) = connection.call(request, timeout_ms=_DESCRIBE_MS).groups
        check(found.error_code, f"group {group}")
        return [Member(str(each.member_id), str(each.client_host)) for each in found.members]

    cluster = resources.cluster()
    try:
        return cluster.call_coordinator(Coordinates.GROUP, group, ask, deadline=Deadline(_DESCRIBE_MS))
    except ClientError:
        return None
    finally:
        cluster.close()


def waiting_for(subscription: Waiting, members: Sequence[Member], stage: Stage, waited_s: float) -> str:
    """A sentence on a member that has no partitions yet. Pure."""
    assert stage.settings is not None
    topics = ", ".join(subscription.topics)
    others = [each for each in members if each.member_id != stage.member_id]
    start = f"waiting for partitions of {topics}: "
    if not others:
        return f"{start}group {subscription.group} is being rebalanced"
    named = ", ".join(f"{each.member_id} on {each.host}" for each in others[:_NAMED_MAX])
    more = f" and {len(others) - _NAMED_MAX} more" if len(others) > _NAMED_MAX else ""
    who = f"member {named} of group {subscription.group}" if len(others) == 1 else f"one of {named}{more}"
    if stage.settings.get("group.protocol") == "consumer":
        return (
            f"{start}{who} has not given them up, or has not been heard from; then at most the group's session "
            "timeout (consumer.session.timeout.ms)"
        )
    left_s = int(stage.settings["session.timeout.ms"]) / 1000 - waited_s
    if left_s > 0:
        return f"{start}{who} has not been heard from; at most {max(left_s, 1):.0f} s more"
    left_s = int(stage.settings.get("max.poll.interval.ms", _POLL_INTERVAL_MS)) / 1000 - waited_s
    return f"{start}{who} has not given them up yet; at most {max(left_s, 1):.0f} s more"


def unreachable(
    addresses: Iterable[Address], *, asks: bool = True, timeout_s: float = _ANSWER_S
) -> str | None:
    """Why none of them answers; None where one does. Where they are not asked, to take a connection is an answer."""
    reasons: dict[str, None] = {}
    with selectors.DefaultSelector() as waiting:
        try:
            for host, port in addresses:
                try:
                    opened = _connecting(host, port)
                except OSError as error:
                    reasons[f"{host}:{port}: {error.strerror or error}"] = None
                else:
                    waiting.register(opened, selectors.EVENT_WRITE, f"{host}:{port}")
            deadline_s = time.monotonic() + timeout_s
            while waiting.get_map() and (left_s := deadline_s - time.monotonic()) > 0:
                for key, events in waiting.select(left_s):
                    made: Any = key.fileobj
                    try:
                        if _answers(made, events, asks):
                            return None
                    except OSError as error:
                        reasons[f"{key.data}: {os.strerror(error.errno or 0).lower()}"] = None
                        waiting.unregister(made)
                        made.close()
                    else:
                        waiting.modify(made, selectors.EVENT_READ, key.data)
            for key in waiting.get_map().values():
                reasons[f"{key.data}: no answer"] = None
        finally:
            for key in list(waiting.get_map().values()):
                with suppress(OSError):
                    key.fileobj.close()  # type: ignore[union-attr]
    return "; ".join(reasons) or "no address is known"


def _answers(made: socket.socket, events: int, asks: bool) -> bool:
    """False while the answer is still to come. Raises OSError."""
    if events & selectors.EVENT_READ:
        if not made.recv(1):
            raise ConnectionResetError(errno.ECONNRESET, "closed")
        return True
    code = made.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise OSError(code, "not connected")
    if asks:
        made.send(_QUESTION)
    return not asks


def _connecting(host: str, port: int) -> socket.socket:
    """Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    made = socket.socket(family, kind, protocol)
    made.setblocking(False)
    made.connect_ex(address)
    return made
