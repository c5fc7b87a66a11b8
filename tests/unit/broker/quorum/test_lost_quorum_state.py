"""A member of the quorum that has lost votes or records refuses to start."""

import shutil
from pathlib import Path
from uuid import UUID

import pytest
from tests.unit.broker.raw_client import create_topic, new_node, running

from penstock.broker.environment import StartFailed
from penstock.log.config import LogConfig
from penstock.log.log import Log
from penstock.log.log_manager import LogManager
from penstock.protocol.record_batch import Record, encode_batch


async def _lived(tmp_path: Path) -> Path:
    async with running(tmp_path) as node:
        await create_topic(node, "t")
        return node.quorum.state.folder


async def test_a_member_whose_metadata_has_lost_its_end_does_not_start(tmp_path: Path) -> None:
    folder = await _lived(tmp_path)
    segment = min(folder.glob("*.log"))
    for path in folder.glob("*.log"):
        path.unlink()
    segment.touch()
    for _ in range(2):
        with pytest.raises(StartFailed, match="synced up to"):
            await new_node(tmp_path).start()


async def test_a_member_whose_votes_have_gone_does_not_start(tmp_path: Path) -> None:
    shutil.rmtree(await _lived(tmp_path))
    for _ in range(2):
        with pytest.raises(StartFailed, match="this node's vote"):
            await new_node(tmp_path).start()


def test_a_crash_while_a_log_is_cut_does_not_look_like_a_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened() -> tuple[LogManager, Log]:
        store = LogManager.open(tmp_path, node_id=1)
        return store, store.open_or_create("t", 0, UUID(int=9), LogConfig(), now_ms=0)

    store, log = opened()
    for _ in range(3):
        log.append(memoryview(encode_batch([Record(0, 0, None, b"x")])), leader_epoch=1, now_ms=0)
    store.close()
    store, log = opened()
    assert store.synced_offset("t", 0, UUID(int=9)) == 3

    def crash(*_: object) -> None:
        raise RuntimeError("the end")

    with monkeypatch.context() as patch:
        patch.setattr(LogManager, "checkpoint", crash)
        with pytest.raises(RuntimeError):
            store.truncate("t", 0, 1, now_ms=0)
    store.close(clean=False)
    store = LogManager.open(tmp_path, node_id=1)
    assert store.synced_offset("t", 0, UUID(int=9)) == 1
    store.close(clean=False)
