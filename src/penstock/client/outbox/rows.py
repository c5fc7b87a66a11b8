"""Rows of the outbox: a message as the table has it. Pure."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from penstock.client.letters import MESSAGE_ID, Header

__all__ = [
    "NewRow",
    "Row",
    "fingerprint",
    "headers_from",
    "headers_text",
    "new_row",
    "row_headers",
    "shard_hash",
    "topic_flaw",
]

HASH_MAX: Final = (1 << 31) - 1
MESSAGE_ID_CHARACTERS_MAX: Final = 1000
_TOPIC: Final = re.compile(r"[A-Za-z0-9._-]{1,249}")
_PARTITION_MAX: Final = (1 << 31) - 1


class NewRow(NamedTuple):
    """As `add` writes it. The database gives it an id and a time."""

    #: None where nothing says which rows belong together: the database spreads them by transaction.
    shard_hash: int | None
    topic: str
    partition: int | None
    key: bytes | None
    value: bytes | None
    headers: str
    message_id: str


class Row(NamedTuple):
    """As a relay reads it."""

    id: int
    topic: str
    partition: int | None
    key: bytes | None
    value: bytes | None
    headers: str
    message_id: str


def new_row(
    topic: str,
    value: bytes | None,
    *,
    key: bytes | None,
    headers: Iterable[Header],
    partition: int | None,
    message_id: str,
) -> NewRow:
    """`message_id` counts unless the headers have one. Raises ValueError for what no broker would take."""
    if (flaw := topic_flaw(topic)) is not None:
        raise ValueError(flaw)
    if partition is not None and not 0 <= partition <= _PARTITION_MAX:
        raise ValueError(f"there is no partition {partition}")
    told = list(headers)
    message_id = _given_id(told) or message_id
    if not 0 < len(message_id) <= MESSAGE_ID_CHARACTERS_MAX or "\0" in message_id:
        raise ValueError(f"a message id has 1 to {MESSAGE_ID_CHARACTERS_MAX} characters, none of them NUL")
    rest = headers_text(header for header in told if header[0] != MESSAGE_ID)
    return NewRow(shard_hash(topic, key, partition), topic, partition, key, value, rest, message_id)


def topic_flaw(topic: object) -> str | None:
    """Why no topic can have this name."""
    if isinstance(topic, str) and _TOPIC.fullmatch(topic) and topic not in (".", ".."):
        return None
    return f"{topic!r} is no name of a topic: 1 to 249 letters, digits, full stops, hyphens and underscores"


def _given_id(headers: list[Header]) -> str | None:
    given = [value for name, value in headers if name == MESSAGE_ID and value]
    try:
        return given[-1].decode() if given else None
    except UnicodeDecodeError:
        raise ValueError("the message id in the headers is not UTF-8") from None


def shard_hash(topic: str, key: bytes | None, partition: int | None = None) -> int | None:
    """The same for all rows whose order counts: those of a key, or of a partition that was chosen without a key."""
    if key is not None:
        return zlib.crc32(key, zlib.crc32(topic.encode() + b"\0")) & HASH_MAX
    if partition is not None:
        return zlib.crc32(f"{topic}\0partition {partition}".encode()) & HASH_MAX
    return None


def headers_text(headers: Iterable[Header]) -> str:
    """JSON that people can read: values are text, or base64 where they are none."""
    return json.dumps([[name, _told(value)] for name, value in headers], ensure_ascii=True)


def headers_from(text: str) -> list[Header]:
    """Raises ValueError for what `headers_text` has not made."""
    try:
        return [(_name(name), _bytes(value)) for name, value in json.loads(text)]
    except (TypeError, KeyError, AttributeError) as flaw:
        raise ValueError(f"headers are a JSON list of names and values: {flaw}") from None


def row_headers(row: Row) -> list[Header]:
    """As the message has them. Raises ValueError."""
    return [*headers_from(row.headers), (MESSAGE_ID, row.message_id.encode())]


def fingerprint(message_id: str) -> str:
    """Short enough for markers; with the row's id it says which row was meant."""
    return hashlib.blake2b(message_id.encode(errors="surrogatepass"), digest_size=6).hexdigest()


def _told(value: bytes | None) -> Any:
    if value is None:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(value).decode()}


def _name(name: Any) -> str:
    if not isinstance(name, str):
        raise ValueError(f"{name!r} is no name of a header")
    return name


def _bytes(value: Any) -> bytes | None:
    if isinstance(value, dict):
        return base64.b64decode(value["base64"], validate=True)
    return None if value is None else str.encode(value)
