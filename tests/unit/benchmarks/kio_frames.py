"""Requests and responses as kio encodes them, to compare with frames that benchmarks pack by hand."""

from io import BytesIO
from typing import Any

from kio.serial import entity_reader, entity_writer


def parse_request(frame: bytes, request_class: Any) -> Any:
    _, size = entity_reader(request_class.__header_schema__)(frame[4:], 0)
    parsed, read = entity_reader(request_class)(frame[4:], size)
    assert size + read == len(frame) - 4 == int.from_bytes(frame[:4], "big")
    return parsed


def encode_response(body: Any) -> memoryview:
    buffer = BytesIO()
    header = type(body).__header_schema__
    entity_writer(header)(buffer, header(correlation_id=7))
    entity_writer(type(body))(buffer, body)
    return memoryview(buffer.getvalue())
