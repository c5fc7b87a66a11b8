"""A connection of plain sockets, and the few admin calls that a run needs."""

import socket
import struct
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Self
from uuid import UUID

from kio.schema.create_topics.v5 import request as create_request
from kio.schema.create_topics.v5 import response as create_response
from kio.schema.delete_topics.v5 import request as delete_request
from kio.schema.delete_topics.v5 import response as delete_response
from kio.schema.list_offsets.v6 import request as offsets_request
from kio.schema.list_offsets.v6 import response as offsets_response
from kio.schema.metadata.v12 import request as metadata_request
from kio.schema.metadata.v12 import response as metadata_response
from kio.serial import entity_reader

from benchmarks.wire.access import LOAD, OPEN, Access, Address
from benchmarks.wire.frames import request_frame

#: Larger than any response that a fetch of 50 MB over a handful of partitions of 1 MB brings.
RECEIVE_BYTES = 16 * 2**20
_LATEST = -1
_UNKNOWN_TOPIC_OR_PARTITION = 3


class Topic(NamedTuple):
    """A topic of one run, what its fetches call it, and which partitions each address leads."""

    name: str
    id: UUID
    leaders: Mapping[Address, Sequence[int]]
    access: Access = OPEN

    @property
    def bootstrap_servers(self) -> str:
        return ",".join(f"{host}:{port}" for host, port in self.leaders)


class BrokerError(Exception):
    """The broker answered a request of the load with an error."""


class Connection:
    def __init__(self, address: Address, timeout_s: float | None = 60, access: Access = OPEN) -> None:
        self.access = access
        self.socket = access.open(address, timeout_s)
        # TLS brings one record at a time, and knows no flags.
        self._flags = socket.MSG_WAITALL if access.certificate is None else 0
        self._buffer: memoryview | None = None
        self._size = bytearray(4)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes | bytearray | memoryview) -> None:
        self.socket.sendall(data)

    def read_frame(self) -> memoryview:
        """One response without its size field, in a buffer that the next read reuses."""
        self._receive_exactly(memoryview(self._size))
        (size,) = struct.unpack(">i", self._size)
        if self._buffer is None or size > len(self._buffer):
            self._buffer = memoryview(bytearray(max(size, RECEIVE_BYTES)))
        frame = self._buffer[:size]
        self._receive_exactly(frame)
        return frame

    def call(self, request: Any, response_class: Any) -> Any:
        self.send(request_frame(request))
        frame = self.read_frame()
        header_class = response_class.__header_schema__
        _, size = entity_reader(header_class)(bytes(frame), 0)
        response, _ = entity_reader(response_class)(bytes(frame), size)
        return response

    def _receive_exactly(self, view: memoryview) -> None:
        while view:
            received = self.socket.recv_into(view, len(view), self._flags)
            if not received:
                raise BrokerError("the broker closed the connection")
            view = view[received:]


class Shape(NamedTuple):
    """How many partitions and copies of each; `assignments` says on which brokers, the leader first."""

    partitions: int = 1
    replication_factor: int = 1
    assignments: Sequence[Sequence[int]] = ()


def create_topic(connection: Connection, name: str, shape: Shape, configs: Mapping[str, str]) -> Topic:
    """Create a topic and wait until it has its leaders, and they know it."""
    topic = create_request.CreatableTopic(
        name=name,
        num_partitions=-1 if shape.assignments else shape.partitions,
        replication_factor=-1 if shape.assignments else shape.replication_factor,
        assignments=tuple(
            create_request.CreatableReplicaAssignment(partition_index=index, broker_ids=tuple(brokers))
            for index, brokers in enumerate(shape.assignments)
        ),
        configs=tuple(create_request.CreatableTopicConfig(name=k, value=v) for k, v in configs.items()),
    )
    request = create_request.CreateTopicsRequest(topics=(topic,), timeout=timedelta(seconds=30))
    (result,) = connection.call(request, create_response.CreateTopicsResponse).topics
    if result.error_code.value:
        raise BrokerError(
            f"cannot create topic {name}: {result.error_code.name} {result.error_message or ''}"
        )
    created = wait_for_topic(connection, name, auto_create=False)
    # Metadata may run ahead of the partitions themselves.
    for address, led in created.leaders.items():
        with Connection(address, access=connection.access) as leader:
            while min(end_offsets(leader, name, led)) < 0:
                time.sleep(0.002)
    return created


def wait_for_topic(connection: Connection, name: str, *, auto_create: bool, timeout_s: float = 30) -> Topic:
    """Ask until every partition has a leader; with `auto_create` the asking is what makes the topic."""
    deadline = time.monotonic() + timeout_s
    while True:
        response = ask_metadata(connection, name, auto_create=auto_create)
        (topic,) = response.topics
        if not topic.error_code.value and all(not p.error_code.value for p in topic.partitions):
            return Topic(
                name, UUID(int=topic.topic_id.int), _leaders(response), connection.access.as_user(LOAD)
            )
        if time.monotonic() > deadline:
            raise BrokerError(f"topic {name} has no leaders: {topic.error_code.name}")
        time.sleep(0.002)


def ask_metadata(connection: Connection, *names: str, auto_create: bool = False) -> Any:
    """The brokers, and these topics."""
    request = metadata_request.MetadataRequest(
        topics=tuple(metadata_request.MetadataRequestTopic(topic_id=None, name=name) for name in names),
        allow_auto_topic_creation=auto_create,
        include_topic_authorized_operations=False,
    )
    return connection.call(request, metadata_response.MetadataResponse)


def _leaders(response: Any) -> dict[Address, list[int]]:
    """Partitions by their leader's address, of a response about one topic."""
    addresses = {broker.node_id: (broker.host, broker.port) for broker in response.brokers}
    leaders: dict[Address, list[int]] = {}
    for partition in sorted(response.topics[0].partitions, key=lambda p: int(p.partition_index)):
        leaders.setdefault(addresses[partition.leader_id], []).append(int(partition.partition_index))
    return leaders


def delete_topic(connection: Connection, name: str) -> None:
    request = delete_request.DeleteTopicsRequest(topic_names=(name,), timeout=timedelta(seconds=30))
    (result,) = connection.call(request, delete_response.DeleteTopicsResponse).responses
    # Gone already: a request that was relayed again after a change of controllers.
    if result.error_code.value not in (0, _UNKNOWN_TOPIC_OR_PARTITION):
        raise BrokerError(f"cannot delete topic {name}: {result.error_code.name}")


def end_offsets(
    connection: Connection, topic: str, partitions: Sequence[int], *, committed_only: bool = False
) -> list[int]:
    """-1 for a partition that cannot tell yet."""
    wanted = tuple(
        offsets_request.ListOffsetsPartition(partition_index=p, timestamp=_LATEST) for p in partitions
    )
    request = offsets_request.ListOffsetsRequest(
        replica_id=-1,
        isolation_level=int(committed_only),
        topics=(offsets_request.ListOffsetsTopic(name=topic, partitions=wanted),),
    )
    (found,) = connection.call(request, offsets_response.ListOffsetsResponse).topics
    by_index = {p.partition_index: p.offset for p in found.partitions}
    return [by_index[p] for p in partitions]


def topic_ends(topic: Topic, partitions: Sequence[int]) -> list[int]:
    """The end offsets of some partitions, each asked of its leader."""
    ends: dict[int, int] = {}
    for address, led in topic.leaders.items():
        if wanted := [p for p in led if p in partitions]:
            with Connection(address, access=topic.access) as connection:
                ends |= zip(wanted, end_offsets(connection, topic.name, wanted), strict=True)
    return [ends[p] for p in partitions]
