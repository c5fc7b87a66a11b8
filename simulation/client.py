"""A client of the simulated cluster: a process on a machine of its own that sends requests over virtual connections."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Coroutine
from datetime import timedelta
from functools import cache
from typing import Any, Final, NamedTuple

from kio.index import load_request_schema

from penstock.broker.network.peers import Peers, PeerUnreachable
from penstock.protocol.errors import ErrorCode
from penstock.protocol.record_batch import checksum, decode_records, iter_batches
from simulation.cluster import Cluster
from simulation.engine.loop import Process
from simulation.engine.machine import CLIENT_PORT

PRODUCE: Final = 0
FETCH: Final = 1
LIST_OFFSETS: Final = 2
CREATE_TOPICS: Final = 19
INIT_PRODUCER_ID: Final = 22
FIND_COORDINATOR: Final = 10

REQUEST_TIMEOUT_S: Final = 0.4
BACKOFF_S: Final = (0.02, 0.1)


class _ClientMachine(NamedTuple):
    host: str
    clock_skew_s: float = 0.0
    disk: Any = None


class Message:
    """Builds messages of one version of one API by name: `Message(0, 9)("ProduceRequest", ...)`."""

    def __init__(self, api_key: int, version: int) -> None:
        self.api_key, self.version = api_key, version
        self.request = load_request_schema(api_key, version)
        self._module = sys.modules[self.request.__module__]

    def __call__(self, name: str, /, **fields: Any) -> Any:
        return getattr(self._module, name)(**fields)


@cache
def message(api_key: int, version: int) -> Message:
    return Message(api_key, version)


class Client:
    """`call` returns None if no response came; the caller then does not know whether the request was handled."""

    def __init__(self, cluster: Cluster, number: int, counts: Counter[str]) -> None:
        self.cluster = cluster
        self.loop = cluster.loop
        self.number = number
        self.counts = counts
        self.host = f"10.0.1.{number}"
        self.process = Process(f"client {number}", _ClientMachine(self.host))
        self._peers = Peers(1000 + number, address_of=lambda node_id: None)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.number}>"

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return self.loop.spawn(self.process, work)

    async def call(
        self,
        node_id: int,
        api_key: int,
        version: int,
        request: Any,
        *,
        timeout_s: float = REQUEST_TIMEOUT_S,
        purpose: str = "control",
        port: int = CLIENT_PORT,
    ) -> Any:
        """Send a request to a node. Call this in a task of this client's process."""
        if node_id < 0:
            await self.back_off()
            return None
        where = (f"10.0.0.{node_id}", port)
        try:
            return await self._peers.call(
                where, api_key, request, version=version, timeout_s=timeout_s, purpose=purpose
            )
        except (PeerUnreachable, TimeoutError):
            self.counts["requests without response"] += 1
            return None

    async def back_off(self) -> None:
        await asyncio.sleep(self.loop.between(*BACKOFF_S))

    def any_node(self) -> int:
        ids = [machine.node_id for machine in self.cluster.machines.values() if machine.is_running]
        return ids[self.loop.draw(len(ids))] if ids else -1

    # -- requests that several kinds of clients send ---------------------------------------------------

    async def new_producer_id(self) -> int:
        """Request an id for an idempotent producer without transactions, until there is one."""
        request = message(INIT_PRODUCER_ID, 4)(
            "InitProducerIdRequest",
            transactional_id=None,
            transaction_timeout=timedelta(seconds=1),
            producer_id=-1,
            producer_epoch=-1,
        )
        while True:
            reply = await self.call(self.any_node(), INIT_PRODUCER_ID, 4, request)
            if reply is not None and reply.error_code == ErrorCode.none:
                return int(reply.producer_id)
            await self.back_off()

    async def produce(
        self,
        topic: str,
        index: int,
        batch: bytes | bytearray,
        *,
        acks: int = -1,
        node_id: int | None = None,
        transactional_id: str | None = None,
        version: int = 9,
    ) -> tuple[ErrorCode, int] | None:
        """Return the error and the base offset; None if no response came."""
        new = message(PRODUCE, version)
        part = new("PartitionProduceData", index=index, records=bytes(batch))
        request = new(
            "ProduceRequest",
            transactional_id=transactional_id,
            acks=acks,
            timeout=timedelta(milliseconds=300),
            topic_data=(new("TopicProduceData", name=topic, partition_data=(part,)),),
        )
        leader = self.cluster.leader_hint(topic, index) if node_id is None else node_id
        reply = await self.call(leader, PRODUCE, version, request, purpose=f"produce {topic}-{index}")
        if reply is None:
            return None
        (result,) = reply.responses[0].partition_responses
        return ErrorCode(result.error_code), int(result.base_offset)

    async def fetch(
        self, topic: str, index: int, offset: int, *, read_committed: bool = False, wait_ms: int = 50
    ) -> Any:
        """Return the partition's part of the response; None if no response came."""
        new = message(FETCH, 12)
        part = new(
            "FetchPartition",
            partition=index,
            current_leader_epoch=-1,
            fetch_offset=offset,
            last_fetched_epoch=-1,
            log_start_offset=-1,
            partition_max_bytes=1 << 20,
        )
        request = new(
            "FetchRequest",
            cluster_id=None,
            replica_id=-1,
            max_wait=timedelta(milliseconds=wait_ms),
            min_bytes=1,
            max_bytes=1 << 20,
            isolation_level=int(read_committed),
            session_id=0,
            session_epoch=-1,
            topics=(new("FetchTopic", topic=topic, partitions=(part,)),),
            forgotten_topics_data=(),
            rack_id="",
        )
        leader = self.cluster.leader_hint(topic, index)
        reply = await self.call(leader, FETCH, 12, request, purpose="fetch")
        if reply is None or not reply.responses:
            return None
        return reply.responses[0].partitions[0]

    async def latest_offset(
        self, topic: str, index: int, *, node_id: int | None = None, read_committed: bool = False
    ) -> int | None:
        """Return the latest offset; None if the leader did not say."""
        new = message(LIST_OFFSETS, 7)
        part = new("ListOffsetsPartition", partition_index=index, current_leader_epoch=-1, timestamp=-1)
        request = new(
            "ListOffsetsRequest",
            replica_id=-1,
            isolation_level=int(read_committed),
            topics=(new("ListOffsetsTopic", name=topic, partitions=(part,)),),
        )
        leader = self.cluster.leader_hint(topic, index) if node_id is None else node_id
        reply = await self.call(leader, LIST_OFFSETS, 7, request)
        if reply is None:
            return None
        found = reply.topics[0].partitions[0]
        return int(found.offset) if found.error_code == ErrorCode.none else None


class Fetched(NamedTuple):
    """One record as a consumer sees it."""

    offset: int
    key: bytes | None
    value: bytes | None


def fetched_records(records: bytes | None, from_offset: int) -> tuple[list[Fetched], int]:
    """Decode data records of a Fetch response; return them with the next offset to fetch."""
    found: list[Fetched] = []
    next_offset = from_offset
    for header, batch in iter_batches(records or b""):
        # A client checks what it gets, and cannot read past a batch that is damaged.
        if checksum(batch) == header.crc and not header.is_control:
            found += [
                Fetched(record.offset, record.key, record.value)
                for record in decode_records(batch, 1 << 24)
                if record.offset >= from_offset
            ]
        next_offset = max(next_offset, header.last_offset + 1)
    return found, next_offset
