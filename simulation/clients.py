"""Clients: idempotent and careless producers, and consumers that compare what they see with the ledger."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, deque
from typing import TYPE_CHECKING, Any, Final

from penstock.protocol.errors import ErrorCode
from simulation.network import OnReply
from simulation.replica import Key, Produce
from simulation.world import Life

if TYPE_CHECKING:
    from simulation.cluster import Cluster

_IN_FLIGHT_MAX: Final = 3


class Client:
    """One party outside the cluster. Its id is negative."""

    def __init__(self, cluster: Cluster, id: int, counts: Counter[str]) -> None:
        assert id < 0, id
        self.cluster = cluster
        self.world = cluster.world
        self.invariants = cluster.invariants
        self.id = id
        self.counts = counts
        self.life = Life(f"client {id}")
        self.timeout_ms = cluster.timings.request_ms
        self.backoff_ms = cluster.timings.backoff_ms

    def after(self, delay_ms: int, call: Any, *args: Any) -> None:
        self.world.after(delay_ms, self.life, call, *args)

    def call(self, target: int, kind: str, request: Any, on_reply: OnReply) -> None:
        self.cluster.network.call(self.id, self.life, target, kind, request, on_reply, self.timeout_ms)


class Sleeper(Client, ABC):
    """One that may stop for a long time, and goes on as if nothing had been."""

    is_asleep = False

    @property
    @abstractmethod
    def is_busy(self) -> bool:
        """Whether it matters that it falls asleep now."""

    def awoken(self) -> None:
        """What it was about to do when it fell asleep, it does first."""


class _Outgoing:
    __slots__ = ("is_acknowledged", "is_sent", "sequence", "values")

    def __init__(self, sequence: int, values: tuple[Any, ...]) -> None:
        self.sequence = sequence
        self.values = values
        self.is_sent = False
        self.is_acknowledged = False


class _Stream:
    """What one producer sends to one partition, in order."""

    __slots__ = ("has_begun", "is_resting", "next_sequence", "queue")

    def __init__(self) -> None:
        self.queue: deque[_Outgoing] = deque()
        self.next_sequence = 0
        self.has_begun = False
        self.is_resting = False


class Producer(Client):
    """acks=all, idempotent, retries for ever, several requests in flight."""

    def __init__(self, cluster: Cluster, id: int, counts: Counter[str]) -> None:
        super().__init__(cluster, id, counts)
        self._streams: dict[Key, _Stream] = {}

    @property
    def has_unacknowledged(self) -> bool:
        return any(stream.queue for stream in self._streams.values())

    def send(self, key: Key, records: int) -> bool:
        """False: too much is under way already."""
        stream = self._streams.setdefault(key, _Stream())
        # In its first leader epoch a partition takes any sequence of a producer it does not know, and here batches
        # that were sent over one connection get lost one by one: so the first batch goes alone.
        has_begun = stream.has_begun or self.cluster.leader_epoch(key) > 0
        if len(stream.queue) >= (_IN_FLIGHT_MAX if has_begun else 1):
            return False
        values = tuple((self.id, stream.next_sequence + place) for place in range(records))
        stream.queue.append(_Outgoing(stream.next_sequence, values))
        stream.next_sequence += records
        self.counts["records sent"] += records
        self._pump(key, stream)
        return True

    def _pump(self, key: Key, stream: _Stream) -> None:
        if stream.is_resting:
            return
        leader = self.cluster.leader_hint(key)
        if leader < 0:
            self._rest(key, stream)
            return
        for batch in stream.queue:
            if not batch.is_sent and not batch.is_acknowledged:
                self._send(key, stream, batch, leader)

    def _send(self, key: Key, stream: _Stream, batch: _Outgoing, leader: int) -> None:
        batch.is_sent = True
        request = Produce(key, batch.values, True, -self.id, 0, batch.sequence)
        self.call(leader, "produce", request, lambda reply, _: self._answered(key, stream, batch, reply))

    def _answered(self, key: Key, stream: _Stream, batch: _Outgoing, reply: Any) -> None:
        error: ErrorCode | None = None if reply is None else reply[0]
        if error is ErrorCode.none:
            self.invariants.acknowledged(key, reply[1], batch.values)
            batch.is_acknowledged = stream.has_begun = True
            self.counts["records acknowledged"] += len(batch.values)
            while stream.queue and stream.queue[0].is_acknowledged:
                stream.queue.popleft()
            return
        self.counts["produce timeouts" if error is None else "produce refusals"] += 1
        batch.is_sent = False
        self._rest(key, stream)

    def _rest(self, key: Key, stream: _Stream) -> None:
        if not stream.is_resting:
            stream.is_resting = True
            self.after(
                self.world.between(self.backoff_ms // 2, self.backoff_ms * 2), self._resume, key, stream
            )

    def _resume(self, key: Key, stream: _Stream) -> None:
        stream.is_resting = False
        self._pump(key, stream)


class CarelessProducer(Client):
    """Never retries. What it loses with acks=1 is counted, not held against anybody."""

    def __init__(self, cluster: Cluster, id: int, counts: Counter[str], *, acks_all: bool) -> None:
        super().__init__(cluster, id, counts)
        self.acks_all = acks_all
        self.acknowledged: list[tuple[Key, int, tuple[Any, ...]]] = []
        self._sent = 0

    def send(self, key: Key, records: int) -> None:
        leader = self.cluster.leader_hint(key)
        if leader < 0:
            return
        values = tuple((self.id, self._sent + place) for place in range(records))
        self._sent += records
        request = Produce(key, values, self.acks_all)
        self.call(leader, "produce", request, lambda reply, _: self._answered(key, values, reply))

    def _answered(self, key: Key, values: tuple[Any, ...], reply: Any) -> None:
        if reply is None or reply[0] is not ErrorCode.none:
            return
        if self.acks_all:
            self.counts["records acknowledged"] += len(values)
            self.invariants.acknowledged(key, reply[1], values)
        else:
            self.counts["acks=1 records acknowledged"] += len(values)
            self.acknowledged.append((key, reply[1], values))

    def count_losses(self) -> None:
        for key, base_offset, values in self.acknowledged:
            batch = self.invariants.ledger(key).batch_at(base_offset)
            if batch is None or batch.payload != values:
                self.counts["acks=1 records lost"] += len(values)


class Consumer(Client):
    """Reads everything below the high watermark, and asks for the latest offset now and then."""

    def __init__(self, cluster: Cluster, id: int, counts: Counter[str]) -> None:
        super().__init__(cluster, id, counts)
        self.positions: dict[Key, int] = {}
        self._asking: set[Key] = set()

    def poll(self, key: Key) -> None:
        leader = self.cluster.leader_hint(key)
        if leader < 0 or key in self._asking:
            return
        self._asking.add(key)
        position = self.positions.get(key, 0)
        self.call(leader, "consume", (key, position), lambda reply, _: self._polled(key, position, reply))

    def _polled(self, key: Key, position: int, reply: Any) -> None:
        self._asking.discard(key)
        if reply is None or reply[0] is not ErrorCode.none:
            # After an unclean election there may be less than there was.
            self.positions[key] = min(position, self.invariants.ledger(key).end_offset)
            return
        _, batches = reply[1]
        if batches:
            reached = self.invariants.consumed(key, position, batches)
            self.counts["records consumed"] += reached - position
            self.positions[key] = reached

    def ask_latest(self, key: Key) -> None:
        leader = self.cluster.leader_hint(key)
        if leader >= 0:
            self.call(leader, "latest", (key,), lambda reply, _: self._told(key, reply))

    def _told(self, key: Key, reply: Any) -> None:
        if reply is not None and reply[0] is ErrorCode.none:
            ledger = self.invariants.ledger(key)
            ledger.shown_offset = max(ledger.shown_offset, reply[1])

    def has_read(self, key: Key) -> bool:
        return self.positions.get(key, 0) >= self.invariants.ledger(key).end_offset
