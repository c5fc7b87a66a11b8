"""Single requests that the client library has no call for, in the newest version that both sides know."""

import io
import socket
import struct
from functools import cache
from typing import Any, NamedTuple

from penstock.protocol.schemas import schema_class

Address = tuple[str, int]

TIMEOUT_S = 5.0
ANSWER_BYTES_MAX = 64 << 20


class NotUnderstood(OSError):
    """The broker does not know this kind of request."""


class Feature(NamedTuple):
    """At which level it is in this cluster (0: not at all), and between which it may be."""

    level: int
    level_min: int
    level_max: int


def features(address: Address) -> dict[str, Feature]:
    """Those that this broker supports; empty where it does not tell."""
    try:
        answer = _api_versions(address, 4)  # before, those that may be at level 0 are left out
    except OSError:
        answer = _api_versions(address, 3)
    levels = {str(entry.name): int(entry.max_version_level) for entry in answer.finalized_features}
    return {
        str(entry.name): Feature(
            levels.get(str(entry.name), 0), int(entry.min_version), int(entry.max_version)
        )
        for entry in answer.supported_features
    }


def stored_bytes(address: Address) -> int:
    """What the partitions on this broker take on disk."""
    return sum(partition_bytes(address).values())


def partition_bytes(address: Address) -> dict[tuple[str, int], int]:
    """What each partition on this broker takes on disk."""
    request = schema_class("describe_log_dirs.v4.request:DescribeLogDirsRequest")(topics=None)
    return {
        (str(topic.name), int(partition.partition_index)): int(partition.partition_size)
        for folder in ask(address, request).results
        for topic in folder.topics
        for partition in topic.partitions
    }


def ask(address: Address, request: Any, *, timeout_s: float = TIMEOUT_S) -> Any:
    """The answer in its own version's class. `request` is of the newest version that is wanted.

    Raises OSError when the broker does not answer, or not in a way that can be read; NotUnderstood when it cannot.
    """
    oldest, newest = _understood(address).get(int(request.__api_key__), (0, -1))
    version = min(newest, int(request.__version__))
    if version < oldest:
        raise NotUnderstood(f"{address[0]}:{address[1]} does not know this request")
    return _exchange(address, request, version, timeout_s)


@cache
def _understood(address: Address) -> dict[int, tuple[int, int]]:
    return {
        int(api.api_key): (int(api.min_version), int(api.max_version))
        for api in _api_versions(address, 3).api_keys
    }


def _api_versions(address: Address, version: int) -> Any:
    request = schema_class(f"api_versions.v{version}.request:ApiVersionsRequest")(
        client_software_name="penstock-cli", client_software_version="1"
    )
    return _exchange(address, request, request.__version__, TIMEOUT_S)


def _exchange(address: Address, request: Any, version: int, timeout_s: float) -> Any:
    from kio.index import load_response_schema
    from kio.serial import entity_reader
    from kio.serial.errors import SerialError

    with socket.create_connection(address, timeout=timeout_s) as connection:
        connection.sendall(_frame(request, version))
        frame = _receive(connection)
    answer_class = load_response_schema(int(request.__api_key__), version)
    try:
        _, size = entity_reader(answer_class.__header_schema__)(frame, 0)
        answer, _ = entity_reader(answer_class)(frame, size)
    except SerialError as error:
        raise OSError(f"unreadable answer: {error}") from None
    return answer


def _frame(request: Any, version: int) -> bytes:
    """An older version is written from the newer one's values: it lacks some of them, and has no others."""
    from kio.index import load_request_schema
    from kio.serial import entity_writer

    schema = load_request_schema(int(request.__api_key__), version)
    buffer = io.BytesIO()
    header = schema.__header_schema__
    values = {"request_api_key": schema.__api_key__, "request_api_version": schema.__version__}
    entity_writer(header)(buffer, header(**values, correlation_id=1, client_id="penstock-cli"))
    entity_writer(schema)(buffer, request)
    return struct.pack(">i", buffer.tell()) + buffer.getvalue()


def _receive(connection: socket.socket) -> bytes:
    (size,) = struct.unpack(">i", _exactly(connection, 4))
    if not 4 <= size <= ANSWER_BYTES_MAX:
        raise OSError(f"an answer of {size} bytes")
    return _exactly(connection, size)


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        chunk = connection.recv(count - len(data))
        if not chunk:
            raise OSError("the connection was closed")
        data += chunk
    return bytes(data)
