"""What a tenant may do to hurt its neighbours: each attack is a process whose threads do nothing else.

All requests are legal. A connection that the broker closes is opened again.
"""

import multiprocessing
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import count, cycle
from multiprocessing.synchronize import Event
from typing import Any
from uuid import UUID

from kio.schema.add_partitions_to_txn.v3 import request as add_request
from kio.schema.add_partitions_to_txn.v3 import response as add_response
from kio.schema.init_producer_id.v4 import request as init_request
from kio.schema.init_producer_id.v4 import response as init_response
from kio.schema.join_group.v3 import request as join_request
from kio.schema.join_group.v3 import response as join_response
from kio.schema.sync_group.v2 import request as sync_request
from kio.schema.sync_group.v2 import response as sync_response

from benchmarks.wire.access import Access, Address, LoginFailed
from benchmarks.wire.frames import fetch_frame, patch_fetch, produce_frame
from benchmarks.wire.raw_client import BrokerError, Connection
from penstock.protocol.compression import Codec
from penstock.protocol.record_batch import Record, encode_batch

#: Spawned, so that it shares nothing with the processes that measure.
_SPAWN = multiprocessing.get_context("spawn")
THREADS = 8
#: How long an attack may take until it is in full swing.
_READY_S = 120.0
_TIMEOUT_S = 60.0
_PAUSE_S = 0.05
#: Closing sends a reset, so that no address of the client is kept waiting.
_RESET = struct.pack("ii", 1, 0)
_API_VERSIONS = struct.pack(">ihhih", 10, 18, 0, 1, -1)
_ALL_TOPICS = struct.pack(">ihhihi", 14, 3, 3, 1, -1, -1)
_LARGE_BYTES = 1_000_000
_BOMB_BYTES = 63 * 2**20
_MEMBER_BYTES = 10_000
#: The subscription of a consumer, which Kafka reads: version, no topics, user data.
_SUBSCRIPTION = struct.Struct(">hii")
_SESSION = timedelta(seconds=10)
_TRANSACTION = timedelta(minutes=10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The broker, how the attacker gets in, and its own topics."""

    address: Address
    access: Access
    topic: str
    topic_id: UUID
    compacted: str
    connections: int


class Under:
    """An attack that is under way."""

    def __init__(self, target: Target, ready: Event, done: Any) -> None:
        self.target = target
        self._ready = ready
        self._done = done
        self._lock = threading.Lock()
        self._kept = 0
        self._all_kept = threading.Event()

    def report(self, requests: int) -> None:
        with self._done.get_lock():
            self._done.value += requests
        self._ready.set()

    def keep(self, change: int) -> None:
        """Count connections that stay open."""
        with self._lock:
            self._kept += change
            if self._kept >= self.target.connections:
                self._all_kept.set()

    def await_connections(self) -> None:
        self._all_kept.wait(_READY_S)

    def connect(self) -> Connection:
        return Connection(self.target.address, _TIMEOUT_S, self.target.access)


Attacker = Callable[[Under, int], None]


def _repeat(frame: bytes, pipelined: int) -> Attacker:
    """The same request again and again, so many at once on each connection."""

    def attack(under: Under, _: int) -> None:
        burst = frame * pipelined
        with under.connect() as connection:
            while True:
                connection.send(burst)
                for _ in range(pipelined):
                    connection.read_frame()
                under.report(pipelined)

    return attack


def _large_batches(under: Under, number: int) -> None:
    batch = bytes(encode_batch([Record(0, 0, None, os.urandom(_LARGE_BYTES))]))
    _repeat(produce_frame(under.target.topic, 0, batch), 1)(under, number)


def _fetches(under: Under, number: int) -> None:
    frame = fetch_frame(under.target.topic_id, [0], partition_bytes_max=2**20, wait_ms=0)
    patch_fetch(frame, 0, -1, [0])  # no session
    _repeat(bytes(frame), 20)(under, number)


def _bombs(under: Under, number: int) -> None:
    batch = bytes(encode_batch([Record(0, 0, b"k", bytes(_BOMB_BYTES))], codec=Codec.ZSTD))
    _repeat(produce_frame(under.target.compacted, 0, batch), 1)(under, number)


def _connections(under: Under, number: int) -> None:
    """Opens its share and keeps them; once all are open, each asks something now and then."""
    share = under.target.connections // THREADS
    opened: list[Connection] = []
    try:
        while len(opened) < share:
            opened.append(under.connect())
            under.keep(1)
        under.await_connections()
        for connection in cycle(opened):
            connection.send(_API_VERSIONS)
            connection.read_frame()
            under.report(1)
    finally:
        under.keep(-len(opened))
        for connection in opened:
            connection.socket.close()


def _handshakes(under: Under, _: int) -> None:
    access = Access(certificate=under.target.access.certificate, source=under.target.access.source)
    while True:
        with access.open(under.target.address, _TIMEOUT_S) as opened:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        under.report(1)


def _transactions(under: Under, number: int) -> None:
    """Each begins with a record and is left open."""
    with under.connect() as connection:
        for turn in count():
            name = f"open-{number}-{os.getpid()}-{turn}"
            init = init_request.InitProducerIdRequest(
                transactional_id=name, transaction_timeout=_TRANSACTION, producer_id=-1, producer_epoch=-1
            )
            producer = connection.call(init, init_response.InitProducerIdResponse)
            if producer.error_code.value:  # the coordinator is not ready yet
                time.sleep(_PAUSE_S)
                continue
            topic = add_request.AddPartitionsToTxnTopic(name=under.target.topic, partitions=(0,))
            add = add_request.AddPartitionsToTxnRequest(
                v3_and_below_transactional_id=name,
                v3_and_below_producer_id=producer.producer_id,
                v3_and_below_producer_epoch=producer.producer_epoch,
                v3_and_below_topics=(topic,),
            )
            connection.call(add, add_response.AddPartitionsToTxnResponse)
            under.report(2)


def _rebalances(under: Under, number: int) -> None:
    """The only member of a group joins again as soon as it has an assignment, each time with other metadata."""
    with under.connect() as connection:
        member = ""
        for turn in count():
            user_data = turn.to_bytes(4, "big") + bytes(_MEMBER_BYTES)
            protocol = join_request.JoinGroupRequestProtocol(
                name="range", metadata=_SUBSCRIPTION.pack(0, 0, len(user_data)) + user_data
            )
            join = join_request.JoinGroupRequest(
                group_id=f"restless-{number}",
                session_timeout=_SESSION,
                rebalance_timeout=_SESSION,
                member_id=member,
                protocol_type="consumer",
                protocols=(protocol,),
            )
            response = connection.call(join, join_response.JoinGroupResponse)
            if response.error_code.value:  # the coordinator is not ready yet
                time.sleep(_PAUSE_S)
                continue
            member = response.member_id
            sync = sync_request.SyncGroupRequest(
                group_id=join.group_id,
                generation_id=response.generation_id,
                member_id=member,
                assignments=(),
            )
            connection.call(sync, sync_response.SyncGroupResponse)
            under.report(2)


ATTACKS: dict[str, Attacker] = {
    "smallest": _repeat(_API_VERSIONS, 100),
    "largest": _large_batches,
    "connections": _connections,
    "metadata": _repeat(_ALL_TOPICS, 16),
    "fetches": _fetches,
    "transactions": _transactions,
    "rebalances": _rebalances,
    "bombs": _bombs,
    "handshakes": _handshakes,
}


def _attack(name: str, target: Target, stop: Event, ready: Event, done: Any) -> None:
    """The process: threads that attack until it ends, and it ends with all of them at once."""
    under = Under(target, ready, done)

    def keep_on(number: int) -> None:
        while not stop.is_set():
            with suppress(OSError, BrokerError, LoginFailed):
                ATTACKS[name](under, number)
            time.sleep(_PAUSE_S)

    for number in range(THREADS):
        threading.Thread(target=keep_on, args=(number,), daemon=True).start()
    stop.wait()
    os._exit(0)


class AttackFailed(Exception):
    """The attack did not get going."""


@contextmanager
def attacking(name: str, target: Target) -> Iterator[Callable[[], int]]:
    """Attacks while the context is open; what it returns tells how many requests were answered so far."""
    stop, ready, done = _SPAWN.Event(), _SPAWN.Event(), _SPAWN.Value("q", 0)
    process = _SPAWN.Process(target=_attack, args=(name, target, stop, ready, done))
    process.start()
    try:
        if not ready.wait(_READY_S):
            raise AttackFailed(f"{name}: no request was answered in {_READY_S:.0f} s")
        yield lambda: int(done.value)
    finally:
        stop.set()
        process.join()
