"""Connections at the level of frames, on a real node and a real socket."""

import asyncio
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.unit.broker.raw_client import (
    API_VERSIONS,
    METADATA,
    PRODUCE,
    Client,
    base_offset,
    fetch,
    frame,
    metadata,
    produce,
    running,
    turn_until,
)

from penstock.broker.node import Node


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with running(tmp_path) as node:
        yield node


async def test_pipelined_replies_come_in_request_order(node: Node) -> None:
    client = await Client.connect(node)
    await client.create("t")
    # The first is a long poll that only the produce behind it can end; the replies still keep their order.
    client.writer.write(
        fetch("t", 0, max_wait_ms=30_000, correlation=1)
        + produce("t", b"x", correlation=2)
        + frame(API_VERSIONS, 0, correlation=3)
    )
    assert [(await client.reply())[0] for _ in range(3)] == [1, 2, 3]


async def test_frames_cut_at_every_byte_are_put_together(node: Node) -> None:
    client = await Client.connect(node)
    await client.create("t")
    stream = b"".join(produce("t", bytes([i]), correlation=i) for i in range(4))
    for place in range(len(stream)):
        client.writer.write(stream[place : place + 1])
        await client.writer.drain()
        await asyncio.sleep(0)
    replies = [await client.reply() for _ in range(4)]
    assert [(number, base_offset(reply, "t")) for number, reply in replies] == [(i, i) for i in range(4)]


async def test_a_frame_larger_than_every_buffer_arrives_whole(tmp_path: Path) -> None:
    async with running(tmp_path, message_max_bytes="20000000") as node:
        client = await Client.connect(node)
        await client.create("t")
        value = bytes(range(256)) * 40_000
        assert base_offset(await client.ask(produce("t", value)), "t") == 0
        assert node.partitions.find("t", 0).log.size_bytes > len(value)
        assert node.server.buffers.bytes_in_use == 0


@pytest.mark.parametrize(
    "bad",
    [
        struct.pack(">i", -1),
        struct.pack(">i", 200_000_000),
        struct.pack(">i", 3) + b"abc",
        frame(999, 0),
        frame(METADATA, 99),
        frame(PRODUCE, 0),
        frame(METADATA, 4, struct.pack(">i", 2**31 - 1)),
        frame(METADATA, 9, b"\x00\xff\xff\xff\xff\x0f"),
        frame(PRODUCE, 7, b"\x00"),
        struct.pack(">i", 10) + struct.pack(">hhih", METADATA, 4, 1, 2_000),
    ],
    ids=["negative", "huge", "tiny", "api", "version", "produce-v0", "count", "compact", "cut", "client-id"],
)
async def test_what_is_no_request_costs_only_its_own_connection(node: Node, bad: bytes) -> None:
    neighbour, client = await Client.connect(node), await Client.connect(node)
    client.writer.write(bad)
    assert await client.is_cut_off()
    assert node.metrics.malformed_frames == 1
    assert node.server.buffers.bytes_in_use == 0
    await neighbour.create("t")
    assert base_offset(await neighbour.ask(produce("t", b"x")), "t") == 0


async def test_api_versions_of_the_future_gets_version_zero_and_the_list(node: Node) -> None:
    client = await Client.connect(node)
    reply = await client.ask(frame(API_VERSIONS, 77))
    error, count = struct.unpack_from(">hi", reply)
    assert error == 35
    versions = {struct.unpack_from(">hhh", reply, 6 + 6 * i)[0]: i for i in range(count)}
    # Produce is offered from 0 because older librdkafka drops compression otherwise.
    assert struct.unpack_from(">hhh", reply, 6 + 6 * versions[PRODUCE]) == (PRODUCE, 0, 13)


async def test_more_requests_than_may_wait_are_read_later_and_all_answered(tmp_path: Path) -> None:
    bound = {"penstock_max_inflight_requests_per_connection": "2"}
    async with running(tmp_path, **bound) as node:
        client = await Client.connect(node)
        await client.create("t")
        polls = [fetch("t", 0, max_wait_ms=50, correlation=i) for i in range(10)]
        client.writer.write(b"".join(polls))
        assert [(await client.reply())[0] for _ in range(10)] == list(range(10))


async def test_frames_beyond_the_memory_bound_wait_for_their_turn(tmp_path: Path) -> None:
    async with running(tmp_path, queued_max_request_bytes="100000") as node:
        slow, quick = await Client.connect(node), await Client.connect(node)
        await quick.create("t")
        large = produce("t", b"x" * 80_000)
        slow.writer.write(large[:1000])
        await slow.writer.drain()
        await turn_until(lambda: node.server.buffers.bytes_in_use > 0)
        quick.writer.write(large[:70_000])
        await quick.writer.drain()
        slow.writer.write(large[1000:])
        assert base_offset((await slow.reply())[1], "t") == 0
        quick.writer.write(large[70_000:])
        assert base_offset((await quick.reply())[1], "t") == 1


async def test_half_a_request_does_not_hold_memory_for_ever(tmp_path: Path) -> None:
    async with running(tmp_path, penstock_request_read_timeout_ms="100") as node:
        client = await Client.connect(node)
        client.writer.write(metadata("t")[:10])
        assert await client.is_cut_off()
        assert node.server.buffers.bytes_in_use == 0


async def test_connections_beyond_the_bound_are_turned_away(tmp_path: Path) -> None:
    async with running(tmp_path, max_connections="1") as node:
        first = await Client.connect(node)
        await first.create("t")
        assert await (await Client.connect(node)).is_cut_off()
        assert base_offset(await first.ask(produce("t", b"x")), "t") == 0


async def test_acks_zero_has_no_reply_but_an_error_ends_the_connection(node: Node) -> None:
    client = await Client.connect(node)
    await client.create("t")
    client.writer.write(produce("t", b"x", acks=0) + produce("t", b"y", correlation=7))
    number, reply = await client.reply()
    assert (number, base_offset(reply, "t")) == (7, 1)
    client.writer.write(produce("unknown-topic", b"x", acks=0))
    assert await client.is_cut_off()


async def test_a_stop_answers_the_writes_under_way(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        client = await Client.connect(node)
        await client.create("t")
        client.writer.write(b"".join(produce("t", b"x", acks=-1, correlation=i) for i in range(20)))
        await turn_until(lambda: node.partitions.find("t", 0).log.end_offset == 20)
        await node.stop()
        assert [(await client.reply())[0] for _ in range(20)] == list(range(20))
        assert await client.is_cut_off()


async def test_who_wants_to_know_hears_that_a_connection_has_ended(node: Node) -> None:
    client = await Client.connect(node)
    await client.create("t")
    (connection,) = node.server.connections
    ended: list[bool] = []
    connection.on_lost = lambda: ended.append(connection.is_open)
    client.writer.close()
    await turn_until(lambda: ended)
    assert ended == [False]
