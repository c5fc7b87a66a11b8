"""Reports within two seconds what an application waits for: brokers that do not answer, or partitions of other members.

A subscription that waits reports nothing itself, because it is inside a call of a client library. So one thread of the
application watches all subscriptions, and asks the cluster why a member has no partitions yet.
"""

from __future__ import annotations

import errno
import logging
import os
import selectors
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from penstock.client.errors import ClientError, raise_for_error
from penstock.client.retry import Deadline
from penstock.client.wire.cluster import CoordinatorType
from penstock.client.wire.connection import Connection
from penstock.client.wire.settings import Address
from penstock.protocol.schemas import schema_class

if TYPE_CHECKING:
    from penstock.client.app.resources import Resources

__all__ = [
    "NO_REPLY",
    "REPEAT_S",
    "BlockingCall",
    "CallWaitReporter",
    "WaitReporter",
    "WorkerPhase",
    "WorkerStage",
    "probe_brokers",
]

_LOG: Final = logging.getLogger("penstock.client")
_CHECK_EVERY_S: Final = 0.25
#: With the time that the cluster takes to answer, a wait is reported within two seconds.
_REPORT_AFTER_S: Final = 1.2
REPEAT_S: Final = 10.0
#: How long a call of a client library may take, for example a commit, before brokers are probed.
_BLOCKED_S: Final = 0.7
#: A broker that has not answered the simplest request by then is taken to be gone: the end of an application waits no
#: longer than a second for it.
_PROBE_TIMEOUT_S: Final = 0.7
#: ApiVersions, version 0: every broker answers it, also before a client has authenticated.
_API_VERSIONS_REQUEST: Final = struct.pack(">ihhih", 10, 18, 0, 0, -1)
#: How the reason ends why a broker that accepts connections does not answer.
NO_REPLY: Final = "no reply"
_DESCRIBE_MS: Final = 5_000
#: The default of librdkafka.
_POLL_INTERVAL_MS: Final = 300_000
_NAMED_MAX: Final = 3


class WorkerPhase(Enum):
    #: Topics are looked up, and those for retries and dead letters created.
    CONNECTING = auto()
    #: A member of the group, without partitions so far.
    JOINING = auto()
    RUNNING = auto()
    #: It failed, logged the error, and waits before it restarts.
    BACKING_OFF = auto()


#: The reporter reports waits in all other phases.
_UNREPORTED_PHASES: Final = (WorkerPhase.RUNNING, WorkerPhase.BACKING_OFF)


@dataclass(frozen=True, slots=True)
class WorkerStage:
    """The phase of a subscription, and when it started."""

    phase: WorkerPhase
    since_s: float
    #: The settings of the member, while it joins.
    settings: dict[str, Any] | None = None
    member_id: str = ""


class GroupMember(NamedTuple):
    member_id: str
    host: str


class WaitReporter(threading.Thread):
    def __init__(self, waiters: Sequence[Any], resources: Resources) -> None:
        super().__init__(name="penstock-waits", daemon=True)
        self._waiters = waiters
        self._resources = resources
        self._ended = threading.Event()
        self._reported: dict[int, tuple[WorkerStage, float]] = {}

    def end(self) -> None:
        self._ended.set()

    def run(self) -> None:
        while not self._ended.wait(_CHECK_EVERY_S):
            for number, waiter in enumerate(self._waiters):
                self._look(number, waiter)

    def _look(self, number: int, waiter: Any) -> None:
        stage: WorkerStage = waiter.stage
        now_s = time.monotonic()
        blocked_s = waiter.blocked_since_s if stage.phase is WorkerPhase.RUNNING else None
        if blocked_s is not None and now_s - blocked_s > _BLOCKED_S:
            for address in self._resources.addresses():
                self._resources.watch.suspect(address)
        reported, reported_s = self._reported.get(number, (None, 0.0))
        is_new = reported is None or reported.since_s != stage.since_s
        due_s = stage.since_s + _REPORT_AFTER_S if is_new else reported_s + REPEAT_S
        if stage.phase in _UNREPORTED_PHASES or now_s < due_s or not waiter.is_alive:
            return
        self._reported[number] = stage, now_s
        sentence = self._report_text(waiter.subscription, stage)
        # The wait may have ended while the cluster answered.
        if waiter.stage.since_s == stage.since_s and not self._ended.is_set():
            _LOG.warning("%s", sentence)

    def _report_text(self, subscription: WaitingCaller, stage: WorkerStage) -> str:
        reason = self._resources.unreachable()
        if reason is not None:
            return f"{subscription.name} waits for a broker: {reason}; trying again"
        topics = ", ".join(subscription.topics)
        if stage.phase is WorkerPhase.CONNECTING or stage.settings is None:
            return f"{subscription.name} waits for metadata of {topics}"
        protocol = str(stage.settings.get("group.protocol", "classic"))
        found = group_members(self._resources, subscription.group, protocol=protocol)
        if found is None:
            return f"waiting for partitions of {topics}: the coordinator of group {subscription.group} does not answer"
        waited_s = time.monotonic() - stage.since_s
        return partition_wait_text(subscription, found, stage, waited_s)


class WaitingCaller(Protocol):
    """A subscription or call that waits, as a report names it."""

    @property
    def name(self) -> str: ...

    @property
    def topics(self) -> Sequence[str]: ...

    @property
    def group(self) -> str: ...


class BlockingCall(NamedTuple):
    """A call of the user that waits for brokers."""

    name: str
    topics: Sequence[str]
    group: str = ""


class CallWaitReporter:
    """Reports what a plain consumer or a call of the user waits for, until `end`."""

    def __init__(self, subscription: WaitingCaller, resources: Resources) -> None:
        self.subscription = subscription
        self.stage = WorkerStage(WorkerPhase.CONNECTING, time.monotonic())
        self.is_alive = True
        #: Since when the user waits in a call; None while the user is busy.
        self.blocked_since_s: float | None = None
        self._reporter = WaitReporter([self], resources)
        self._reporter.start()

    def note_joining(self, settings: dict[str, Any], member_id: str) -> None:
        """Called when the user polls and the member has no partitions yet."""
        is_new = self.stage.phase is not WorkerPhase.JOINING
        since_s = time.monotonic() if is_new else self.stage.since_s
        self.stage = WorkerStage(WorkerPhase.JOINING, since_s, settings, member_id)

    def note_running(self) -> None:
        if self.stage.phase is not WorkerPhase.RUNNING:
            self.stage = WorkerStage(WorkerPhase.RUNNING, time.monotonic())

    @contextmanager
    def blocking(self) -> Iterator[None]:
        """The user waits for the brokers as long as this lasts."""
        self.blocked_since_s = time.monotonic()
        try:
            yield
        finally:
            self.blocked_since_s = None

    def end(self) -> None:
        self._reporter.end()


def group_members(resources: Resources, group: str, *, protocol: str) -> list[GroupMember] | None:
    """Returns the members as the group's coordinator describes them; None if it does not answer.

    Does not use the admin client of librdkafka, which may crash the process if it is closed during a request.
    """
    if protocol == "consumer":
        name = "consumer_group_describe.v0.request:ConsumerGroupDescribeRequest"
        request = schema_class(name)(group_ids=(group,), include_authorized_operations=False)
    else:
        name = "describe_groups.v5.request:DescribeGroupsRequest"
        request = schema_class(name)(groups=(group,), include_authorized_operations=False)

    def describe(connection: Connection) -> list[GroupMember]:
        (found,) = connection.call(request, timeout_ms=_DESCRIBE_MS).groups
        raise_for_error(found.error_code, f"group {group}")
        return [GroupMember(str(each.member_id), str(each.client_host)) for each in found.members]

    with resources.cluster() as cluster, suppress(ClientError):
        return cluster.call_coordinator(
            CoordinatorType.GROUP, group, describe, deadline=Deadline(_DESCRIBE_MS)
        )
    return None


def partition_wait_text(
    subscription: WaitingCaller, members: Sequence[GroupMember], stage: WorkerStage, waited_s: float
) -> str:
    """Returns a sentence that says why a member has no partitions yet. Pure."""
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
            f"{start}{who} still owns them or is gone; if it is gone, they are free after the group's session timeout "
            "(consumer.session.timeout.ms)"
        )
    left_s = int(stage.settings["session.timeout.ms"]) / 1000 - waited_s
    if left_s > 0:
        return f"{start}{who} sends no heartbeats; at most {max(left_s, 1):.0f} s more"
    left_s = int(stage.settings.get("max.poll.interval.ms", _POLL_INTERVAL_MS)) / 1000 - waited_s
    return f"{start}{who} has not released them yet; at most {max(left_s, 1):.0f} s more"


def probe_brokers(
    addresses: Iterable[Address], *, uses_tls: bool = False, timeout_s: float = _PROBE_TIMEOUT_S
) -> str | None:
    """Returns why no broker answers; None if one does."""
    request = _client_hello() if uses_tls else _API_VERSIONS_REQUEST
    reasons: dict[str, None] = {}
    with selectors.DefaultSelector() as waiting:
        try:
            for host, port in addresses:
                try:
                    opened = _start_connecting(host, port)
                except OSError as error:
                    reasons[f"{host}:{port}: {error.strerror or error}"] = None
                else:
                    waiting.register(opened, selectors.EVENT_WRITE, f"{host}:{port}")
            deadline_s = time.monotonic() + timeout_s
            while waiting.get_map():
                left_s = deadline_s - time.monotonic()
                ready = waiting.select(max(left_s, 0.0))
                # Read what has arrived before giving up: this process may have been suspended.
                if left_s <= 0 and not ready:
                    break
                for key, events in ready:
                    made: Any = key.fileobj
                    try:
                        if events & selectors.EVENT_READ:
                            if made.recv(1):
                                return None
                            raise ConnectionResetError(errno.ECONNRESET, "closed")
                        if code := made.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                            raise OSError(code, "not connected")
                        made.send(request)
                        waiting.modify(made, selectors.EVENT_READ, key.data)
                    except OSError as error:
                        reasons[f"{key.data}: {os.strerror(error.errno or 0).lower()}"] = None
                        waiting.unregister(made)
                        made.close()
            for key in waiting.get_map().values():
                reasons[f"{key.data}: {NO_REPLY}"] = None
        finally:
            for key in list(waiting.get_map().values()):
                with suppress(OSError):
                    key.fileobj.close()  # type: ignore[union-attr]
    return "; ".join(reasons) or "no address is known"


def _start_connecting(host: str, port: int) -> socket.socket:
    """Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    made = socket.socket(family, kind, protocol)
    made.setblocking(False)
    made.connect_ex(address)
    return made


def _client_hello() -> bytes:
    """Returns the first message of a TLS handshake, which every broker answers, even if it refuses the client."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    sent = ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), sent).do_handshake()
    return sent.read()
