"""One socket, plain or TLS: frames go out and come in, each within a deadline. Any failure closes it for good."""

from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import Sequence
from typing import Any, Final, NoReturn

from penstock.client.errors import AuthenticationFailed, ClientError, Unavailable
from penstock.client.retrying import Deadline
from penstock.client.settings import Address, ConnectionSettings
from penstock.client.tls import tls_context
from penstock.protocol.compression import BytesLike

_SIZE: Final = struct.Struct(">i")
_SIZE_BYTES_MIN: Final = 4
#: Below this one copy costs less than a second packet.
_JOIN_BYTES_MAX: Final = 64 * 1024
#: A socket with a timeout of nothing would not wait at all, and say so in another way.
_WAIT_S_MIN: Final = 0.001


class Transport:
    """Raises Unavailable when the peer is not there or too slow, AuthenticationFailed when it is not trusted."""

    def __init__(self, address: Address, settings: ConnectionSettings) -> None:
        self.address = address
        self._answer_bytes_max = settings.answer_bytes_max
        self._socket: socket.socket | None = None
        deadline = Deadline(settings.connect_timeout_ms)
        try:
            self._socket = socket.create_connection(address, timeout=_patience(deadline))
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
        """One frame; its size goes before it."""
        size = sum(map(len, buffers))
        parts: list[BytesLike] = [_SIZE.pack(size), *buffers]
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
        """The next frame, without its size."""
        try:
            (size,) = _SIZE.unpack(self._exactly(_SIZE.size, deadline))
            if not _SIZE_BYTES_MIN <= size <= self._answer_bytes_max:
                raise ConnectionError(
                    f"an answer of {size} bytes, where {self._answer_bytes_max} are allowed"
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
        self._socket.settimeout(_patience(deadline))
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
        self._socket.settimeout(_patience(deadline))
        return self._socket

    def _fail(self, error: OSError, deadline: Deadline) -> NoReturn:
        """A late answer must never be taken for the answer to something else."""
        self.close()
        if isinstance(error, ssl.SSLCertVerificationError):
            raise AuthenticationFailed(
                f"{self.peer}: its certificate is not trusted: {error.verify_message}"
            ) from None
        raise Unavailable(f"{self.peer}: {_reason(error, deadline)}") from None


def _patience(deadline: Deadline) -> float:
    return max(deadline.left_s, _WAIT_S_MIN)


def _reason(error: Any, deadline: Deadline) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {deadline.timeout_ms:g} ms"
    return str(error.strerror or error)
