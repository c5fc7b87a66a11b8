"""What a client may rely on at the level of frames, against a real node on a real socket."""

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from penstock.broker.node import Node
from penstock.broker.settings import load_settings
from penstock.protocol.records import Record, encode_batch

API_VERSIONS, METADATA, PRODUCE, FETCH = 18, 3, 0, 1


@contextlib.asynccontextmanager
async def running(tmp_path: Path, **settings: str) -> AsyncIterator[Node]:
    given = {"listeners": "PLAINTEXT://127.0.0.1:0", "log.dirs": str(tmp_path / "data")}
    given |= {name.replace("_", "."): value for name, value in settings.items()}
    node = Node(load_settings(given, {}))
    await node.start()
    try:
        yield node
    finally:
        await node.stop()


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with running(tmp_path) as node:
        yield node


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def connect(cls, node: Node) -> "Client":
        return cls(*await asyncio.open_connection("127.0.0.1", node.listeners[0].port))

    async def reply(self) -> tuple[int, bytes]:
        size = struct.unpack(">i", await self.reader.readexactly(4))[0]
        data = await self.reader.readexactly(size)
        return struct.unpack_from(">i", data)[0], data[4:]

    async def ask(self, frame: bytes) -> bytes:
        self.writer.write(frame)
        return (await self.reply())[1]

    async def is_cut_off(self) -> bool:
        try:
            return await self.reader.read(1) == b""
        except ConnectionError:
            return True


async def turn_until(reached: Callable[[], bool]) -> None:
    """Let the loop turn, and stop at the very turn in which it is reached."""
    for _ in range(1_000_000):
        if reached():
            return
        await asyncio.sleep(0)
    raise AssertionError("never reached")


def frame(api_key: int, version: int, body: bytes = b"", correlation: int = 0) -> bytes:
    message = struct.pack(">hhih", api_key, version, correlation, 4) + b"test" + body
    return struct.pack(">i", len(message)) + message


def string(text: str) -> bytes:
    return struct.pack(">h", len(text)) + text.encode()


def metadata(topic: str, correlation: int = 0) -> bytes:
    return frame(METADATA, 4, struct.pack(">i", 1) + string(topic) + b"\x01", correlation)


def produce(topic: str, value: bytes, *, acks: int = 1, correlation: int = 0) -> bytes:
    batch = bytes(encode_batch([Record(0, 1_000, None, value)]))
    body = struct.pack(">hhi", -1, acks, 5_000) + struct.pack(">i", 1) + string(topic)
    body += struct.pack(">iii", 1, 0, len(batch)) + batch
    return frame(PRODUCE, 7, body, correlation)


def fetch(
    topic: str, offset: int, *, max_wait_ms: int = 0, min_bytes: int = 1, correlation: int = 0
) -> bytes:
    body = (
        struct.pack(">iiiib", -1, max_wait_ms, min_bytes, 1 << 20, 0) + struct.pack(">i", 1) + string(topic)
    )
    return frame(FETCH, 4, body + struct.pack(">iiqi", 1, 0, offset, 1 << 20), correlation)


def base_offset(reply: bytes, topic: str) -> int:
    error, offset = struct.unpack_from(">hq", reply, 4 + 2 + len(topic) + 4 + 4)
    assert error == 0
    return int(offset)


async def test_pipelined_replies_come_in_request_order(node: Node) -> None:
    client = await Client.connect(node)
    await client.ask(metadata("t"))
    # The first is a long poll that only the produce behind it can end; the replies still keep their order.
    client.writer.write(
        fetch("t", 0, max_wait_ms=30_000, correlation=1)
        + produce("t", b"x", correlation=2)
        + frame(API_VERSIONS, 0, correlation=3)
    )
    assert [(await client.reply())[0] for _ in range(3)] == [1, 2, 3]


async def test_frames_cut_at_every_byte_are_put_together(node: Node) -> None:
    client = await Client.connect(node)
    await client.ask(metadata("t"))
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
        await client.ask(metadata("t"))
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
    await neighbour.ask(metadata("t"))
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
        await client.ask(metadata("t"))
        polls = [fetch("t", 0, max_wait_ms=50, correlation=i) for i in range(10)]
        client.writer.write(b"".join(polls))
        assert [(await client.reply())[0] for _ in range(10)] == list(range(10))


async def test_frames_beyond_the_memory_bound_wait_for_their_turn(tmp_path: Path) -> None:
    async with running(tmp_path, queued_max_request_bytes="100000") as node:
        slow, quick = await Client.connect(node), await Client.connect(node)
        await quick.ask(metadata("t"))
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
        await first.ask(metadata("t"))
        assert await (await Client.connect(node)).is_cut_off()
        assert base_offset(await first.ask(produce("t", b"x")), "t") == 0


async def test_acks_zero_has_no_reply_but_an_error_ends_the_connection(node: Node) -> None:
    client = await Client.connect(node)
    await client.ask(metadata("t"))
    client.writer.write(produce("t", b"x", acks=0) + produce("t", b"y", correlation=7))
    number, reply = await client.reply()
    assert (number, base_offset(reply, "t")) == (7, 1)
    client.writer.write(produce("unknown-topic", b"x", acks=0))
    assert await client.is_cut_off()


async def test_a_stop_answers_the_writes_under_way(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        client = await Client.connect(node)
        await client.ask(metadata("t"))
        client.writer.write(b"".join(produce("t", b"x", acks=-1, correlation=i) for i in range(20)))
        await turn_until(lambda: node.partitions.find("t", 0).log.end_offset == 20)
        await node.stop()
        assert [(await client.reply())[0] for _ in range(20)] == list(range(20))
        assert await client.is_cut_off()
