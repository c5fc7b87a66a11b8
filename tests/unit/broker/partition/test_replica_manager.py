"""The replica manager follows the metadata log, also after a full disk or a crash."""

import errno
import os
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from kio.schema.create_partitions.v3.request import CreatePartitionsRequest, CreatePartitionsTopic
from tests.unit.broker.raw_client import Client, create_topic, delete_topic, new_node, running, until
from tests.unit.broker.wire_client import WireClient

from penstock.broker.node import Node
from penstock.cluster.controller.alter_topics import TopicRef, delete_topics
from penstock.cluster.controller.create_topics import CreateTopicResult, NewTopic
from penstock.log import data_directory
from penstock.log.log_manager import LogManager
from penstock.protocol.errors import ApiError, ErrorCode


class FullDisk:
    """While `is_full`, nothing new fits: no folder and no segment. `appends` may still be possible."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full = self.appends_fail = False
        self._wrap(monkeypatch, Path, "mkdir", lambda: self.is_full)
        self._wrap(monkeypatch, data_directory, "write_topic_id", lambda: self.is_full)
        self._wrap(monkeypatch, os, "pwrite", lambda: self.appends_fail)

    def _wrap(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, fails: Any) -> None:
        real = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            if fails():
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*args, **options)

        monkeypatch.setattr(owner, name, call)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> FullDisk:
    return FullDisk(monkeypatch)


async def _create(node: Node, name: str, partitions: int = 1) -> CreateTopicResult:
    (result,) = await node.topic_creator.create([NewTopic(name=name, partitions=partitions)])
    return result


async def test_a_metadata_log_that_cannot_be_written_changes_nothing(tmp_path: Path, disk: FullDisk) -> None:
    async with running(tmp_path) as node:
        disk.appends_fail = True
        with pytest.raises(ApiError) as refused:
            await _create(node, "t")
        assert refused.value.code is ErrorCode.kafka_storage_error
        assert "t" not in node.image.topics
        disk.appends_fail = False
        assert (await _create(node, "t")).error is ErrorCode.none
        client = await Client.connect(node)
        assert (await client.produce("t", b"x", acks=-1)).offset == 0


async def test_a_topic_whose_folders_find_no_room_gets_them_later(tmp_path: Path, disk: FullDisk) -> None:
    async with running(tmp_path) as node:
        disk.is_full = True
        assert (await _create(node, "t", 3)).error is ErrorCode.kafka_storage_error
        # The decision stands: what is in the log is in the image, and a second topic of that name is refused.
        assert (await _create(node, "t", 3)).error is ErrorCode.topic_already_exists
        assert node.partitions.refused == {("t", 0), ("t", 1), ("t", 2)}
        client = await Client.connect(node)
        assert (await client.produce("t", b"x")).error is ErrorCode.kafka_storage_error
        disk.is_full = False
        await node.housekeeping._try_refused()
        assert not node.partitions.refused
        assert (await client.produce("t", b"x", partition=2, acks=-1)).error is ErrorCode.none
    async with running(tmp_path) as node:
        assert node.partitions.find("t", 2).log.end_offset == 1


async def test_who_adds_partitions_is_told_that_they_find_no_room(tmp_path: Path, disk: FullDisk) -> None:
    async with running(tmp_path) as node:
        await create_topic(node, "t")
        client = await WireClient.connect(node)
        disk.is_full = True
        assert await _add_partitions(client, "t", 3) is ErrorCode.kafka_storage_error
        disk.is_full = False
        await node.housekeeping._try_refused()
        assert node.partitions.get("t", 2) is not None
        assert await _add_partitions(client, "t", 4) is ErrorCode.none


async def _add_partitions(client: WireClient, topic: str, count: int) -> ErrorCode:
    wanted = CreatePartitionsTopic(name=topic, count=count, assignments=None)
    request = CreatePartitionsRequest(topics=(wanted,), timeout=timedelta(seconds=10), validate_only=False)
    return (await client.ask(request)).results[0].error_code  # type: ignore[no-any-return]


async def test_other_topics_go_on_while_one_finds_no_room(tmp_path: Path, disk: FullDisk) -> None:
    async with running(tmp_path) as node:
        await create_topic(node, "old")
        disk.is_full = True
        assert (await _create(node, "new")).error is ErrorCode.kafka_storage_error
        client = await Client.connect(node)
        assert (await client.produce("old", b"x", acks=-1)).error is ErrorCode.none
        await delete_topic(node, "old")
        assert node.partitions.refused == {("new", 0)}
        await delete_topic(node, "new")
        assert not node.partitions.refused
        await node.housekeeping._try_refused()
        assert node.partitions.get("new", 0) is None


async def test_offsets_find_room_later_and_groups_serve_then(tmp_path: Path, disk: FullDisk) -> None:
    async with running(tmp_path, offsets_topic_num_partitions="2") as node:
        disk.is_full = True
        await node.groups.ensure_topic()
        assert {topic for topic, _ in node.partitions.refused} == {"__consumer_offsets"}
        disk.is_full = False
        await node.housekeeping._try_refused()
        await until(lambda: len(node.groups._runtime._active) == 2)


async def test_a_crash_between_decision_and_folder_is_made_up_for(tmp_path: Path, disk: FullDisk) -> None:
    node = new_node(tmp_path)
    await node.start()
    disk.is_full = True
    await _create(node, "t", 2)
    await node.stop(clean=False)
    disk.is_full = False
    async with running(tmp_path) as node:
        assert [node.partitions.find("t", index).log.end_offset for index in range(2)] == [0, 0]


async def test_a_crash_between_deletion_and_its_files_is_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path) as node:
        await create_topic(node, "kept")
        await create_topic(node, "gone", 2)
        client = await Client.connect(node)
        assert (await client.produce("gone", b"old", acks=-1)).error is ErrorCode.none
        with monkeypatch.context() as patch:
            patch.setattr(LogManager, "delete", _refuse_to_delete)
            await delete_topic(node, "gone")
        assert "gone" not in node.image.topics
        assert (tmp_path / "data" / "gone-0").is_dir()
        stranger = tmp_path / "data" / "stranger-0"
        stranger.mkdir()
    async with running(tmp_path) as node:
        assert not list((tmp_path / "data").glob("gone*"))
        assert stranger.is_dir(), "what no deletion explains is not ours to erase"
        assert node.partitions.get("kept", 0) is not None


async def test_a_name_taken_again_starts_empty_whatever_its_past_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path) as node:
        client = await Client.connect(node)
        for patched in (True, False):
            await create_topic(node, "t")
            assert (await client.produce("t", b"x", acks=-1)).offset == 0
            with monkeypatch.context() as patch:
                if patched:
                    patch.setattr(LogManager, "delete", _refuse_to_delete)
                await delete_topic(node, "t")
        await create_topic(node, "t")
        fetched = await client.fetch([("t", 0, 0)])
        assert (fetched.one().error_code, fetched.one().high_watermark) == (ErrorCode.none, 0)


async def test_deleting_a_large_topic_does_not_block_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_erase = threading.Event()
    real = LogManager.purge

    def purge(store: LogManager, folders: Any) -> None:
        assert may_erase.wait(60)
        real(store, folders)

    async with running(tmp_path) as node:
        await create_topic(node, "t")
        monkeypatch.setattr(LogManager, "purge", purge)
        await delete_topic(node, "t")
        await create_topic(node, "t")
        assert list((tmp_path / "data").glob("t-0*delete"))
        may_erase.set()
        await until(lambda: not list((tmp_path / "data").glob("t-0*delete")))


async def test_the_data_directory_is_read_once_for_all_topics_that_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = 0
    real = LogManager.stored

    def stored(store: LogManager) -> Any:
        nonlocal reads
        reads += 1
        return real(store)

    async with running(tmp_path) as node:
        names = [f"t{number}" for number in range(20)]
        for name in names:
            await create_topic(node, name)
        monkeypatch.setattr(LogManager, "stored", stored)
        await node.metadata.propose(lambda image: delete_topics(image, [TopicRef(name) for name in names]))
        assert reads == 1
        await until(lambda: not list((tmp_path / "data").glob("t*-0*")))


def _refuse_to_delete(*_: object) -> Path:
    raise OSError(errno.EIO, os.strerror(errno.EIO))
