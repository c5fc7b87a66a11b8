"""How a client of the load gets in: over TLS or not, as which user."""

import io
import socket
import ssl
import struct
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from kio.schema.sasl_authenticate.v1 import response as authenticate_response
from kio.serial import entity_reader

Address = tuple[str, int]

ADMIN, LOAD = "admin", "bench"
_HANDSHAKE, _AUTHENTICATE, _API_VERSIONS = 17, 36, 18
_PLAIN = b"\x00\x05PLAIN"


class LoginFailed(Exception):
    """The broker refuses the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """`user` logs in by PLAIN; the password is the name, as brokers under measurement listen on loopback only."""

    certificate: Path | None = None
    user: str | None = None
    #: The address that the client connects from.
    source: str | None = None

    def as_user(self, user: str) -> "Access":
        """The same for another user, where users log in at all."""
        return self if self.user is None else replace(self, user=user)

    def open(self, address: Address, timeout_s: float | None) -> socket.socket:
        origin = None if self.source is None else (self.source, 0)
        opened = socket.create_connection(address, timeout=timeout_s, source_address=origin)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self.certificate is not None:
            opened = _context(self.certificate).wrap_socket(opened, server_hostname="localhost")
        if self.user is not None:
            self._log_in(opened, self.user)
        elif self.certificate is not None:
            # Tickets of TLS come with the first answer; a load that waits for answers would take them for one.
            _ask(opened, _API_VERSIONS, 0, b"")
        return opened

    def _log_in(self, opened: socket.socket, user: str) -> None:
        _ask(opened, _HANDSHAKE, 1, _PLAIN)
        message = f"\0{user}\0{user}".encode()
        answer = _ask(opened, _AUTHENTICATE, 1, struct.pack(">i", len(message)) + message)
        response, _ = entity_reader(authenticate_response.SaslAuthenticateResponse)(answer, 4)
        if response.error_code.value:
            raise LoginFailed(f"{user} cannot log in: {response.error_message}")


OPEN = Access()


@cache
def _context(certificate: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(certificate))


def _ask(opened: socket.socket, api_key: int, version: int, body: bytes) -> bytes:
    message = struct.pack(">hhih", api_key, version, 0, -1) + body
    opened.sendall(struct.pack(">i", len(message)) + message)
    return _receive(opened, int.from_bytes(_receive(opened, 4), "big"))


def _receive(opened: socket.socket, size: int) -> bytes:
    received = io.BytesIO()
    while size:
        piece = opened.recv(size)
        if not piece:
            raise LoginFailed("the broker closed the connection")
        received.write(piece)
        size -= len(piece)
    return received.getvalue()
