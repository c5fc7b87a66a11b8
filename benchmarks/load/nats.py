"""The same work on JetStream, over its text protocol: messages in batches, outcomes pipelined, all by whole buffers.

The usual Python client has a coroutine for each message, and would have been what is measured. Here a batch of messages
is one regular expression, and their outcomes are one write. Outcomes are not answered by the server unless asked to;
the last of each batch is, so that a batch counts when the server has seen all of it.
"""

import json
import random
import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from benchmarks.load.acknowledgements import Dice, Mix
from benchmarks.load.processes import Phase, Slot
from benchmarks.wire.raw_client import Address, BrokerError
from benchmarks.wire.share_frames import ACCEPT, REJECT, RELEASE

_CHUNK_BYTES = 1 << 20
_TIMEOUT_S = 30.0
_REPLY = re.compile(rb"(\$JS\.ACK\.\S+) \d+\r\n")
_PUBLISHED_AT_ONCE = 2000
_PING = b"PING\r\n"
#: What follows the subject of an outcome.
_SAYINGS = {ACCEPT: b"+ACK", RELEASE: b"-NAK", REJECT: b"+TERM"}
_TAILS = [
    b" %d\r\n%s\r\n" % (len(_SAYINGS[kind]), _SAYINGS[kind]) if kind in _SAYINGS else b"" for kind in range(4)
]
#: As often as it takes, so that what is done with can be counted from outside.
_DELIVERIES_MAX = -1
_LOCK_NS = 30_000_000_000


class NatsConnection:
    def __init__(self, address: Address) -> None:
        self.socket = socket.create_connection(address, timeout=_TIMEOUT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.inbox = f"_INBOX.{random.getrandbits(64):x}".encode()
        self._read_until(lambda data: b"\r\n" in data)
        options = json.dumps({"verbose": False, "pedantic": False, "headers": True, "no_responders": True})
        self.socket.sendall(b"CONNECT %s\r\nSUB %s.* 1\r\nPING\r\n" % (options.encode(), self.inbox))
        self._read_until(lambda data: data.endswith(b"PONG\r\n"))

    def call(self, subject: str, body: dict[str, Any]) -> dict[str, Any]:
        """One request of the JetStream API."""
        payload = json.dumps(body).encode()
        self.socket.sendall(
            b"PUB $JS.API.%s %s.api %d\r\n%s\r\n" % (subject.encode(), self.inbox, len(payload), payload)
        )
        data = self.read_lines(2)
        answer: dict[str, Any] = json.loads(data.split(b"\r\n")[1])
        if "error" in answer:
            raise BrokerError(f"{subject}: {answer['error']}")
        return answer

    def read_lines(self, count: int) -> bytes:
        """At least so many; whole messages, as no payload of the load has a line break."""
        return self._read_until(lambda data: data.count(b"\r\n") >= count and data.endswith(b"\r\n"))

    def _read_until(self, is_enough: Callable[[bytes], bool]) -> bytes:
        data = b""
        while not is_enough(data):
            chunk = self.socket.recv(_CHUNK_BYTES)
            if not chunk:
                raise BrokerError("nats-server closed the connection")
            data += chunk
            if _PING in data:
                data = data.replace(_PING, b"")
                self.socket.sendall(b"PONG\r\n")
        return data


def create_stream(connection: NatsConnection, name: str) -> None:
    connection.call(
        f"STREAM.CREATE.{name}",
        {
            "name": name,
            "subjects": [name],
            "storage": "file",
            "retention": "limits",
            "num_replicas": 1,
            "max_msgs": -1,
            "max_bytes": -1,
            "max_age": 0,
            "discard": "old",
        },
    )


def create_consumer(connection: NatsConnection, stream: str, name: str, pending_max: int) -> None:
    config = {
        "durable_name": name,
        "deliver_policy": "all",
        "ack_policy": "explicit",
        "ack_wait": _LOCK_NS,
        "max_deliver": _DELIVERIES_MAX,
        "max_ack_pending": pending_max,
        "replay_policy": "instant",
    }
    connection.call(f"CONSUMER.DURABLE.CREATE.{stream}.{name}", {"stream_name": stream, "config": config})


def fill_stream(connection: NatsConnection, stream: str, values: Sequence[bytes], records: int) -> None:
    """Published without waiting; what the stream holds in the end is what counts."""
    subject = stream.encode()
    messages = [b"PUB %s %d\r\n%s\r\n" % (subject, len(value), value) for value in values]
    chunk = b"".join(messages[at % len(messages)] for at in range(_PUBLISHED_AT_ONCE))
    for _ in range(-(-records // _PUBLISHED_AT_ONCE)):
        connection.socket.sendall(chunk)
    while connection.call(f"STREAM.INFO.{stream}", {})["state"]["messages"] < records:
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class NatsPlan:
    address: Address
    stream: str
    consumer: str
    mix: Mix
    seed: int
    messages_max: int


class NatsWorked(NamedTuple):
    """How many messages were accepted or rejected, and how many released."""

    final: int
    released: int


class _Puller:
    def __init__(self, plan: NatsPlan) -> None:
        self._connection = NatsConnection(plan.address)
        ask = json.dumps({"batch": plan.messages_max, "expires": int(_TIMEOUT_S * 1e9)}).encode()
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{plan.stream}.{plan.consumer}".encode()
        inbox = self._connection.inbox
        self._pull = b"PUB %s %s.m %d\r\n%s\r\n" % (subject, inbox, len(ask), ask)
        self._sync = b" %s.s" % inbox
        self._batch = plan.messages_max
        self._dice = Dice(plan.mix, plan.seed)
        self._replies: list[bytes] = []
        self.requests = self.acknowledged = self.final = 0

    def turn(self, *, is_last: bool = False) -> None:
        """Say something of all that is held, and get more; wait for both."""
        replies, types = self._replies, self._dice.throw(len(self._replies))
        if is_last and not replies:
            return
        outcomes = [b"PUB " + reply + _TAILS[kind] for reply, kind in zip(replies, types, strict=True)]
        lines = 0
        if outcomes:
            outcomes[-1] = b"PUB " + replies[-1] + self._sync + _TAILS[types[-1]]
            lines += 2
        if not is_last:
            outcomes.append(self._pull)
            lines += 2 * self._batch
        self._connection.socket.sendall(b"".join(outcomes))
        data = self._connection.read_lines(lines)
        self._replies = _REPLY.findall(data)
        if not is_last and len(self._replies) != self._batch:
            raise BrokerError(f"asked for {self._batch} messages, got {len(self._replies)}: {data[-200:]!r}")
        self.requests += 1
        self.acknowledged += len(types)
        self.final += len(types) - types.count(RELEASE)


def pull(slot: Slot, plan: NatsPlan) -> NatsWorked:
    puller = _Puller(plan)
    slot.set_ready()
    slot.wait_for(Phase.RUN)
    while slot.phase < Phase.STOP:
        puller.turn()
        slot.publish(puller.requests, puller.acknowledged)
    puller.turn(is_last=True)
    return NatsWorked(puller.final, puller.acknowledged - puller.final)
