"""A connection to one broker: who it talks to is proven, what versions both know is settled, answers come in order."""

from __future__ import annotations

import io
import os
import secrets
import struct
from collections import deque
from collections.abc import Sequence
from functools import cache
from typing import Any, Final, NamedTuple

from penstock import __version__
from penstock.client.errors import AuthenticationFailed, ClientError, Unavailable, UnsupportedVersion
from penstock.client.retrying import Deadline
from penstock.client.sasl import exchange
from penstock.client.settings import Address, ConnectionSettings, SaslSettings
from penstock.client.transport import Transport
from penstock.protocol.compression import BytesLike
from penstock.protocol.errors import ErrorCode, MalformedFrame
from penstock.protocol.produce import skip_tags
from penstock.protocol.schemas import request_encoder, request_is_flexible, response_reader, schema_class

API_VERSIONS: Final = 18
_HEADER: Final = struct.Struct(">hhih")  # api key, version, correlation id, length of the client id
_INT16: Final = struct.Struct(">h")
_INT32: Final = struct.Struct(">i")
_CORRELATION_BYTES: Final = 4
_CORRELATIONS: Final = 1 << 31
#: Before a broker ends the session of its own accord we begin a new one.
_SESSION_SHARE: Final = 0.8
_NONCE_BYTES: Final = 24


class Ticket(NamedTuple):
    """A request that is on its way."""

    correlation_id: int
    api_key: int
    version: int


class Connection:
    """Raises Unavailable when the broker does not answer. It is closed then, and stays so."""

    def __init__(self, address: Address, settings: ConnectionSettings) -> None:
        self._settings = settings
        self._client_id = settings.client_id.encode()
        self._owner = os.getpid()
        self._next_correlation = 0
        self._waiting: deque[Ticket] = deque()
        self._session_end: Deadline | None = None
        self._versions: dict[int, tuple[int, int]] = {}
        self._features: dict[str, int] = {}
        self._transport = Transport(address, settings)
        try:
            self._negotiate()
            if settings.sasl is not None:
                self._authenticate(settings.sasl)
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
        """Open, not about to be closed by the broker, and made by this process."""
        is_expired = self._session_end is not None and self._session_end.is_over
        return self._transport.is_open and not is_expired and self._owner == os.getpid()

    def close(self) -> None:
        self._waiting.clear()
        self._transport.close()

    # What both sides know

    def versions(self, api_key: int) -> tuple[int, int]:
        """Oldest and newest version that the broker knows. Raises UnsupportedVersion."""
        try:
            return self._versions[api_key]
        except KeyError:
            raise UnsupportedVersion(f"{self.peer} does not know requests of kind {api_key}") from None

    def version(self, api_key: int, newest: int, oldest: int = 0) -> int:
        """The newest that both know, where we know `oldest` to `newest`. Raises UnsupportedVersion."""
        theirs_oldest, theirs_newest = self.versions(api_key)
        version = min(newest, theirs_newest)
        if version < max(oldest, theirs_oldest):
            raise UnsupportedVersion(
                f"{self.peer} knows versions {theirs_oldest} to {theirs_newest} of requests of kind {api_key}, "
                f"and we {oldest} to {newest}"
            )
        return version

    def knows(self, api_key: int, version: int) -> bool:
        oldest, newest = self._versions.get(api_key, (0, -1))
        return oldest <= version <= newest

    def features(self) -> dict[str, int]:
        """The finalized features of the cluster with their levels; empty where the broker does not tell."""
        return dict(self._features)

    # Asking

    def call(self, request: Any, *, oldest: int = 0, timeout_ms: float | None = None) -> Any:
        """Send it in the newest version that both know, from `oldest` on; returns that version's response."""
        api_key = int(request.__api_key__)
        version = self.version(api_key, int(request.__version__), oldest)
        return self._exchange(request, api_key, version, timeout_ms)

    def call_raw(
        self, api_key: int, version: int, body: Sequence[BytesLike], *, timeout_ms: float | None = None
    ) -> memoryview:
        """Send what is packed already; returns the body of the answer."""
        assert not self._waiting, f"{self} has answers to come"
        return self.finish(self.begin(api_key, version, body), timeout_ms=timeout_ms)

    def begin(self, api_key: int, version: int, body: Sequence[BytesLike]) -> Ticket:
        """Send it, and ask for the answer later: `finish` takes tickets in the order of `begin`."""
        self._check_owner()
        ticket = Ticket(self._next_correlation, api_key, version)
        self._next_correlation = (self._next_correlation + 1) % _CORRELATIONS
        deadline = Deadline(self._settings.request_timeout_ms)
        self._transport.send([self._header(ticket), *body], deadline)
        self._waiting.append(ticket)
        return ticket

    def finish(self, ticket: Ticket, *, timeout_ms: float | None = None) -> memoryview:
        """The body of the answer to this ticket, which is the oldest."""
        self._check_owner()
        assert self._waiting, f"{ticket} of {self} was answered, or its connection has failed"
        assert self._waiting[0] == ticket, f"{ticket} is not the oldest of {self}"
        try:
            frame = self._transport.receive(Deadline(timeout_ms or self._settings.request_timeout_ms))
        except Unavailable:
            self.close()
            raise
        self._waiting.popleft()
        return frame[self._body_at(frame, ticket) :]

    def decode(self, ticket: Ticket, body: memoryview) -> Any:
        """The response in that version's own class."""
        try:
            return response_reader(ticket.api_key, ticket.version)(body, 0)
        except MalformedFrame as error:
            raise self._broken(str(error)) from None

    def _exchange(self, request: Any, api_key: int, version: int, timeout_ms: float | None) -> Any:
        out = io.BytesIO()
        request_encoder(api_key, version)(out, request)
        assert not self._waiting, f"{self} has answers to come"
        ticket = self.begin(api_key, version, [out.getvalue()])
        return self.decode(ticket, self.finish(ticket, timeout_ms=timeout_ms))

    def _header(self, ticket: Ticket) -> bytes:
        head = _HEADER.pack(ticket.api_key, ticket.version, ticket.correlation_id, len(self._client_id))
        tags = b"\x00" if request_is_flexible(ticket.api_key, ticket.version) else b""
        return head + self._client_id + tags

    def _body_at(self, frame: memoryview, ticket: Ticket) -> int:
        (correlation_id,) = _INT32.unpack_from(frame)
        if correlation_id != ticket.correlation_id:
            raise self._broken(
                f"an answer to request {correlation_id} came in place of {ticket.correlation_id}"
            )
        # This one is read by who cannot know yet which headers the broker writes.
        if ticket.api_key == API_VERSIONS or not request_is_flexible(ticket.api_key, ticket.version):
            return _CORRELATION_BYTES
        try:
            return skip_tags(frame, _CORRELATION_BYTES, len(frame))
        except (IndexError, MalformedFrame):
            raise self._broken("the answer's header is damaged") from None

    def _broken(self, reason: str) -> Unavailable:
        self.close()
        return Unavailable(f"{self.peer}: {reason}")

    def _check_owner(self) -> None:
        if self._owner != os.getpid():
            raise ClientError(f"the connection to {self.peer} belongs to another process")

    # Becoming acquainted

    def _negotiate(self) -> None:
        answer = self._api_versions(_newest_api_versions())
        if answer is None:
            answer = self._api_versions(schema_class("api_versions.v0.request:ApiVersionsRequest")())
        if answer is None or answer.error_code is not ErrorCode.none:
            raise UnsupportedVersion(f"{self.peer} does not tell which requests it knows")
        self._versions = {
            int(api.api_key): (int(api.min_version), int(api.max_version)) for api in answer.api_keys
        }
        features = getattr(answer, "finalized_features", ())
        self._features = {str(each.name): int(each.max_version_level) for each in features}

    def _api_versions(self, request: Any) -> Any:
        """None where this version is too new for the broker, which says so in version 0."""
        version = int(request.__version__)
        out = io.BytesIO()
        request_encoder(API_VERSIONS, version)(out, request)
        ticket = self.begin(API_VERSIONS, version, [out.getvalue()])
        # One who listens and never answers is found out as soon as one who does not listen.
        body = self.finish(ticket, timeout_ms=self._settings.connect_timeout_ms)
        if len(body) >= _INT16.size and _INT16.unpack_from(body)[0] == ErrorCode.unsupported_version:
            return None
        return self.decode(ticket, body)

    def _authenticate(self, sasl: SaslSettings) -> None:
        shake = schema_class("sasl_handshake.v1.request:SaslHandshakeRequest")(mechanism=sasl.mechanism)
        answer = self.call(shake)
        if answer.error_code is not ErrorCode.none:
            offered = ", ".join(map(str, answer.mechanisms)) or "none"
            raise AuthenticationFailed(
                f"{self.peer} does not take sasl.mechanism={sasl.mechanism}; it offers: {offered}"
            )
        talk = exchange(
            sasl.mechanism, sasl.username, sasl.password, nonce=secrets.token_urlsafe(_NONCE_BYTES)
        )
        message: bytes | None = talk.first()
        while message is not None:
            message = talk.next(self._say(message, sasl))

    def _say(self, message: bytes, sasl: SaslSettings) -> bytes:
        request = schema_class("sasl_authenticate.v2.request:SaslAuthenticateRequest")(auth_bytes=message)
        answer = self.call(request)
        if answer.error_code is not ErrorCode.none:
            reason = answer.error_message or answer.error_code.name.replace("_", " ")
            raise AuthenticationFailed(f"{self.peer} does not let {sasl.username} in: {reason}")
        self._note_lifetime(answer)
        return bytes(answer.auth_bytes)

    def _note_lifetime(self, answer: Any) -> None:
        lifetime = getattr(answer, "session_lifetime", None)
        if lifetime:
            self._session_end = Deadline(lifetime.total_seconds() * 1000 * _SESSION_SHARE)


@cache
def _newest_api_versions() -> Any:
    return schema_class("api_versions.v3.request:ApiVersionsRequest")(
        client_software_name="penstock-client", client_software_version=__version__
    )
