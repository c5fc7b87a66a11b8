"""Produce on the wire: what is acknowledged, in which order, and which errors clients get."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.broker.partition.flush_gate import FlushGate
from tests.unit.broker.raw_client import (
    Client,
    batch_of,
    create_topic,
    delete_topic,
    fetch_v7,
    produce,
    produce_many,
    produced,
    running,
    set_config,
    until,
)
from tests.unit.broker.raw_client import fetched as _fetched

from penstock.broker.node import Node
from penstock.protocol.errors import ErrorCode
from penstock.protocol.record_batch import decode_records, iter_batches


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with running(tmp_path) as node:
        yield node


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[FlushGate]:
    gate = FlushGate(monkeypatch)
    yield gate
    gate.open()


class Decoding:
    """Threads that decode batches wait until the test lets them."""

    def __init__(self, node: Node) -> None:
        self.may_go_on = threading.Event()
        self.begun = 0
        real = node.preparer.prepare

        def prepare(*args: Any) -> Any:
            self.begun += 1
            assert self.may_go_on.wait(60)
            return real(*args)

        node.preparer.prepare = prepare  # type: ignore[method-assign]


def values(node: Node, topic: str) -> list[bytes | None]:
    log = node.partitions.find(topic, 0).log
    piece = log.read(0, 1 << 20, log.end)
    return [
        record.value for _, batch in iter_batches(piece.data) for record in decode_records(batch, 1 << 20)
    ]


async def test_acks_all_waits_for_the_sync_and_acks_one_does_not(node: Node, gate: FlushGate) -> None:
    await create_topic(node, "t")
    one, everyone = await Client.connect(node), await Client.connect(node)
    gate.close()
    everyone.writer.write(produce("t", b"a", acks=-1))
    await until(lambda: gate.begun)
    assert (await one.produce("t", b"b", acks=1)).offset == 1
    assert node.partitions.find("t", 0).high_watermark == 0
    gate.open()
    assert produced((await everyone.reply())[1])[0].offset == 0
    await until(lambda: node.partitions.find("t", 0).high_watermark == 2)


@pytest.mark.parametrize(("flush", "readable_at_once"), [("ack", False), ("interval", True), ("never", True)])
async def test_what_acks_one_has_acknowledged_is_read_once_it_is_synced_or_at_once(
    node: Node, gate: FlushGate, flush: str, readable_at_once: bool
) -> None:
    """Under flush policy ack no consumer sees what a power cut could take back; the others do as Apache Kafka."""
    await create_topic(node, "t", penstock_flush=flush)
    client = await Client.connect(node)
    gate.close()
    assert (await client.produce("t", b"a", acks=1)).error is ErrorCode.none
    fetched = (await client.fetch([("t", 0, 0)])).one()
    assert (bool(fetched.records), fetched.high_watermark) == (readable_at_once, int(readable_at_once))
    waiting = await Client.connect(node)
    waiting.writer.write(fetch_v7([("t", 0, 0)], max_wait_ms=60_000))
    gate.open()
    assert _fetched((await waiting.reply())[1]).one().records, "a reader that waits gets it with the sync"


async def test_what_is_appended_while_a_sync_runs_waits_for_the_next(node: Node, gate: FlushGate) -> None:
    await create_topic(node, "t")
    first, second = await Client.connect(node), await Client.connect(node)
    partition = node.partitions.find("t", 0)
    gate.close()
    first.writer.write(produce("t", b"a", acks=-1))
    await until(lambda: gate.begun == 1)
    second.writer.write(produce("t", b"b", acks=-1))
    await until(lambda: partition.log.end_offset == 2)
    assert partition.log.synced.offset == 0
    gate.open()
    assert produced((await first.reply())[1])[0].offset == 0
    assert produced((await second.reply())[1])[0].offset == 1
    assert partition.log.synced.offset == 2


async def test_each_partition_of_a_request_is_answered_for_itself(node: Node, gate: FlushGate) -> None:
    await create_topic(node, "slow")
    await create_topic(node, "quick", penstock_flush="never")
    client = await Client.connect(node)
    gate.close()
    damaged = batch_of(b"x")[:-1] + b"?"
    client.writer.write(
        produce_many(
            [
                ("slow", [(0, batch_of(b"a")), (7, batch_of(b"b"))]),
                ("quick", [(0, batch_of(b"c")), (0, damaged), (0, batch_of(b"d"))]),
                ("unknown", [(0, batch_of(b"e"))]),
            ],
            acks=-1,
        )
    )
    await until(lambda: gate.begun)
    gate.open()
    assert [(r.topic, r.partition, r.error.name, r.offset) for r in produced((await client.reply())[1])] == [
        ("slow", 0, "none", 0),
        ("slow", 7, "unknown_topic_or_partition", -1),
        ("quick", 0, "none", 0),
        ("quick", 0, "corrupt_message", -1),
        ("quick", 0, "none", 1),
        ("unknown", 0, "unknown_topic_or_partition", -1),
    ]


async def test_a_request_that_times_out_is_answered_once_and_may_have_happened(
    node: Node, gate: FlushGate
) -> None:
    await create_topic(node, "t")
    client = await Client.connect(node)
    gate.close()
    client.writer.write(produce("t", b"a", acks=-1, timeout_ms=1, correlation=1))
    number, reply = await client.reply()
    assert (number, produced(reply)[0].error) == (1, ErrorCode.request_timed_out)
    gate.open()
    assert (await client.produce("t", b"b", acks=-1, correlation=2)).offset == 1


@pytest.mark.parametrize("timeout_ms", [0, -1])
async def test_without_a_timeout_requests_still_end(
    node: Node, gate: FlushGate, monkeypatch: pytest.MonkeyPatch, timeout_ms: int
) -> None:
    monkeypatch.setattr("penstock.broker.handlers.produce._TIMEOUT_MS_DEFAULT", 1)
    await create_topic(node, "t")
    client = await Client.connect(node)
    gate.close()
    client.writer.write(produce("t", b"a", acks=-1, timeout_ms=timeout_ms))
    assert produced((await client.reply())[1])[0].error is ErrorCode.request_timed_out


async def test_what_has_timed_out_is_not_kept_while_the_disk_is_stuck(node: Node, gate: FlushGate) -> None:
    await create_topic(node, "t")
    patient, hasty = await Client.connect(node), await Client.connect(node)
    partition = node.partitions.find("t", 0)
    gate.close()
    patient.writer.write(produce("t", b"a", acks=-1))
    await until(lambda: partition.log.end_offset == 1)
    asking = asyncio.create_task(partition.committed(0))
    for _ in range(20):
        hasty.writer.write(produce("t", b"b", acks=-1, timeout_ms=1))
        assert produced((await hasty.reply())[1])[0].error is ErrorCode.request_timed_out
        assert len(partition._commit_waiters) <= 4
    asking.cancel()
    await asyncio.wait([asking])
    assert len(partition._commit_waiters) <= 2
    gate.open()
    assert produced((await patient.reply())[1])[0].offset == 0, "who still waits is answered"
    await until(lambda: partition.high_watermark == 21)
    assert (len(partition._commit_waiters), partition._given_up) == (0, set())


async def test_a_decoded_batch_that_comes_after_the_timeout_is_not_answered_again(node: Node) -> None:
    await create_topic(node, "t", cleanup_policy="compact")
    decoding = Decoding(node)
    client = await Client.connect(node)
    client.writer.write(produce("t", b"a", key=b"k", acks=-1, timeout_ms=1, correlation=1))
    number, reply = await client.reply()
    assert (number, produced(reply)[0].error) == (1, ErrorCode.request_timed_out)
    decoding.may_go_on.set()
    await until(lambda: node.partitions.find("t", 0).high_watermark == 1)
    client.writer.write(produce("t", b"b", key=b"k", acks=-1, correlation=2))
    assert (await client.reply())[0] == 2
    assert sum(node.metrics.requests[0].counts) == 2


async def test_pipelined_batches_that_are_decoded_keep_their_order(node: Node) -> None:
    await create_topic(node, "t", cleanup_policy="compact")
    client = await Client.connect(node)
    sizes = [500_000 if place % 3 == 0 else 10 for place in range(20)]  # the slow ones to decode come first
    requests = [
        produce("t", b"%d" % place + bytes(size), key=b"k", sequence=place, acks=-1, correlation=place)
        for place, size in enumerate(sizes)
    ]
    client.writer.write(b"".join(requests))
    replies = [await client.reply() for _ in sizes]
    assert [(number, produced(reply)[0].offset) for number, reply in replies] == [(i, i) for i in range(20)]


async def test_batches_never_overtake_those_that_are_still_decoded(node: Node) -> None:
    await create_topic(node, "t", cleanup_policy="compact")
    decoding = Decoding(node)
    client = await Client.connect(node)
    client.writer.write(produce("t", b"a", key=b"k", sequence=0, acks=-1))
    await until(lambda: decoding.begun == 1)
    await set_config(node, "t", "cleanup.policy", "delete")
    client.writer.write(produce("t", b"b", sequence=1, acks=-1))
    await until(lambda: decoding.begun == 2)
    decoding.may_go_on.set()
    replies = [produced((await client.reply())[1])[0] for _ in range(2)]
    assert [(r.error.name, r.offset) for r in replies] == [("none", 0), ("none", 1)]
    assert values(node, "t") == [b"a", b"b"]
    # With nothing left to wait for, batches go the short way again.
    await client.produce("t", b"c", sequence=2)
    assert decoding.begun == 2


async def test_a_topic_deleted_while_its_batch_is_decoded_takes_nothing(node: Node, tmp_path: Path) -> None:
    await create_topic(node, "t", cleanup_policy="compact", segment_bytes="100000")
    client = await Client.connect(node)
    assert (await client.produce("t", bytes(90_000), key=b"k", acks=1)).offset == 0
    decoding = Decoding(node)
    client.writer.write(produce("t", bytes(90_000), key=b"k", acks=1))  # one that has to start a segment
    await until(lambda: decoding.begun == 1)
    await delete_topic(node, "t")
    decoding.may_go_on.set()
    assert produced((await client.reply())[1])[0].error is ErrorCode.unknown_topic_or_partition
    await until(lambda: not list((tmp_path / "data").glob("t-0*")))


async def test_a_topic_deleted_while_it_is_synced_tells_those_who_wait(
    node: Node, gate: FlushGate, tmp_path: Path
) -> None:
    await create_topic(node, "t")
    client = await Client.connect(node)
    gate.close(tmp_path / "data" / "t-0")
    client.writer.write(produce("t", b"x", acks=-1))
    await until(lambda: gate.begun)
    deleting = asyncio.create_task(delete_topic(node, "t"))
    assert produced((await client.reply())[1])[0].error is ErrorCode.not_leader_or_follower
    assert not deleting.done(), "the files are not moved while they are synced"
    gate.open()
    await deleting
    await create_topic(node, "t")
    assert (await client.produce("t", b"x", acks=-1)).offset == 0


async def test_a_batch_too_large_to_be_looked_into_is_refused_before_it_is_copied(node: Node) -> None:
    await create_topic(node, "t", cleanup_policy="compact", max_message_bytes="1000")
    decoding = Decoding(node)
    client = await Client.connect(node)
    assert (await client.produce("t", bytes(2000), key=b"k")).error is ErrorCode.message_too_large
    assert decoding.begun == 0


async def test_batches_that_wait_to_be_decoded_count_against_the_bound(tmp_path: Path) -> None:
    async with running(tmp_path, queued_max_request_bytes="300000") as node:
        await create_topic(node, "t", cleanup_policy="compact")
        decoding = Decoding(node)
        clients = [await Client.connect(node) for _ in range(4)]
        for client in clients:
            client.writer.write(b"".join(produce("t", bytes(20_000), key=b"k", acks=-1) for _ in range(20)))
        await until(lambda: len(node.server._waiting_for_memory) == 4)
        assert node.server.buffers.bytes_in_use < 300_000 + 4 * 2 * 40_000
        decoding.may_go_on.set()
        for client in clients:
            for _ in range(20):
                assert produced((await client.reply())[1])[0].error is ErrorCode.none
        assert node.server.buffers.bytes_in_use == 0
        assert node.partitions.find("t", 0).log.end_offset == 80


async def test_one_client_cannot_have_more_decoded_than_the_bound(tmp_path: Path) -> None:
    async with running(tmp_path, queued_max_request_bytes="50000") as node:
        await create_topic(node, "t", cleanup_policy="compact")
        decoding = Decoding(node)
        client = await Client.connect(node)
        client.writer.write(b"".join(produce("t", bytes(20_000), key=b"k", acks=-1) for _ in range(10)))
        await until(lambda: node.server._waiting_for_memory)
        assert node.server.buffers.bytes_in_use < 50_000 + 21_000
        decoding.may_go_on.set()
        offsets = [produced((await client.reply())[1])[0].offset for _ in range(10)]
        assert offsets == list(range(10))


async def test_a_mistake_of_ours_while_decoding_cuts_off_only_its_client(node: Node) -> None:
    await create_topic(node, "t", cleanup_policy="compact")
    client, other = await Client.connect(node), await Client.connect(node)
    real = node.preparer.prepare

    def fail(*_: Any) -> Any:
        node.preparer.prepare = real  # type: ignore[method-assign]
        raise AssertionError("a mistake")

    node.preparer.prepare = fail  # type: ignore[method-assign]
    client.writer.write(produce("t", b"x", key=b"k", acks=-1))
    assert await client.is_cut_off()
    assert node.metrics.internal_errors == 1
    assert (await other.produce("t", b"x", key=b"k", acks=-1)).offset == 0


async def test_an_easier_flush_policy_lets_those_go_who_wait_for_a_sync(node: Node, gate: FlushGate) -> None:
    await create_topic(node, "t")
    client = await Client.connect(node)
    partition = node.partitions.find("t", 0)
    gate.close()
    client.writer.write(produce("t", b"a", acks=-1))
    await until(lambda: gate.begun)
    _configure(partition, "never")
    assert produced((await client.reply())[1])[0].offset == 0
    assert (await client.produce("t", b"b", acks=-1)).offset == 1
    # And back: what was let through meanwhile is synced without anyone asking for it again.
    _configure(partition, "ack")
    client.writer.write(produce("t", b"c", acks=-1))
    await until(lambda: partition.log.end_offset == 3)
    assert partition.high_watermark == 2
    gate.open()
    assert produced((await client.reply())[1])[0].offset == 2
    assert partition.log.synced.offset == 3


async def test_a_stricter_flush_policy_makes_good_what_is_not_synced(node: Node) -> None:
    await create_topic(node, "t", penstock_flush="never")
    client = await Client.connect(node)
    assert (await client.produce("t", b"a", acks=-1)).offset == 0
    partition = node.partitions.find("t", 0)
    assert partition.log.synced.offset == 0
    await set_config(node, "t", "penstock.flush", "ack")
    await until(lambda: partition.log.synced.offset == 1)


def _configure(partition: Any, flush: str) -> None:

    partition.log.configure(partition.log.config._replace(flush=flush))
    partition.configured()


async def test_a_repeat_is_acknowledged_only_once_the_first_is_safe(node: Node, gate: FlushGate) -> None:
    await create_topic(node, "t")
    first, again = await Client.connect(node), await Client.connect(node)
    gate.close()
    first.writer.write(produce("t", b"a", sequence=0, acks=-1))
    await until(lambda: gate.begun)
    again.writer.write(produce("t", b"a", sequence=0, acks=-1, timeout_ms=50))
    assert produced((await again.reply())[1])[0].error is ErrorCode.request_timed_out
    gate.open()
    assert produced((await first.reply())[1])[0].offset == 0
    assert (await again.produce("t", b"a", sequence=0, acks=-1)).offset == 0
    assert node.partitions.find("t", 0).log.end_offset == 1
