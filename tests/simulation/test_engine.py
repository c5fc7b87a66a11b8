"""The virtual computers do what real ones do: processes that stop, networks that fail, disks that forget."""

import asyncio
import errno
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from simulation.engine.disk import Disk
from simulation.engine.loop import OUTSIDE, Process, Violation, VirtualLoop
from simulation.engine.network import Network
from simulation.engine.system import close_descriptors, simulated


class Computer(NamedTuple):
    host: str
    disk: Any = None
    clock_skew_s: float = 0.0


class Echo(asyncio.Protocol):
    """Sends back what it receives."""

    def __init__(self) -> None:
        self.received = b""
        self.lost: list[Exception | None] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.received += data
        if not data.startswith(b"echo"):
            self.transport.write(b"echo " + data)  # type: ignore[attr-defined]

    def connection_lost(self, error: Exception | None) -> None:
        self.lost.append(error)


@pytest.fixture
def loop() -> VirtualLoop:
    return VirtualLoop(1)


@pytest.fixture
def network(loop: VirtualLoop) -> Iterator[Network]:
    found = Network(loop)
    with simulated(loop, found, 1):
        yield found


# -- processes and time --------------------------------------------------------------------------------


def test_virtual_time_takes_no_time_and_keeps_the_order(loop: VirtualLoop) -> None:
    seen: list[str] = []
    loop.call_later(3600, seen.append, "later")
    loop.call_later(1, seen.append, "sooner")
    before = time.monotonic()
    assert not loop.run_for(7200)
    assert seen == ["sooner", "later"]
    assert loop.now_ms == 7_200_000
    assert time.monotonic() - before < 600


def test_a_killed_process_does_nothing_more(loop: VirtualLoop) -> None:
    process, seen = Process("a", Computer("10.0.0.1")), []

    async def work() -> None:
        try:
            seen.append("before")
            await asyncio.sleep(2)
            seen.append("after")
        finally:
            seen.append("finally")

    loop.spawn(process, work())
    loop.run_for(1)
    loop.end(process)
    loop.run_for(10)
    assert seen == ["before"]


def test_a_suspended_process_goes_on_where_it_stopped(loop: VirtualLoop) -> None:
    process, seen = Process("a", Computer("10.0.0.1")), []
    for number in range(3):
        loop.after(number + 1, process, seen.append, number)
    loop.suspend(process)
    loop.run_for(10)
    assert seen == []
    loop.resume(process)
    loop.run_for(0)
    assert seen == [0, 1, 2]


def test_an_error_that_nothing_handles_fails_the_run(loop: VirtualLoop) -> None:
    def fail() -> None:
        raise ValueError("unexpected")

    loop.call_later(1, fail)
    with pytest.raises(Violation, match=r"every error is handled.*unexpected"):
        loop.run_for(2)


def test_system_calls_are_virtual_in_simulated_processes_only(loop: VirtualLoop, network: Network) -> None:
    process, seen = Process("a", Computer("10.0.0.1", clock_skew_s=5.0)), {}

    def look() -> None:
        seen.update(monotonic=time.monotonic(), wall=time.time(), id=uuid.uuid4())

    loop.after(2, process, look)
    loop.run_for(3)
    assert seen["monotonic"] == pytest.approx(1002)
    assert seen["wall"] - seen["monotonic"] == pytest.approx(1_750_000_005)
    assert abs(time.time() - seen["wall"]) > 1000  # outside, the real clock
    assert seen["id"].version == 4


# -- the network ---------------------------------------------------------------------------------------


def connected(loop: VirtualLoop, network: Network) -> tuple[Process, Echo, Process, list[Echo]]:
    """Return a client process with its connection, and a server process with its connections."""
    client, server = Process("client", Computer("10.0.1.1")), Process("server", Computer("10.0.0.1"))
    accepted: list[Echo] = []

    def accept() -> Echo:
        accepted.append(Echo())
        return accepted[-1]

    async def serve() -> None:
        listener = await loop.create_server(accept, "10.0.0.1", 9092)
        await listener.start_serving()

    async def connect() -> Echo:
        _, protocol = await loop.create_connection(Echo, "10.0.0.1", 9092)
        return protocol

    loop.spawn(server, serve())
    loop.run_for(0.1)
    task = loop.spawn(client, connect())
    loop.run_for(1)
    return client, task.result(), server, accepted


def test_data_arrives_and_is_answered(loop: VirtualLoop, network: Network) -> None:
    client, connection, _, _ = connected(loop, network)
    loop.after(0, client, connection.transport.write, b"hello")  # type: ignore[attr-defined]
    loop.run_for(1)
    assert connection.received == b"echo hello"


def test_nothing_listens_so_the_connection_is_refused(loop: VirtualLoop, network: Network) -> None:
    client = Process("client", Computer("10.0.1.1"))

    async def connect() -> None:
        with pytest.raises(ConnectionRefusedError):
            await loop.create_connection(Echo, "10.0.0.1", 9092)

    task = loop.spawn(client, connect())
    loop.run_for(1)
    task.result()


def test_a_cut_holds_data_back_until_it_heals(loop: VirtualLoop, network: Network) -> None:
    client, connection, _, accepted = connected(loop, network)
    network.cut(("10.0.1.1",), ("10.0.0.1",), both_ways=False)
    loop.after(0, client, connection.transport.write, b"hello")  # type: ignore[attr-defined]
    loop.run_for(5)
    assert accepted[0].received == b""
    network.heal()
    loop.run_for(1)
    assert connection.received == b"echo hello"


def test_a_killed_process_resets_its_connections(loop: VirtualLoop, network: Network) -> None:
    _, connection, server, _ = connected(loop, network)
    loop.end(server)
    network.process_ended(server)
    loop.run_for(1)
    assert isinstance(connection.lost[0], ConnectionResetError)


def test_a_machine_without_power_says_nothing_until_it_is_back(loop: VirtualLoop, network: Network) -> None:
    client, connection, server, _ = connected(loop, network)
    loop.end(server)
    network.power_lost(server, "10.0.0.1")
    loop.after(0, client, connection.transport.write, b"hello")  # type: ignore[attr-defined]
    loop.run_for(5)
    assert connection.lost == []
    network.power_restored("10.0.0.1")
    loop.run_for(1)
    assert isinstance(connection.lost[0], ConnectionResetError)


# -- disks ---------------------------------------------------------------------------------------------


@pytest.fixture
def disk(loop: VirtualLoop, tmp_path: Path) -> Disk:
    return Disk(loop, tmp_path / "disk")


def in_process(loop: VirtualLoop, disk: Disk, call: Any) -> Process:
    process = Process("node", Computer("10.0.0.1", disk))
    loop.after(0, process, call)
    loop.run_for(0.1)
    return process


def test_a_power_loss_keeps_what_was_synced(loop: VirtualLoop, network: Network, disk: Disk) -> None:
    path = disk.folder / "file"

    def write() -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT)
        os.pwrite(fd, b"synced", 0)
        os.fdatasync(fd)
        os.pwrite(fd, b" and not", 6)

    process = in_process(loop, disk, write)
    close_descriptors(process)
    disk.lose_power()
    assert path.read_bytes().startswith(b"synced")
    assert b"synced and not".startswith(path.read_bytes())
    assert disk.boots == 1


def test_a_full_disk_and_a_failed_sync_raise_errors(loop: VirtualLoop, network: Network, disk: Disk) -> None:
    errors: list[int | None] = []

    def write() -> None:
        fd = os.open(disk.folder / "file", os.O_RDWR | os.O_CREAT)
        disk.is_full = True
        try:
            os.pwrite(fd, b"x", 0)
        except OSError as error:
            errors.append(error.errno)
        disk.is_full, disk.fails_next_sync = False, True
        try:
            os.fsync(fd)
        except OSError as error:
            errors.append(error.errno)
        os.fsync(fd)
        os.close(fd)

    in_process(loop, disk, write)
    assert errors == [errno.ENOSPC, errno.EIO]


def test_the_end_of_a_process_closes_its_files(loop: VirtualLoop, network: Network, disk: Disk) -> None:
    opened: list[int] = []
    process = in_process(
        loop, disk, lambda: opened.append(os.open(disk.folder / "file", os.O_RDWR | os.O_CREAT))
    )
    loop.end(process)
    close_descriptors(process)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened[0])


def test_what_happens_outside_of_processes_goes_on(loop: VirtualLoop) -> None:
    process, seen = Process("a", Computer("10.0.0.1")), []
    loop.end(process)
    loop.call_later(1, seen.append, "network", context=OUTSIDE)
    loop.run_for(2)
    assert seen == ["network"]
