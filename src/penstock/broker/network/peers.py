"""Connections to other nodes: one per peer and purpose, with pipelined requests, closed on the first error.

A server replies in order, so requests that may wait there for long (long polls) have a connection of their own.
"""

from __future__ import annotations

import asyncio
import io
import logging
import secrets
import ssl
import struct
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import cache, partial
from itertools import count
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from penstock.broker.config.listener_security import node_token_endpoint
from penstock.broker.environment import in_daemon_thread
from penstock.broker.network.apis import API_VERSIONS, APIS, FETCH
from penstock.broker.network.tls import Handshakes, TlsContexts, TlsLayer
from penstock.protocol.compression import BytesLike
from penstock.protocol.errors import MalformedFrame
from penstock.protocol.jaas import parse_jaas
from penstock.protocol.sasl_client import (
    OAUTHBEARER,
    PLAIN,
    PlainExchange,
    SaslError,
    SaslExchange,
    ScramExchange,
)
from penstock.protocol.scram import SCRAM_HASHES
from penstock.protocol.wire import skip_tags

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.broker.config.node_settings import NodeSettings

logger = logging.getLogger("penstock.peers")

#: Host and port.
Address = tuple[str, int]
#: The id of a node, or the address that it listens on.
Destination = int | Address

QUORUM: Final = "quorum"
#: Long polls of the metadata log; votes must not wait behind them.
QUORUM_FETCH: Final = "quorum-fetch"
DATA: Final = "data"
CONTROL: Final = "control"

#: The largest response that a peer may send; snapshots and fetches request far less.
RESPONSE_BYTES_MAX: Final = 256 * 1024 * 1024
CONNECT_TIMEOUT_S: Final = 1.0
#: For the TLS handshake and the login.
AUTHENTICATION_TIMEOUT_S: Final = 5.0
#: The part of a session after which a new connection replaces the one that it belongs to.
_SESSION_FRACTION: Final = 0.85
_SASL_HANDSHAKE: Final = 17
_SASL_AUTHENTICATE: Final = 36
_WARNING_SECONDS: Final = 5.0
_last_warning = -_WARNING_SECONDS
_RECEIVE_BUFFER_BYTES: Final = 64 * 1024
_HEADER = struct.Struct(">hhih")  # api key, version, correlation id, length of the client id
_INT32 = struct.Struct(">i")
_CORRELATION_ID_POSITION: Final = 4
_FLEXIBLE_FETCH_FROM: Final = 12


class PeerLogin(NamedTuple):
    """How this node logs in to others with SASL. `new_exchange` may wait for a token, and raises SaslError."""

    mechanism: str
    new_exchange: Callable[[], SaslExchange]

    async def exchange(self) -> SaslExchange:
        """Raises SaslError."""
        if self.mechanism == OAUTHBEARER:
            return await in_daemon_thread(self.new_exchange, "penstock-token")
        return self.new_exchange()


class PeerSecurity(NamedTuple):
    """`contexts` is None without TLS, and `login` without SASL."""

    handshakes: Handshakes
    contexts: TlsContexts | None
    login: PeerLogin | None


def peer_security(
    settings: NodeSettings,
    listener: str | None,
    handshakes: Handshakes | None,
    contexts: Mapping[str, TlsContexts],
) -> PeerSecurity | None:
    """Return how to connect to the listeners of this name of other nodes."""
    if listener is None or handshakes is None or not settings.protocol(listener):
        return None
    login = None
    if settings.protocol(listener).uses_sasl:
        mechanism = settings.node_mechanism(listener) or ""  # the settings are checked
        login = PeerLogin(mechanism, partial(_new_exchange, settings, listener, mechanism))
    return PeerSecurity(handshakes, contexts.get(listener), login)


def _new_exchange(settings: NodeSettings, listener: str, mechanism: str) -> SaslExchange:
    if mechanism == OAUTHBEARER:
        # Imported here, because it takes 10 ms, which a node without OAUTHBEARER saves.
        from penstock.protocol.access_tokens import token_source

        return token_source(node_token_endpoint(partial(settings.listener_value, listener))).new_exchange()
    text = settings.listener_value(listener, "sasl.jaas.config", mechanism)
    options = parse_jaas(str(text)).options
    if mechanism == PLAIN:
        return PlainExchange(options["username"], options["password"])
    return ScramExchange(
        SCRAM_HASHES[mechanism], options["username"], options["password"], nonce=secrets.token_urlsafe(24)
    )


class PeerUnreachable(Exception):
    """No response will come. `refused`: the connection was closed or refused, so the peer is down or starting."""

    def __init__(self, message: str, *, refused: bool) -> None:
        super().__init__(message)
        self.refused = refused


class Peers:
    """Sends requests to other nodes.

    Raises PeerUnreachable, or TimeoutError if a peer takes too long; its connection is then closed.
    """

    def __init__(
        self,
        node_id: int,
        *,
        address_of: Callable[[int], Address | None],
        bind_host: str = "",
        security: PeerSecurity | None = None,
    ) -> None:
        """`address_of` returns where a node listens for other nodes, or None if that is unknown."""
        self._security = security
        self._client_id = f"penstock-{node_id}".encode()
        self._address_of = address_of
        self._bind_host = bind_host
        self._connections: dict[tuple[Address, str], asyncio.Task[_PeerConnection]] = {}
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<Peers of {self._client_id.decode()}: {sorted(self._connections)}>"

    async def call(
        self,
        where: Destination,
        api_key: int,
        request: Any,
        *,
        version: int | None = None,
        timeout_s: float,
        purpose: str = CONTROL,
    ) -> Any:
        """Send a request in the newest version, or in `version`; return the response in that version's class."""
        if version is None:
            version = APIS[api_key].max_version
        codec = _codec(api_key, version)
        out = io.BytesIO()
        out.write(self._header(api_key, version, codec.is_flexible))
        codec.write(out, request)
        answer = await self.raw(where, out.getvalue(), timeout_s=timeout_s, purpose=purpose)
        position = _body_position(answer, codec.is_flexible and api_key != API_VERSIONS)
        try:
            return codec.read(answer, position)
        except MalformedFrame as error:
            raise PeerUnreachable(str(error), refused=False) from None

    async def fetch(
        self,
        where: Destination,
        body: BytesLike,
        *,
        version: int,
        timeout_s: float,
        purpose: str = DATA,
    ) -> memoryview:
        """Send a Fetch request whose body is already encoded; return the body of the response."""
        is_flexible = version >= _FLEXIBLE_FETCH_FROM
        frame = b"".join((self._header(FETCH, version, is_flexible), body))
        answer = await self.raw(where, frame, timeout_s=timeout_s, purpose=purpose)
        return answer[_body_position(answer, is_flexible) :]

    async def raw(
        self, where: Destination, frame: BytesLike, *, timeout_s: float, purpose: str = CONTROL
    ) -> memoryview:
        """Send a whole request without its size field, with a correlation id of our own; return the whole response."""
        address = self._address(where)
        try:
            async with asyncio.timeout(timeout_s):
                connection = await self._connection(address, purpose)
                return await connection.ask(frame)
        except TimeoutError:
            raise TimeoutError(f"no answer from {address[0]}:{address[1]} in {timeout_s:.3g} s") from None

    async def close(self) -> None:
        self._is_closed = True
        connecting, self._connections = self._connections, {}
        for task in connecting.values():
            task.add_done_callback(_abort_when_connected)
            task.cancel()
        await asyncio.gather(*connecting.values(), return_exceptions=True)

    def _header(self, api_key: int, version: int, is_flexible: bool) -> bytes:
        return _request_header(self._client_id, api_key, version, is_flexible)

    def _address(self, where: Destination) -> Address:
        if not isinstance(where, int):
            return where
        found = self._address_of(where)
        if found is None:
            raise PeerUnreachable(f"the address of node {where} is unknown", refused=False)
        return found

    async def _connection(self, address: Address, purpose: str) -> _PeerConnection:
        if self._is_closed:
            raise PeerUnreachable("this node is stopping", refused=False)
        key = (address, purpose)
        task = self._connections.get(key)
        if task is None or (task.done() and not _is_usable(task)):
            if task is not None:
                _retire(task)
            connecting = _connect(address, self._bind_host, self._security, self._client_id)
            task = self._connections[key] = asyncio.get_running_loop().create_task(connecting)
            task.add_done_callback(_mark_retrieved)
        # Callers share the task: if one is cancelled, the others must still get their connection.
        return await asyncio.shield(task)


def _request_header(client_id: bytes, api_key: int, version: int, is_flexible: bool) -> bytes:
    head = _HEADER.pack(api_key, version, 0, len(client_id)) + client_id
    return head + b"\x00" if is_flexible else head


class _RequestCodec(NamedTuple):
    is_flexible: bool
    write: Callable[[io.BytesIO, Any], None]
    read: Callable[[memoryview, int], Any]


def load_codecs(api_keys: Iterable[int]) -> list[tuple[int, int]]:
    """Load what `call` would load with the first request; return each API with the version that `call` uses."""
    found = [(api_key, APIS[api_key].max_version) for api_key in (*api_keys, FETCH)]
    for api_key, version in found:
        _codec(api_key, version)
    return found[:-1]


@cache
def _codec(api_key: int, version: int) -> _RequestCodec:
    from penstock.protocol.schemas import request_encoder, request_is_flexible, response_reader

    return _RequestCodec(
        request_is_flexible(api_key, version),
        request_encoder(api_key, version),
        response_reader(api_key, version),
    )


def _body_position(answer: memoryview, is_flexible: bool) -> int:
    """Return where the body starts, after the header. Raises PeerUnreachable if the header is damaged."""
    try:
        return skip_tags(answer, 4, len(answer)) if is_flexible else 4
    except (IndexError, MalformedFrame):
        raise PeerUnreachable("the answer's header is damaged", refused=False) from None


async def _connect(
    address: Address, bind_host: str, security: PeerSecurity | None, client_id: bytes
) -> _PeerConnection:
    """Connect with a short timeout: TCP retries an old attempt ever more slowly, while a new one sends at once."""
    host, port = address
    source = (bind_host, 0) if bind_host else None
    connection = _PeerConnection()
    tls = None if security is None or security.contexts is None else _PeerTls(connection, security, host)
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await asyncio.get_running_loop().create_connection(
                lambda: connection if tls is None else tls.layer, host, port, local_addr=source
            )
    except TimeoutError:
        raise PeerUnreachable(
            f"{host}:{port}: no connection in {CONNECT_TIMEOUT_S:g} s", refused=False
        ) from None
    except OSError as error:
        refused = isinstance(error, ConnectionError)
        raise PeerUnreachable(f"{host}:{port}: {error.strerror or error}", refused=refused) from None
    if security is not None:
        await _secure(connection, tls, security, client_id, f"{host}:{port}")
    return connection


async def _secure(
    connection: _PeerConnection, tls: _PeerTls | None, security: PeerSecurity, client_id: bytes, where: str
) -> None:
    try:
        async with asyncio.timeout(AUTHENTICATION_TIMEOUT_S):
            if tls is not None:
                await tls.finished
            if security.login is not None:
                await _log_in(connection, security.login, client_id)
    except TimeoutError:
        text = f"{where}: not authenticated in {AUTHENTICATION_TIMEOUT_S:g} s"
        raise _not_authenticated(connection, text, refused=False) from None
    except ssl.SSLError as error:
        what = error.verify_message if isinstance(error, ssl.SSLCertVerificationError) else error.reason
        raise _not_authenticated(connection, f"{where}: TLS failed: {what or error}", refused=False) from None
    except SaslError as error:
        raise _not_authenticated(connection, f"{where}: {error}", refused=False) from None
    except (OSError, MalformedFrame) as error:
        raise _not_authenticated(connection, f"{where}: {error}", refused=True) from None
    except PeerUnreachable as error:
        raise _not_authenticated(connection, f"{where}: {error}", refused=error.refused) from None
    except asyncio.CancelledError:
        connection.abort("this node is stopping", refused=False)
        raise


def _not_authenticated(connection: _PeerConnection, reason: str, *, refused: bool) -> PeerUnreachable:
    global _last_warning
    connection.abort(reason, refused=refused)
    if not refused and (now := time.monotonic()) - _last_warning >= _WARNING_SECONDS:
        _last_warning = now
        logger.warning("another node cannot be authenticated, or refuses this one", extra={"reason": reason})
    return PeerUnreachable(reason, refused=refused)


async def _log_in(connection: _PeerConnection, login: PeerLogin, client_id: bytes) -> None:
    """Raises SaslError."""
    from kio.schema.sasl_authenticate.v2.request import SaslAuthenticateRequest
    from kio.schema.sasl_handshake.v1.request import SaslHandshakeRequest

    async def call(api_key: int, version: int, request: Any) -> Any:
        codec = _codec(api_key, version)
        out = io.BytesIO()
        out.write(_request_header(client_id, api_key, version, codec.is_flexible))
        codec.write(out, request)
        answer = await connection.ask(out.getvalue())
        return codec.read(answer, _body_position(answer, codec.is_flexible))

    offered = await call(_SASL_HANDSHAKE, 1, SaslHandshakeRequest(mechanism=login.mechanism))
    if offered.error_code != 0:
        raise SaslError(f"no SASL mechanism {login.mechanism}; offered are {', '.join(offered.mechanisms)}")
    exchange = await login.exchange()
    message: bytes | None = exchange.first()
    lifetime_ms = 0
    while message is not None:
        response = await call(_SASL_AUTHENTICATE, 2, SaslAuthenticateRequest(auth_bytes=message))
        if response.error_code != 0:
            raise SaslError(response.error_message or "the login was refused")
        lifetime_ms = response.session_lifetime / timedelta(milliseconds=1)
        message = exchange.next(response.auth_bytes)
    if lifetime_ms:
        # A new connection takes over before the other node would close this one.
        connection.usable_until = asyncio.get_running_loop().time() + lifetime_ms / 1000 * _SESSION_FRACTION


class _PeerTls:
    """The layer of a connection to another node, and the end of its handshake."""

    def __init__(self, connection: _PeerConnection, security: PeerSecurity, host: str) -> None:
        contexts = security.contexts
        assert contexts is not None
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.layer = TlsLayer(
            connection, security.handshakes, contexts.for_client, self._end, server_hostname=host
        )

    def _end(self, layer: TlsLayer, failure: Exception | None) -> None:
        if self.finished.done():
            return
        if failure is None:
            self.finished.set_result(None)
        else:
            self.finished.set_exception(failure)
            self.finished.exception()  # a caller that was cancelled does not look at it


def _is_usable(task: asyncio.Task[_PeerConnection]) -> bool:
    return not task.cancelled() and task.exception() is None and task.result().is_usable


def _retire(task: asyncio.Task[_PeerConnection]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().retire()


def _mark_retrieved(task: asyncio.Task[_PeerConnection]) -> None:
    """Keep asyncio from logging the exception if no caller waits any more; callers that wait still get it."""
    if not task.cancelled():
        task.exception()


def _abort_when_connected(task: asyncio.Task[_PeerConnection]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().abort("this node is stopping", refused=False)


class _PeerConnection(asyncio.BufferedProtocol):
    """Sends requests, and receives the responses in the same order."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._waiting: dict[int, asyncio.Future[memoryview]] = {}
        self._numbers = count(1)
        self._receive_buffer = memoryview(bytearray(_RECEIVE_BUFFER_BYTES))
        self._received_bytes = 0
        #: When the session of this node at the other one is nearly over; by the clock of the event loop.
        self.usable_until: float | None = None
        self._is_retired = False
        self._frame: memoryview | None = None  # a response that does not fit into the receive buffer
        self._filled = 0

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def is_usable(self) -> bool:
        if self.usable_until is not None and asyncio.get_running_loop().time() >= self.usable_until:
            return False
        return self.is_open

    def retire(self) -> None:
        """Close once all responses have arrived; another connection gets further requests."""
        self._is_retired = True
        self._close_if_retired()

    def _close_if_retired(self) -> None:
        if self._is_retired and not self._waiting and self._transport is not None:
            self._transport.close()

    async def ask(self, frame: BytesLike) -> memoryview:
        if self._transport is None:
            raise PeerUnreachable("the connection is closed", refused=True)
        number = next(self._numbers) & 0x7FFF_FFFF
        answer: asyncio.Future[memoryview] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        request = bytearray(_INT32.size + len(frame))
        _INT32.pack_into(request, 0, len(frame))
        request[_INT32.size :] = frame
        _INT32.pack_into(request, _INT32.size + _CORRELATION_ID_POSITION, number)
        self._transport.write(request)
        try:
            return await answer
        except asyncio.CancelledError:
            # Later requests on this connection would wait for the response too.
            self.abort("an answer was given up", refused=False)
            raise

    def abort(self, reason: str, *, refused: bool) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()
        waiting, self._waiting = self._waiting, {}
        for answer in waiting.values():
            if not answer.done():
                answer.set_exception(PeerUnreachable(reason, refused=refused))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.abort(f"the connection was closed{f': {exc}' if exc else ''}", refused=True)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._frame is not None:
            return self._frame[self._filled :]
        return self._receive_buffer[self._received_bytes :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._frame is None:
            self._received_bytes += nbytes
            self._take_frames()
            return
        self._filled += nbytes
        if self._filled == len(self._frame):
            frame, self._frame = self._frame, None
            self._response_received(frame)

    def _take_frames(self) -> None:
        position, end = 0, self._received_bytes
        while end - position >= _INT32.size:
            (size,) = _INT32.unpack_from(self._receive_buffer, position)
            if not _INT32.size <= size <= RESPONSE_BYTES_MAX:
                self.abort(f"an answer of {size} bytes", refused=False)
                return
            start, after = position + _INT32.size, position + _INT32.size + size
            if after > end:
                if after - position <= _RECEIVE_BUFFER_BYTES // 2:
                    break
                self._frame, self._filled = memoryview(bytearray(size)), end - start
                self._frame[: end - start] = self._receive_buffer[start:end]
                self._received_bytes = 0
                return
            self._response_received(memoryview(bytes(self._receive_buffer[start:after])))
            position = after
        self._receive_buffer[: end - position] = bytes(self._receive_buffer[position:end])
        self._received_bytes = end - position

    def _response_received(self, frame: memoryview) -> None:
        (number,) = _INT32.unpack_from(frame)
        answer = self._waiting.pop(number, None)
        if answer is None:
            self.abort(f"an answer to {number}, which was not asked", refused=False)
        elif not answer.done():
            answer.set_result(frame)
            self._close_if_retired()
