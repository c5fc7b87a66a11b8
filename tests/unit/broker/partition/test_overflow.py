"""Overflow policies on the leader: what the reply says, what is kept, and that every dropped record is counted."""

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.unit.broker.partition.full_disks import Disk, MountedDisk
from tests.unit.broker.raw_client import (
    Client,
    Produced,
    create_topic,
    delete_topic,
    produce,
    produced,
    running,
    set_config,
    until,
)

from penstock.broker.node import Node
from penstock.broker.partition.partition import Partition
from penstock.protocol.errors import ErrorCode
from penstock.security.overflow import DropCounts, DroppedBy, DropReason

BOUND = 65536
VALUE = bytes(9000)
#: Batches of VALUE that fit within the bound.
FIT = BOUND // 9100
POLICIES = ("block", "reject", "drop-oldest", "drop-newest")
REFUSALS = {"block": ErrorCode.kafka_storage_error, "reject": ErrorCode.policy_violation}


@contextlib.asynccontextmanager
async def topic(tmp_path: Path, policy: str, **configs: str) -> AsyncIterator[tuple[Node, Client]]:
    async with running(tmp_path) as node:
        # The records are decades old.
        await create_topic(node, "t", penstock_overflow=policy, retention_ms="-1", **configs)
        yield node, await Client.connect(node)


def partition_of(node: Node, name: str = "t") -> Partition:
    return node.partitions.find(name, 0)


def drops(node: Node, name: str = "t") -> DropCounts:
    return node.overflow.drops.of(partition_of(node, name).topic_id, 0)


def kept(node: Node, name: str = "t") -> int:
    log = partition_of(node, name).log
    return log.end_offset - log.start_offset


async def fill(client: Client, count: int = FIT) -> None:
    for offset in range(count):
        assert (await client.produce("t", VALUE, acks=-1, sequence=offset)).offset == offset


async def ask(client: Client, frame: bytes) -> tuple[Produced, int]:
    """Returns the result, and the throttle time that the response names."""
    reply = await client.ask(frame)
    return produced(reply)[0], struct.unpack(">i", reply[-4:])[0]


async def test_block_holds_the_producer_until_there_is_room(tmp_path: Path) -> None:
    async with topic(tmp_path, "block", penstock_overflow_bytes=str(BOUND)) as (node, client):
        await fill(client)
        for _ in range(2):
            refused, throttle_ms = await ask(client, produce("t", VALUE, sequence=FIT))
            assert (refused.error, refused.offset) == (ErrorCode.kafka_storage_error, -1)
            assert 0 < throttle_ms <= 500
        assert kept(node) == FIT
        await set_config(node, "t", "penstock.overflow.bytes", str(4 * BOUND))
        taken, throttle_ms = await ask(client, produce("t", VALUE, sequence=FIT))
        assert (taken.error, taken.offset, throttle_ms) == (ErrorCode.none, FIT, 0)
        assert not drops(node)


async def test_what_is_sent_behind_a_batch_that_has_to_wait_waits_too(tmp_path: Path) -> None:
    async with topic(tmp_path, "block", penstock_overflow_bytes=str(BOUND)) as (node, client):
        await fill(client)
        assert (await client.produce("t", VALUE, sequence=FIT)).error is ErrorCode.kafka_storage_error
        small = await client.produce("t", b"small", sequence=FIT + 1)
        assert small.error is ErrorCode.kafka_storage_error, "it would overtake, and the first would be lost"
        assert kept(node) == FIT


async def test_reject_is_final_and_the_producer_may_go_on(tmp_path: Path) -> None:
    async with topic(tmp_path, "reject", penstock_overflow_records="3") as (node, client):
        await fill(client, 3)
        refused, throttle_ms = await ask(client, produce("t", VALUE, sequence=3))
        assert (refused.error, throttle_ms) == (ErrorCode.policy_violation, 0)
        await set_config(node, "t", "penstock.overflow.records", "4")
        assert (await client.produce("t", VALUE, sequence=4)).offset == 3
        assert not drops(node)
        assert partition_of(node).traffic.refused == {("reject", "records"): 1}


async def test_drop_newest_answers_without_an_offset_and_counts_once(tmp_path: Path) -> None:
    async with topic(tmp_path, "drop-newest", penstock_overflow_records="3") as (node, client):
        await fill(client, 3)
        for _ in range(3):  # retries of the same batch
            dropped = await client.produce("t", VALUE, sequence=3)
            assert (dropped.error, dropped.offset) == (ErrorCode.none, -1)
        assert (await client.produce("t", VALUE, acks=-1, sequence=4)).offset == -1
        assert (await client.produce("t", VALUE)).offset == -1, "without idempotence, too"
        assert drops(node) == {(DroppedBy.DROP_NEWEST, DropReason.RECORDS): 3}
        await set_config(node, "t", "penstock.overflow.records", "-1")
        assert (await client.produce("t", VALUE, sequence=3)).offset == -1, "a late retry stays dropped"
        assert (await client.produce("t", VALUE, sequence=5)).offset == 3
        assert kept(node) + drops(node).total() == 7


async def test_drop_newest_refuses_what_would_be_refused_with_room(tmp_path: Path) -> None:
    async with topic(tmp_path, "drop-newest", penstock_overflow_records="1") as (node, client):
        await fill(client, 1)
        assert (await client.produce("t", VALUE, sequence=1)).offset == -1
        damaged = bytearray(produce("t", VALUE, sequence=2))
        damaged[-1] ^= 1
        assert (await ask(client, bytes(damaged)))[0].error is ErrorCode.corrupt_message
        old = await client.produce("t", VALUE, sequence=2**31 - 5)
        assert old.error is ErrorCode.out_of_order_sequence_number
        assert drops(node).total() == 1


@pytest.mark.parametrize("policy", POLICIES)
async def test_a_retry_of_what_is_stored_gets_its_offset_although_there_is_no_room(
    tmp_path: Path, policy: str
) -> None:
    async with topic(tmp_path, policy, penstock_overflow_bytes=str(BOUND)) as (node, client):
        await fill(client)
        assert (await client.produce("t", VALUE, sequence=FIT - 1)).offset == FIT - 1
        assert kept(node) == FIT
        assert not drops(node)


async def test_drop_oldest_keeps_the_newest_records_to_the_very_one(tmp_path: Path) -> None:
    async with topic(tmp_path, "drop-oldest", penstock_overflow_records="10") as (node, client):
        await fill(client, 25)
        await until(lambda: kept(node) == 10)
        assert drops(node) == {(DroppedBy.DROP_OLDEST, DropReason.RECORDS): 15}
        answer = (await client.fetch([("t", 0, 3)])).one()
        assert answer.error_code is ErrorCode.offset_out_of_range
        assert answer.log_start_offset in (15, -1)
        await set_config(node, "t", "penstock.overflow.records", "4")
        await until(lambda: kept(node) == 4)
        assert kept(node) + drops(node).total() == 25


async def test_drop_oldest_stays_within_its_bytes_on_the_disk(tmp_path: Path) -> None:
    async with topic(tmp_path, "drop-oldest", penstock_overflow_bytes=str(BOUND)) as (node, client):
        await fill(client, 60)
        log = partition_of(node).log
        await until(lambda: log.size_bytes <= BOUND and kept(node) + drops(node).total() == 60)
        assert log.size_bytes > BOUND * 6 // 8
        assert {*drops(node)} == {(DroppedBy.DROP_OLDEST, DropReason.BYTES)}
        await until(lambda: not [*log.directory.glob("*.deleted")])


@pytest.mark.parametrize("policy", ["block", "reject", "drop-oldest"])
async def test_a_batch_larger_than_the_bound_is_refused_for_good(tmp_path: Path, policy: str) -> None:
    async with topic(tmp_path, policy, penstock_overflow_bytes=str(BOUND)) as (_, client):
        assert (await client.produce("t", bytes(BOUND))).error is ErrorCode.message_too_large


async def test_batches_that_are_inspected_have_the_same_policies(tmp_path: Path) -> None:
    settings = {"penstock_overflow_records": "2", "compression_type": "gzip"}
    async with topic(tmp_path, "drop-newest", **settings) as (node, client):
        await fill(client, 2)
        assert (await client.produce("t", VALUE, sequence=2)).offset == -1
        assert (await client.produce("t", VALUE, sequence=2)).offset == -1
        assert drops(node).total() == 1


async def test_a_topic_without_any_of_it_has_no_rules(tmp_path: Path) -> None:
    async with topic(tmp_path, "block") as (node, _):
        assert partition_of(node).overflow is None
        await set_config(node, "t", "penstock.overflow.records", "2")
        assert partition_of(node).overflow is not None
        await set_config(node, "t", "penstock.overflow.records", "-1")
        assert partition_of(node).overflow is None


# -- counts that last ------------------------------------------------------------------------------------


async def test_counts_survive_a_restart_and_end_with_their_topic(tmp_path: Path) -> None:
    async with topic(tmp_path, "drop-newest", penstock_overflow_records="1") as (node, client):
        await fill(client, 1)
        assert (await client.produce("t", VALUE, sequence=1)).offset == -1
    async with running(tmp_path) as node:
        assert drops(node) == {(DroppedBy.DROP_NEWEST, DropReason.RECORDS): 1}
        client = await Client.connect(node)
        assert (await client.produce("t", VALUE, sequence=1)).offset == -1, "the same retry"
        assert (await client.produce("t", VALUE, sequence=2)).offset == -1
        assert drops(node).total() == 2
        topic_id = partition_of(node).topic_id
        await delete_topic(node, "t")
        await until(lambda: not node.overflow.drops.of(topic_id, 0))


async def test_counts_are_saved_while_the_node_runs(tmp_path: Path) -> None:
    async with topic(tmp_path, "drop-newest", penstock_overflow_records="1") as (_, client):
        await fill(client, 1)
        await client.produce("t", VALUE, sequence=1)
        saved = tmp_path / "data" / "penstock-dropped-records"
        await until(lambda: saved.exists() and "drop-newest records 1" in saved.read_text())


# -- a full disk -----------------------------------------------------------------------------------------


async def full(client: Client, disk: Disk, policy: str) -> int:
    """Fill up the disk; returns how many records were taken, or dropped, until the first other answer."""
    count = 0
    while True:
        result = await client.produce("t", bytes(50_000), sequence=count)
        if result.error is REFUSALS.get(policy, ErrorCode.kafka_storage_error):
            return count
        assert result.error is ErrorCode.none
        count += 1
        if result.offset == -1:
            return count
        if count == 20:
            disk.fill()


@pytest.mark.parametrize("policy", ["block", "reject", "drop-newest"])
async def test_a_full_disk_has_the_answer_of_the_policy(tmp_path: Path, disk: Disk, policy: str) -> None:
    async with topic(tmp_path, policy) as (node, client):
        count = await full(client, disk, policy)
        for sequence in range(count, count + 5):
            result = await client.produce(
                "t", bytes(50_000), sequence=sequence if policy != "block" else count
            )
            assert result.error is REFUSALS.get(policy, ErrorCode.none)
            assert result.offset == -1
        dropped = drops(node).total()
        assert dropped == (6 if policy == "drop-newest" else 0)
        assert {reason for _, reason in drops(node)} <= {DropReason.DISK}
        disk.free()
        sequence = count if policy == "block" else count + 5
        assert (await client.produce("t", bytes(50_000), sequence=sequence)).offset == kept(node) - 1
        assert kept(node) + drops(node).total() == (count + 6 if policy == "drop-newest" else count + 1)


async def test_drop_oldest_makes_room_on_a_full_disk(tmp_path: Path, disk: Disk) -> None:
    if not isinstance(disk, MountedDisk):
        pytest.skip("nothing that is deleted makes room there")
    async with running(tmp_path, penstock_disk_reserve_bytes="65536") as node:
        settings = {"penstock_overflow": "drop-oldest", "segment_bytes": "200000", "retention_ms": "-1"}
        await create_topic(node, "t", **settings)
        client = await Client.connect(node)
        sent, waits, is_filled = 0, 0, False
        while sent < 40:
            result = await client.produce("t", bytes(50_000), sequence=sent)
            if result.error is ErrorCode.none:
                sent += 1
            else:
                assert result.error is ErrorCode.kafka_storage_error
                waits += 1
            if sent == 20 and not is_filled:
                is_filled = True
                disk.fill()
        assert waits > 0
        assert drops(node)[DroppedBy.DROP_OLDEST, DropReason.DISK] > 0
        assert kept(node) + drops(node).total() == 40


async def test_too_little_free_space_counts_as_a_full_disk(tmp_path: Path) -> None:
    async with running(tmp_path, penstock_overflow_disk_free_bytes=str(1 << 60)) as node:
        await create_topic(node, "t", penstock_overflow="drop-newest")
        await create_topic(node, "plain")
        client = await Client.connect(node)

        async def is_dropped() -> bool:
            return (await client.produce("t", VALUE)).offset == -1

        async with asyncio.timeout(60):
            while not await is_dropped():
                pass
        assert (await client.produce("plain", VALUE)).error is ErrorCode.kafka_storage_error
        assert {*drops(node)} == {(DroppedBy.DROP_NEWEST, DropReason.DISK)}


# -- shedding --------------------------------------------------------------------------------------------


async def test_the_least_valuable_topic_is_shed_and_its_sample_is_kept(tmp_path: Path) -> None:
    # All disks have less free than all of it, and more than nothing: priorities below 10 times the used share are shed.
    shed = {"penstock_shed_disk_free_ratio_start": "1", "penstock_shed_disk_free_ratio_all": "0"}
    async with running(tmp_path, **shed) as node:
        await create_topic(node, "t", penstock_shed_priority="0", penstock_shed_sample="0.25")
        await create_topic(node, "valued", penstock_shed_priority="9")
        await create_topic(node, "plain")
        client = await Client.connect(node)
        await until(lambda: node.overflow.disk_free < 1)
        node.overflow._measured = lambda _: None  # type: ignore[method-assign]
        node.overflow.disk_free = 0.5
        offsets = [
            (await client.produce("t", VALUE, sequence=sequence)).offset
            for sequence in range(40)
            for _ in range(2)  # a retry is not sampled again
        ]
        assert offsets[::2] == offsets[1::2]
        assert [offset for offset in offsets[::2] if offset >= 0] == list(range(10))
        assert drops(node) == {(DroppedBy.SHED, DropReason.DISK): 30}
        assert (await client.produce("valued", VALUE)).offset == 0
        node.overflow.disk_free = 0.05
        assert (await client.produce("valued", VALUE)).offset == -1
        assert (await client.produce("plain", VALUE)).offset == 0
        node.overflow.disk_free = 1.0
        assert (await client.produce("t", VALUE, sequence=40)).offset == 10
        assert kept(node) + drops(node).total() == 41
