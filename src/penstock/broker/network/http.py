"""The HTTP endpoint of a node: /metrics, /health and /ready, one request per connection."""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from penstock.broker.config.listeners import format_address
from penstock.broker.network.tls import Handshakes, TlsContexts, TlsLayer
from penstock.protocol.errors import ApiError

if TYPE_CHECKING:
    from penstock.broker.coordinators.groups.coordinator import GroupCoordinator
    from penstock.broker.metrics.exposition import Exposition

logger = logging.getLogger("penstock.http")

HEAD_BYTES_MAX: Final = 8 * 1024
#: Timeouts for receiving the request and for the whole exchange, which takes longer if the node is busy or the client
#: reads slowly.
HEAD_SECONDS_MAX: Final = 5.0
EXCHANGE_SECONDS_MAX: Final = 30.0
CONNECTIONS_MAX: Final = 64
_COORDINATOR_SECONDS_MAX: Final = 2.0

_END_OF_HEAD: Final = b"\r\n\r\n"
_METHODS: Final = ("GET", "HEAD")


class HttpResponse(NamedTuple):
    status: HTTPStatus
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


HttpHandler = Callable[[], Awaitable[HttpResponse]]


class HttpError(Exception):
    """The status and the message with which a request is refused."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


# -- endpoints -------------------------------------------------------------------------------------------


class NodeEndpoints:
    """`exposition` and `groups` are used only while the state is "serving"."""

    def __init__(
        self,
        node_id: int,
        *,
        state: Callable[[], str],
        exposition: Callable[[], Exposition],
        groups: Callable[[], GroupCoordinator],
    ) -> None:
        self._node_id = node_id
        self._state = state
        self._exposition = exposition
        self._groups = groups

    def routes(self) -> dict[str, HttpHandler]:
        return {"/metrics": self._metrics, "/health": self._health, "/ready": self._ready}

    async def _metrics(self) -> HttpResponse:
        if (state := self._state()) != "serving":
            return _text_response(HTTPStatus.SERVICE_UNAVAILABLE, f"the node is {state}")
        exposition = self._exposition()
        return HttpResponse(HTTPStatus.OK, await exposition.scrape(), exposition.content_type)

    async def _health(self) -> HttpResponse:
        """Always reports ok: that there is a response shows that the event loop runs."""
        fields = {"status": "ok", "node_id": self._node_id, "state": self._state()}
        return _json_response(HTTPStatus.OK, fields)

    async def _ready(self) -> HttpResponse:
        reason = await self.readiness_problem()
        if reason is None:
            return _json_response(HTTPStatus.OK, {"ready": True})
        return _json_response(HTTPStatus.SERVICE_UNAVAILABLE, {"ready": False, "reason": reason})

    async def readiness_problem(self) -> str | None:
        """Return None if clients can be sent here: the listeners are served and every group coordinator replies."""
        if (state := self._state()) != "serving":
            return f"the node is {state}"
        try:
            async with asyncio.timeout(_COORDINATOR_SECONDS_MAX):
                await self._groups().read_all(lambda shard: None)
        except TimeoutError:
            return "a group coordinator does not answer"
        except ApiError as error:
            return f"a group coordinator cannot be reached: {error.code.name}"
        return None


def _json_response(status: HTTPStatus, fields: dict[str, Any]) -> HttpResponse:
    import json

    return HttpResponse(status, json.dumps(fields).encode() + b"\n", "application/json")


# -- HTTP ------------------------------------------------------------------------------------------------


class HttpTls(NamedTuple):
    handshakes: Handshakes
    contexts: TlsContexts


def _log_failure(layer: TlsLayer, failure: Exception | None) -> None:
    if failure is not None:
        logger.debug("no TLS handshake", extra={"reason": str(failure)})


class HttpServer:
    """Use `HttpServer.start`."""

    def __init__(self, routes: Mapping[str, HttpHandler], token: str | None = None) -> None:
        self.routes = routes
        self._token = None if token is None else token.encode()
        self.connections: set[_HttpConnection] = set()
        self._server: asyncio.Server | None = None

    @classmethod
    async def start(
        cls,
        address: tuple[str, int],
        routes: Mapping[str, HttpHandler],
        *,
        token: str | None = None,
        tls: HttpTls | None = None,
    ) -> HttpServer:
        """With `token`, every request must carry it."""
        self = cls(routes, token)

        def new_connection() -> asyncio.BufferedProtocol:
            connection = _HttpConnection(self)
            if tls is None:
                return connection
            return TlsLayer(connection, tls.handshakes, lambda: tls.contexts.server, _log_failure)

        host, port = address
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(new_connection, host, port)
        except OSError as error:
            why = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
            raise OSError(error.errno, f"HTTP on {format_address(host, port)}: {why}") from None
        return self

    def is_allowed(self, request: HttpRequest) -> bool:
        if self._token is None:
            return True
        scheme, _, given = request.authorization.partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), self._token)

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """The addresses that were bound, of which a host name may have several."""
        assert self._server is not None
        return [socket.getsockname()[:2] for socket in self._server.sockets]

    @property
    def port(self) -> int:
        return self.addresses[0][1]

    async def close(self) -> None:
        if self._server is None:
            return
        self._server.close()
        self._server = None
        for connection in tuple(self.connections):
            connection.abort()
        await asyncio.sleep(0)


class _HttpConnection(asyncio.BufferedProtocol):
    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._received = memoryview(bytearray(HEAD_BYTES_MAX))
        self._transport: asyncio.Transport
        self._head = bytearray()
        self._is_answered = False
        self._timers: tuple[asyncio.TimerHandle, ...] = ()
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        loop = asyncio.get_running_loop()
        self._timers = (
            loop.call_later(HEAD_SECONDS_MAX, self._head_is_late),
            loop.call_later(EXCHANGE_SECONDS_MAX, self.abort),
        )
        self._server.connections.add(self)
        if len(self._server.connections) > CONNECTIONS_MAX:
            self._refuse(HttpError(HTTPStatus.SERVICE_UNAVAILABLE, "too many connections"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(self)
        for timer in self._timers:
            timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def abort(self) -> None:
        self._transport.abort()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._received

    def buffer_updated(self, nbytes: int) -> None:
        if self._is_answered:
            return
        self._head += self._received[:nbytes]
        try:
            head = _complete_head(self._head)
            if head is not None:
                self._is_answered = True
                self._begin(parse_request(head))
        except HttpError as error:
            self._refuse(error)

    def _begin(self, request: HttpRequest) -> None:
        if not self._server.is_allowed(request):
            raise HttpError(HTTPStatus.UNAUTHORIZED, "a bearer token is needed")
        route = self._server.routes.get(request.path)
        if route is None:
            known = ", ".join(sorted(self._server.routes))
            raise HttpError(HTTPStatus.NOT_FOUND, f"nothing here; there are {known}")
        if request.method not in _METHODS:
            raise HttpError(HTTPStatus.METHOD_NOT_ALLOWED, f"{request.path} takes GET and HEAD")
        self._task = asyncio.get_running_loop().create_task(self._answer(route, request.method))

    async def _answer(self, route: HttpHandler, method: str) -> None:
        try:
            answer = await route()
        except asyncio.CancelledError:
            raise
        except Exception:
            logger.exception("HTTP request failed")
            answer = _text_response(HTTPStatus.INTERNAL_SERVER_ERROR, "internal error")
        self._send(answer, with_body=method != "HEAD")

    def _refuse(self, error: HttpError) -> None:
        self._is_answered = True
        self._send(_text_response(error.status, str(error)))

    def _head_is_late(self) -> None:
        if not self._is_answered:
            self._refuse(HttpError(HTTPStatus.REQUEST_TIMEOUT, "the request did not arrive in time"))

    def _send(self, answer: HttpResponse, *, with_body: bool = True) -> None:
        self._transport.write(encode_head(answer) + (answer.body if with_body else b""))
        self._transport.close()


class HttpRequest(NamedTuple):
    method: str
    path: str
    authorization: str = ""

    def __repr__(self) -> str:
        return f"HttpRequest({self.method} {self.path})"


def _complete_head(received: bytearray) -> bytes | None:
    """Return the head without the empty line that ends it, or None while it is incomplete. Raises HttpError."""
    end = received.find(_END_OF_HEAD)
    if end > HEAD_BYTES_MAX or (end < 0 and len(received) > HEAD_BYTES_MAX):
        raise HttpError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"more than {HEAD_BYTES_MAX} bytes")
    return None if end < 0 else bytes(received[:end])


def parse_request(head: bytes) -> HttpRequest:
    """Raises HttpError."""
    request_line, *headers = head.decode("latin-1").split("\r\n")
    parts = request_line.split(" ")
    if len(parts) != 3 or not parts[0].isalpha() or not parts[2].startswith("HTTP/"):
        raise HttpError(HTTPStatus.BAD_REQUEST, "this is no HTTP request")
    method, target, version = parts
    if version not in ("HTTP/1.1", "HTTP/1.0"):
        raise HttpError(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "HTTP/1.1 is spoken here")
    names = [line.partition(":")[0].lower() for line in headers if ":" in line]
    if len(names) != len(headers) or (version == "HTTP/1.1" and names.count("host") != 1):
        raise HttpError(HTTPStatus.BAD_REQUEST, "bad header fields")
    authorization = [
        line.partition(":")[2].strip() for line in headers if line.lower().startswith("authorization:")
    ]
    if len(authorization) > 1:
        raise HttpError(HTTPStatus.BAD_REQUEST, "bad header fields")
    return HttpRequest(method, _path(target), *authorization)


def _path(target: str) -> str:
    if target.startswith("http://"):
        target = "/" + target.removeprefix("http://").partition("/")[2]
    if not target.startswith("/"):
        raise HttpError(HTTPStatus.BAD_REQUEST, "bad request target")
    return target.partition("?")[0]


def encode_head(answer: HttpResponse) -> bytes:
    status = answer.status
    lines = [
        f"HTTP/1.1 {status.value} {status.phrase}",
        f"Content-Type: {answer.content_type}",
        f"Content-Length: {len(answer.body)}",
        "Cache-Control: no-store",
        "Connection: close",
    ]
    if status is HTTPStatus.METHOD_NOT_ALLOWED:
        lines.append(f"Allow: {', '.join(_METHODS)}")
    if status is HTTPStatus.UNAUTHORIZED:
        lines.append("WWW-Authenticate: Bearer")
    return "\r\n".join([*lines, "", ""]).encode()


def _text_response(status: HTTPStatus, message: str) -> HttpResponse:
    return HttpResponse(status, f"{message}\n".encode())
