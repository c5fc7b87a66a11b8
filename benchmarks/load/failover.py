"""How long a partition has no leader, as producers see it: from the last acknowledgement to the first new one.

The probe sends one record after the other and gives a request one second. When it gets no answer it asks the other
nodes for a new leader until they name one, so that the figure is the cluster's own and not a client's patience. What
a client with its default settings sees is measured beside it.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple

from confluent_kafka import KafkaError, Message, Producer

from benchmarks.wire.frames import Ack, ack_struct, produce_frame
from benchmarks.wire.payloads import single_record_batch
from benchmarks.wire.raw_client import Address, BrokerError, Connection, ask_metadata

REQUEST_TIMEOUT_S = 1.0
_INTERVAL_S = 0.005
_ASK_INTERVAL_S = 0.02
#: A leader that fell silent is not tried again before the others name one: each try could hide that for a second.
_SILENT_S = 10.0
#: One that answers, but not as wished, is.
_RELUCTANT_S = 0.1


class Acked(NamedTuple):
    at_s: float
    offset: int
    leader_epoch: int


class Leader(NamedTuple):
    node_id: int
    epoch: int


class _Steady(threading.Thread):
    """A producer of its own; `acks` grows as records are acknowledged."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.acks: list[Acked] = []
        self.failure: Exception | None = None
        self._stopping = threading.Event()

    def run(self) -> None:
        try:
            while not self._stopping.is_set():
                self.step()
        except Exception as error:
            self.failure = error

    def step(self) -> None:
        raise NotImplementedError

    def wait_for(self, has_happened: Callable[[], bool], timeout_s: float, complaint: str) -> None:
        deadline = time.monotonic() + timeout_s
        while not has_happened():
            if self.failure is not None:
                raise BrokerError(f"the probe failed: {self.failure!r}")
            if time.monotonic() > deadline:
                raise BrokerError(complaint)
            time.sleep(_INTERVAL_S)

    def stop(self) -> None:
        self._stopping.set()
        self.join()


@contextlib.contextmanager
def running(producer: "_Steady") -> Iterator[None]:
    producer.start()
    try:
        yield
    finally:
        producer.stop()


class Probe(_Steady):
    """One record in flight, one second of patience, no backoff to speak of."""

    def __init__(self, addresses: Mapping[int, Address], topic: str, partition: int) -> None:
        super().__init__()
        self._addresses = addresses
        self._topic, self._partition = topic, partition
        batch = single_record_batch(b"probe", int(time.time() * 1000))
        self._frame = produce_frame(topic, partition, batch)
        self._layout = ack_struct(topic)
        self._connections: dict[int, Connection] = {}
        self._leader: Leader | None = None

    def step(self) -> None:
        if self._leader is None:
            self._leader = self._find_leader(None, _SILENT_S)
            return
        try:
            ack = self._produce(self._leader.node_id)
        except (OSError, BrokerError):
            self._hang_up(self._leader.node_id)
            has_led = bool(self.acks) and self.acks[-1].leader_epoch == self._leader.epoch
            self._leader = self._find_leader(self._leader, _SILENT_S if has_led else _RELUCTANT_S)
            return
        if ack.error_code:
            self._leader = self._find_leader(self._leader, _RELUCTANT_S)
            return
        self._note(Acked(time.monotonic(), ack.base_offset, self._leader.epoch))
        self._stopping.wait(_INTERVAL_S)

    def stop(self) -> None:
        super().stop()
        for node_id in tuple(self._connections):
            self._hang_up(node_id)

    def _note(self, acked: Acked) -> None:
        if self.acks and acked.offset <= self.acks[-1].offset:
            raise BrokerError(
                f"lost what it acknowledged: offset {acked.offset} after {self.acks[-1].offset}"
            )
        self.acks.append(acked)

    def _produce(self, node_id: int) -> Ack:
        connection = self._connect(node_id)
        connection.send(self._frame)
        response = bytes(connection.read_frame())
        # A refusal may name the leader behind the code, which makes the answer longer.
        return Ack._make(self._layout.unpack_from(b"\0\0\0\0" + response))

    def _find_leader(self, failed: Leader | None, patience_s: float) -> Leader | None:
        """Ask the other nodes until they name another leader or a new epoch; in the end ask the failed one again."""
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline and not self._stopping.is_set():
            for node_id in self._addresses:
                if failed is not None and node_id == failed.node_id:
                    continue
                leader = self._ask(node_id)
                if leader is not None and leader != failed:
                    return leader
            self._stopping.wait(_ASK_INTERVAL_S)
        return failed

    def _ask(self, node_id: int) -> Leader | None:
        try:
            (topic,) = ask_metadata(self._connect(node_id), self._topic).topics
        except (OSError, BrokerError):
            self._hang_up(node_id)
            return None
        for partition in topic.partitions:
            if partition.partition_index == self._partition and partition.leader_id >= 0:
                return Leader(int(partition.leader_id), int(partition.leader_epoch))
        return None

    def _connect(self, node_id: int) -> Connection:
        if node_id not in self._connections:
            self._connections[node_id] = Connection(self._addresses[node_id], REQUEST_TIMEOUT_S)
        return self._connections[node_id]

    def _hang_up(self, node_id: int) -> None:
        if (connection := self._connections.pop(node_id, None)) is not None:
            connection.socket.close()


class DefaultProducer(_Steady):
    """librdkafka with its own defaults, and acknowledgements by all in-sync replicas, which is one of them."""

    def __init__(self, addresses: Mapping[int, Address], topic: str, partition: int) -> None:
        super().__init__()
        servers = ",".join(f"{host}:{port}" for host, port in addresses.values())
        self._producer = Producer({"bootstrap.servers": servers, "log_level": 0})
        self._topic, self._partition = topic, partition
        #: When the newest of the acknowledged records was handed over.
        self.acked_sent_s = 0.0

    def step(self) -> None:
        sent_s = time.monotonic()
        self._producer.produce(
            self._topic,
            b"probe",
            partition=self._partition,
            on_delivery=lambda error, message: self._delivered(error, message, sent_s),
        )
        self._producer.poll(_INTERVAL_S)

    def stop(self) -> None:
        super().stop()
        self._producer.purge()
        self._producer.flush(1)

    def _delivered(self, error: KafkaError | None, message: Message, sent_s: float) -> None:
        if error is None:
            self.acked_sent_s = max(self.acked_sent_s, sent_s)
            self.acks.append(Acked(time.monotonic(), message.offset() or 0, 0))


def gap_between_epochs_s(acks: list[Acked]) -> float:
    """From the last acknowledgement of one leader to the first of another."""
    return next(
        after.at_s - before.at_s
        for before, after in pairwise(acks)
        if after.leader_epoch > before.leader_epoch
    )


def longest_gap_s(acks: list[Acked], since_s: float) -> float:
    """Between two acknowledgements, the second of which came after `since_s`."""
    pairs = pairwise(acks)
    return max(after.at_s - before.at_s for before, after in pairs if after.at_s > since_s)
