"""Without syncs on append, the node starts writing pages early, so that a later sync does not block the loop."""

import os
import struct
from pathlib import Path

import pytest
from tests.unit.broker.partition.follower_world import batch_of
from tests.unit.broker.partition.one_broker import PEER, TOPIC_ID, broker_of_three
from tests.unit.broker.raw_client import Client, create_topic, running, until

from penstock.broker.partition.follower_replica import FetchOutcome
from penstock.log.flush import begin_writeback
from penstock.protocol.fetch import ReplicaPartitionData

_LEADER_EPOCH_AT = 12


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files whose writing was asked for."""
    files: list[str] = []

    def note(fd: int) -> None:
        files.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        begin_writeback(fd)

    monkeypatch.setattr("penstock.broker.partition.flusher.begin_writeback", note)
    return files


async def test_the_disk_is_asked_each_time_it_has_fallen_behind(tmp_path: Path, asked: list[str]) -> None:
    settings = {"penstock_write_behind_bytes": "5000", "penstock_flush": "never"}
    async with running(tmp_path, **settings) as node:
        await create_topic(node, "t")
        client = await Client.connect(node)
        await client.produce("t", b"x" * 1000)
        assert not asked
        flusher = node.partitions.find("t", 0)._flusher
        for times in (1, 2):
            await client.produce("t", b"x" * 6000)
            await until(lambda times=times: len(asked) == times and not flusher._writing_back)
        assert set(asked) == {"00000000000000000000.log"}
        assert (await client.produce("t", b"x")).offset == 3


@pytest.mark.parametrize("settings", [{"penstock_flush": "ack"}, {"penstock_write_behind_bytes": "0"}])
async def test_no_early_writes_if_appends_are_synced_or_it_is_disabled(
    tmp_path: Path, asked: list[str], settings: dict[str, str]
) -> None:
    given = {"penstock_write_behind_bytes": "1", "penstock_flush": "never", **settings}
    async with running(tmp_path, **given) as node:
        await create_topic(node, "t")
        client = await Client.connect(node)
        for offset in range(3):
            assert (await client.produce("t", b"x" * 1000, acks=-1)).offset == offset
    assert not asked


@pytest.mark.parametrize(("flush", "times"), [("never", 1), ("ack", 0)])
async def test_a_followers_disk_is_asked_too(
    tmp_path: Path, asked: list[str], flush: str, times: int
) -> None:
    async with broker_of_three(tmp_path, penstock_write_behind_bytes="5000") as broker:
        await broker.create(leader=PEER, configs={"penstock.flush": flush})
        partition = broker.partition()
        following = broker.new_follower(partition, PEER, partition.leader_epoch)
        batch = batch_of(b"x" * 6000)
        struct.pack_into(">i", batch, _LEADER_EPOCH_AT, partition.leader_epoch)
        answer = ReplicaPartitionData(TOPIC_ID.bytes, 0, 0, 0, 0, batch)
        assert await following.apply(following.position(), answer) is FetchOutcome.MOVED
        await until(lambda: len(asked) == times and not partition._flusher._writing_back)
