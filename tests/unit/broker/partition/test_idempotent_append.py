"""A planned append that is repeated, by any node and any number of times, is in the partition once."""

import asyncio
import gc
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from tests.unit.broker.raw_client import create_topic, delete_topic, running, set_config, until
from tests.unit.broker.three_nodes import Trio

from penstock.broker.node import Node
from penstock.broker.partition.idempotent_append import PlannedAppends
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.record_batch import Record, decode_records, encode_batch, iter_batches

TWO = (Record(0, 5, b"a", b"1"), Record(0, 6, b"b", b"2"))


def values(node: Node, topic: str = "t") -> list[bytes | None]:
    partition = node.partitions.find(topic, 0)
    data = partition.log.read(0, 1 << 20, partition.high).data if partition.high_watermark else b""
    return [record.value for _, batch in iter_batches(data) for record in decode_records(batch, 1 << 20)]


async def append(
    node: Node, sequence: int, records: tuple[Record, ...] = TWO, topic_id: UUID | None = None
) -> int:
    placed = [record._replace(offset=place) for place, record in enumerate(records)]
    batch = encode_batch(placed, producer_id=9, producer_epoch=0, base_sequence=sequence)
    topic_id = topic_id or node.image.topics["t"].id
    return await node.planned_appends().append("t", 0, batch, topic_id=topic_id)


@pytest.mark.parametrize("configs", [{}, {"cleanup_policy": "compact"}, {"compression_type": "lz4"}])
async def test_a_repeated_plan_is_there_once(tmp_path: Path, configs: dict[str, str]) -> None:
    async with running(tmp_path) as node:
        await create_topic(node, "t", **configs)
        assert await append(node, 0) == 0
        assert await append(node, 0) == 0
        assert await append(node, 2) == 2
        assert await append(node, 2) == 2
        assert values(node) == [b"1", b"2", b"1", b"2"]


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize(
    "change",
    [("max.message.bytes", "50"), ("cleanup.policy", "compact"), ("message.timestamp.before.max.ms", "1")],
)
async def test_a_plan_that_is_there_stays_so_whatever_the_topic_would_say_by_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remote: bool, change: tuple[str, str]
) -> None:
    async with running(tmp_path) as node:
        await create_topic(node, "t")
        keyless = (Record(0, 5, None, b"1"), Record(0, 6, None, b"2"))
        assert await append(node, 0, keyless) == 0
        await set_config(node, "t", *change)
        if remote:
            # As from another node: through the handler, on a connection to itself.
            monkeypatch.setattr(
                PlannedAppends,
                "_append_local",
                lambda appends, partition, batch: appends._append_remote(
                    node.node_id, partition.topic_id, partition.index, batch, "test"
                ),
            )
        assert await append(node, 0, keyless) == 0
        with pytest.raises(ApiError):
            await append(node, 2, keyless)
        assert values(node) == [b"1", b"2"]


async def test_what_will_never_be_there_is_said(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        await create_topic(node, "t", max_message_bytes="200")
        await append(node, 0)
        for code, sequence, other in (
            (ErrorCode.unknown_topic_or_partition, 0, {"topic_id": UUID(int=7)}),
            (ErrorCode.out_of_order_sequence_number, 7, {}),
            (ErrorCode.message_too_large, 2, {"records": (Record(0, 5, b"a", b"." * 300),)}),
        ):
            with pytest.raises(ApiError) as raised:
                await append(node, sequence, **other)
            assert raised.value.code is code
        assert values(node) == [b"1", b"2"]


async def test_a_refusal_that_nobody_waits_for_is_not_reported_as_an_error(tmp_path: Path) -> None:
    unhandled: list[dict[str, Any]] = []
    async with running(tmp_path) as node:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
        await create_topic(node, "t", cleanup_policy="compact")
        partition, gate = node.partitions.find("t", 0), asyncio.Event()
        earlier = asyncio.create_task(gate.wait())
        partition.begin_turn(earlier)
        waiting = asyncio.create_task(append(node, 7, topic_id=node.image.topics["t"].id))
        await until(lambda: partition.last_turn is not earlier)
        turn = partition.last_turn
        assert turn is not None
        waiting.cancel()
        await asyncio.wait([waiting])
        partition.is_leader = False
        gate.set()
        await asyncio.wait([turn])
        partition.is_leader = True
        del turn, waiting
        gc.collect()
        assert not unhandled


async def test_a_deleted_topic_ends_the_attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(tmp_path) as node:
        await create_topic(node, "t")

        async def unreachable(*_: Any) -> int:
            raise ConnectionError

        with monkeypatch.context() as patch:
            patch.setattr(PlannedAppends, "_append", unreachable)
            appending = asyncio.ensure_future(append(node, 0))
            await asyncio.sleep(0)
        await delete_topic(node, "t")
        await create_topic(node, "t")  # another one of the same name
        with pytest.raises(ApiError) as raised:
            await appending
        assert raised.value.code is ErrorCode.unknown_topic_or_partition
        assert values(node) == []


async def test_from_any_node_through_a_change_of_leaders(tmp_path: Path) -> None:
    trio = Trio(tmp_path)
    await trio.start()
    await trio.create_topic("t")
    leader = trio.leader("t")
    assert leader is not None
    others = [node for node in trio.nodes.values() if node is not leader]
    assert await append(others[0], 0) == 0
    assert await append(leader, 0) == 0
    await trio.kill(leader.node_id)
    # Both repeat the next plan while there is no leader, or a dead one.
    assert await asyncio.gather(*(append(node, 2) for node in others)) == [2, 2]
    await until(lambda: trio.leader("t"))
    found = trio.leader("t")
    assert found is not None
    assert values(found) == [b"1", b"2", b"1", b"2"]
    await trio.stop()
