"""A connection to one broker: a socket, TLS, authentication, API versions, requests and their responses.

`Transport` sends and receives frames within a deadline; any failure closes it for good. `Connection` authenticates the
broker, agrees on the API versions and matches responses to requests. A certificate or key that the settings hold as
text is on disk for a moment, in a file that only this user can read, because OpenSSL loads it from files only.
"""

from __future__ import annotations

import io
import os
import secrets
import socket
import ssl
import struct
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

from penstock import __version__
from penstock.client.errors import (
    AuthenticationFailed,
    ClientError,
    Unavailable,
    UnencodableRequest,
    UnsupportedVersion,
)
from penstock.client.retry import Deadline
from penstock.client.wire.settings import Address, ConnectionSettings, SaslSettings, TlsSettings
from penstock.protocol.access_tokens import TokenUnavailable, token_source
from penstock.protocol.compression import BytesLike
from penstock.protocol.errors import ErrorCode, MalformedFrame
from penstock.protocol.sasl_client import PLAIN, PlainExchange, SaslError, SaslExchange, ScramExchange
from penstock.protocol.schemas import request_encoder, request_is_flexible, response_reader, schema_class
from penstock.protocol.scram import SCRAM_HASHES
from penstock.protocol.secret_file import SecretFile
from penstock.protocol.wire import skip_tags


def tls_context(tls: TlsSettings) -> ssl.SSLContext:
    """Raises ClientError if a file or a key cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = tls.checks_hostname and tls.verifies
    context.verify_mode = ssl.CERT_REQUIRED if tls.verifies else ssl.CERT_NONE
    _load_authorities(context, tls)
    _load_certificate(context, tls)
    return context


def _load_authorities(context: ssl.SSLContext, tls: TlsSettings) -> None:
    if tls.ca_location is None and tls.ca_pem is None:
        context.load_default_certs()
        return
    where = tls.ca_location
    is_folder = where is not None and Path(where).is_dir()
    try:
        context.load_verify_locations(
            cafile=None if is_folder else where, capath=where if is_folder else None, cadata=tls.ca_pem
        )
    except (OSError, ValueError) as error:
        raise ClientError(f"ssl.ca.location={where}: cannot be read as PEM: {error}") from None


def _load_certificate(context: ssl.SSLContext, tls: TlsSettings) -> None:
    if tls.certificate_location is None and tls.certificate_pem is None:
        return
    with ExitStack() as stack:
        certificate = tls.certificate_location or _secret_file(stack, tls.certificate_pem)
        key = tls.key_location or _secret_file(stack, tls.key_pem)
        try:
            # Without a password OpenSSL would ask for one at the terminal.
            context.load_cert_chain(certificate or "", key, password=tls.key_password or "")
        except (OSError, ValueError) as error:
            raise ClientError(
                f"ssl.certificate.location and ssl.key.location (or ssl.keystore.*) cannot be used: {error}"
            ) from None


def _secret_file(stack: ExitStack, pem: str | None) -> str | None:
    return None if pem is None else stack.enter_context(SecretFile(pem)).path


_FRAME_SIZE: Final = struct.Struct(">i")
_FRAME_BYTES_MIN: Final = 4
#: Below this size, one copy costs less than a second packet.
_JOIN_BYTES_MAX: Final = 64 * 1024
#: A timeout of 0 would make the socket non-blocking, which raises other errors.
_TIMEOUT_S_MIN: Final = 0.001


class Transport:
    """Raises Unavailable if the peer cannot be reached or is too slow, AuthenticationFailed if it is not trusted."""

    def __init__(self, address: Address, settings: ConnectionSettings) -> None:
        self.address = address
        self._answer_bytes_max = settings.answer_bytes_max
        self._socket: socket.socket | None = None
        deadline = Deadline(settings.connect_timeout_ms)
        try:
            self._socket = socket.create_connection(address, timeout=_socket_timeout_s(deadline))
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if settings.security is not None:
                self._secure(settings, deadline)
        except (OSError, ssl.SSLError) as error:
            self._fail(error, deadline)

    def __repr__(self) -> str:
        state = "open" if self.is_open else "closed"
        return f"<Transport to {self.peer} ({state})>"

    @property
    def peer(self) -> str:
        return f"{self.address[0]}:{self.address[1]}"

    @property
    def is_open(self) -> bool:
        return self._socket is not None

    def send(self, buffers: Sequence[BytesLike], deadline: Deadline) -> None:
        """Sends one frame, with its size first."""
        size = sum(map(len, buffers))
        parts: list[BytesLike] = [_FRAME_SIZE.pack(size), *buffers]
        if size <= _JOIN_BYTES_MAX:
            parts = [b"".join(parts)]
        else:
            parts[:2] = [b"".join(parts[:2])]
        try:
            for part in parts:
                connected = self._connected(deadline)
                connected.sendall(part)
        except OSError as error:
            self._fail(error, deadline)

    def receive(self, deadline: Deadline) -> memoryview:
        """Returns the next frame, without its size."""
        try:
            (size,) = _FRAME_SIZE.unpack(self._exactly(_FRAME_SIZE.size, deadline))
            if not _FRAME_BYTES_MIN <= size <= self._answer_bytes_max:
                raise ConnectionError(
                    f"a response of {size} bytes, where at most {self._answer_bytes_max} are allowed"
                )
            return self._exactly(size, deadline)
        except OSError as error:
            self._fail(error, deadline)

    def close(self) -> None:
        closing, self._socket = self._socket, None
        if closing is not None:
            closing.close()

    def _secure(self, settings: ConnectionSettings, deadline: Deadline) -> None:
        assert settings.security is not None
        assert self._socket is not None
        self._socket.settimeout(_socket_timeout_s(deadline))
        try:
            context = tls_context(settings.security)
            self._socket = context.wrap_socket(self._socket, server_hostname=self.address[0])
        except ClientError:
            self.close()
            raise

    def _exactly(self, size: int, deadline: Deadline) -> memoryview:
        data = memoryview(bytearray(size))
        filled = 0
        while filled < size:
            count = self._connected(deadline).recv_into(data[filled:])
            if count == 0:
                raise ConnectionError("the connection was closed")
            filled += count
        return data

    def _connected(self, deadline: Deadline) -> socket.socket:
        if self._socket is None:
            raise ConnectionError("the connection is closed")
        self._socket.settimeout(_socket_timeout_s(deadline))
        return self._socket

    def _fail(self, error: OSError, deadline: Deadline) -> NoReturn:
        """Closes the connection, so that a late response is never taken for that of another request."""
        self.close()
        if isinstance(error, ssl.SSLCertVerificationError):
            raise AuthenticationFailed(
                f"{self.peer}: the broker's certificate is not trusted: {error.verify_message}"
            ) from None
        raise Unavailable(f"{self.peer}: {_failure_reason(error, deadline)}") from None


def _socket_timeout_s(deadline: Deadline) -> float:
    return max(deadline.left_s, _TIMEOUT_S_MIN)


def _failure_reason(error: Any, deadline: Deadline) -> str:
    if isinstance(error, TimeoutError):
        return f"no response within {deadline.timeout_ms:g} ms"
    return str(error.strerror or error)


API_VERSIONS: Final = 18
_REQUEST_HEADER: Final = struct.Struct(">hhih")  # api key, version, correlation id, length of the client id
_INT16: Final = struct.Struct(">h")
_INT32: Final = struct.Struct(">i")
_CORRELATION_BYTES: Final = 4
_CORRELATION_IDS: Final = 1 << 31
#: The client replaces a connection before the broker ends its session.
_SESSION_LIFETIME_SHARE: Final = 0.8
_NONCE_BYTES: Final = 24


class PendingRequest(NamedTuple):
    """A request without a response yet."""

    correlation_id: int
    api_key: int
    version: int


class Connection:
    """Raises Unavailable if the broker does not answer. The connection is then closed for good."""

    def __init__(self, address: Address, settings: ConnectionSettings) -> None:
        self._settings = settings
        self._client_id = settings.client_id.encode()
        self._owner = os.getpid()
        self._next_correlation = 0
        self._waiting: deque[PendingRequest] = deque()
        self._session_end: Deadline | None = None
        self._versions: dict[int, tuple[int, int]] = {}
        self._features: dict[str, int] = {}
        # Before it connects, because it may have to wait for a token, and the broker does not wait long.
        exchange = None if settings.sasl is None else _sasl_exchange(settings.sasl)
        self._transport = Transport(address, settings)
        try:
            self._negotiate()
            if settings.sasl is not None and exchange is not None:
                self._authenticate(settings.sasl, exchange)
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"<Connection to {self.peer}, {len(self._waiting)} waiting>"

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def address(self) -> Address:
        return self._transport.address

    @property
    def peer(self) -> str:
        return self._transport.peer

    @property
    def is_usable(self) -> bool:
        """Whether the connection is open, its session has not expired, and this process has opened it."""
        is_expired = self._session_end is not None and self._session_end.is_over
        return self._transport.is_open and not is_expired and self._owner == os.getpid()

    def close(self) -> None:
        self._waiting.clear()
        self._transport.close()

    # API versions

    def versions(self, api_key: int) -> tuple[int, int]:
        """Returns the oldest and newest version that the broker supports. Raises UnsupportedVersion."""
        try:
            return self._versions[api_key]
        except KeyError:
            raise UnsupportedVersion(f"{self.peer} does not support API {api_key}") from None

    def version(self, api_key: int, newest: int, oldest: int = 0) -> int:
        """Returns the newest version from `oldest` to `newest` that the broker supports. Raises UnsupportedVersion."""
        theirs_oldest, theirs_newest = self.versions(api_key)
        version = min(newest, theirs_newest)
        if version < max(oldest, theirs_oldest):
            raise UnsupportedVersion(
                f"{self.peer} supports versions {theirs_oldest} to {theirs_newest} of API {api_key}, "
                f"and this client {oldest} to {newest}"
            )
        return version

    def knows(self, api_key: int, version: int) -> bool:
        oldest, newest = self._versions.get(api_key, (0, -1))
        return oldest <= version <= newest

    def features(self) -> dict[str, int]:
        """Returns the finalized features of the cluster with their levels; empty for older brokers."""
        return dict(self._features)

    # Requests

    def call(self, request: Any, *, oldest: int = 0, timeout_ms: float | None = None) -> Any:
        """Sends a request in the newest version that both sides support; returns that version's response."""
        api_key = int(request.__api_key__)
        version = self.version(api_key, int(request.__version__), oldest)
        return self._exchange(request, api_key, version, timeout_ms)

    def call_raw(
        self, api_key: int, version: int, body: Sequence[BytesLike], *, timeout_ms: float | None = None
    ) -> memoryview:
        """Sends an encoded request; returns the body of the response."""
        assert not self._waiting, f"{self} has pending requests"
        return self.finish(self.begin(api_key, version, body), timeout_ms=timeout_ms)

    def begin(self, api_key: int, version: int, body: Sequence[BytesLike]) -> PendingRequest:
        """Sends a request without waiting. Call `finish` for each request in the order of `begin`."""
        self._check_owner()
        pending = PendingRequest(self._next_correlation, api_key, version)
        self._next_correlation = (self._next_correlation + 1) % _CORRELATION_IDS
        deadline = Deadline(self._settings.request_timeout_ms)
        self._transport.send([self._header(pending), *body], deadline)
        self._waiting.append(pending)
        return pending

    def finish(self, pending: PendingRequest, *, timeout_ms: float | None = None) -> memoryview:
        """Returns the body of the response to the oldest pending request."""
        self._check_owner()
        assert self._waiting, f"{pending} of {self} is finished, or its connection has failed"
        assert self._waiting[0] == pending, f"{pending} is not the oldest of {self}"
        try:
            frame = self._transport.receive(Deadline(timeout_ms or self._settings.request_timeout_ms))
        except Unavailable:
            self.close()
            raise
        self._waiting.popleft()
        return frame[self._body_at(frame, pending) :]

    def decode(self, pending: PendingRequest, body: memoryview) -> Any:
        """Decodes the response in the version of its request."""
        try:
            return response_reader(pending.api_key, pending.version)(body, 0)
        except MalformedFrame as error:
            raise self._broken(str(error)) from None

    def _exchange(self, request: Any, api_key: int, version: int, timeout_ms: float | None) -> Any:
        out = io.BytesIO()
        try:
            request_encoder(api_key, version)(out, request)
        except struct.error as error:
            what, _, bounds = str(error).rpartition("requires ")
            name = type(request).__name__.removesuffix("Request")
            raise UnencodableRequest(f"a number in {name} is out of range: {bounds or what}") from None
        assert not self._waiting, f"{self} has pending requests"
        pending = self.begin(api_key, version, [out.getvalue()])
        return self.decode(pending, self.finish(pending, timeout_ms=timeout_ms))

    def _header(self, pending: PendingRequest) -> bytes:
        head = _REQUEST_HEADER.pack(
            pending.api_key, pending.version, pending.correlation_id, len(self._client_id)
        )
        tags = b"\x00" if request_is_flexible(pending.api_key, pending.version) else b""
        return head + self._client_id + tags

    def _body_at(self, frame: memoryview, pending: PendingRequest) -> int:
        (correlation_id,) = _INT32.unpack_from(frame)
        if correlation_id != pending.correlation_id:
            raise self._broken(
                f"received the response to request {correlation_id} instead of {pending.correlation_id}"
            )
        # The response header of ApiVersions has no tags, because the versions are not known yet.
        if pending.api_key == API_VERSIONS or not request_is_flexible(pending.api_key, pending.version):
            return _CORRELATION_BYTES
        try:
            return skip_tags(frame, _CORRELATION_BYTES, len(frame))
        except (IndexError, MalformedFrame):
            raise self._broken("malformed response header") from None

    def _broken(self, reason: str) -> Unavailable:
        self.close()
        return Unavailable(f"{self.peer}: {reason}")

    def _check_owner(self) -> None:
        if self._owner != os.getpid():
            raise ClientError(f"the connection to {self.peer} belongs to another process")

    # Negotiation and authentication

    def _negotiate(self) -> None:
        response = self._api_versions(_api_versions_request())
        if response is None:
            response = self._api_versions(schema_class("api_versions.v0.request:ApiVersionsRequest")())
        if response is None or response.error_code is not ErrorCode.none:
            raise UnsupportedVersion(f"{self.peer} does not answer ApiVersions requests")
        self._versions = {
            int(api.api_key): (int(api.min_version), int(api.max_version)) for api in response.api_keys
        }
        features = getattr(response, "finalized_features", ())
        self._features = {str(each.name): int(each.max_version_level) for each in features}

    def _api_versions(self, request: Any) -> Any:
        """Returns None if the version is too new for the broker, which then answers in version 0."""
        version = int(request.__version__)
        out = io.BytesIO()
        request_encoder(API_VERSIONS, version)(out, request)
        pending = self.begin(API_VERSIONS, version, [out.getvalue()])
        # Use the connect timeout: a peer that accepts connections may still never answer.
        body = self.finish(pending, timeout_ms=self._settings.connect_timeout_ms)
        if len(body) >= _INT16.size and _INT16.unpack_from(body)[0] == ErrorCode.unsupported_version:
            return None
        return self.decode(pending, body)

    def _authenticate(self, sasl: SaslSettings, exchange: SaslExchange) -> None:
        handshake = schema_class("sasl_handshake.v1.request:SaslHandshakeRequest")(mechanism=sasl.mechanism)
        response = self.call(handshake)
        if response.error_code is not ErrorCode.none:
            offered = ", ".join(map(str, response.mechanisms)) or "none"
            raise AuthenticationFailed(
                f"{self.peer} does not support sasl.mechanism={sasl.mechanism}; it offers: {offered}"
            )
        try:
            message: bytes | None = exchange.first()
            while message is not None:
                message = exchange.next(self._send_sasl(message, sasl))
        except SaslError as error:
            raise AuthenticationFailed(f"{self.peer}: {error}") from None

    def _send_sasl(self, message: bytes, sasl: SaslSettings) -> bytes:
        request = schema_class("sasl_authenticate.v2.request:SaslAuthenticateRequest")(auth_bytes=message)
        response = self.call(request)
        if response.error_code is not ErrorCode.none:
            reason = response.error_message or response.error_code.name.replace("_", " ")
            user = sasl.username or "the token"
            raise AuthenticationFailed(f"{self.peer} refuses the login of {user}: {reason}")
        if lifetime := getattr(response, "session_lifetime", None):
            self._session_end = Deadline(lifetime.total_seconds() * 1000 * _SESSION_LIFETIME_SHARE)
        return bytes(response.auth_bytes)


def _sasl_exchange(sasl: SaslSettings) -> SaslExchange:
    """Raises AuthenticationFailed if no token is issued to this client, Unavailable if there is none now."""
    if sasl.endpoint is not None:
        try:
            return token_source(sasl.endpoint).new_exchange()
        except TokenUnavailable as error:
            raise (AuthenticationFailed if error.is_refused else Unavailable)(str(error)) from None
    if sasl.mechanism == PLAIN:
        return PlainExchange(sasl.username, sasl.password)
    return ScramExchange(
        SCRAM_HASHES[sasl.mechanism],
        sasl.username,
        sasl.password,
        nonce=secrets.token_urlsafe(_NONCE_BYTES),
        is_token=sasl.is_token,
    )


@cache
def _api_versions_request() -> Any:
    return schema_class("api_versions.v3.request:ApiVersionsRequest")(
        client_software_name="penstock-client", client_software_version=__version__
    )
