"""A disk without room: writes are refused with the right error, reads go on, and all is well when there is room.

Where the test may mount one, the disk is a real file system of a few megabytes; elsewhere calls that would need
room fail as they would there.
"""

import asyncio
import logging
from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest
from kio.schema.delete_records.v2.request import (
    DeleteRecordsPartition,
    DeleteRecordsRequest,
    DeleteRecordsTopic,
)
from kio.schema.offset_commit.v8.request import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
)
from tests.unit.broker.partition.full_disks import Disk, MountedDisk, PatchedDisk
from tests.unit.broker.raw_client import Client, create_topic, delete_topic, new_node, running, until
from tests.unit.broker.wire_client import WireClient
from tests.waiting import eventually_async

from penstock.broker.node import Node
from penstock.cluster.controller.create_topics import NewTopic
from penstock.protocol.errors import ApiError, ErrorCode


async def _fill_up(client: Client, disk: Disk, count_before: int = 20) -> int:
    """Returns how many records were acknowledged before there was no room left."""
    count = 0
    while True:
        result = await client.produce("t", bytes(50_000), acks=-1)
        if result.error is ErrorCode.kafka_storage_error:
            return count
        assert result.error is ErrorCode.none
        assert result.offset == count
        count += 1
        if count == count_before:
            disk.fill()


async def _read_all(client: Client) -> int:
    """Reads on to the end; returns how many records there are."""
    answer = await client.fetch([("t", 0, 0)])
    end = answer.one().high_watermark
    for offset in range(end):
        part = (await client.fetch([("t", 0, offset)], partition_bytes=1)).one()
        assert part.error_code is ErrorCode.none
        assert len(part.records) > 50_000
    return int(end)


async def test_writes_are_refused_reads_go_on_and_writes_come_back(tmp_path: Path, disk: Disk) -> None:
    async with running(tmp_path) as node:
        await create_topic(node, "t")
        client = await Client.connect(node)
        written = await _fill_up(client, disk)
        for _ in range(3):
            assert (await client.produce("t", bytes(50_000), acks=-1)).error is ErrorCode.kafka_storage_error
        assert await _read_all(client) == written
        disk.free()
        assert (await client.produce("t", bytes(50_000), acks=-1)).offset == written
        assert await _read_all(client) == written + 1


async def test_a_segment_for_which_there_is_no_room_is_begun_later(tmp_path: Path, disk: Disk) -> None:
    async with running(tmp_path) as node:
        await create_topic(node, "t", segment_bytes="120000")
        client = await Client.connect(node)
        written = await _fill_up(client, disk)
        assert await _read_all(client) == written
        disk.free()
        for place in range(5):
            assert (await client.produce("t", bytes(50_000), acks=-1)).offset == written + place
    async with running(tmp_path) as node:
        assert await _read_all(await Client.connect(node)) == written + 5


async def test_topics_are_made_and_deleted_again_once_there_is_room(tmp_path: Path, disk: Disk) -> None:
    async with running(tmp_path) as node:
        await create_topic(node, "t")
        disk.fill()
        assert await _creation_error(node, "new") is ErrorCode.kafka_storage_error
        disk.free()
        # If the metadata was not written, the topic can be created again; otherwise it only lacks its directories.
        assert await _creation_error(node, "new") in (ErrorCode.none, ErrorCode.topic_already_exists)
        await node.housekeeping._try_refused()
        client = await Client.connect(node)
        assert (await client.produce("new", b"x", acks=-1)).offset == 0
        await delete_topic(node, "t")
    async with running(tmp_path) as node:
        assert set(node.image.topics) == {"new"}


async def _creation_error(node: Node, name: str) -> ErrorCode:
    try:
        (result,) = await node.topic_creator.create([NewTopic(name=name)])
    except ApiError as error:
        return error.code
    return result.error


async def test_groups_are_sent_away_and_served_once_there_is_room(tmp_path: Path, disk: Disk) -> None:
    async with running(tmp_path, offsets_topic_num_partitions="1") as node:
        await node.groups.ensure_topic()
        await create_topic(node, "t")
        member = await WireClient.connect(node)
        assert await _commit(member, "t") is ErrorCode.none
        await _fill_up(await Client.connect(node), disk)
        refused = await _commit(member, "t")
        assert refused in (ErrorCode.not_coordinator, ErrorCode.coordinator_not_available)
        disk.free()
        await until(lambda: node.groups._runtime._active)
        assert await _commit(member, "t") is ErrorCode.none


async def _delete_all_records(client: WireClient, topic: str) -> ErrorCode:
    partition = DeleteRecordsPartition(partition_index=0, offset=-1)
    request = DeleteRecordsRequest(
        topics=(DeleteRecordsTopic(name=topic, partitions=(partition,)),), timeout=timedelta(seconds=10)
    )
    response = await client.ask(request)
    return response.topics[0].partitions[0].error_code  # type: ignore[no-any-return]


async def _takes_records_again(client: Client, topic: str, disk: Disk) -> None:
    if isinstance(disk, PatchedDisk):
        disk.free()  # there, nothing that is deleted makes room

    async def is_taken() -> bool:
        return (await client.produce(topic, b"x", acks=-1)).error is ErrorCode.none

    await eventually_async(is_taken)


async def test_records_can_be_deleted_on_a_full_disk_and_make_room(tmp_path: Path, disk: Disk) -> None:
    async with running(tmp_path) as node:
        await create_topic(node, "t", segment_bytes="120000")
        client = await Client.connect(node)
        written = await _fill_up(client, disk, 60)
        assert await _delete_all_records(await WireClient.connect(node), "t") is ErrorCode.none
        log = node.partitions.find("t", 0).log
        if isinstance(disk, MountedDisk):
            assert log.size_bytes < 120_000, "no round of retention is waited for"
        await _takes_records_again(client, "t", disk)
        assert node.partitions.find("t", 0).log.start_offset == written
    async with running(tmp_path) as node:
        log = node.partitions.find("t", 0).log
        assert log.start_offset == written
        assert log.end_offset > written


async def test_topics_can_be_deleted_on_a_full_disk_and_make_room(tmp_path: Path, disk: Disk) -> None:
    if isinstance(disk, PatchedDisk):
        pytest.skip("the reserve of a disk that takes no writes at all cannot be used")
    async with running(tmp_path) as node:
        await create_topic(node, "other")
        await create_topic(node, "t")
        client = await Client.connect(node)
        await _fill_up(client, disk, 60)
        assert (await client.produce("other", bytes(5000), acks=-1)).error is ErrorCode.kafka_storage_error
        await delete_topic(node, "t")
        await _takes_records_again(client, "other", disk)
    async with running(tmp_path) as node:
        assert set(node.image.topics) == {"other"}


async def test_a_full_disk_is_said_once_and_without_tracebacks(
    tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    often = {"log_retention_check_interval_ms": "20", "log_flush_offset_checkpoint_interval_ms": "20"}
    async with running(tmp_path, offsets_topic_num_partitions="1", **often) as node:
        await node.groups.ensure_topic()
        await create_topic(node, "t", segment_bytes="120000", retention_ms="-1")
        client, member = await Client.connect(node), await WireClient.connect(node)
        await _fill_up(client, disk)
        for _ in range(20):
            await client.produce("t", bytes(50_000), acks=-1)
            await _commit(member, "t")
            await asyncio.sleep(0.02)
        disk.free()
        await _takes_records_again(client, "t", disk)
    # What clients say is another matter: one of an earlier test may still look for its broker.
    ours = [record for record in caplog.records if record.name.startswith("penstock.")]
    said = [record for record in ours if not record.name.startswith("penstock.client")]
    assert [record.message for record in said if record.exc_info] == []
    # A slow machine is another matter, and says so itself.
    loud = Counter(
        record.message.partition(":")[0]
        for record in said
        if record.levelno >= logging.WARNING and "stood still" not in record.message
    )
    assert (loud.pop("disk full"), loud.pop("disk has room again; records are accepted")) == (1, 1), loud
    assert max(loud.values(), default=0) <= 2, loud


async def _commit(client: WireClient, topic: str) -> ErrorCode:
    partition = OffsetCommitRequestPartition(
        partition_index=0, committed_offset=1, committed_leader_epoch=-1, committed_metadata="x" * 4000
    )
    request = OffsetCommitRequest(
        group_id="g",
        generation_id_or_member_epoch=-1,
        member_id="",
        group_instance_id=None,
        topics=(OffsetCommitRequestTopic(name=topic, partitions=(partition,)),),
    )
    response = await client.ask(request)
    return response.topics[0].partitions[0].error_code  # type: ignore[no-any-return]


async def test_a_stop_without_room_loses_nothing(tmp_path: Path, disk: Disk) -> None:
    node = new_node(tmp_path)
    await node.start()
    await create_topic(node, "t")
    written = await _fill_up(await Client.connect(node), disk)
    await node.stop()
    disk.free()
    async with running(tmp_path) as node:
        assert await _read_all(await Client.connect(node)) == written
