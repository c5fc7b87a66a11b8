"""A cluster in memory with every failure that a producer can meet, in an order that a seed decides.

One partition per lane; a leader that changes and forgets what was not acknowledged; connections that break before or
after a request is served; requests that arrive after their timeout; errors that go away.
"""

from collections import defaultdict, deque
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any
from uuid import UUID

from penstock.client.errors import Unavailable, broker_error
from penstock.client.wire.connection import PendingRequest
from penstock.client.wire.metadata import PartitionInfo
from penstock.client.wire.settings import ConnectionSettings
from penstock.protocol.backoff import ExponentialBackoff
from penstock.protocol.errors import ErrorCode
from penstock.protocol.produce import parse_produce_request
from penstock.protocol.record_batch import decode_records, read_header

TOPIC_ID = UUID(int=7)
NODES = (1, 2, 3)
WINDOW = 5
PASSING = (
    ErrorCode.not_enough_replicas,
    ErrorCode.not_leader_or_follower,
    ErrorCode.kafka_storage_error,
    ErrorCode.concurrent_transactions,
)


@dataclass
class Log:
    """Of one partition, as the present leader has it."""

    batches: list[tuple[int, int, list[bytes]]] = field(
        default_factory=list
    )  # first and last sequence, values
    safe: int = 0  # batches that were acknowledged, so that every later leader has them

    def append(self, data: bytes) -> tuple[ErrorCode, int]:
        header = read_header(data)
        first, last = header.base_sequence, header.base_sequence + header.last_offset_delta
        for place, (known_first, known_last, _) in enumerate(self.batches):
            if (first, last) == (known_first, known_last) and place >= len(self.batches) - WINDOW:
                return ErrorCode.none, place
        if self.batches and first != self.batches[-1][1] + 1:
            return ErrorCode.out_of_order_sequence_number, -1
        values = [record.value or b"" for record in decode_records(data, 1 << 20)]
        self.batches.append((first, last, values))
        return ErrorCode.none, len(self.batches) - 1


class World:
    """Stands for a Cluster towards a Pipeline."""

    def __init__(self, seed: int, *, troubles: int) -> None:
        self.chance = Random(seed)
        self.backoff = ExponentialBackoff(base_ms=0, cap_ms=0)
        self.settings = ConnectionSettings(bootstrap=(("nowhere", 1),))
        self.troubles_left = troubles
        self.logs: defaultdict[int, Log] = defaultdict(Log)
        self.leaders: dict[int, int] = {}
        self.believed: dict[int, int] = {}
        self.late: list[tuple[int, deque[bytes]]] = []
        self.connections: list[FakeConnection] = []

    def strikes(self, probability: float) -> bool:
        if self.troubles_left <= 0 or self.chance.random() >= probability:
            return False
        self.troubles_left -= 1
        return True

    # As a cluster

    def await_topic(self, name: str) -> Any:
        return SimpleNamespace(id=TOPIC_ID)

    def forget_topic(self, name: str) -> None:
        self.believed.clear()

    def learn_topics(self, names: set[str]) -> None:
        pass

    def leader(self, topic: str, partition: int, topic_id: UUID) -> PartitionInfo:
        self.happen()
        if self.strikes(0.02):
            raise broker_error(ErrorCode.leader_not_available, topic)
        if partition not in self.believed:
            self.believed[partition] = self.leader_of(partition)
        return PartitionInfo(index=partition, leader_id=self.believed[partition], leader_epoch=0)

    def connect(self, node_id: int) -> "FakeConnection":
        if self.strikes(0.05):
            raise Unavailable(f"node {node_id} is not there")
        made = FakeConnection(self, node_id)
        self.connections.append(made)
        return made

    # What happens

    def leader_of(self, partition: int) -> int:
        return self.leaders.setdefault(partition, self.chance.choice(NODES))

    def happen(self) -> None:
        if self.strikes(0.02):
            for partition in self.logs:
                self.elect(partition)
        if self.late and self.chance.random() < 0.2:
            node_id, requests = self.chance.choice(self.late)
            self.serve(node_id, requests.popleft())
            self.late = [each for each in self.late if each[1]]

    def elect(self, partition: int) -> None:
        log = self.logs[partition]
        self.leaders[partition] = self.chance.choice(NODES)
        del log.batches[self.chance.randint(log.safe, len(log.batches)) :]

    def serve(self, node_id: int, frame: bytes) -> tuple[int, ErrorCode, int]:
        request = parse_produce_request(memoryview(frame), 0, 13)
        ((_, ((partition, records),)),) = request.topics
        assert records is not None
        if self.leader_of(partition) != node_id:
            return partition, ErrorCode.not_leader_or_follower, -1
        if self.strikes(0.05):
            return partition, self.chance.choice(PASSING), -1
        return partition, *self.logs[partition].append(bytes(records))


class FakeConnection:
    def __init__(self, world: World, node_id: int) -> None:
        self.world, self.node_id = world, node_id
        self.peer = f"node {node_id}"
        self.is_usable = True
        self.queue: deque[tuple[PendingRequest, bytes]] = deque()
        self.longest = 0

    def version(self, api_key: int, newest: int, oldest: int) -> int:
        return newest

    def begin(self, api_key: int, version: int, body: list[Any]) -> PendingRequest:
        if not self.is_usable or self.world.strikes(0.03):
            raise self.broken()
        pending = PendingRequest(len(self.queue), api_key, version)
        self.queue.append((pending, b"".join(body)))
        self.longest = max(self.longest, len(self.queue))
        return pending

    def finish(self, pending: PendingRequest, *, timeout_ms: float) -> Any:
        world = self.world
        world.happen()
        if world.strikes(0.05):
            raise self.broken()
        asked, frame = self.queue.popleft()
        assert asked == pending
        partition, code, place = world.serve(self.node_id, frame)
        if world.strikes(0.05):
            raise self.broken()
        if code is ErrorCode.none and world.strikes(0.05):
            code = ErrorCode.request_timed_out  # appended, and the replicas took too long
        if code is ErrorCode.none:
            log = world.logs[partition]
            log.safe = max(log.safe, place + 1)
        told = SimpleNamespace(index=partition, error_code=code, base_offset=place, error_message=None)
        return SimpleNamespace(responses=[SimpleNamespace(partition_responses=[told])])

    def decode(self, pending: PendingRequest, answer: Any) -> Any:
        return answer

    def broken(self) -> Unavailable:
        """Some of what is under way arrives all the same, sooner or later, in its order."""
        arriving = deque(
            frame for _, frame in list(self.queue)[: self.world.chance.randint(0, len(self.queue))]
        )
        if arriving:
            self.world.late.append((self.node_id, arriving))
        self.close()
        return Unavailable(f"{self.peer} is gone")

    def close(self) -> None:
        self.is_usable = False
        self.queue.clear()
