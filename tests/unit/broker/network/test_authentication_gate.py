"""What a connection may do before it has authenticated, and after its session has expired."""

from __future__ import annotations

import asyncio
import logging
import struct
from pathlib import Path

import pytest
from tests.unit.broker.raw_client import running

from penstock.broker.metrics.counters import Metrics
from penstock.broker.network.connection import Connection
from penstock.broker.network.unauthenticated import Refusals, Unauthenticated
from penstock.broker.node import Node
from penstock.security.principal import Principal

API_VERSIONS, METADATA = 18, 3


def request(api_key: int, correlation_id: int, body: bytes = b"") -> bytes:
    frame = struct.pack(">hhih", api_key, 0, correlation_id, 1) + b"c" + body
    return struct.pack(">i", len(frame)) + frame


class Login:
    """A login that the test decides about."""

    def __init__(self) -> None:
        self.is_done = self.is_expired = False

    def is_complete(self, now_ms: int) -> bool:
        return self.is_done and not self.is_expired

    def must_reauthenticate(self, now_ms: int) -> bool:
        return self.is_expired


async def connected(node: Node) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, Connection, Login]:
    """One whose next request is the first for which a login is needed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", node.listeners[0].port)
    writer.write(request(API_VERSIONS, 1))
    await received(reader, 1)
    (connection,) = node.server.connections
    login = connection.authentication = Login()
    connection.frame_bytes_max = 1000
    return reader, writer, connection, login


async def received(reader: asyncio.StreamReader, correlation_id: int) -> None:
    (size,) = struct.unpack(">i", await reader.readexactly(4))
    assert struct.unpack_from(">i", await reader.readexactly(size)) == (correlation_id,)


def kinds(node: Node) -> list[str]:
    return [kind for _, kind in node.metrics.authentication_failures]


async def test_only_api_versions_is_served_before_a_login(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.WARNING, "penstock.server")
    async with running(tmp_path) as node:
        reader, writer, _, _ = await connected(node)
        writer.write(request(API_VERSIONS, 2) + request(METADATA, 3, b"\0\0\0\0") + request(API_VERSIONS, 4))
        await received(reader, 2)
        assert await reader.read() == b""
        assert kinds(node) == ["no_authentication"]
        assert caplog.records[-1].reason == "a request before authentication"
        writer.close()


@pytest.mark.parametrize("api_key", [0, 1, 19, 58, 30_000, 9999, -1])
async def test_no_other_api_is_served_either(tmp_path: Path, api_key: int):
    async with running(tmp_path) as node:
        reader, writer, _, _ = await connected(node)
        writer.write(request(api_key, 2, bytes(100)))
        assert await reader.read() == b""
        assert kinds(node) == ["no_authentication"]
        writer.close()


async def test_large_frames_are_served_only_after_a_login(tmp_path: Path):
    async with running(tmp_path) as node:
        reader, writer, connection, login = await connected(node)
        login.is_done = True
        connection.authenticated(Principal("User", "alice"))
        writer.write(request(METADATA, 2, b"\0\0\0\1" + struct.pack(">h", 2000) + b"x" * 2000))
        await received(reader, 2)
        writer.close()
    async with running(tmp_path) as node:
        reader, writer, connection, login = await connected(node)
        writer.write(request(API_VERSIONS, 2, bytes(2000)))
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(4)
        writer.close()


async def test_the_end_of_a_session_closes_the_connection_at_its_next_request(tmp_path: Path):
    async with running(tmp_path) as node:
        reader, writer, _, login = await connected(node)
        login.is_done = True
        writer.write(request(METADATA, 2, b"\0\0\0\0"))
        await received(reader, 2)
        login.is_expired = True
        writer.write(request(API_VERSIONS, 3))
        await received(reader, 3)
        writer.write(request(METADATA, 4, b"\0\0\0\0"))
        assert await reader.read() == b""
        assert kinds(node) == ["session_expired"]
        writer.close()


async def test_a_connection_closes_after_the_replies_to_its_requests(tmp_path: Path):
    async with running(tmp_path) as node:
        reader, writer, _, login = await connected(node)
        login.is_done = True
        served = node.server.dispatch

        def closes_at_the_second(connection: Connection, frame: memoryview) -> None:
            if struct.unpack_from(">i", frame, 4) == (3,):
                connection.close_after_replies()
            served(connection, frame)

        node.server.dispatch = closes_at_the_second
        writer.write(b"".join(request(METADATA, number, b"\0\0\0\0") for number in (2, 3, 4)))
        await received(reader, 2)
        await received(reader, 3)
        assert await reader.read() == b""
        writer.close()


class Silent:
    """A connection of which only its place among those that have not authenticated matters."""

    listener = peer = "SASL"

    def __init__(self, *, waits_for_node: bool, client_host: str = "10.0.0.1") -> None:
        self.waits_for_node = waits_for_node
        self.client_host = client_host
        self.is_aborted = False

    def abort(self) -> None:
        self.is_aborted = True


@pytest.mark.parametrize("waiting", [0, 3, 10])
def test_the_number_of_connections_that_have_not_authenticated_is_bounded(waiting: int) -> None:
    """Also while all of them wait for this node, as in a flood of handshakes: then new ones are refused."""
    bound = Unauthenticated(10, 60.0, Refusals(Metrics(), lambda: 0.0))
    connections = [Silent(waits_for_node=number < waiting) for number in range(30)]
    for connection in connections:
        bound.add(connection, 0.0)  # type: ignore[arg-type]
        assert len(bound) <= 10
    assert not any(connection.is_aborted for connection in connections[:waiting])
    assert sum(connection.is_aborted for connection in connections) == 20


def test_a_flood_of_handshakes_costs_little_for_each_of_them_and_spares_no_silent_connection() -> None:
    looked_at = 0

    class Busy(Silent):
        @property
        def waits_for_node(self) -> bool:
            nonlocal looked_at
            looked_at += 1
            return True

        @waits_for_node.setter
        def waits_for_node(self, value: bool) -> None: ...

    bound = Unauthenticated(1000, 60.0, Refusals(Metrics(), lambda: 0.0))
    busy = [Busy(waits_for_node=True) for _ in range(500)]
    silent = [Silent(waits_for_node=False) for _ in range(500)]
    for connection in (*busy, *silent):
        bound.add(connection, 0.0)  # type: ignore[arg-type]
    flood = [Silent(waits_for_node=False) for _ in range(100)]
    for connection in flood:
        bound.add(connection, 1.0)  # type: ignore[arg-type]
    assert looked_at <= 20 * len(flood)
    assert sum(connection.is_aborted for connection in silent) > 50, "those that were silent for longest"
    assert not any(connection.is_aborted for connection in busy)
    bound.close_late(61.0)
    assert all(connection.is_aborted for connection in silent)
    assert sum(not connection.is_aborted for connection in flood) > 50


def bound_of(connections_max: int) -> Unauthenticated:
    return Unauthenticated(connections_max, 60.0, Refusals(Metrics(), lambda: 0.0))


def test_those_whose_login_failed_go_first_the_first_to_fail_before_the_others() -> None:
    bound = bound_of(4)
    silent, first, second, other = (Silent(waits_for_node=True) for _ in range(4))
    silent.waits_for_node = False
    for connection in (silent, second, first, other):
        bound.add(connection, 0.0)  # type: ignore[arg-type]
    bound.failed(first)  # type: ignore[arg-type]
    bound.failed(second)  # type: ignore[arg-type]
    gone = []
    for _ in range(4):
        bound.add(Silent(waits_for_node=True), 1.0)  # type: ignore[arg-type]
        gone.append([connection.is_aborted for connection in (first, second, silent, other)])
    assert gone == [
        [True, False, False, False],
        [True, True, False, False],
        [True, True, True, False],
        [True, True, True, False],  # all that are left wait for this node: the newest was refused
    ]


@pytest.mark.parametrize("is_busy", [False, True], ids=["silent", "in handshakes"])
@pytest.mark.parametrize(
    "attackers",
    [["10.0.0.66"], ["10.0.0.66", "10.0.0.67"], [f"2001:db8::{n:x}" for n in range(50)]],
    ids=["one address", "two addresses", "a network"],
)
def test_an_address_that_takes_all_places_takes_none_from_others(attackers: list[str], is_busy: bool) -> None:
    bound = bound_of(100)
    real = [Silent(waits_for_node=False, client_host=f"10.0.1.{number}") for number in range(20)]
    for connection in real[:10]:
        bound.add(connection, 0.0)  # type: ignore[arg-type]
    for number in range(500):
        attacker = Silent(waits_for_node=is_busy, client_host=attackers[number % len(attackers)])
        bound.add(attacker, 1.0)  # type: ignore[arg-type]
    for connection in real[10:]:
        bound.add(connection, 2.0)  # type: ignore[arg-type]
    assert len(bound) == 100
    assert not any(connection.is_aborted for connection in real)


def test_of_many_addresses_with_one_place_each_the_one_that_was_silent_for_longest_is_closed() -> None:
    bound = bound_of(10)
    connections = [Silent(waits_for_node=False, client_host=f"10.0.2.{number}") for number in range(15)]
    for connection in connections:
        bound.add(connection, 0.0)  # type: ignore[arg-type]
    assert [connection.is_aborted for connection in connections] == [True] * 5 + [False] * 10
