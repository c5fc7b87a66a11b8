"""Damage that share groups meet: members get no damaged record, and dead letters do not wait for one."""

import asyncio
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.damage import flip_byte
from tests.unit.broker.coordinators.share.dead_letter_harness import (
    DEAD,
    TOPIC,
    all_dead_letters_written,
    append,
    dead_letters_in,
    header,
    prepare,
    started,
    write,
)
from tests.unit.broker.coordinators.share.share_client import GROUP, Member, publish, share_topic
from tests.unit.broker.raw_client import until
from tests.unit.broker.three_nodes import PATIENT, Trio
from tests.waiting import eventually_async

from penstock.broker.coordinators.share.fetch import record_runs
from penstock.broker.metrics.exposition import Exposition
from penstock.broker.node import Node
from penstock.broker.partition.partition import Partition
from penstock.cluster.controller.create_topics import NewTopic
from penstock.groups.share.state.share_state import SharePartitionKey
from penstock.log.log import Log
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.record_batch import Record, encode_batch, pack_batch, read_header

_LONG_MS = 20_000
_REJECTED = 33
_WITHOUT = "penstock.dlq.without.record"


@pytest.fixture
async def trio(tmp_path: Path) -> AsyncIterator[Trio]:
    trio = Trio(tmp_path, PATIENT)
    await trio.start()
    yield trio
    await trio.stop()


def segment(partition: Partition) -> Path:
    (path,) = partition.log.directory.glob("*.log")
    return path


def flip(partition: Partition, value: bytes) -> None:
    flip_byte(segment(partition), segment(partition).read_bytes().index(value))


def overwrite(partition: Partition, place: int, data: bytes) -> None:
    with segment(partition).open("r+b") as file:
        file.seek(place)
        file.write(data)


async def create(trio: Trio, name: str, *replicas: tuple[int, ...]) -> None:
    topic = NewTopic(name, assignments=tuple(enumerate(replicas)))
    (result,) = await trio.any.topic_creator.create([topic])
    assert result.error is ErrorCode.none, result
    await until(lambda: all(name in node.image.topics for node in trio.nodes.values()))
    await until(lambda: all(trio.leader(name, index) for index in range(len(replicas))))


# -- members ---------------------------------------------------------------------------------------------

HARM = {
    "value": (70, b"\xff"),
    "magic": (16, b"\x05"),
    "length that leads back": (8, struct.pack(">i", -12)),
    "length of nothing": (8, bytes(4)),
    "base offset that leads ahead": (0, struct.pack(">q", 3)),
}


@pytest.mark.parametrize("harm", HARM.values(), ids=HARM)
async def test_the_only_copy_gives_what_is_intact_and_refuses_the_rest(
    tmp_path: Path, harm: tuple[int, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    node = await started(tmp_path)
    await share_topic(node)
    await publish(node, 2, batches=3)
    partition, member = node.partitions.find("t", 0), await Member.join(node)
    overwrite(partition, partition.log.size_bytes // 3 + harm[0], harm[1])
    reply = await member.fetch(wait_ms=_LONG_MS)
    assert reply.acquired == [(0, 1), (1, 1)]

    async def is_refused() -> bool:
        reply = await member.fetch(wait_ms=_LONG_MS)
        assert reply.acquired == []
        # Until the damage is surveyed, the records may only be unreachable.
        return {ErrorCode.corrupt_message: True, ErrorCode.kafka_storage_error: False}[reply.error]

    await eventually_async(is_refused)
    assert [(damage.start_offset, damage.end_offset) for damage in partition.log.damages] == [(2, 4)]
    assert [record.message for record in caplog.records if record.levelname == "CRITICAL"] == [
        "log damaged: acknowledged records cannot be read"
    ]
    text = (await Exposition(node.metric_sources()).scrape()).decode()
    assert "penstock_damaged_offsets 2.0" in text
    await member.vanish()
    await node.stop()


async def test_members_get_from_the_next_leader_what_is_damaged_at_this_one(trio: Trio) -> None:
    await create(trio, "t", (1, 2, 3))
    first = trio.nodes[1]
    await publish(first, 3)
    await share_topic(first)
    damaged = first.partitions.find("t", 0)
    flip(damaged, b"v1")
    member = await Member.join(first)
    refused = await member.fetch(wait_ms=_LONG_MS)
    assert (refused.error, refused.acquired) == (ErrorCode.kafka_storage_error, [])
    await until(lambda: (leader := trio.leader("t")) and leader is not first)
    leader = trio.leader("t")
    assert leader is not None
    other = await Member.join(leader)
    reply = await other.fetch(wait_ms=_LONG_MS)
    assert reply.acquired == [(0, 1), (1, 1), (2, 1)], "the damaged record has not been delivered before"
    assert reply.values == {0: b"v0", 1: b"v1", 2: b"v2"}

    def is_fetched_again() -> bool:
        state, copy = leader.image.partition("t", 0), first.partitions.get("t", 0)
        is_new = copy is not None and copy is not damaged and copy.log.end_offset == 3
        return is_new and state is not None and len(state.isr) == 3

    await until(is_fetched_again)
    assert first.metrics.replicas_lost == 1
    await member.vanish()
    await other.vanish()


async def test_a_read_from_disk_that_fails_is_not_repeated_endlessly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member that asks for more than one byte reads twice: to see whether there is enough, and to acquire."""
    node = await started(tmp_path)
    await share_topic(node)
    await publish(node, 2)
    member, read, failed = await Member.join(node), Log.read, []

    def unreadable(log: Log, *args: Any, nowait: bool = False, **options: Any) -> Any:
        if log.directory.name != "t-0":
            return read(log, *args, nowait=nowait, **options)
        if nowait:
            raise BlockingIOError
        failed.append(args)
        raise ApiError(ErrorCode.kafka_storage_error) from OSError()

    monkeypatch.setattr(Log, "read", unreadable)
    async with asyncio.timeout(60):
        reply = await member.fetch(wait_ms=_LONG_MS, min_bytes=1_000)
    assert (reply.error, len(failed)) == (ErrorCode.kafka_storage_error, 1)
    await member.vanish()
    await node.stop()


def test_a_batch_that_cannot_be_decoded_counts_as_its_header_says() -> None:
    """Its checksum holds, so it is what a producer sent, and no damage."""
    header = read_header(encode_batch([Record(place, 1, None, b"v") for place in range(3)]))
    batch = memoryview(pack_batch(header, b"\x7f" * 40))
    assert record_runs(batch, 1 << 20) == [(0, 3)]


# -- dead letters ----------------------------------------------------------------------------------------


def described(records: list[Record]) -> dict[int, tuple[bytes | None, str | None]]:
    """By source offset: the value, and why the dead letter has none."""
    return {
        int(header(record, "__dlq.errors.offset") or "-1"): (record.value, header(record, _WITHOUT))
        for record in records
    }


_DAMAGED = (None, "damaged in the source")


@pytest.mark.parametrize("is_surveyed", [False, True], ids=["met by the writer", "known before"])
async def test_the_only_copy_of_a_damaged_record_blocks_no_dead_letter(
    tmp_path: Path, is_surveyed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    node = await started(tmp_path)
    key = await prepare(node, 3)
    await append(node, TOPIC, 2)
    partition = node.partitions.find(TOPIC, 0)
    flip(partition, b"value 2")
    if is_surveyed:
        partition.log.scan_for_damage(0)
    await write(node, key, (0, 4, _REJECTED, 1))
    await all_dead_letters_written(node)
    found = described(dead_letters_in(node))
    assert found == dict.fromkeys(range(3), _DAMAGED) | {3: (b"value 0", None), 4: (b"value 1", None)}
    assert [(damage.start_offset, damage.end_offset) for damage in partition.log.damages] == [(0, 3)]
    assert sum(record.levelname == "CRITICAL" for record in caplog.records) == 1
    assert not node.share_state().dead_letters.lost
    await node.stop()


async def rejected_elsewhere(trio: Trio, records: int) -> tuple[SharePartitionKey, Node]:
    """A share partition whose dead letters are written by another node than the leader of its source."""
    topic_id = trio.any.image.topics[TOPIC].id
    for index in range(3):
        key = SharePartitionKey(GROUP, topic_id, index)
        await trio.any.share_state().persister.initialize(*key, state_epoch=0, start_offset=0)
        shard = trio.any.share_state().shard_of_key(key)
        await until(lambda: trio.leader("__share_group_state", shard))  # noqa: B023
        source = trio.leader(TOPIC, index)
        assert source is not None
        if trio.leader("__share_group_state", shard) is not source:
            await publish(source, 2, topic=TOPIC, index=index, batches=records // 2)
            return key, source
    raise AssertionError("two shards have two leaders at most")


async def reject(node: Node, key: SharePartitionKey, count: int) -> None:
    await node.share_state().persister.write(
        *key,
        state_epoch=0,
        leader_epoch=0,
        start_offset=0,
        delivery_complete_count=0,
        batches=[(0, count - 1, _REJECTED, 1)],
    )


async def dead_letters_of(trio: Trio, key: SharePartitionKey, count: int) -> dict[int, Any]:
    def found() -> list[Record]:
        leader = trio.leader(DEAD, key.partition) if DEAD in trio.any.image.topics else None
        return [] if leader is None else dead_letters_in(leader, index=key.partition)

    await until(lambda: len(found()) >= count)
    assert len(found()) == count
    return described(found())


async def test_a_leader_elsewhere_is_told_that_its_copy_is_damaged(trio: Trio) -> None:
    await create(trio, TOPIC, (1, 2, 3), (2, 3, 1), (3, 1, 2))
    key, source = await rejected_elsewhere(trio, 4)
    flip(source.partitions.find(TOPIC, key.partition), b"v2")
    await reject(trio.any, key, 4)
    written = await dead_letters_of(trio, key, 4)
    assert written == {offset: (b"v%d" % offset, None) for offset in range(4)}
    assert trio.leader(TOPIC, key.partition) is not source
    assert source.metrics.replicas_lost == 1


async def test_a_leader_elsewhere_says_that_the_only_copy_is_damaged(trio: Trio) -> None:
    await create(trio, TOPIC, (1,), (2,), (3,))
    key, source = await rejected_elsewhere(trio, 6)
    partition = source.partitions.find(TOPIC, key.partition)
    flip(partition, b"v2")
    await reject(trio.any, key, 6)
    written = await dead_letters_of(trio, key, 6)
    intact = {offset: (b"v%d" % offset, None) for offset in (0, 1, 4, 5)}
    assert written == {2: _DAMAGED, 3: _DAMAGED, **intact}
    assert [(damage.start_offset, damage.end_offset) for damage in partition.log.damages] == [(2, 4)]
    assert source.metrics.replicas_lost == 0
