"""Replies stay in order and memory stays bounded, whatever a client pipelines, leaves unread or breaks off."""

import asyncio
import inspect
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, cast

import pytest
from tests.unit.broker.partition.flush_gate import FlushGate
from tests.unit.broker.raw_client import (
    API_VERSIONS,
    Client,
    batch_of,
    create_topic,
    fetch,
    frame,
    new_node,
    produce,
    produced,
    running,
    until,
)

from penstock.broker.network.connection import Connection, PendingReply
from penstock.broker.network.frame_buffers import RECEIVE_BUFFER_BYTES, FrameBuffers
from penstock.broker.node import Node

_FOREVER_MS = 2**31 - 1


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> FlushGate:
    return FlushGate(monkeypatch)


async def test_an_error_under_acks_zero_ends_the_connection_after_what_is_owed(
    tmp_path: Path, gate: FlushGate
) -> None:
    async with running(tmp_path) as node:
        await create_topic(node, "t")
        client = await Client.connect(node)
        gate.close()
        client.writer.write(
            produce("t", b"x", acks=-1, correlation=1)
            + frame(API_VERSIONS, 0, correlation=2)
            + produce("unknown", b"x", acks=0)
        )
        await until(lambda: gate.begun)
        gate.open()
        assert [(await client.reply())[0] for _ in range(2)] == [1, 2]
        assert await client.is_cut_off()


async def test_replies_made_before_a_hang_up_are_sent(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        await create_topic(node, "t")
        client = await Client.connect(node)
        client.writer.write(produce("t", b"x", correlation=1) + produce("unknown", b"x", acks=0))
        assert (await client.reply())[0] == 1
        assert await client.is_cut_off()


async def test_replies_that_wait_for_an_earlier_one_count_as_requests_under_way(tmp_path: Path) -> None:
    async with running(tmp_path, penstock_max_inflight_requests_per_connection="8") as node:
        await create_topic(node, "t")
        client = await Client.connect(node)
        small = [frame(API_VERSIONS, 0, correlation=i) for i in range(1, 1000)]
        client.writer.write(fetch("t", 0, max_wait_ms=_FOREVER_MS) + b"".join(small))
        connection = await _connection_of(node, client)
        await until(lambda: len(connection._slots) == 8)
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert len(connection._slots) == 8
        assert (await (await Client.connect(node)).produce("t", b"x")).error == 0
        assert [(await client.reply())[0] for _ in range(1000)] == list(range(1000))


async def test_replies_that_one_event_lets_go_leave_in_one_write(tmp_path: Path, gate: FlushGate) -> None:
    async with running(tmp_path) as node:
        await create_topic(node, "t")
        client = await Client.connect(node)
        connection = await _connection_of(node, client)
        gate.close()
        client.writer.write(b"".join(produce("t", b"x", acks=-1, correlation=i) for i in range(5)))
        await until(lambda: len(connection._slots) == 5)
        writes = Writes(connection)
        node.server.gathered(lambda: _commit_all(node, "t"))
        gate.open()
        assert writes.count == 1
        assert [(await client.reply())[0] for _ in range(5)] == list(range(5))
        assert not node.server.is_gathering


async def test_requests_that_had_to_wait_are_answered_behind_the_replies_that_made_room(
    tmp_path: Path, gate: FlushGate
) -> None:
    async with running(tmp_path, penstock_max_inflight_requests_per_connection="2") as node:
        await create_topic(node, "t")
        client = await Client.connect(node)
        connection = await _connection_of(node, client)
        gate.close()
        writing = [produce("t", b"x", acks=-1, correlation=i) for i in range(2)]
        asking = [frame(API_VERSIONS, 0, correlation=i) for i in range(2, 9)]
        client.writer.write(b"".join(writing + asking))
        await until(lambda: len(connection._slots) == 2 and connection._muted)
        node.server.gathered(lambda: _commit_all(node, "t"))
        gate.open()
        assert [(await client.reply())[0] for _ in range(9)] == list(range(9))


async def test_a_client_that_pipelines_fetches_and_reads_nothing_costs_no_more_than_the_bound(
    tmp_path: Path,
) -> None:
    bound = 1 << 20
    async with running(tmp_path, penstock_max_queued_response_bytes=str(bound)) as node:
        await create_topic(node, "t", max_message_bytes="2000000")
        writer, reader = await Client.connect(node), await Client.connect(node, receive_bytes=4096)
        for _ in range(8):
            assert (await writer.produce("t", bytes(500_000), acks=-1)).error == 0
        one = fetch("t", 0)
        reader.writer.write(one * (RECEIVE_BUFFER_BYTES // len(one)))
        connection = await _connection_of(node, reader)
        await until(lambda: connection.is_write_paused)
        assert connection.unsent_bytes <= 2 * bound


async def test_a_client_that_pipelines_questions_and_reads_no_answers_is_no_longer_read(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as node:
        client = await Client.connect(node, receive_bytes=4096)
        one = frame(API_VERSIONS, 0)
        client.writer.write(one * (4 * RECEIVE_BUFFER_BYTES // len(one)))
        connection = await _connection_of(node, client)
        await until(lambda: connection.is_write_paused)
        assert connection.unsent_bytes < 500_000


async def test_records_do_not_overtake_the_replies_before_them(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        await create_topic(node, "t")
        client = await Client.connect(node)
        assert (await client.produce("t", b"x", acks=-1)).offset == 0
        pipelined = [frame(API_VERSIONS, 0, correlation=i) + fetch("t", 0, correlation=i + 1) for i in (1, 3)]
        client.writer.write(b"".join(pipelined))
        assert [(await client.reply())[0] for _ in range(4)] == [1, 2, 3, 4]


async def test_replies_held_back_behind_a_long_poll_count_against_the_bound(tmp_path: Path) -> None:
    bound = 1 << 20
    async with running(tmp_path, penstock_max_queued_response_bytes=str(bound)) as node:
        await create_topic(node, "t", max_message_bytes="2000000")
        await create_topic(node, "quiet")
        client = await Client.connect(node)
        for _ in range(40):
            assert (await client.produce("t", bytes(60_000), acks=-1)).error == 0
        client.writer.write(fetch("quiet", 0, max_wait_ms=_FOREVER_MS) + fetch("t", 0) * 50)
        connection = await _connection_of(node, client)
        await until(lambda: [slot.done for slot in connection._slots] == [False] + 50 * [True])
        # Once the bound is reached, each further reply is allowed one batch.
        assert bound < node.server.held_bytes + 60_000 < bound + 50 * 70_000 < 40 * 60_000 * 50
        client.writer.close()
        await until(lambda: not node.server.connections)
        assert node.server.held_bytes == 0


async def test_a_reader_that_disconnects_blocks_no_other(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        await create_topic(node, "t")
        client = await Client.connect(node)
        partition = node.partitions.find("t", 0)
        client.writer.write(fetch("t", 0, max_wait_ms=_FOREVER_MS))
        await until(lambda: partition._fetch_waiters)
        client.writer.close()
        await until(lambda: not partition._fetch_waiters)


async def test_no_bound_on_request_memory_is_no_bound(tmp_path: Path) -> None:
    async with running(tmp_path, queued_max_request_bytes="-1") as node:
        slow, quick = await Client.connect(node), await Client.connect(node)
        large = produce("t", b"x" * 100_000)
        await quick.create("t")
        for client in (slow, quick):
            client.writer.write(large[:1000])
        await until(lambda: node.server.buffers.bytes_in_use >= 2 * 1000)
        quick.writer.write(large[1000:])
        assert produced((await quick.reply())[1])[0].offset == 0


async def test_everyone_who_waits_for_memory_gets_a_turn(tmp_path: Path) -> None:
    async with running(tmp_path, queued_max_request_bytes="150000") as node:
        clients = [await Client.connect(node) for _ in range(6)]
        await clients[0].create("t")
        large = produce("t", b"x" * 100_000)
        for client in clients:
            client.writer.write(large[:50_000])
        await until(lambda: len(node.server._waiting_for_memory) + len(node.server._waiting_to_grow) >= 3)
        # One frame may grow beyond the bound.
        assert node.server.buffers.bytes_in_use < 150_000 + 131_072
        for client in clients:
            client.writer.write(large[50_000:])
        offsets = [produced((await client.reply())[1])[0].offset for client in clients]
        assert sorted(offsets) == list(range(6))
        assert node.server.buffers.bytes_in_use == node.server.buffers.backlog_bytes == 0


def test_under_pressure_a_connection_brings_little_that_must_be_kept() -> None:
    buffers = FrameBuffers(100_000)
    assert len(buffers.receive_buffer) == RECEIVE_BUFFER_BYTES
    taken = buffers.begin(memoryview(bytes(20_000)), 60_000)
    assert taken is not None
    buffers.count_backlog(60_000)
    assert len(buffers.receive_buffer) == 4096
    buffers.count_backlog(-60_000)
    assert len(buffers.receive_buffer) == RECEIVE_BUFFER_BYTES
    assert buffers.begin(memoryview(bytes(20_000)), 60_000) is None
    buffers.end(taken)
    assert buffers.bytes_in_use == 0


def test_one_frame_always_fits_whatever_waits() -> None:
    buffers = FrameBuffers(10_000)
    buffers.count_backlog(50_000)
    assert buffers.begin(memoryview(bytes(200_000)), 1_000_000) is not None
    assert buffers.begin(memoryview(b"x"), 100) is None


async def test_a_client_that_is_kept_waiting_is_not_idle(tmp_path: Path) -> None:
    async with running(tmp_path, connections_max_idle_ms="1") as node:
        await create_topic(node, "t")
        waiting, idle = await Client.connect(node), await Client.connect(node)
        waiting.writer.write(fetch("t", 0, max_wait_ms=_FOREVER_MS))
        assert await idle.is_cut_off()
        partition = node.partitions.find("t", 0)
        assert partition._fetch_waiters
        # Nor is it idle right after it was answered, before it can ask again.
        connection = await _connection_of(node, waiting)
        connection.last_active = 0.0
        node.server._check_idle(connection, node.server.clock())
        assert connection.last_active > 0.0
        partition.append(memoryview(bytearray(batch_of(b"x"))), node.environment.now_ms())
        assert (await waiting.reply())[0] == 0


async def test_a_client_that_takes_nothing_does_not_stay_for_ever(tmp_path: Path) -> None:
    bounds = {"connections_max_idle_ms": "1500", "penstock_request_read_timeout_ms": "100"}
    async with running(tmp_path, **bounds) as node:
        await create_topic(node, "t", max_message_bytes="20000000")
        writer = await Client.connect(node)
        assert (await writer.produce("t", bytes(12_000_000), acks=-1)).error == 0
        client = await Client.connect(node, receive_bytes=4096)
        client.writer.write(fetch("t", 0) * 20)
        connection = await _connection_of(node, client)
        await until(lambda: connection.is_write_paused)
        await until(lambda: not node.server.connections)


async def test_every_address_of_a_listener_has_the_same_port(tmp_path: Path) -> None:
    node = new_node(tmp_path, listeners="PLAINTEXT://:0", advertised_listeners="PLAINTEXT://127.0.0.1:0")
    await node.start()
    try:
        ports = {s.getsockname()[1] for _, server in node.server._servers for s in server.sockets}
        assert ports == {node.listeners[0].port}
    finally:
        await node.stop()


class Writes:
    """Counts what a connection hands to its socket."""

    def __init__(self, connection: Connection) -> None:
        self.count = 0
        self._transport: Any = connection._transport
        connection._transport = cast(asyncio.Transport, self)

    def write(self, data: bytes) -> None:
        self.count += 1
        self._transport.write(data)

    def writelines(self, replies: list[bytes]) -> None:
        self.count += 1
        self._transport.writelines(replies)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def _commit_all(node: Node, topic: str) -> None:
    """As the fetch does that tells of the last follower."""
    partition = node.partitions.by_raw_name[topic.encode()][0]
    partition.advance(partition.log.end)


async def _connection_of(node: Node, client: Client) -> Connection:
    """The server's side."""
    port = client.writer.get_extra_info("sockname")[1]
    found: list[Connection] = []

    def is_found() -> bool:
        found[:] = [c for c in node.server.connections if c.peer.endswith(f":{port}")]
        return bool(found)

    await until(is_found)
    return found[0]


async def test_a_reply_that_is_lost_at_once_leaves_no_coroutine_behind() -> None:
    """The peer closes the connection in the same turn of the event loop in which its request was read."""

    async def respond() -> None:
        await asyncio.Event().wait()

    async def encode(response: Coroutine[Any, Any, None]) -> None:
        await response

    response = respond()
    task = asyncio.get_running_loop().create_task(encode(response))
    slot = PendingReply(3)
    slot.cancel_if_lost(task)
    assert slot.on_lost is not None
    slot.on_lost()
    await asyncio.wait([task])
    assert task.cancelled()
    assert inspect.getcoroutinestate(response) == inspect.CORO_CLOSED
