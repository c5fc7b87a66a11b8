"""Producers that do one transaction after the other, and producers that send the same batches without one."""

import select
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import NamedTuple

from kio.schema.init_producer_id.v4 import request as init_request
from kio.schema.init_producer_id.v4 import response as init_response

from benchmarks.load.processes import Phase, Slot
from benchmarks.load.results import Int64s, int64s
from benchmarks.wire.admin import Coordinated, await_coordinator
from benchmarks.wire.raw_client import Address, BrokerError, Connection
from benchmarks.wire.transaction_frames import (
    END_ANSWER,
    Answer,
    EndFrame,
    ProduceFrame,
    add_answer,
    add_frame,
    next_producer,
    produce_answer,
)
from penstock.protocol.record_batch import TRANSACTIONAL, Record, encode_batch

#: Coordinator loading, unavailable or elsewhere; not enough replicas (which stands for those to older clients);
#: the last transaction's markers are still on their way.
_RETRIABLE = frozenset((14, 15, 16, 19, 51))
_RETRY_S = 0.001
_INIT_WAIT_S = 60.0


class Protocol(Enum):
    NONE = "plain produce"
    OLDER = "partitions are added by a request"
    NEWER = "partitions are added by producing"


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionPlan:
    """What one process does, over how many connections, each with a producer and one request in flight."""

    address: Address
    topic: str
    partitions: Sequence[int]
    values: Sequence[bytes]
    protocol: Protocol
    connections: int
    #: What tells this process's transactional ids from others.
    name: str


class Ended(NamedTuple):
    """Transactions (or plain rounds) that were acknowledged; how often a request was put off; latencies measured."""

    rounds: int
    retries: int
    latencies_ns: Int64s


class Step(NamedTuple):
    data: bytes | bytearray
    answer: Answer


class Transactor:
    """One producer on its own connection: the requests of a transaction, one at a time, over and over."""

    def __init__(self, plan: TransactionPlan, number: int) -> None:
        self.connection = Connection(plan.address)
        self._plan = plan
        self._id = f"{plan.topic}-{plan.name}-{number}"
        self._is_newer = plan.protocol is Protocol.NEWER
        self._producer_id = self._epoch = self._sequence = -1
        transactional_id = None if plan.protocol is Protocol.NONE else self._id
        self._produce = ProduceFrame(
            plan.topic,
            plan.partitions,
            _batch(plan),
            transactional_id=transactional_id,
            implicit=self._is_newer,
        )
        self._end = EndFrame(self._id, implicit=self._is_newer)
        if transactional_id:
            self._init(transactional_id)
        self._steps = tuple(self._lay_out())
        self._at = 0
        self.retries = 0
        self.retry_s: float | None = None
        self.began_ns = 0

    def _init(self, transactional_id: str) -> None:
        await_coordinator(self.connection, Coordinated.TRANSACTION, transactional_id)
        request = init_request.InitProducerIdRequest(
            transactional_id=transactional_id, transaction_timeout=timedelta(seconds=60)
        )
        deadline = time.monotonic() + _INIT_WAIT_S
        while True:
            answer = self.connection.call(request, init_response.InitProducerIdResponse)
            if not answer.error_code.value:
                break
            if answer.error_code.value not in _RETRIABLE or time.monotonic() > deadline:
                raise BrokerError(f"no producer id: {answer.error_code.name}")
            time.sleep(0.02)
        self._producer_id, self._epoch, self._sequence = (
            int(answer.producer_id),
            int(answer.producer_epoch),
            0,
        )
        self._stamp()

    def _lay_out(self) -> Iterator[Step]:
        plan = self._plan
        if plan.protocol is Protocol.OLDER:
            # Its epoch stays, and so does this frame.
            frame = add_frame(self._id, self._producer_id, self._epoch, plan.topic, plan.partitions)
            yield Step(frame, add_answer(plan.topic, len(plan.partitions)))
        yield Step(self._produce.data, produce_answer(plan.topic, len(plan.partitions)))
        if plan.protocol is not Protocol.NONE:
            yield Step(self._end.data, END_ANSWER)

    def _stamp(self) -> None:
        self._produce.stamp(self._producer_id, self._epoch, self._sequence)
        self._end.stamp(self._producer_id, self._epoch)

    def begin(self) -> None:
        self.began_ns = time.monotonic_ns()
        self.send()

    def send(self) -> None:
        self.retry_s = None
        self.connection.send(self._steps[self._at].data)

    def receive(self) -> bool:
        """Take an answer and send what comes next; whether a transaction has ended (then nothing is sent)."""
        frame = self.connection.read_frame()
        step = self._steps[self._at]
        if code := step.answer.error_code(frame):
            if code not in _RETRIABLE:
                raise BrokerError(f"step {self._at} of a transaction: error code {code}")
            self.retries += 1
            self.retry_s = time.monotonic() + _RETRY_S
            return False
        self._at += 1
        if self._at < len(self._steps):
            self.send()
            return False
        self._at = 0
        self._move_on(frame)
        return True

    def _move_on(self, frame: memoryview) -> None:
        """Each transaction has an epoch of its own in the newer protocol; the older one goes on in its sequence."""
        if self._is_newer:
            self._producer_id, self._epoch = next_producer(frame)
            self._stamp()
        elif self._plan.protocol is Protocol.OLDER:
            self._sequence += len(self._plan.values)
            self._stamp()


def _batch(plan: TransactionPlan) -> bytes:
    now_ms = int(time.time() * 1000)
    records = [Record(offset, now_ms, None, value) for offset, value in enumerate(plan.values)]
    if plan.protocol is Protocol.NONE:
        return bytes(encode_batch(records))
    return bytes(
        encode_batch(records, attributes=TRANSACTIONAL, producer_id=0, producer_epoch=0, base_sequence=0)
    )


def transact(slot: Slot, plan: TransactionPlan) -> Ended:
    """Until told to stop; transactions that have begun are ended."""
    transactors = {
        t.connection.socket.fileno(): t for t in (Transactor(plan, n) for n in range(plan.connections))
    }
    poller = select.epoll()
    for fd in transactors:
        poller.register(fd, select.EPOLLIN)
    slot.set_ready()
    slot.wait_for(Phase.RUN)
    for transactor in transactors.values():
        transactor.begin()
    rounds, under_way = 0, len(transactors)
    latencies_ns = int64s()
    records = len(plan.values) * len(plan.partitions)
    while under_way:
        for fd, _ in poller.poll(_send_due(transactors.values())):
            transactor = transactors[fd]
            if not transactor.receive():
                continue
            rounds += 1
            phase = slot.phase
            if phase == Phase.MEASURE:
                latencies_ns.append(time.monotonic_ns() - transactor.began_ns)
            if phase < Phase.STOP:
                transactor.begin()
            else:
                under_way -= 1
        slot.publish(rounds, rounds * records)
    return Ended(rounds, sum(t.retries for t in transactors.values()), latencies_ns)


def _send_due(transactors: Iterable[Transactor]) -> float:
    """Send again what was put off for long enough; how long to wait for answers."""
    waiting = [(t, t.retry_s) for t in transactors if t.retry_s is not None]
    now_s = time.monotonic()
    for transactor, due_s in waiting:
        if due_s <= now_s:
            transactor.send()
    return _RETRY_S if waiting else 0.1
