"""All connections of a user or a tenant together get what its quota says, however many they are.

Connections use a real node as fast as they may, on a clock that the test moves. Together they never get more than the
quota says for the time, ten seconds' worth of burst, and one request of each connection that was open when the burst
ended: as in Apache Kafka, it is served and then the connection waits. A connection that comes later waits first.
"""

from __future__ import annotations

import asyncio
import heapq
import io
import itertools
import struct
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from kio.schema.share_fetch.v2 import request as sharing
from kio.schema.share_fetch.v2.response import ShareFetchResponse
from kio.serial import entity_reader, entity_writer
from tests.unit.broker.coordinators.share.share_client import GROUP, Member, share_topic
from tests.unit.broker.raw_client import (
    API_VERSIONS,
    batch_of,
    create_topic,
    fetch_v7,
    fetched,
    frame,
    produce,
    running,
    turn_until,
)

from penstock.broker.network.connection import Connection
from penstock.broker.network.tenants import TenantOnNode
from penstock.broker.node import Node
from penstock.cluster.tenants import Tenant
from penstock.protocol.errors import ErrorCode
from penstock.security.quotas import (
    CONSUMER_BYTE_RATE,
    PRODUCER_BYTE_RATE,
    REQUEST_PERCENTAGE,
    USER,
)
from penstock.security.tenant_limits import REQUEST_RATE, TenantRates

SECONDS = 120
PER_SECOND = 20_000
RECORD_BYTES = 2_500
RECORDS = 1_200
#: Between a reply and the next request.
ROUND_TRIP_S = 0.005
BURST_S, LEAST, TOLERANCE = 10, 0.90, 1.005
_numbers = itertools.count(1)


class _Timer(asyncio.TimerHandle):
    """In place of the timer that ends a throttle: the simulation does that."""

    def __init__(self, when: float) -> None:
        super().__init__(when, lambda: None, (), asyncio.get_running_loop())


class _Socket(asyncio.Transport):
    """The client's end of a connection."""

    def __init__(self) -> None:
        super().__init__()
        self.received = bytearray()

    def write(self, data: Any) -> None:
        self.received += data

    def writelines(self, list_of_data: Any) -> None:
        for each in list_of_data:
            self.received += each

    def take_reply(self) -> bytes | None:
        """Return a reply without its size and correlation id."""
        if len(self.received) < 4:
            return None
        end = 4 + struct.unpack_from(">i", self.received)[0]
        reply = bytes(self.received[8:end])
        del self.received[:end]
        return reply

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def close(self) -> None: ...

    def abort(self) -> None: ...


class World:
    """The node's clock and what happens when. Throttles of connections end on this clock."""

    def __init__(self, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
        self.node = node
        self.now_s = float(node.environment.now_ms() // 1000)
        self.join: Callable[[Connection], None] = lambda connection: None
        self.used: list[tuple[float, float]] = []
        self._order = itertools.count()
        monkeypatch.setattr(type(node.environment), "now_ms", lambda _: self._now_ms())
        monkeypatch.setattr(node.quotas, "_now_ms", self._now_ms)
        monkeypatch.setattr(node.services, "now_ms", self._now_ms)
        monkeypatch.setattr(Connection, "throttle", lambda *given: self._throttle(*given))

    def _now_ms(self) -> int:
        return round(self.now_s * 1000)

    def _throttle(self, connection: Connection, milliseconds: int) -> None:
        until_s = self.now_s + milliseconds / 1000
        if connection._throttle is None or connection._throttle.when() < until_s:
            connection._throttle = _Timer(until_s)
        connection.mute()

    def limit_user(self, kind: str, per_second: float) -> None:
        self.node.quotas.configure({((USER, "ANONYMOUS"),): {kind: per_second}})

    def limit_tenant(self, kind: str, per_second: float) -> None:
        rates = TenantRates(11, 1000)
        rates.limit({kind: per_second})
        tenant = TenantOnNode(Tenant(name="t", users=(), prefix="t-", limits={}), rates)
        self.join = lambda connection: connection.joins(tenant)
        self.node.quotas.measure_tenants(True)

    async def run(self, clients: list[Client], seconds: float) -> None:
        began = self.now_s
        agenda = [(began, next(self._order), client) for client in clients]
        while agenda and agenda[0][0] < began + seconds:
            self.now_s, _, client = heapq.heappop(agenda)
            next_s = await client.act()
            heapq.heappush(agenda, (next_s, next(self._order), client))
        self.now_s = began + seconds
        for client in clients:
            client.leave()


class Client:
    """Sends the next request when it has the reply to the last one, and its connection is read."""

    def __init__(self, world: World, *, reconnects: bool) -> None:
        self.world = world
        self.reconnects = reconnects
        self.used = 0.0
        self.turns = 0
        self.longest_wait_s = 0.0
        self._last_turn_s = world.now_s
        self.connection: Connection | None = None

    def request(self) -> bytes:
        raise NotImplementedError

    def used_by(self, request: bytes, reply: bytes) -> float:
        """Return what counts towards the quota."""
        raise NotImplementedError

    def connect(self) -> None:
        self.socket = _Socket()
        self.connection = Connection(self.world.node.server, self.world.node.listeners[0].name)
        self.connection.connection_made(self.socket)
        self.world.join(self.connection)
        self.sent: bytes | None = None

    def leave(self) -> None:
        if self.connection is not None:
            self.connection.connection_lost(None)
            self.connection = None

    async def act(self) -> float:
        """Return when the client can do something again."""
        if self.connection is None:
            self.connect()
        connection, now_s = self.connection, self.world.now_s
        assert connection is not None
        if connection._throttle is not None:
            if (until_s := connection._throttle.when()) > now_s:
                return until_s
            connection._throttle_over()
        if self.sent is None:
            self.sent = self.request()
            rest = memoryview(self.sent)
            while rest:
                buffer = connection.get_buffer(-1)
                count = min(len(buffer), len(rest))
                buffer[:count] = rest[:count]
                rest = rest[count:]
                connection.buffer_updated(count)
        await turn_until(lambda: bool(self.socket.received) or _is_held(connection) or not connection.is_open)
        reply = self.socket.take_reply()
        if reply is not None:
            used = self.used_by(self.sent, reply)
            self.sent = None
            if used:
                self.used += used
                self.turns += 1
                self.world.used.append((now_s, used))
                self.longest_wait_s = max(self.longest_wait_s, now_s - self._last_turn_s)
                self._last_turn_s = now_s
                if self.reconnects:
                    self.leave()
                    return now_s + ROUND_TRIP_S
        throttle = connection._throttle
        return now_s + ROUND_TRIP_S if throttle is None else max(throttle.when(), now_s + ROUND_TRIP_S)


def _is_held(connection: Connection) -> bool:
    return connection._has_frames and connection._throttle is not None


class Producer(Client):
    record_bytes = RECORD_BYTES

    def request(self) -> bytes:
        return produce("produced", bytes(self.record_bytes))

    def used_by(self, request: bytes, reply: bytes) -> float:
        return len(request)


class LargeProducer(Producer):
    record_bytes = PER_SECOND


class Consumer(Client):
    def request(self) -> bytes:
        return fetch_v7([("t", 0, 0)])

    def used_by(self, request: bytes, reply: bytes) -> float:
        return sum(len(partition.records or b"") for partition in fetched(reply).partitions.values())


class ShareConsumer(Client):
    def connect(self) -> None:
        super().connect()
        self.member, self.epoch = f"member-{next(_numbers)}", 0

    def request(self) -> bytes:
        partition = sharing.FetchPartition(partition_index=0, acknowledgement_batches=())
        topic = sharing.FetchTopic(topic_id=self.world.node.image.topics["t"].id, partitions=(partition,))
        request = sharing.ShareFetchRequest(
            group_id=GROUP,
            member_id=self.member,
            share_session_epoch=self.epoch,
            max_wait=timedelta(0),
            min_bytes=1,
            max_bytes=1 << 20,
            max_records=500,
            batch_size=500,
            topics=(topic,) if self.epoch == 0 else (),
            forgotten_topics_data=(),
        )
        self.epoch += 1
        body = io.BytesIO()
        entity_writer(sharing.ShareFetchRequest)(body, request)
        header = struct.pack(">hhih", sharing.ShareFetchRequest.__api_key__, 2, 0, -1) + b"\0"
        return struct.pack(">i", len(header) + len(body.getvalue())) + header + body.getvalue()

    def used_by(self, request: bytes, reply: bytes) -> float:
        answer, _ = entity_reader(ShareFetchResponse)(reply, 1)
        assert not answer.error_code
        return sum(len(part.records or b"") for topic in answer.responses for part in topic.partitions)


class Asker(Client):
    def request(self) -> bytes:
        return frame(API_VERSIONS, 0)

    def used_by(self, request: bytes, reply: bytes) -> float:
        return 1


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with running(
        tmp_path, penstock_flush="never", share_coordinator_state_topic_num_partitions="1"
    ) as node:
        await create_topic(node, "produced")
        yield node


@pytest.fixture
def world(node: Node, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(node, monkeypatch)


async def fill(node: Node) -> None:
    await share_topic(node)
    partition = node.partitions.find("t", 0)
    for _ in range(RECORDS):
        partition.append(memoryview(bytearray(batch_of(bytes(RECORD_BYTES)))), node.environment.now_ms())
    await partition.committed(partition.log.end_offset - 1)
    # The share partition is loaded from now on.
    member = await Member.join(node)
    assert (await member.fetch(records=1, wait_ms=20_000)).values
    await member.client.close()


def check(world: World, clients: list[Client], per_second: float) -> None:
    used = sum(client.used for client in clients)
    request = max(amount for _, amount in world.used[len(clients) :])
    in_excess = request * (2 if clients[0].reconnects else len(clients) + 1)
    assert used <= TOLERANCE * per_second * (SECONDS + BURST_S) + in_excess
    assert used >= LEAST * SECONDS * per_second
    later_s = SECONDS * 3 / 4
    later = sum(amount for when, amount in world.used if when > world.now_s - later_s)
    assert later <= 1.02 * later_s * per_second + in_excess, "the burst comes only once"
    # Each connection gets its turn, and none much more of them than the others.
    turns = [client.turns for client in clients]
    assert min(turns) > 0
    assert max(turns) <= 2 * min(turns) + 2


WHOSE = {"user": World.limit_user, "tenant": World.limit_tenant}
KINDS = {
    "produce": (PRODUCER_BYTE_RATE, Producer),
    "produce large": (PRODUCER_BYTE_RATE, LargeProducer),
    "fetch": (CONSUMER_BYTE_RATE, Consumer),
    "share fetch": (CONSUMER_BYTE_RATE, ShareConsumer),
}


@pytest.mark.parametrize("reconnects", [False, True], ids=["steady", "reconnecting"])
@pytest.mark.parametrize("count", [1, 5, 50])
@pytest.mark.parametrize("whose", WHOSE)
@pytest.mark.parametrize("kind", KINDS)
async def test_connections_share_their_bytes_per_second(
    node: Node, world: World, kind: str, whose: str, count: int, reconnects: bool
) -> None:
    quota, client = KINDS[kind]
    if quota == CONSUMER_BYTE_RATE:
        await fill(node)
    WHOSE[whose](world, quota, PER_SECOND)
    clients: list[Client] = [client(world, reconnects=reconnects) for _ in range(count)]
    await world.run(clients, SECONDS)
    check(world, clients, PER_SECOND)


async def test_a_connection_that_is_lost_while_it_waits_for_its_first_turn_uses_nothing(
    node: Node, world: World
) -> None:
    world.limit_user(PRODUCER_BYTE_RATE, PER_SECOND)
    end_offset = lambda: node.partitions.get("produced", 0).log.end_offset  # noqa: E731
    first = LargeProducer(world, reconnects=False)
    for _ in range(BURST_S + 2):
        await first.act()
        assert first.connection is not None
        if first.connection._throttle is not None:
            break
    owed_s = first.connection._throttle.when() - world.now_s
    before = end_offset()
    for _ in range(20):
        lost = LargeProducer(world, reconnects=False)
        assert await lost.act() > world.now_s
        lost.leave()
    last = LargeProducer(world, reconnects=False)
    until_s = await last.act()
    assert until_s - world.now_s <= owed_s, "those that are gone are not waited for"
    assert (last.turns, end_offset()) == (0, before)
    world.now_s = until_s
    await last.act()
    assert (last.turns, end_offset()) == (1, before + 1)
    for client in (first, last):
        client.leave()


@pytest.mark.parametrize("is_crowded", [False, True])
async def test_a_large_first_request_is_held_unless_it_keeps_others_waiting(
    node: Node, world: World, monkeypatch: pytest.MonkeyPatch, is_crowded: bool
) -> None:
    monkeypatch.setattr(Producer, "record_bytes", 700_000)  # in a buffer of its own
    world.limit_user(PRODUCER_BYTE_RATE, PER_SECOND)
    clients = [Producer(world, reconnects=False) for _ in range(2)]
    await clients[0].act()
    monkeypatch.setattr(type(node.server.buffers), "is_crowded", property(lambda _: is_crowded))
    until_s = await clients[1].act()
    buffers = node.server.buffers
    assert (buffers.bytes_in_use > 0) != is_crowded
    connection = clients[1].connection
    assert connection is not None
    assert connection.is_open != is_crowded
    if not is_crowded:
        world.now_s = until_s
        await clients[1].act()
        assert clients[1].turns == 1
    assert buffers.bytes_in_use == 0
    for client in clients:
        client.leave()


@pytest.mark.parametrize("session", [(0, 0), (0, -1)])
async def test_a_first_fetch_of_an_indebted_user_is_answered_at_once_and_empty(
    node: Node, world: World, session: tuple[int, int]
) -> None:
    await fill(node)
    world.limit_user(CONSUMER_BYTE_RATE, PER_SECOND)
    first = Consumer(world, reconnects=False)
    await first.act()
    assert first.used > PER_SECOND * BURST_S
    late = Consumer(world, reconnects=False)
    late.request = lambda: fetch_v7([("t", 0, 0)], session=session)  # type: ignore[method-assign]
    replies: list[bytes] = []
    late.used_by = lambda request, reply: len(replies.append(reply) or b"")  # type: ignore[func-returns-value, method-assign]
    until_s = await late.act()
    (throttle_ms,) = struct.unpack_from(">i", replies[0])
    assert throttle_ms == round((until_s - world.now_s) * 1000) > 0
    answer = fetched(replies[0])
    assert (answer.error, answer.session_id, answer.partitions) == (ErrorCode.none, 0, {})
    world.now_s = until_s
    await late.act()
    served = fetched(replies[1])
    assert served.one().records
    assert bool(served.session_id) == (session == (0, 0))
    for client in (first, late):
        client.leave()


async def test_requests_per_second_of_a_tenant_hold_for_all_connections(node: Node, world: World) -> None:
    world.limit_tenant(REQUEST_RATE, 20)
    for reconnects in (False, True):
        clients: list[Client] = [Asker(world, reconnects=reconnects) for _ in range(20)]
        world.used.clear()
        await world.run(clients, SECONDS)
        check(world, clients, 20)
        world.now_s += 100


async def test_many_connections_get_no_more_of_the_event_loop_than_one(
    node: Node, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in Apache Kafka, the time of one request costs a client one second at most, but the waits add up."""
    world.limit_user(REQUEST_PERCENTAGE, 1)
    times = itertools.count(0, 0.5)
    monkeypatch.setattr("penstock.broker.network.dispatch.perf_counter", lambda: next(times))
    for reconnects in (False, True):
        clients: list[Client] = [Asker(world, reconnects=reconnects) for _ in range(20)]
        await world.run(clients, SECONDS)
        requests = sum(client.used for client in clients)
        in_excess = 2 if reconnects else len(clients)
        assert SECONDS / 2 < requests <= SECONDS + BURST_S + in_excess
        world.now_s += 100
