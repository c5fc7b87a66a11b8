"""Records as lines of text, hexadecimal, base64, JSON or a template.

`produce` reads these lines, `consume` writes them.
"""

import base64
import binascii
import json
import string
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

Headers = Sequence[tuple[str, bytes | None]]

FORMATS = ("text", "json", "hex", "base64")
TEMPLATE_FIELDS = ("topic", "partition", "offset", "timestamp", "time", "key", "value", "headers")


class ConsumerRecord(NamedTuple):
    """A record as a consumer received it."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: Headers = ()


class ProducerRecord(NamedTuple):
    """A record to publish. For partition -1 the key decides; timestamp 0 is now."""

    key: bytes | None
    value: bytes | None
    headers: Headers = ()
    partition: int = -1
    timestamp_ms: int = 0


def line_writer(
    format_name: str, *, keys: bool = False, headers: bool = False
) -> Callable[[ConsumerRecord], bytes]:
    """A function that formats a record as a line. Raises ValueError if the format is neither known nor a template."""
    if format_name == "json":
        return lambda record: json.dumps(record_document(record), ensure_ascii=False).encode() + b"\n"
    if format_name in FORMATS:
        encode = _ENCODERS[format_name]
        return lambda record: _format_columns(record, encode, keys, headers)
    if "{" in format_name:
        return _template_writer(format_name)
    raise ValueError(
        f"unknown format {format_name!r}: use {', '.join(FORMATS)} or a template like '{{key}}: {{value}}'"
    )


def line_reader(format_name: str, *, key_separator: bytes | None = None) -> Callable[[bytes], ProducerRecord]:
    """A function that parses a line into a record; it raises ValueError for a line that it cannot parse."""
    if format_name == "json":
        return _parse_json_line
    if format_name not in FORMATS:
        raise ValueError(f"unknown format {format_name!r}: use {', '.join(FORMATS)}")
    decode = _DECODERS[format_name]

    def read(line: bytes) -> ProducerRecord:
        if key_separator is None:
            return ProducerRecord(None, decode(line))
        key, found, value = line.partition(key_separator)
        if not found:
            raise ValueError(f"no {key_separator.decode()!r} between key and value")
        return ProducerRecord(decode(key), decode(value))

    return read


def record_document(record: ConsumerRecord) -> dict[str, Any]:
    """The JSON form, from which `produce --format json` reads the same record again."""
    return {
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "timestamp": record.timestamp_ms,
        "key": bytes_to_json(record.key),
        "value": bytes_to_json(record.value),
        "headers": [[name, bytes_to_json(value)] for name, value in record.headers],
    }


def bytes_to_json(data: bytes | None) -> str | dict[str, str] | None:
    if data is None:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


def _parse_json_line(line: bytes) -> ProducerRecord:
    try:
        document = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(document, dict) or "value" not in document:
        raise ValueError('a record is written {"key": ..., "value": ...}')
    return ProducerRecord(
        _json_to_bytes(document.get("key")),
        _json_to_bytes(document["value"]),
        tuple(_parse_header(pair) for pair in document.get("headers") or ()),
        _integer_field(document, "partition", -1),
        _integer_field(document, "timestamp", 0),
    )


def _parse_header(pair: Any) -> tuple[str, bytes | None]:
    if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], str):
        raise ValueError('a header is written ["name", "value"]')
    return pair[0], _json_to_bytes(pair[1])


def _integer_field(document: dict[str, Any], name: str, default: int) -> int:
    value = document.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name} must be a whole number")
    return value


def _json_to_bytes(value: Any) -> bytes | None:
    match value:
        case None:
            return None
        case str():
            return value.encode()
        case {"base64": str(text)} if len(value) == 1:
            return _decode_base64(text.encode())
        case _:
            return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _decode_base64(text: bytes) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"not base64: {error}") from None


def _decode_hex(text: bytes) -> bytes:
    try:
        return binascii.unhexlify(text.strip())
    except binascii.Error as error:
        raise ValueError(f"not hexadecimal: {error}") from None


_ENCODERS: dict[str, Callable[[bytes], bytes]] = {
    "text": lambda data: data,
    "hex": binascii.hexlify,
    "base64": base64.b64encode,
}
_DECODERS: dict[str, Callable[[bytes], bytes]] = {
    "text": lambda data: data,
    "hex": _decode_hex,
    "base64": lambda text: _decode_base64(text.strip()),
}


def _format_columns(
    record: ConsumerRecord, encode: Callable[[bytes], bytes], keys: bool, headers: bool
) -> bytes:
    parts = []
    if headers:
        parts.append(_format_headers(record.headers))
    if keys:
        parts.append(encode(record.key or b""))
    parts.append(encode(record.value or b""))
    return b"\t".join(parts) + b"\n"


def _format_headers(headers: Headers) -> bytes:
    return b",".join(name.encode() + b"=" + (value or b"") for name, value in headers)


def _template_writer(text: str) -> Callable[[ConsumerRecord], bytes]:
    """Writes literal parts and fields alternately; keys and values are written as raw bytes."""
    text = text.replace("\\n", "\n").replace("\\t", "\t")
    parts: list[tuple[bytes, str | None]] = []
    for literal, field, spec, conversion in string.Formatter().parse(text):
        if field is not None and (field not in TEMPLATE_FIELDS or spec or conversion):
            raise ValueError(f"unknown field {{{field}}} in the template: use {', '.join(TEMPLATE_FIELDS)}")
        parts.append((literal.encode(), field))

    def write(record: ConsumerRecord) -> bytes:
        return b"".join(literal + _format_field(record, field) for literal, field in parts) + b"\n"

    return write


def _format_field(record: ConsumerRecord, field: str | None) -> bytes:
    match field:
        case None:
            return b""
        case "key":
            return record.key or b""
        case "value":
            return record.value or b""
        case "headers":
            return _format_headers(record.headers)
        case "time":
            return _format_time(record.timestamp_ms).encode()
        case "timestamp":
            return str(record.timestamp_ms).encode()
        case _:
            return str(getattr(record, field)).encode()


def _format_time(timestamp_ms: int) -> str:
    moment = datetime.fromtimestamp(timestamp_ms / 1000, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
