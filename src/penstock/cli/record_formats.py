"""Records as lines, which `produce` reads and `consume` writes: text, hex, base64, JSON, templates."""

import base64
import binascii
import json
import string
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

Headers = Sequence[tuple[str, bytes | None]]

FORMATS = ("text", "json", "hex", "base64")
FIELDS = ("topic", "partition", "offset", "timestamp", "time", "key", "value", "headers")


class Incoming(NamedTuple):
    """A record as a consumer got it."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: Headers = ()


class Outgoing(NamedTuple):
    """A record to be published. A partition of -1 is chosen by the key, a timestamp of 0 is now."""

    key: bytes | None
    value: bytes | None
    headers: Headers = ()
    partition: int = -1
    timestamp_ms: int = 0


def line_writer(
    format_name: str, *, keys: bool = False, headers: bool = False
) -> Callable[[Incoming], bytes]:
    """How a record becomes a line. Raises ValueError for a format that is neither known nor a template."""
    if format_name == "json":
        return _json_line
    if format_name in FORMATS:
        encode = _ENCODERS[format_name]
        return lambda record: _columns(record, encode, keys, headers)
    if "{" in format_name:
        return _template(format_name)
    raise ValueError(
        f"unknown format {format_name!r}: use {', '.join(FORMATS)} or a template like '{{key}}: {{value}}'"
    )


def line_reader(format_name: str, *, key_separator: bytes | None = None) -> Callable[[bytes], Outgoing]:
    """How a line becomes a record. The reader raises ValueError for a line that does not fit."""
    if format_name == "json":
        return _from_json
    if format_name not in FORMATS:
        raise ValueError(f"unknown format {format_name!r}: use {', '.join(FORMATS)}")
    decode = _DECODERS[format_name]

    def read(line: bytes) -> Outgoing:
        if key_separator is None:
            return Outgoing(None, decode(line))
        key, found, value = line.partition(key_separator)
        if not found:
            raise ValueError(f"no {key_separator.decode()!r} between key and value")
        return Outgoing(decode(key), decode(value))

    return read


def as_document(record: Incoming) -> dict[str, Any]:
    """The JSON form, which `produce --format json` reads back to the same record."""
    return {
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "timestamp": record.timestamp_ms,
        "key": to_json(record.key),
        "value": to_json(record.value),
        "headers": [[name, to_json(value)] for name, value in record.headers],
    }


def to_json(data: bytes | None) -> str | dict[str, str] | None:
    if data is None:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


def _from_json(line: bytes) -> Outgoing:
    try:
        document = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(document, dict) or "value" not in document:
        raise ValueError('a record is written {"key": ..., "value": ...}')
    return Outgoing(
        _bytes_of(document.get("key")),
        _bytes_of(document["value"]),
        tuple(_header(pair) for pair in document.get("headers") or ()),
        _whole_number(document, "partition", -1),
        _whole_number(document, "timestamp", 0),
    )


def _header(pair: Any) -> tuple[str, bytes | None]:
    if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], str):
        raise ValueError('a header is written ["name", "value"]')
    return pair[0], _bytes_of(pair[1])


def _whole_number(document: dict[str, Any], name: str, default: int) -> int:
    value = document.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name} must be a whole number")
    return value


def _bytes_of(value: Any) -> bytes | None:
    match value:
        case None:
            return None
        case str():
            return value.encode()
        case {"base64": str(text)} if len(value) == 1:
            return _from_base64(text.encode())
        case _:
            return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _from_base64(text: bytes) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"not base64: {error}") from None


def _from_hex(text: bytes) -> bytes:
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
    "hex": _from_hex,
    "base64": lambda text: _from_base64(text.strip()),
}


def _json_line(record: Incoming) -> bytes:
    return json.dumps(as_document(record), ensure_ascii=False).encode() + b"\n"


def _columns(record: Incoming, encode: Callable[[bytes], bytes], keys: bool, headers: bool) -> bytes:
    parts = []
    if headers:
        parts.append(_headers_text(record.headers))
    if keys:
        parts.append(encode(record.key or b""))
    parts.append(encode(record.value or b""))
    return b"\t".join(parts) + b"\n"


def _headers_text(headers: Headers) -> bytes:
    return b",".join(name.encode() + b"=" + (value or b"") for name, value in headers)


def _template(text: str) -> Callable[[Incoming], bytes]:
    """Literal parts and fields in turn; values are written as the bytes they are."""
    text = text.replace("\\n", "\n").replace("\\t", "\t")
    parts: list[tuple[bytes, str | None]] = []
    for literal, field, spec, conversion in string.Formatter().parse(text):
        if field is not None and (field not in FIELDS or spec or conversion):
            raise ValueError(f"unknown field {{{field}}} in the template: use {', '.join(FIELDS)}")
        parts.append((literal.encode(), field))

    def write(record: Incoming) -> bytes:
        return b"".join(literal + _field(record, field) for literal, field in parts) + b"\n"

    return write


def _field(record: Incoming, field: str | None) -> bytes:
    match field:
        case None:
            return b""
        case "key":
            return record.key or b""
        case "value":
            return record.value or b""
        case "headers":
            return _headers_text(record.headers)
        case "time":
            return _iso(record.timestamp_ms).encode()
        case "timestamp":
            return str(record.timestamp_ms).encode()
        case _:
            return str(getattr(record, field)).encode()


def _iso(timestamp_ms: int) -> str:
    moment = datetime.fromtimestamp(timestamp_ms / 1000, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
