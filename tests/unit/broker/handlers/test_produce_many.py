"""Produce requests of many partitions are handled in slices, and mean the same as those that are handled at once."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.broker.network.test_slices import Ticks
from tests.unit.broker.partition.flush_gate import FlushGate
from tests.unit.broker.raw_client import (
    API_VERSIONS,
    Client,
    batch_of,
    create_topic,
    frame,
    produce,
    produce_many,
    produced,
    running,
    turn_until,
    until,
)

from penstock.broker.handlers import produce as handler
from penstock.broker.node import Node
from penstock.protocol.errors import ErrorCode
from penstock.protocol.produce import PARTITIONS_AT_ONCE
from penstock.protocol.record_batch import decode_records, iter_batches

COUNT = PARTITIONS_AT_ONCE + 150


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with running(tmp_path, auto_create_topics_enable="false") as node:
        await create_topic(node, "t", partitions=2)
        yield node


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> Ticks:
    return Ticks(monkeypatch)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[FlushGate]:
    gate = FlushGate(monkeypatch)
    yield gate
    gate.open()


def many(topic: str = "t", *, key: bytes | None = None, count: int = COUNT, **options: Any) -> bytes:
    """Batches for the two partitions in turn."""
    parts = [(number % 2, batch_of(b"%d" % number, key)) for number in range(count)]
    return produce_many([(topic, parts)], **options)


def values(node: Node, topic: str = "t", partition: int = 0) -> list[bytes | None]:
    log = node.partitions.find(topic, partition).log
    piece = log.read(0, 1 << 20, log.end)
    return [
        record.value for _, batch in iter_batches(piece.data) for record in decode_records(batch, 1 << 20)
    ]


def of_partition(partition: int) -> list[bytes]:
    return [b"%d" % number for number in range(partition, COUNT, 2)]


async def nothing_is_held(node: Node) -> None:
    await until(lambda: not any(each._holds for each in node.server.connections))
    assert node.server.buffers.bytes_in_use == 0


@pytest.mark.parametrize("acks", [1, -1])
async def test_each_batch_is_appended_in_order_and_answered(node: Node, ticks: Ticks, acks: int) -> None:
    client = await Client.connect(node)
    results = produced(await client.ask(many(acks=acks)))
    assert [(each.partition, each.error, each.offset) for each in results] == [
        (number % 2, ErrorCode.none, number // 2) for number in range(COUNT)
    ]
    for partition in (0, 1):
        assert values(node, partition=partition) == of_partition(partition)
    await nothing_is_held(node)


async def test_as_many_as_are_handled_at_once_take_no_turns(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handler, "_handle_in_slices", None)
    client = await Client.connect(node)
    results = produced(await client.ask(many(count=PARTITIONS_AT_ONCE - 1)))
    assert {each.error for each in results} == {ErrorCode.none}


async def order_is_kept(node: Node) -> None:
    client = await Client.connect(node)
    client.writer.write(
        many(correlation=1)
        + produce("t", b"second", correlation=2)
        + many(correlation=3)
        + produce("t", b"last", correlation=4)
    )
    assert [(await client.reply())[0] for _ in range(4)] == [1, 2, 3, 4]
    assert values(node) == [*of_partition(0), b"second", *of_partition(0), b"last"]


async def test_requests_behind_it_are_appended_later(node: Node) -> None:
    await order_is_kept(node)


async def test_requests_behind_it_are_appended_later_if_it_takes_several_turns(
    node: Node, ticks: Ticks
) -> None:
    await order_is_kept(node)


async def test_a_neighbour_is_answered_meanwhile(node: Node, ticks: Ticks) -> None:
    client, neighbour = await Client.connect(node), await Client.connect(node)
    await neighbour.ask(frame(API_VERSIONS, 0))
    client.writer.write(many())
    await turn_until(lambda: bool(values(node)))
    await neighbour.ask(frame(API_VERSIONS, 0))
    assert len(values(node)) < COUNT // 2
    assert len(produced((await client.reply())[1])) == COUNT


async def test_errors_are_those_of_their_partitions(node: Node) -> None:
    client = await Client.connect(node)
    damaged = batch_of(b"x")[:-1] + b"?"
    parts = [(0, batch_of(b"a")), (7, batch_of(b"b")), (1, damaged)] * COUNT
    results = produced(await client.ask(produce_many([("t", parts), ("unknown", parts), ("t", parts[:1])])))
    names = ["none", "unknown_topic_or_partition", "corrupt_message"] * COUNT
    unknown = ["unknown_topic_or_partition"] * len(parts)
    assert [each.error.name for each in results] == [*names, *unknown, "none"]
    assert [each.topic for each in results] == ["t"] * len(parts) + ["unknown"] * len(parts) + ["t"]
    assert results[-1].offset == COUNT


async def test_a_batch_without_key_is_refused_by_a_compacted_topic(node: Node, ticks: Ticks) -> None:
    await create_topic(node, "c", partitions=2, cleanup_policy="compact")
    client = await Client.connect(node)
    parts = [(0, batch_of(b"%d" % number, b"k" if number % 3 else None)) for number in range(COUNT)]
    results = produced(await client.ask(produce_many([("c", parts)], acks=-1)))
    kept = [number for number in range(COUNT) if number % 3]
    assert [each.error is ErrorCode.none for each in results] == [bool(n % 3) for n in range(COUNT)]
    assert [each.offset for each in results if each.error is ErrorCode.none] == list(range(len(kept)))
    assert values(node, "c") == [b"%d" % number for number in kept]


async def test_acks_all_waits_until_everything_is_committed(node: Node, gate: FlushGate) -> None:
    client, other = await Client.connect(node), await Client.connect(node)
    gate.close()
    client.writer.write(many(acks=-1))
    await until(lambda: len(values(node)) == len(of_partition(0)) and gate.begun)
    await other.ask(frame(API_VERSIONS, 0))
    (connection,) = (each for each in node.server.connections if each.has_pending_replies)
    assert connection.has_pending_reply(0)
    gate.open()
    assert {each.error for each in produced((await client.reply())[1])} == {ErrorCode.none}


async def test_what_is_not_committed_in_time_is_answered_once(node: Node, gate: FlushGate) -> None:
    client = await Client.connect(node)
    gate.close()
    client.writer.write(many(acks=-1, timeout_ms=1, correlation=1))
    number, reply = await client.reply()
    assert number == 1
    assert {each.error for each in produced(reply)} == {ErrorCode.request_timed_out}
    assert all(not node.partitions.find("t", index)._commit_waiters for index in (0, 1))
    gate.open()
    client.writer.write(produce("t", b"last", acks=-1, correlation=2))
    assert (await client.reply())[0] == 2
    await nothing_is_held(node)


async def test_without_acks_it_is_done_for_a_client_that_has_gone(node: Node, ticks: Ticks) -> None:
    client = await Client.connect(node)
    client.writer.write(many(acks=0))
    await turn_until(lambda: bool(values(node)))
    client.writer.close()
    await until(lambda: len(values(node, partition=1)) == len(of_partition(1)))
    await until(lambda: not node.server.connections)
    assert node.server.buffers.bytes_in_use == 0


async def test_without_acks_an_error_closes_the_connection(node: Node) -> None:
    client = await Client.connect(node)
    parts = [(number % 3, batch_of(b"x")) for number in range(COUNT)]
    client.writer.write(produce_many([("t", parts)], acks=0))
    assert await client.is_cut_off()
    assert len(values(node, partition=1)) == len(of_partition(1)) * 2 // 3


async def test_the_rest_is_not_done_for_a_client_that_waits_and_has_gone(node: Node, ticks: Ticks) -> None:
    client = await Client.connect(node)
    client.writer.write(many(acks=1))
    await turn_until(lambda: bool(values(node)))
    client.writer.transport.abort()
    await until(lambda: not node.server.connections)
    assert len(values(node)) < len(of_partition(0))
    assert not node.server.slices.waiting
    assert node.server.buffers.bytes_in_use == 0


async def test_a_malformed_request_closes_the_connection(node: Node) -> None:
    client = await Client.connect(node)
    cut = many()[4:-1]
    client.writer.write(len(cut).to_bytes(4, "big") + cut)
    assert await client.is_cut_off()
    await until(lambda: not node.server.connections)
    assert node.server.buffers.bytes_in_use == 0


async def test_a_topic_that_the_client_may_not_write_is_refused(tmp_path: Path, ticks: Ticks) -> None:
    async with running(tmp_path, authorizer_class_name="StandardAuthorizer") as node:
        await create_topic(node, "t", partitions=2)
        client = await Client.connect(node)
        with ticks.most_in_a_turn() as turns:
            results = produced(await client.ask(many()))
        assert {each.error for each in results} == {ErrorCode.topic_authorization_failed}
        assert len(results) == COUNT
        assert len(turns) > COUNT / 20
        assert not values(node)
