"""A client that sends any version of any request and returns the reply."""

import asyncio
import io
import struct
from typing import Any

from kio.index import load_request_schema, load_response_schema
from kio.serial import entity_reader, entity_writer
from kio.serial.errors import OutOfBoundValue
from tests.compat.raw import Unreadable

from penstock.broker.node import Node


class WireClient:
    """One connection to a node. A request is anything that has the fields of the version it is sent as."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._correlation_id = 0

    @classmethod
    async def connect(cls, node: Node, listener: int = 0, *, own_host: str | None = None) -> "WireClient":
        address, own = node.listeners[listener], None if own_host is None else (own_host, 0)
        return cls(*await asyncio.open_connection(address.host, address.port, local_addr=own))

    async def ask(self, request: Any, *, api_key: int | None = None, version: int | None = None) -> Any:
        """The version and key are those of the request's class unless they are given."""
        schema = load_request_schema(
            request.__api_key__ if api_key is None else api_key,
            request.__version__ if version is None else version,
        )
        body = io.BytesIO()
        entity_writer(schema)(body, request)
        return await self.ask_raw(schema.__api_key__, schema.__version__, body.getvalue())

    async def ask_raw(self, api_key: int, version: int, body: bytes) -> Any:
        """The answer to a request whose body was made by hand."""
        schema = load_request_schema(api_key, version)
        self._correlation_id += 1
        frame = io.BytesIO()
        header = schema.__header_schema__(
            request_api_key=schema.__api_key__,
            request_api_version=schema.__version__,
            correlation_id=self._correlation_id,
            client_id="test",
        )
        entity_writer(schema.__header_schema__)(frame, header)
        frame.write(body)
        self._writer.write(struct.pack(">i", len(frame.getvalue())) + frame.getvalue())
        return await self._answer(load_response_schema(schema.__api_key__, schema.__version__))

    async def _answer(self, schema: Any) -> Any:
        (size,) = struct.unpack(">i", await self._reader.readexactly(4))
        answer = await self._reader.readexactly(size)
        header, position = entity_reader(schema.__header_schema__)(answer, 0)
        assert header.correlation_id == self._correlation_id
        try:
            body, body_size = entity_reader(schema)(answer, position)
        except OutOfBoundValue as error:
            raise Unreadable(schema, answer[position:]) from error
        assert position + body_size == size, "bytes are left over"
        return body

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()
