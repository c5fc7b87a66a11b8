"""A broker on a real socket that follows a script, for replies that no real broker would send."""

import io
import socket
import ssl
import struct
import threading
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any

from penstock.client.wire.settings import Address
from penstock.protocol.schemas import response_encoder, schema_class

API_VERSIONS, METADATA = 18, 3

#: (server, api key, version, correlation id, body) -> what to send, or None to hang up
Script = Callable[["ScriptedServer", int, int, int, bytes], bytes | None]


def frame(correlation_id: int, body: bytes, *, flexible: bool = False) -> bytes:
    payload = struct.pack(">i", correlation_id) + (b"\x00" if flexible else b"") + body
    return struct.pack(">i", len(payload)) + payload


def encoded(message: Any) -> bytes:
    out = io.BytesIO()
    response_encoder(int(message.__api_key__), int(message.__version__))(out, message)
    return out.getvalue()


def api_versions(apis: dict[int, tuple[int, int]], version: int = 3) -> bytes:
    module = f"api_versions.v{version}.response"
    api = schema_class(f"{module}:ApiVersion")
    values: dict[str, Any] = {"throttle_time": timedelta(0)} if version else {}
    response = schema_class(f"{module}:ApiVersionsResponse")(
        error_code=schema_class("errors:ErrorCode").none,
        api_keys=tuple(api(api_key=k, min_version=a, max_version=b) for k, (a, b) in apis.items()),
        **values,
    )
    return encoded(response)


class ScriptedServer:
    """Answers ApiVersions itself; all else is up to the script."""

    def __init__(
        self, script: Script, apis: dict[int, tuple[int, int]], *, context: ssl.SSLContext | None = None
    ) -> None:
        self.script, self.apis, self._context = script, apis, context
        self.asked: list[int] = []
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> Address:
        host, port = self._listener.getsockname()
        return host, port

    def __enter__(self) -> "ScriptedServer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Closing alone would let the thread that accepts do so once more.
        self._listener.shutdown(socket.SHUT_RDWR)
        for each in (self._listener, *self._open):
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
                if self._context is not None:
                    connection = self._context.wrap_socket(connection, server_side=True)
            except OSError:
                if self._listener.fileno() < 0:
                    return
                continue
            self.connections += 1
            self._open.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, connection.makefile("rb") as stream:
                while head := stream.read(4):
                    request = stream.read(struct.unpack(">i", head)[0])
                    api_key, version, correlation_id = struct.unpack_from(">hhi", request)
                    self.asked.append(api_key)
                    reply = self._reply(api_key, version, correlation_id, request)
                    if reply is None:
                        return
                    connection.sendall(reply)
        except OSError:
            return

    def _reply(self, api_key: int, version: int, correlation_id: int, request: bytes) -> bytes | None:
        if api_key == API_VERSIONS and API_VERSIONS not in self.apis:
            return frame(correlation_id, api_versions(self.apis))
        return self.script(self, api_key, version, correlation_id, request)
