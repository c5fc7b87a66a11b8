"""kio's message schemas, each loaded on first use: importing all of them would cost most of a second."""

import io
from collections.abc import Callable
from functools import cache
from pkgutil import resolve_name
from typing import Any

from kio.index import load_request_schema, load_response_schema
from kio.schema.index import api_key_map, schema_name_map
from kio.serial import entity_reader
from kio.serial.errors import SerialError

from penstock.protocol.bounds import Patch, bounds_check, patched
from penstock.protocol.errors import MalformedFrame
from penstock.protocol.upgrade import upgrader
from penstock.protocol.writing import element_writer, message_writer

#: Older versions of these say what the newest cannot (topic names, one group or member beside many): their
#: handlers read each version as it is.
#: OffsetCommit, OffsetFetch, FindCoordinator, LeaveGroup, DeleteTopics, AddPartitionsToTxn.
_READ_AS_SENT = frozenset({8, 9, 10, 13, 20, 24})
#: Keys of requests that Kafka does not have.
_OUR_OWN_FROM = 30_000
#: Metadata of these versions can ask what one may do in the cluster; the newest cannot.
_READ_AS_OTHER = {(3, 8): 10, (3, 9): 10, (3, 10): 10}


def newest_version(api_key: int) -> int:
    return int(max(schema_name_map[api_key_map[api_key]]))


@cache
def request_is_flexible(api_key: int, version: int) -> bool:
    """Requests of our own, which have no schema, are not."""
    return api_key < _OUR_OWN_FROM and bool(load_request_schema(api_key, version).__flexible__)


@cache
def request_decoder(api_key: int, version: int) -> Callable[[memoryview, int], Any]:
    """Bytes of any version -> the newest version's request. Raises MalformedFrame."""
    read = request_reader(api_key, version)
    upgrade = upgrader(
        load_request_schema(api_key, version), load_request_schema(api_key, _shape_of(api_key, version))
    )
    return lambda frame, position: upgrade(read(frame, position))


def _shape_of(api_key: int, version: int) -> int:
    """The version in whose class a handler gets a request of this version."""
    if api_key in _READ_AS_SENT:
        return version
    return _READ_AS_OTHER.get((api_key, version)) or newest_version(api_key)


@cache
def request_reader(api_key: int, version: int) -> Callable[[memoryview, int], Any]:
    """Bytes of one version -> that version's own request. Raises MalformedFrame."""
    return _reader(load_request_schema(api_key, version), version)


@cache
def response_reader(api_key: int, version: int) -> Callable[[memoryview, int], Any]:
    """Bytes of one version -> that version's own response, as a peer sent it. Raises MalformedFrame."""
    return _reader(load_response_schema(api_key, version), version)


def _reader(schema: Any, version: int) -> Callable[[memoryview, int], Any]:
    check, read_entity = bounds_check(schema), entity_reader(schema)

    def read(frame: memoryview, position: int) -> Any:
        patches: list[Patch] = []
        check(frame, position, len(frame), patches)
        message = patched(frame, patches) if patches else frame.toreadonly()
        try:
            request, _ = read_entity(message, position)
        except (SerialError, ValueError, OverflowError) as error:
            raise MalformedFrame(f"{schema.__name__} v{version}: {error}") from None
        return request

    return read


@cache
def response_encoder(api_key: int, version: int) -> Callable[[io.BytesIO, Any], None]:
    """Writes the newest version's response (or this version's own class) as `version`."""
    return message_writer(load_response_schema(api_key, version))


@cache
def response_element_encoder(api_key: int, version: int, name: str) -> Callable[[Any], bytes]:
    """One element of an array in that response, for `EncodedElements`."""
    write = element_writer(load_response_schema(api_key, version), name)

    def encode(element: Any) -> bytes:
        out = io.BytesIO()
        write(out, element)
        return out.getvalue()

    return encode


@cache
def request_encoder(api_key: int, version: int) -> Callable[[io.BytesIO, Any], None]:
    """Writes the newest version's request (or this version's own class) as `version`."""
    return message_writer(load_request_schema(api_key, version))


def schema_class(path: str) -> Any:
    """`schema_class("metadata.v13.response:MetadataResponse")`, for handlers that load on first use."""
    return resolve_name(f"kio.schema.{path}")
