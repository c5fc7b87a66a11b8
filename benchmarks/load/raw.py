"""The raw load: pre-encoded frames over plain sockets, cheap enough that the broker is what is measured."""

import select
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from benchmarks.load.processes import Phase, Slot
from benchmarks.load.results import Consumed, Produced, Timeline, int64s
from benchmarks.wire.access import OPEN, Access
from benchmarks.wire.frames import Ring, ack_struct, fetch_frame, patch_fetch, read_fetch_response
from benchmarks.wire.raw_client import Address, BrokerError, Connection, Topic
from penstock.protocol.record_batch import iter_batches

PARTITION_BYTES_MAX = 2**20
LONG_POLL_MS = 100
_CHUNK_BYTES = 1 << 18
#: Requests that a late pacer sends before it looks for responses again.
_BURST = 64
_HELD_BACK_S = 0.001
_QUIET_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducePlan:
    """What one raw producer process sends, and over how many connections."""

    address: Address
    topic: str
    partitions: Sequence[int]
    batch: bytes
    batch_records: int
    connections: int
    window: int
    #: How far consumers may fall behind before the load waits for them; None without consumers.
    lag_records_max: int | None
    access: Access = OPEN


class Stream:
    """One pipelined connection: frames out of its ring, acknowledgements in the order they were sent."""

    def __init__(self, plan: ProducePlan) -> None:
        self._connection = Connection(plan.address, access=plan.access)
        self.socket = self._connection.socket
        self._ring = Ring(plan.topic, plan.partitions, plan.batch, plan.window)
        self._layout = ack_struct(plan.topic)
        self._rest = b""
        self._expected = 0
        self.in_flight = 0
        #: When each request in flight was due, for the paced load.
        self.due_ns: deque[int] = deque()

    def send(self, count: int) -> None:
        self._connection.send(self._ring.take(count))
        self.in_flight += count

    def receive(self) -> list[tuple[int, ...]]:
        """The whole acknowledgements that have arrived; the fields are those of `wire.Ack`."""
        data = self.socket.recv(_CHUNK_BYTES)
        if not data:
            raise BrokerError("the broker closed the connection")
        if self._rest:
            data = self._rest + data
        whole = len(data) - len(data) % self._layout.size
        self._rest = data[whole:]
        acks = list(self._layout.iter_unpack(memoryview(data)[:whole]))
        for ack in acks:
            if ack[0] != self._layout.size - 4 or ack[1] != self._expected or ack[7]:
                raise BrokerError(f"unexpected produce response, error code {ack[7]}: {ack}")
            self._expected = (self._expected + 1) % self._ring.slots
        self.in_flight -= len(acks)
        return acks


def produce_flat_out(slot: Slot, plan: ProducePlan) -> Produced:
    """Keep the window of every connection full, as long as the consumers keep up."""
    streams = {stream.socket.fileno(): stream for stream in _open_streams(plan)}
    poller = select.epoll()
    for fd in streams:
        poller.register(fd, select.EPOLLIN)
    slot.set_ready()
    slot.wait_for(Phase.RUN)
    owed = dict.fromkeys(streams.values(), plan.window)
    acked = 0
    while owed or any(stream.in_flight for stream in streams.values()):
        if slot.phase >= Phase.STOP:
            owed.clear()
        elif plan.lag_records_max is None or slot.lag_records() <= plan.lag_records_max:
            for stream, count in owed.items():
                stream.send(count)
            owed.clear()
        for fd, _ in poller.poll(_HELD_BACK_S if owed else _QUIET_S):
            stream = streams[fd]
            if count := len(stream.receive()):
                owed[stream] = owed.get(stream, 0) + count
                acked += count
        slot.publish(acked, acked * plan.batch_records)
    return Produced(acked * plan.batch_records, int64s(), Timeline(int64s()))


def produce_paced(slot: Slot, plan: ProducePlan, rate: float) -> Produced:
    """Send `rate` requests a second whatever the broker does, spread evenly over the connections.

    A latency runs from the moment the request was due, so a stall counts for every request it delayed.
    """
    pacer = _Pacer(slot, plan, rate)
    slot.set_ready()
    slot.wait_for(Phase.RUN)
    return pacer.run()


class _Pacer:
    def __init__(self, slot: Slot, plan: ProducePlan, rate: float) -> None:
        self._slot, self._plan = slot, plan
        self._streams = {stream.socket: stream for stream in _open_streams(plan)}
        self._turns = list(self._streams.values())
        self._interval_ns = 1e9 / rate
        self._sent = self._acked = 0
        self._latencies_ns = int64s()
        self._due = int64s()

    def run(self) -> Produced:
        start_ns = time.monotonic_ns()
        while self._slot.phase < Phase.STOP:
            self._send_due(start_ns)
            wait_s = max(start_ns + self._sent * self._interval_ns - time.monotonic_ns(), 0) / 1e9
            self._receive(min(wait_s, 0.05))
        while any(stream.in_flight for stream in self._turns):
            self._receive(0.05)
        return Produced(self._acked * self._plan.batch_records, self._latencies_ns, Timeline(self._due))

    def _send_due(self, start_ns: int) -> None:
        for _ in range(_BURST):
            due_ns = start_ns + int(self._sent * self._interval_ns)
            if due_ns > time.monotonic_ns():
                return
            stream = self._turns[self._sent % len(self._turns)]
            stream.due_ns.append(due_ns)
            stream.send(1)
            self._sent += 1

    def _receive(self, timeout_s: float) -> None:
        # select waits to the microsecond; epoll would round the wait up to a whole millisecond.
        readable, _, _ = select.select(self._streams, (), (), timeout_s)
        measuring = self._slot.phase == Phase.MEASURE
        for sock in readable:
            stream = self._streams[sock]
            acks = stream.receive()
            now_ns = time.monotonic_ns()
            self._acked += len(acks)
            for ack in acks:
                due_ns = stream.due_ns.popleft()
                if measuring:
                    self._latencies_ns.append(now_ns - due_ns)
                    self._due.extend((ack[6], ack[8], due_ns))
        self._slot.publish(self._acked, self._acked * self._plan.batch_records)


def _open_streams(plan: ProducePlan) -> list[Stream]:
    return [Stream(plan) for _ in range(plan.connections)]


def consume(slot: Slot, topic: Topic, leader: Address, partitions: Sequence[int], timed: bool) -> Consumed:
    """Follow partitions of one leader in one incremental fetch session until all producers are done and all is read."""
    with Connection(leader, access=topic.access) as connection:
        reader = SessionReader(connection, topic.id, partitions)
        slot.set_ready()
        arrivals = int64s()
        while True:
            draining = slot.phase >= Phase.DRAIN
            fetched = reader.fetch()
            if timed and slot.phase >= Phase.MEASURE:
                now_ns = time.monotonic_ns()
                for partition, base_offset in fetched:
                    arrivals.extend((partition, base_offset, now_ns))
            slot.publish(reader.requests, reader.records)
            if draining and not fetched:
                return Consumed(reader.records, Timeline(arrivals))


class SessionReader:
    """An incremental fetch session over some partitions of one topic, from their beginning."""

    def __init__(self, connection: Connection, topic_id: UUID, partitions: Sequence[int]) -> None:
        self._connection = connection
        self._frame = fetch_frame(
            topic_id, partitions, partition_bytes_max=PARTITION_BYTES_MAX, wait_ms=LONG_POLL_MS
        )
        self._offsets = dict.fromkeys(partitions, 0)
        self._session_id = self._epoch = 0
        self.requests = self.records = self.bytes = 0
        self.batches: list[memoryview] = []

    def fetch(self) -> list[tuple[int, int]]:
        """Partition and base offset of every batch that came; `batches` holds them until the next fetch."""
        patch_fetch(self._frame, self._session_id, self._epoch, list(self._offsets.values()))
        self._connection.send(self._frame)
        response = read_fetch_response(self._connection.read_frame())
        if response.error_code or not response.session_id:
            raise BrokerError(f"fetch: error code {response.error_code}, session {response.session_id}")
        self._session_id = response.session_id
        self._epoch += 1
        self.requests += 1
        self.batches = []
        return [
            (part.partition, base_offset)
            for part in response.partitions
            for base_offset in self._take(part.partition, part.error_code, part.records)
        ]

    def _take(self, partition: int, error_code: int, records: memoryview) -> list[int]:
        if error_code:
            raise BrokerError(f"fetch of partition {partition}: error code {error_code}")
        bases: list[int] = []
        offset = self._offsets[partition]
        for header, batch in iter_batches(records):
            if header.base_offset != offset:
                raise BrokerError(f"partition {partition} goes from offset {offset} to {header.base_offset}")
            offset = header.last_offset + 1
            self.records += header.record_count
            self.bytes += header.size
            self.batches.append(batch)
            bases.append(header.base_offset)
        self._offsets[partition] = offset
        return bases
