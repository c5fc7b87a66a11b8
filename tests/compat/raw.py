"""A connection that sends what no proper client would: frames made by hand, on the schemas of kio."""

import contextlib
import importlib
import io
import socket
import struct
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from kio.serial import entity_reader, entity_writer
from kio.serial.errors import OutOfBoundValue

from penstock.protocol.errors import ErrorCode

TIMEOUT_S = 60.0
CORRELATION_ID = 77


class Unreadable(Exception):
    """A response with a time that kio cannot hold, such as the -1 of Apache Kafka for "no time"."""

    def __init__(self, schema: Any, body: bytes) -> None:
        super().__init__(schema.__name__)
        self._schema, self._body = schema, body

    @property
    def error_code(self) -> ErrorCode:
        assert fields(self._schema)[0].name == "error_code", self._schema
        return ErrorCode(struct.unpack_from(">h", self._body)[0])


class RawConnection:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def send(self, data: bytes) -> None:
        self._connection.sendall(data)

    def send_frame(self, payload: bytes) -> None:
        self.send(struct.pack(">i", len(payload)) + payload)

    def receive_frame(self) -> bytes:
        """The next response, or b"" when the broker has closed the connection."""
        size = self._receive(4)
        return self._receive(struct.unpack(">i", size)[0]) if size else b""

    def is_closed_by_broker(self) -> bool:
        with contextlib.suppress(ConnectionError):
            return self._connection.recv(1) == b""
        return True

    def call(self, request: Any) -> Any:
        """Send a request of kio's and return kio's response of the same version."""
        self.send(framed(request))
        return self.answer(request)

    def answer(self, request: Any) -> Any:
        """The response to what was sent before."""
        reply = self.receive_frame()
        assert reply, "the broker closed the connection"
        return response(request, reply)

    def _receive(self, count: int) -> bytes:
        received = b""
        while len(received) < count:
            chunk = self._connection.recv(count - len(received))
            if not chunk:
                return b""
            received += chunk
        return received


@contextlib.contextmanager
def connected(address: tuple[str, int]) -> Iterator[RawConnection]:
    with socket.create_connection(address, timeout=TIMEOUT_S) as connection:
        yield RawConnection(connection)


def schema(api: str, version: int, name: str) -> Any:
    """`schema("metadata", 12, "MetadataRequest")`: a message class of kio."""
    kind = "response" if name.endswith("Response") else "request"
    return getattr(importlib.import_module(f"kio.schema.{api}.v{version}.{kind}"), name)


def framed(request: Any) -> bytes:
    """What `call` sends."""
    payload = _header(request) + _written(request)
    return struct.pack(">i", len(payload)) + payload


def _written(entity: Any) -> bytes:
    buffer = io.BytesIO()
    entity_writer(type(entity))(buffer, entity)
    return buffer.getvalue()


def _header(request: Any) -> bytes:
    fields = {
        "request_api_key": type(request).__api_key__,
        "request_api_version": type(request).__version__,
        "correlation_id": CORRELATION_ID,
        "client_id": "raw",
    }
    return _written(type(request).__header_schema__(**fields))


def response(request: Any, reply: bytes) -> Any:
    """kio's response of the same version."""
    module = importlib.import_module(type(request).__module__.replace(".request", ".response"))
    cls = getattr(module, type(request).__name__.replace("Request", "Response"))
    header, size = entity_reader(cls.__header_schema__)(reply, 0)
    assert header.correlation_id == CORRELATION_ID
    try:
        return entity_reader(cls)(reply, size)[0]
    except OutOfBoundValue as error:
        raise Unreadable(cls, reply[size:]) from error
