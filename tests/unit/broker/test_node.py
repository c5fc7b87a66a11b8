"""Starting and stopping a node: a failed start leaves nothing open, and a stop loses nothing."""

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.unit.broker.raw_client import Client, create_topic, fetch, new_node, produce, running, until

from penstock.broker import process as node_process
from penstock.broker.config.node_settings import load_settings
from penstock.broker.controller.broker_lifecycle import BrokerLifecycleManager
from penstock.broker.environment import StartFailed
from penstock.broker.quorum.driver import QuorumFailed
from penstock.log.log_manager import LogManager
from penstock.log.segment_files import Tail
from penstock.protocol.errors import ApiError, ErrorCode


def _threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("penstock")}


async def _can_start(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        assert node.state == "serving"


async def test_an_address_in_use_leaves_no_lock_port_or_thread(tmp_path: Path) -> None:
    before = _threads()
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as free:
        port, other = taken.getsockname()[1], free.getsockname()[1]
        free.close()
        both = f"A://127.0.0.1:{other},B://127.0.0.1:{port}"
        node = new_node(tmp_path, listeners=both, advertised_listeners="")
        with pytest.raises(StartFailed, match="cannot listen"):
            await node.start()
        assert node.state == "stopped"
        socket.create_server(("127.0.0.1", other)).close()
    assert _threads() == before
    await _can_start(tmp_path)


async def test_a_folder_in_use_is_not_disturbed(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        await create_topic(node, "t")
        with pytest.raises(StartFailed, match="in use"):
            await new_node(tmp_path).start()
        client = await Client.connect(node)
        assert (await client.produce("t", b"x", acks=-1)).error is ErrorCode.none


async def test_a_start_without_room_says_so_and_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise ApiError(ErrorCode.kafka_storage_error, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Tail, "write", refuse)
        with pytest.raises(StartFailed, match="No space left"):
            await new_node(tmp_path).start()
    await _can_start(tmp_path)


async def test_a_quorum_that_fails_after_the_node_has_caught_up_fails_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node registers, waits for its role, ... meanwhile it may have to save a vote on a disk that fails."""

    async def register(self: BrokerLifecycleManager) -> None:
        node.quorum.failed(QuorumFailed("the vote cannot be saved"))
        await asyncio.Event().wait()  # what it waits for will never happen without the quorum

    monkeypatch.setattr(BrokerLifecycleManager, "register", register)
    node = new_node(tmp_path)
    with pytest.raises(StartFailed, match="the vote cannot be saved"):
        await asyncio.wait_for(node.start(), 60)
    assert node.state == "stopped"


async def test_a_start_that_is_broken_off_while_it_recovers_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path) as node:
        await create_topic(node, "t", 3)
    recovering, may_go_on = threading.Event(), threading.Event()
    real = LogManager.open_or_create_these

    def slowly(store: LogManager, wanted: Any, **options: Any) -> Any:
        if ("t", 0) in wanted:
            recovering.set()
            assert may_go_on.wait(60)
        return real(store, wanted, **options)

    with monkeypatch.context() as patch:
        patch.setattr(LogManager, "open_or_create_these", slowly)
        node = new_node(tmp_path)
        starting = asyncio.create_task(node.start())
        await until(recovering.is_set)
        starting.cancel()
        await until(lambda: node.state == "stopping")
        assert not starting.done(), "the thread that opens logs is waited for"
        may_go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await starting
    assert node.state == "stopped"
    await _can_start(tmp_path)


async def test_everyone_who_stops_a_node_waits_until_it_has_stopped(tmp_path: Path) -> None:
    node = new_node(tmp_path)
    await node.start()
    await asyncio.gather(node.stop(), node.stop())
    assert node.state == "stopped"
    await node.stop()
    await _can_start(tmp_path)


async def test_a_stop_with_readers_waiting_and_requests_half_sent_is_quick_and_clean(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        await create_topic(node, "t")
        waiting, half = await Client.connect(node), await Client.connect(node)
        waiting.writer.write(fetch("t", 0, max_wait_ms=2**31 - 1))
        half.writer.write(produce("t", b"x")[:-1])
        await until(lambda: node.partitions.find("t", 0)._fetch_waiters)
        await until(lambda: node.server.buffers.bytes_in_use)
        await node.stop()
        assert await waiting.is_cut_off()
        assert await half.is_cut_off()
    assert (tmp_path / "data" / ".kafka_cleanshutdown").exists()


async def test_a_stop_without_room_ends_and_the_next_start_recovers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = new_node(tmp_path)
    await node.start()
    await create_topic(node, "t")
    client = await Client.connect(node)
    assert (await client.produce("t", b"x", acks=-1)).offset == 0

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("penstock.log.index_files.write_indexes", full)
        await node.stop()
    assert (node.state, node.stopped_cleanly) == ("stopped", False)
    assert not (tmp_path / "data" / ".kafka_cleanshutdown").exists()
    async with running(tmp_path) as node:
        assert node.partitions.find("t", 0).log.end_offset == 1


def _serve(tmp_path: Path, script: str) -> "subprocess.Popen[str]":
    """A process of its own, which prints a line for each thing that the test waits for."""
    return subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "data")], stdout=subprocess.PIPE, text=True
    )


_SLOW_START = """
import sys, threading
from penstock.broker.process import serve
from penstock.broker.config.node_settings import load_settings
from penstock.broker.quorum.metadata_log import MetadataLog

def recover():
    print("recovering", flush=True)
    threading.Event().wait(60)

async def commit(self, records):
    await self._environment.in_thread(recover)

MetadataLog._commit = commit
settings = load_settings({"listeners": "127.0.0.1:0", "log.dirs": sys.argv[1]}, {})
sys.exit(serve(settings))
"""

_FAILING_SYNC = """
import asyncio, errno, os, sys
from tests.unit.broker.raw_client import Client, create_topic, new_node
from pathlib import Path

async def main():
    node = new_node(Path(sys.argv[1]))
    await node.start()
    await create_topic(node, "t")
    client = await Client.connect(node)
    print((await client.produce("t", b"x", acks=-1)).offset, flush=True)
    def fail(fd):
        raise OSError(errno.EIO, "disk on fire")
    os.fdatasync = fail
    print(await client.produce("t", b"y", acks=-1), flush=True)

asyncio.run(main())
"""


def test_a_second_signal_does_not_wait_for_anything(tmp_path: Path) -> None:
    with _serve(tmp_path, _SLOW_START) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "recovering\n"
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) != 0


def test_a_failed_sync_ends_the_process_and_acknowledges_nothing(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", _FAILING_SYNC, str(tmp_path)],
        capture_output=True, text=True, timeout=60, cwd=root, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "0\n"), done.stderr
    assert "fsync failed" in done.stderr


def test_threads_that_compute_give_way_to_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    before = sys.getswitchinterval()

    async def nothing(*_: object) -> int:
        return 0

    monkeypatch.setattr(node_process, "_serve", nothing)
    try:
        assert node_process.serve(load_settings({}, {})) == 0
        assert sys.getswitchinterval() <= 0.001
    finally:
        sys.setswitchinterval(before)
