"""Single requests that the client library has no call for: what a broker can do, and how much it stores."""

import io
import socket
import struct
from typing import Any

from penstock.protocol.schemas import schema_class

TIMEOUT_S = 5.0
ANSWER_BYTES_MAX = 64 << 20


def features(address: tuple[str, int]) -> dict[str, int]:
    """The finalized features of the cluster; empty where the broker does not tell."""
    request = schema_class("api_versions.v3.request:ApiVersionsRequest")(
        client_software_name="penstock-cli", client_software_version="1"
    )
    answer = _ask(address, request, schema_class("api_versions.v3.response:ApiVersionsResponse"))
    return {str(entry.name): int(entry.max_version_level) for entry in answer.finalized_features}


def stored_bytes(address: tuple[str, int]) -> int:
    """What the partitions on this broker take on disk."""
    request = schema_class("describe_log_dirs.v4.request:DescribeLogDirsRequest")(topics=None)
    answer = _ask(address, request, schema_class("describe_log_dirs.v4.response:DescribeLogDirsResponse"))
    return sum(
        int(partition.partition_size)
        for folder in answer.results
        for topic in folder.topics
        for partition in topic.partitions
    )


def _ask(address: tuple[str, int], request: Any, answer_class: Any) -> Any:
    """Raises OSError when the broker does not answer, or not in a way that can be read."""
    from kio.serial import entity_reader
    from kio.serial.errors import SerialError

    with socket.create_connection(address, timeout=TIMEOUT_S) as connection:
        connection.sendall(_frame(request))
        frame = _receive(connection)
    try:
        _, size = entity_reader(answer_class.__header_schema__)(frame, 0)
        answer, _ = entity_reader(answer_class)(frame, size)
    except SerialError as error:
        raise OSError(f"unreadable answer: {error}") from None
    return answer


def _frame(request: Any) -> bytes:
    from kio.serial import entity_writer

    buffer = io.BytesIO()
    header = type(request).__header_schema__
    values = {"request_api_key": request.__api_key__, "request_api_version": request.__version__}
    entity_writer(header)(buffer, header(**values, correlation_id=1, client_id="penstock-cli"))
    entity_writer(type(request))(buffer, request)
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
