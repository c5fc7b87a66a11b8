"""The HTTP port: scrapers, load balancers and malformed requests."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from tests.unit.broker.raw_client import running
from tests.waiting import eventually_async

from penstock.broker.network import http
from penstock.broker.network.http import HttpResponse, HttpServer, NodeEndpoints
from penstock.protocol.errors import ApiError, ErrorCode


async def _hello() -> HttpResponse:
    return HttpResponse(HTTPStatus.OK, b"hello", "text/x-greeting")


async def _broken() -> HttpResponse:
    raise RuntimeError("secret detail")


@pytest.fixture
async def server() -> AsyncIterator[HttpServer]:
    server = await HttpServer.start(("127.0.0.1", 0), {"/hello": _hello, "/broken": _broken})
    yield server
    await server.close()


async def _exchange(server: HttpServer, request: bytes) -> tuple[int, dict[str, str], bytes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(request)
    try:
        answer = await asyncio.wait_for(reader.read(), 10)
    finally:
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *headers = head.decode().split("\r\n")
    return int(status.split(" ")[1]), dict(line.split(": ", 1) for line in headers), body


async def test_get(server: HttpServer) -> None:
    status, headers, body = await _exchange(server, b"GET /hello HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (status, body) == (200, b"hello")
    assert headers["Content-Type"] == "text/x-greeting"
    assert headers["Content-Length"] == "5"
    assert headers["Connection"] == "close"


async def test_head_is_get_without_the_body(server: HttpServer) -> None:
    status, headers, body = await _exchange(server, b"HEAD /hello HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (status, headers["Content-Length"], body) == (200, "5", b"")


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"GET /hello?name=x HTTP/1.1", 200),
        (b"GET http://somewhere:1/hello HTTP/1.1", 200),
        (b"GET /hello HTTP/1.0", 200),
        (b"GET /nothing HTTP/1.1", 404),
        (b"GET / HTTP/1.1", 404),
        (b"POST /hello HTTP/1.1", 405),
        (b"GET /hello HTTP/2.0", 505),
        (b"GET hello HTTP/1.1", 400),
        (b"GET /hel lo HTTP/1.1", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"", 400),
    ],
)
async def test_status_of_a_request_line(server: HttpServer, request_line: bytes, status: int) -> None:
    assert (await _exchange(server, request_line + b"\r\nHost: x\r\n\r\n"))[0] == status


@pytest.mark.parametrize("headers", [b"", b"\r\nHost: a\r\nHost: b", b"\r\nHost: a\r\nnonsense"])
async def test_bad_header_fields(server: HttpServer, headers: bytes) -> None:
    assert (await _exchange(server, b"GET /hello HTTP/1.1" + headers + b"\r\n\r\n"))[0] == 400


async def test_a_wrong_method_is_told_the_right_ones(server: HttpServer) -> None:
    _, headers, _ = await _exchange(server, b"DELETE /hello HTTP/1.1\r\nHost: x\r\n\r\n")
    assert headers["Allow"] == "GET, HEAD"


async def test_a_request_in_pieces(server: HttpServer) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    for byte in b"GET /hello HTTP/1.1\r\nHost: x\r\n\r\n":
        writer.write(bytes([byte]))
        await writer.drain()
    assert (await reader.read()).endswith(b"hello")
    writer.close()


async def test_a_head_without_end_is_refused(server: HttpServer) -> None:
    status, _, _ = await _exchange(
        server, b"GET /hello HTTP/1.1\r\nHost: " + b"x" * (http.HEAD_BYTES_MAX + 1)
    )
    assert status == 431


async def test_a_request_that_does_not_come_is_given_up(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "HEAD_SECONDS_MAX", 0.01)
    assert (await _exchange(server, b"GET /hel"))[0] == 408


async def test_connections_are_bounded(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "CONNECTIONS_MAX", 1)
    _, idle = await asyncio.open_connection("127.0.0.1", server.port)
    assert (await _exchange(server, b""))[0] == 503
    idle.close()


async def test_a_failure_inside_is_not_shown(server: HttpServer) -> None:
    status, _, body = await _exchange(server, b"GET /broken HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (status, body) == (500, b"internal error\n")


async def test_an_address_in_use_is_named(server: HttpServer) -> None:
    with pytest.raises(OSError, match=rf"HTTP on 127\.0\.0\.1:{server.port}: Address already in use"):
        await HttpServer.start(("127.0.0.1", server.port), {})


async def test_closing_disconnects_remaining_clients(server: HttpServer) -> None:
    port = server.port
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"GET /hel")
    await eventually_async(_has_connections(server))
    await server.close()
    with contextlib.suppress(ConnectionResetError):
        assert await asyncio.wait_for(reader.read(), 10) == b""
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)
    writer.close()


def _has_connections(server: HttpServer) -> Callable[[], Awaitable[bool]]:
    async def check() -> bool:
        return bool(server.connections)

    return check


class _Groups:
    def __init__(self, error: ApiError | None = None) -> None:
        self.error = error

    async def read_all(self, question: Any) -> list[Any]:
        if self.error is not None:
            raise self.error
        return []


def _endpoints(state: str, groups: _Groups) -> NodeEndpoints:
    return NodeEndpoints(
        7,
        state=lambda: state,
        exposition=pytest.fail,  # type: ignore[arg-type]
        groups=lambda: groups,  # type: ignore[arg-type,return-value]
    )


@pytest.mark.parametrize("state", ["starting", "stopping", "stopped"])
async def test_a_node_that_does_not_serve_is_not_ready(state: str) -> None:
    assert await _endpoints(state, _Groups()).readiness_problem() == f"the node is {state}"


async def test_a_node_that_serves_is_ready() -> None:
    assert await _endpoints("serving", _Groups()).readiness_problem() is None


async def test_a_node_without_its_coordinators_is_not_ready() -> None:
    groups = _Groups(ApiError(ErrorCode.coordinator_load_in_progress))
    reason = await _endpoints("serving", groups).readiness_problem()
    assert reason == "a group coordinator cannot be reached: coordinator_load_in_progress"


async def test_the_routes_of_a_node() -> None:
    server = await HttpServer.start(("127.0.0.1", 0), _endpoints("starting", _Groups()).routes())
    try:
        answers = [
            await _exchange(server, b"GET /%b HTTP/1.0\r\n\r\n" % path)
            for path in (b"health", b"ready", b"metrics")
        ]
    finally:
        await server.close()
    (health, _, healthy), (ready, _, readiness), (metrics, _, _) = answers
    assert (health, json.loads(healthy)["status"]) == (200, "ok")
    assert (ready, json.loads(readiness)) == (503, {"ready": False, "reason": "the node is starting"})
    assert metrics == 503


@pytest.mark.parametrize(
    ("given", "bound"),
    [(":0", "127.0.0.1"), ("127.0.0.1:0", "127.0.0.1"), ("0.0.0.0:0", "0.0.0.0")],
)
async def test_without_a_host_only_this_machine_is_served(tmp_path: Path, given: str, bound: str) -> None:
    async with running(tmp_path, **{"penstock.http.listen": given}) as node:
        assert node.http is not None
        assert node.http.addresses == [(bound, node.http.port)]
