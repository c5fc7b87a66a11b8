"""Batches that must be decompressed: how many bytes at once, and in which order."""

import asyncio
import struct
import threading
from pathlib import Path
from typing import Any

from kio.index import load_response_schema
from kio.serial import entity_reader
from tests.unit.broker.raw_client import (
    Client,
    create_topic,
    frame,
    produce_many,
    produced,
    running,
    string,
    until,
)

from penstock.broker.node import Node
from penstock.broker.partition.produced_batch import DecompressionBudget
from penstock.protocol.compression import Codec
from penstock.protocol.errors import ErrorCode
from penstock.protocol.record_batch import Record, encode_batch

_MIB = 1 << 20


class Takers:
    """Who asks for memory, and who has been given some, in order."""

    def __init__(self, budget: DecompressionBudget) -> None:
        self._budget = budget
        self.granted: list[str] = []

    async def ask(self, owner: str, size: int) -> "asyncio.Task[None]":
        async def take() -> None:
            await self._budget.take(owner, size)
            self.granted.append(owner)

        task = asyncio.create_task(take())
        await asyncio.sleep(0)
        return task

    async def done(self, owner: str, size: int) -> None:
        self._budget.give_back(owner, size)
        await asyncio.sleep(0)


async def test_owners_that_wait_take_turns() -> None:
    takers = Takers(DecompressionBudget(100, 100))
    for owner in "aaabbc":
        await takers.ask(owner, 100)
    for _ in range(6):
        await takers.done(takers.granted[-1], 100)
    assert "".join(takers.granted) == "aabcab"


async def test_an_owner_has_its_own_bound() -> None:
    budget = DecompressionBudget(100, 30)
    takers = Takers(budget)
    for owner in ("a", "a", "a", "b"):
        await takers.ask(owner, 20)
    assert takers.granted == ["a", "b"]
    await takers.done("a", 20)
    assert takers.granted == ["a", "b", "a"]
    assert budget.bytes_in_use == 40


async def test_a_large_one_is_not_overtaken_for_ever_and_one_always_fits() -> None:
    budget = DecompressionBudget(100, 1000)
    takers = Takers(budget)
    await takers.ask("small", 60)
    await takers.ask("huge", 500)
    await takers.ask("small", 10)
    assert takers.granted == ["small"]
    await takers.done("small", 60)
    assert takers.granted == ["small", "huge"]
    await takers.done("huge", 500)
    await takers.done("small", 10)
    assert budget.bytes_in_use == budget.waiting_count == 0


async def test_as_many_as_fit_go_on_at_once() -> None:
    budget = DecompressionBudget(100, 100)
    takers = Takers(budget)
    await takers.ask("big", 100)
    for _ in range(7):
        await takers.ask("small", 20)
    await takers.done("big", 100)
    assert takers.granted == ["big", *["small"] * 5]


async def test_one_that_gives_up_holds_nothing() -> None:
    budget = DecompressionBudget(100, 100)
    takers = Takers(budget)
    await takers.ask("a", 100)
    waiting = await takers.ask("b", 100)
    waiting.cancel()
    await asyncio.sleep(0)
    await takers.done("a", 100)
    assert budget.bytes_in_use == budget.waiting_count == 0
    # Given its memory in the very moment in which it gives up.
    await takers.ask("a", 100)
    waiting = await takers.ask("b", 100)
    budget.give_back("a", 100)
    waiting.cancel()
    await asyncio.sleep(0)
    assert budget.bytes_in_use == 0


# -- on a node ---------------------------------------------------------------------------------------------


class Gate:
    """Threads that unfold batches wait until the test lets them."""

    def __init__(self, node: Node) -> None:
        self._opened = threading.Event()
        self._lock = threading.Lock()
        self.under_way = self.most_under_way = 0
        real = node.preparer.prepare

        def prepare(*args: Any) -> Any:
            with self._lock:
                self.under_way += 1
                self.most_under_way = max(self.most_under_way, self.under_way)
            assert self._opened.wait(60)
            try:
                return real(*args)
            finally:
                with self._lock:
                    self.under_way -= 1

        node.preparer.prepare = prepare  # type: ignore[method-assign]

    def open(self) -> None:
        self._opened.set()


def _bomb(size: int, codec: Codec = Codec.ZSTD, key: bytes | None = b"k") -> bytes:
    return bytes(encode_batch([Record(0, 1_000, key, bytes(size))], codec=codec))


def _frame(batch: bytes, acks: int = -1) -> bytes:
    return produce_many([("t", [(0, batch)])], acks=acks)


async def test_bombs_wait_for_each_other(tmp_path: Path) -> None:
    settings = {"penstock_decompress_inflight_max_bytes": str(2 * _MIB + 2000)}
    async with running(tmp_path, **settings) as node:
        await create_topic(node, "t", cleanup_policy="compact")
        gate = Gate(node)
        clients = [await Client.connect(node) for _ in range(6)]
        for client in clients:
            client.writer.write(_frame(_bomb(_MIB)) * 3)
        await until(lambda: node.preparer.budget.waiting_count == 16)
        assert node.preparer.budget.bytes_in_use <= 2 * _MIB + 2000
        gate.open()
        for client in clients:
            for _ in range(3):
                assert produced((await client.reply())[1])[0].error is ErrorCode.none
        assert gate.most_under_way == 2
        assert node.preparer.budget.bytes_in_use == node.preparer.budget.waiting_count == 0
        assert node.partitions.find("t", 0).log.end_offset == 18


async def test_a_bomb_beyond_the_bound_is_refused_at_once_whatever_waits(tmp_path: Path) -> None:
    settings = {"penstock_decompress_max_bytes": str(_MIB)}
    async with running(tmp_path, **settings) as node:
        await create_topic(node, "t", cleanup_policy="compact")
        client = await Client.connect(node)
        for codec in (Codec.GZIP, Codec.SNAPPY, Codec.LZ4, Codec.ZSTD):
            (result,) = produced(await client.ask(_frame(_bomb(5 * _MIB, codec))))
            assert result.error is ErrorCode.invalid_record
        assert (await client.produce("t", b"x", key=b"k", acks=-1)).offset == 0


async def test_what_waits_for_a_client_that_has_gone_is_given_up(tmp_path: Path) -> None:
    settings = {"penstock_decompress_inflight_max_bytes": "1024"}
    async with running(tmp_path, **settings) as node:
        await create_topic(node, "t", cleanup_policy="compact")
        gate = Gate(node)
        first, gone, silent = [await Client.connect(node) for _ in range(3)]
        first.writer.write(_frame(_bomb(_MIB)))
        await until(lambda: gate.under_way == 1)
        gone.writer.write(_frame(_bomb(_MIB)))
        await until(lambda: node.preparer.budget.waiting_count == 1)
        silent.writer.write(_frame(_bomb(_MIB), acks=0))
        await until(lambda: node.preparer.budget.waiting_count == 2)
        for client in (gone, silent):
            client.writer.close()
        await until(lambda: len(node.server.connections) == 1)
        gate.open()
        assert produced((await first.reply())[1])[0].offset == 0
        # One that waits for no answer may leave as soon as it has sent its records.
        await until(lambda: node.partitions.find("t", 0).log.end_offset == 2)
        assert node.preparer.budget.bytes_in_use == node.preparer.budget.waiting_count == 0


async def test_what_would_be_stored_unfolded_and_is_too_large_is_refused(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        await create_topic(node, "t", compression_type="uncompressed", max_message_bytes="100000")
        client = await Client.connect(node)
        (result,) = produced(await client.ask(_frame(_bomb(_MIB))))
        assert result.error is ErrorCode.message_too_large
        (result,) = produced(await client.ask(_frame(_bomb(90_000))))
        assert result.error is ErrorCode.none


async def test_a_batch_that_holds_more_than_it_announces_is_unfolded_all_the_same(tmp_path: Path) -> None:
    import zstandard

    from penstock.protocol.record_batch import BATCH_HEADER_BYTES, open_batch, pack_batch

    async with running(tmp_path) as node:
        await create_topic(node, "t", cleanup_policy="compact")
        header, body = open_batch(_bomb(300_000, Codec.NONE), _MIB)
        frames = zstandard.compress(bytes(body[:100])) + zstandard.compress(bytes(body[100:]))
        batch = pack_batch(header._replace(attributes=header.attributes | Codec.ZSTD), frames)
        assert len(batch) < BATCH_HEADER_BYTES + 1000
        client = await Client.connect(node)
        (result,) = produced(await client.ask(_frame(bytes(batch))))
        assert result.error is ErrorCode.none
        assert node.preparer.budget.bytes_in_use == 0


# -- searches for a timestamp ------------------------------------------------------------------------------


def _search(timestamp: int, correlation: int = 0) -> bytes:
    """ListOffsets v2 of partition 0 of `t`."""
    place = struct.pack(">ib", -1, 0) + struct.pack(">i", 1) + string("t")
    return frame(2, 2, place + struct.pack(">iiq", 1, 0, timestamp), correlation)


def _found(reply: bytes) -> tuple[ErrorCode, int]:
    response, _ = entity_reader(load_response_schema(2, 2))(reply, 0)
    (partition,) = response.topics[0].partitions
    return partition.error_code, partition.offset


async def test_searches_that_unfold_much_wait_for_each_other(tmp_path: Path) -> None:
    """Also those in topics whose batches were never looked into."""
    async with running(tmp_path) as node:
        await create_topic(node, "t")
        clients = [await Client.connect(node) for _ in range(4)]
        assert produced(await clients[0].ask(_frame(_bomb(2 * _MIB))))[0].error is ErrorCode.none
        log = node.partitions.find("t", 0).log
        gate, most = threading.Event(), 0
        real = log.offset_for_timestamp

        def search(timestamp: int, bytes_max: int | None = None) -> Any:
            nonlocal most
            most = max(most, node.preparer.budget.bytes_in_use)
            assert gate.wait(60)
            return real(timestamp, bytes_max)

        log.offset_for_timestamp = search  # type: ignore[method-assign]
        for client in clients:
            client.writer.write(b"".join(_search(1_000, number) for number in range(30)))
        # 16 of each connection may look for a small batch, and 64 on the node.
        await until(lambda: node.preparer.budget.waiting_count == 4 * 30 - 64)
        gone = clients.pop()
        gone.writer.close()
        await until(lambda: len(node.server.connections) == 3)
        gate.set()
        for client in clients:
            for number in range(30):
                correlation, reply = await client.reply()
                assert (correlation, _found(reply)) == (number, (ErrorCode.none, 0))
        await until(lambda: not node.preparer.budget.bytes_in_use)
        assert node.preparer.budget.waiting_count == 0
        assert most <= 64 * _MIB
