"""What one connection can take from the others: time of the loop, turn by turn, and memory of frames, byte by byte.

Time is a number that the tests move: no test depends on how fast anything is.
"""

import asyncio
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.broker.raw_client import (
    API_VERSIONS,
    Client,
    base_offset,
    create_topic,
    fetch,
    frame,
    produce,
    running,
    string,
    turn_until,
    until,
)

from penstock.broker.network.connection import Connection
from penstock.broker.network.frame_buffers import FrameBuffers, PartialFrame
from penstock.broker.network.tenants import TenantOnNode
from penstock.broker.node import Node
from penstock.cluster.tenants import Tenant
from penstock.security.principal import USER, Principal
from penstock.security.tenant_limits import TenantRates

_FOREVER_MS = 2**31 - 1
_PIPELINED = 300
_ANNOUNCED_BYTES = 100 * 2**20


class Work:
    """Every request of a connection in `costly` takes `cost_s`; `handled` has the connections in order."""

    def __init__(self, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.costly: set[int] = set()
        self.cost_s = 1.0
        self.handled: list[int] = []
        node.dispatcher.faults = self._serve
        for module in ("connection", "slices", "dispatch"):
            monkeypatch.setattr(f"penstock.broker.network.{module}.perf_counter", lambda: self.now)

    def _serve(self, context: Any, connection: Any, frame: memoryview, dispatcher: Any) -> bool:
        self.handled.append(connection.number)
        if connection.number in self.costly:
            self.now += self.cost_s
        return False


class Clock:
    """The node's time, from now on."""

    def __init__(self, node: Node) -> None:
        self.now = 5000.0
        node.server.clock = lambda: self.now

    def has_heard(self, connection: Connection) -> bool:
        return connection.last_active == self.now and connection._partial is not None


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with running(tmp_path) as node:
        yield node


@pytest.fixture
def work(node: Node, monkeypatch: pytest.MonkeyPatch) -> Work:
    return Work(node, monkeypatch)


async def _client(node: Node) -> tuple[Client, int]:
    """A client that has been answered once, and the number of its connection."""
    before = {connection.number for connection in node.server.connections}
    client = await Client.connect(node)
    await client.ask(frame(API_VERSIONS, 0))
    (number,) = {connection.number for connection in node.server.connections} - before
    return client, number


def _questions(count: int, first: int = 0) -> bytes:
    return b"".join(frame(API_VERSIONS, 0, correlation=first + i) for i in range(count))


async def test_a_neighbour_does_not_wait_for_what_another_has_pipelined(node: Node, work: Work) -> None:
    (hog, hog_number), (neighbour, _) = await _client(node), await _client(node)
    work.costly.add(hog_number)
    hog.writer.write(_questions(_PIPELINED))
    await turn_until(lambda: hog_number in work.handled)
    before = work.handled.count(hog_number)
    await neighbour.ask(frame(API_VERSIONS, 0))
    # A turn of the loop has room for one of them, and the answer takes a handful of turns.
    assert work.handled.count(hog_number) - before < 20
    assert [(await hog.reply())[0] for _ in range(_PIPELINED)] == list(range(_PIPELINED))


async def test_many_whose_frames_wait_share_one_turn(node: Node, work: Work) -> None:
    hogs = [await _client(node) for _ in range(10)]
    neighbour, number = await _client(node)
    work.costly |= {number for _, number in hogs}
    for client, _ in hogs:
        client.writer.write(_questions(60))
    await turn_until(lambda: len(node.server.slices.waiting) == 10)
    before = len(work.handled)
    await neighbour.ask(frame(API_VERSIONS, 0))
    assert work.handled.index(number, before) - before < 20


async def test_connections_whose_frames_wait_take_turns(node: Node, work: Work) -> None:
    hogs = [await _client(node) for _ in range(3)]
    numbers = {number for _, number in hogs}
    work.costly |= numbers
    for client, _ in hogs:
        client.writer.write(_questions(20))
    for client, _ in hogs:
        assert [(await client.reply())[0] for _ in range(20)] == list(range(20))
    # At first some may not have been read yet, and at last the first is done before the others.
    in_turn = work.handled[20:50]
    assert all(set(in_turn[i : i + 3]) == numbers for i in range(0, 30, 3)), in_turn


def _assign(node: Node, number: int, party: str) -> None:
    """The listener of the tests is for nodes too, whose time is not shared out."""
    (connection,) = (each for each in node.server.connections if each.number == number)
    connection.account = node.slices.accounts.join(party)


async def test_a_tenant_does_not_wait_for_what_another_pipelines_on_many_connections(
    node: Node, work: Work
) -> None:
    """12,800 requests of 0.1 ms wait, 1.3 s of work, and more connections come all the time."""
    hogs = [await _client(node) for _ in range(200)]
    neighbour, number = await _client(node)
    work.costly |= {each for _, each in hogs}
    work.cost_s = 0.0001
    for _, each in hogs:
        _assign(node, each, "hog")
    _assign(node, number, "neighbour")
    await neighbour.ask(frame(API_VERSIONS, 0))  # it has been active lately, as one that produces steadily
    work.handled.clear()
    for client, _ in hogs:
        client.writer.write(_questions(64))
    waits_s = []
    for _ in range(50):
        before = len(work.handled)
        await neighbour.ask(frame(API_VERSIONS, 0))
        waits_s.append((work.handled.index(number, before) - before) * work.cost_s)
    assert len(work.handled) < 6_000  # the hog had more to do all the while
    assert max(waits_s[1:]) < 0.002, waits_s
    # At first all connections are read at once: the hog has used nothing yet.
    assert waits_s[0] < 0.01, waits_s


async def test_a_user_and_a_tenant_have_one_account_for_all_their_connections(tmp_path: Path) -> None:
    async with running(tmp_path, listeners="PLAINTEXT://127.0.0.1:0,NODES://127.0.0.1:0") as node:
        clients = [await _client(node) for _ in range(3)]
        first, second, third = node.server.connections
        assert first.account is second.account is third.account is not None
        assert not node.slices.accounts.are_several
        first.authenticated(Principal(USER, "ann"))
        second.authenticated(Principal(USER, "ann"))
        assert first.account is second.account is not third.account
        assert node.slices.accounts.are_several
        second.tenant = TenantOnNode(
            Tenant(name="acme", users=(), prefix="acme.", limits={}), TenantRates(10, 1000)
        )
        node.server.assign_account(second)
        assert second.account is not first.account
        assert first.account.connections == second.account.connections == third.account.connections == 1
        first.abort()
        await until(lambda: len(node.server.connections) == 2)
        assert first.account is None
        del clients  # open until here


async def test_a_request_behind_an_expensive_one_waits_until_others_have_been_read(
    node: Node, work: Work
) -> None:
    (hog, hog_number), (neighbour, number) = await _client(node), await _client(node)
    work.costly.add(hog_number)
    await hog.ask(frame(API_VERSIONS, 0))
    work.handled.clear()
    hog.writer.write(frame(API_VERSIONS, 0))
    neighbour.writer.write(frame(API_VERSIONS, 0))
    await hog.reply()
    await neighbour.reply()
    assert work.handled == [number, hog_number]


async def test_a_large_request_behind_an_expensive_one_is_answered_too(node: Node, work: Work) -> None:
    await create_topic(node, "t")
    client, number = await _client(node)
    work.costly.add(number)
    await client.ask(frame(API_VERSIONS, 0))
    large = produce("t", bytes(300_000), correlation=5)
    client.writer.write(large[:100_000])
    await until(lambda: node.server.buffers.bytes_in_use)
    client.writer.write(large[100_000:] + _questions(3, 6))
    assert [(await client.reply())[0] for _ in range(4)] == [5, 6, 7, 8]
    assert node.server.buffers.bytes_in_use == 0


@pytest.mark.parametrize(
    "leave", [lambda w: w.close(), lambda w: w.transport.abort()], ids=["close", "reset"]
)
async def test_frames_of_a_peer_that_has_gone_are_not_handled(
    node: Node, work: Work, leave: Callable[[asyncio.StreamWriter], None]
) -> None:
    await create_topic(node, "t")
    client, number = await _client(node)
    work.costly.add(number)
    # Nothing is written to it meanwhile, which would tell that it has gone.
    client.writer.write(fetch("t", 0, max_wait_ms=_FOREVER_MS) * 60)
    await turn_until(lambda: number in work.handled)
    leave(client.writer)
    await until(lambda: not node.server.connections)
    assert work.handled.count(number) < 20
    assert node.server.buffers.backlog_bytes == 0
    assert not node.partitions.find("t", 0)._fetch_waiters


async def test_records_of_a_producer_that_waits_for_no_answer_are_taken_after_it_has_gone(
    node: Node, work: Work
) -> None:
    await create_topic(node, "t")
    client, number = await _client(node)
    work.costly.add(number)
    pipelined = (produce("t", b"x", acks=0) + frame(API_VERSIONS, 0)) * 50
    client.writer.write(pipelined)
    await turn_until(lambda: number in work.handled)
    client.writer.close()
    log = node.partitions.find("t", 0).log
    await until(lambda: log.end_offset == 50)
    await until(lambda: not node.server.connections)
    assert work.handled.count(number) < 50 + 20


async def test_a_client_that_reads_none_of_its_replies_is_not_sent_megabytes(node: Node, work: Work) -> None:
    await create_topic(node, "t")
    client, number = await _client(node)
    await client.produce("t", bytes(200_000), acks=-1)
    (connection,) = (each for each in node.server.connections if each.number == number)
    before = len(work.handled)
    client.writer.write(fetch("t", 0) * 100)
    await until(lambda: connection.is_write_paused)
    sent = len(work.handled) - before
    assert sent < 10  # what the kernel takes for the reader too
    for _ in range(100):
        await client.reply()
    assert len(work.handled) - before == 100


async def test_a_peer_that_goes_while_it_is_not_read_from_is_noticed(tmp_path: Path) -> None:
    async with running(tmp_path, penstock_max_inflight_requests_per_connection="2") as node:
        await create_topic(node, "t")
        client = await Client.connect(node)
        client.writer.write(fetch("t", 0, max_wait_ms=_FOREVER_MS) * 5)
        partition = node.partitions.find("t", 0)
        await until(lambda: len(partition._fetch_waiters) == 2)
        client.writer.close()
        # The check that the server makes every second.
        await until(lambda: not node.server.connections)
        assert not partition._fetch_waiters


# -- requests of many parts ----------------------------------------------------------------------------------


def _fetch_of(partitions: int) -> bytes:
    parts = b"".join(struct.pack(">iqi", index, 0, 1) for index in range(partitions))
    topic = struct.pack(">i", 1) + string("t") + struct.pack(">i", partitions) + parts
    return frame(1, 4, struct.pack(">iiiib", -1, 0, 0, 1 << 20, 0) + topic)


async def test_a_request_without_records_that_is_too_large_is_not_looked_into(tmp_path: Path) -> None:
    both = {"listeners": "PLAINTEXT://127.0.0.1:0,NODES://127.0.0.1:0"}
    async with running(tmp_path, penstock_request_max_bytes="65536", **both) as node:
        await create_topic(node, "t")
        client = await Client.connect(node)
        await client.ask(_fetch_of(4_000))
        client.writer.write(_fetch_of(4_200))
        assert await client.is_cut_off()
        assert node.metrics.malformed_frames == 1
        # Records may be larger, and so may requests between nodes.
        client = await Client.connect(node)
        assert base_offset(await client.ask(produce("t", bytes(100_000))), "t") == 0
        at = node.listeners[1]
        reader, writer = await asyncio.open_connection(at.host, at.port)
        writer.write(_fetch_of(4_200))
        assert await reader.readexactly(4)
        writer.close()
        assert node.metrics.malformed_frames == 1


# -- frames that arrive in pieces ---------------------------------------------------------------------------


async def test_frames_that_are_announced_and_do_not_come_leave_room_for_others(tmp_path: Path) -> None:
    async with running(tmp_path, queued_max_request_bytes=str(1 << 20)) as node:
        await create_topic(node, "t")
        drips = [await Client.connect(node) for _ in range(3)]
        for client in drips:
            client.writer.write(struct.pack(">ihhih", _ANNOUNCED_BYTES, 0, 7, 1, -1))
        await until(lambda: len(node.server.connections) == 3 and node.server.buffers.bytes_in_use)
        neighbour = await Client.connect(node)
        large = produce("t", bytes(500_000))
        neighbour.writer.write(large[:200_000])
        await until(lambda: node.server.buffers.bytes_in_use > 200_000)
        neighbour.writer.write(large[200_000:])
        assert base_offset((await neighbour.reply())[1], "t") == 0
        assert node.server.buffers.bytes_in_use < 100_000


async def test_bytes_that_drip_in_do_not_give_a_request_more_time(node: Node) -> None:
    clock = Clock(node)
    client = await Client.connect(node)
    await until(lambda: node.server.connections)
    (connection,) = node.server.connections
    for sent in range(6):
        client.writer.write(struct.pack(">ihhih", _ANNOUNCED_BYTES, 0, 7, 1, -1)[sent : sent + 1])
        await until(lambda: clock.has_heard(connection))
        node.server._check_idle(connection, clock.now)
        assert connection.is_open, f"cut off after {sent} bytes"
        clock.now += 5.9
    # 30 s is the default of penstock.request.read.timeout.ms; bytes came all the while.
    node.server._check_idle(connection, clock.now)
    assert not connection.is_open
    assert await client.is_cut_off()
    assert node.server.buffers.bytes_in_use == 0


async def test_each_request_has_the_whole_time(node: Node) -> None:
    clock = Clock(node)
    client = await Client.connect(node)
    await until(lambda: node.server.connections)
    (connection,) = node.server.connections
    question = frame(API_VERSIONS, 0, correlation=3)
    for _ in range(4):
        for cut in (question[:4], question[4:9]):
            client.writer.write(cut)
            await until(lambda: clock.has_heard(connection))
            clock.now += 14.0
            node.server._check_idle(connection, clock.now)
        client.writer.write(question[9:])
        assert (await client.reply())[0] == 3


async def test_time_in_which_the_node_does_not_read_is_not_the_clients(tmp_path: Path) -> None:
    async with running(tmp_path, penstock_max_inflight_requests_per_connection="1") as node:
        await create_topic(node, "t")
        clock = Clock(node)
        client = await Client.connect(node)
        question = frame(API_VERSIONS, 0, correlation=1)
        client.writer.write(fetch("t", 0, max_wait_ms=_FOREVER_MS) + question[:10])
        await until(lambda: node.server.buffers.bytes_in_use)
        (connection,) = node.server.connections
        clock.now += 3600.0
        node.server._check_idle(connection, clock.now)
        assert connection.is_open
        assert base_offset(await (await Client.connect(node)).ask(produce("t", b"x")), "t") == 0
        assert (await client.reply())[0] == 0
        clock.now += 29.0
        node.server._check_idle(connection, clock.now)
        client.writer.write(question[10:])
        assert (await client.reply())[0] == 1


def _receive(buffers: FrameBuffers, frame: PartialFrame, data: bytes) -> bool:
    """As a socket fills the room there is; False when there is none left and no more memory."""
    while frame.filled < len(data):
        room = frame.view[frame.filled :]
        piece = data[frame.filled : frame.filled + min(len(room), 60_000)]
        room[: len(piece)] = piece
        frame.filled += len(piece)
        if frame.is_out_of_room and not buffers.grow(frame):
            return False
    return True


@pytest.mark.parametrize("size", [10, 5_000, 70_000, 1_000_000, 4 << 20, (4 << 20) + 1, 30_000_000])
def test_a_frame_holds_a_few_times_what_has_arrived_of_it(size: int) -> None:
    data = bytes(range(256)) * (size // 256 + 1)
    data = data[:size]
    buffers = FrameBuffers(1 << 30)
    frame = buffers.begin(memoryview(data)[:4], size)
    assert frame is not None
    while not frame.is_whole:
        assert buffers.bytes_in_use <= max(16 * 1024, 8 * frame.filled)
        assert _receive(buffers, frame, data[: frame.filled + 50_000])
    assert bytes(frame.view) == data
    buffers.end(frame)
    assert buffers.bytes_in_use == 0


def test_frames_that_all_need_more_memory_finish_one_after_the_other() -> None:
    freed = 0

    def count() -> None:
        nonlocal freed
        freed += 1

    buffers = FrameBuffers(100_000, count)
    data = bytes(60_000)
    first, second = (buffers.begin(memoryview(data)[:10_000], 60_000) for _ in range(2))
    assert first is not None
    assert second is None  # it would not fit
    second = buffers.begin(memoryview(data)[:100], 60_000)
    third = buffers.begin(memoryview(data)[:100], 60_000)
    assert second is not None
    assert third is not None
    # Beyond the bound one goes on, and the other only when that one is done.
    assert _receive(buffers, second, data)
    assert not buffers.may_overdraw
    assert not _receive(buffers, third, data)
    before = freed
    buffers.end(second)
    assert freed > before
    assert buffers.may_overdraw
    assert buffers.grow(third)
    assert _receive(buffers, third, data)
    buffers.end(third)
    buffers.end(first)
    assert buffers.bytes_in_use == 0


async def test_frames_that_wait_for_memory_to_grow_all_arrive(tmp_path: Path) -> None:
    async with running(tmp_path, queued_max_request_bytes="100000") as node:
        await create_topic(node, "t")
        clients = [await Client.connect(node) for _ in range(5)]
        large = produce("t", bytes(400_000))
        for client in clients:
            client.writer.write(large[:100])
        await until(lambda: node.server.buffers.bytes_in_use >= 5 * 16_384)
        for client in clients:
            client.writer.write(large[100:])
        offsets = [base_offset((await client.reply())[1], "t") for client in clients]
        assert sorted(offsets) == list(range(5))
        assert node.server.buffers.bytes_in_use == node.server.buffers.backlog_bytes == 0


async def test_a_request_with_too_many_elements_closes_its_connection(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A name takes a few bytes, and far more time than these."""

    def metadata(count: int) -> bytes:
        return frame(3, 1, struct.pack(">i", count) + string("topic") * count)

    async with running(tmp_path, penstock_request_elements_max="1000") as node:
        client = await Client.connect(node)
        await client.ask(metadata(1_000))
        client.writer.write(metadata(1_001))
        assert await client.is_cut_off()
        assert "penstock.request.elements.max, which is 1000" in caplog.records[-1].reason
        assert "metadata" in caplog.records[-1].reason
        assert node.server.buffers.bytes_in_use == 0


async def test_frames_that_go_on_after_a_late_reply_wait_for_their_turn_too(node: Node, work: Work) -> None:
    hog, number = await _client(node)
    _, other = await _client(node)
    _assign(node, number, "hog")
    _assign(node, other, "other")
    (connection,) = (each for each in node.server.connections if each.number == number)
    slot = connection.defer(API_VERSIONS)
    connection.wait_for_reply(slot)
    connection._keep_for_later(memoryview(bytearray(_questions(3))))
    accounts = node.slices.accounts
    accounts.join("other").spend(work.now, work.now)
    connection.account.spend(work.now, work.now + 0.01)
    work.now += 0.01
    before = len(work.handled)
    connection.fulfil(slot, None)
    assert len(work.handled) == before
    assert len(node.slices.waiting) == 1
    assert [(await hog.reply())[0] for _ in range(3)] == [0, 1, 2]
