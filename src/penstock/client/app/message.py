"""A message as handlers see it: a view of the client library's own, which decodes nothing that nobody asks for."""

from __future__ import annotations

from typing import Any

from penstock.client.letters import MESSAGE_ID, Header, Origin, origin_of
from penstock.client.payloads import codec_for
from penstock.client.salting import unsalted

__all__ = ["Message", "id_of", "raw_of"]


class Message:
    """One record, where it is, and what is told of it."""

    __slots__ = ("_raw",)

    def __init__(self, raw: Any) -> None:
        self._raw = raw

    @property
    def topic(self) -> str:
        """Where it was read: a retry topic for one that failed before. `origin` has the first."""
        return str(self._raw.topic())

    @property
    def partition(self) -> int:
        return int(self._raw.partition())

    @property
    def offset(self) -> int:
        return int(self._raw.offset())

    @property
    def key(self) -> bytes | None:
        key: bytes | None = self._raw.key()
        return key

    @property
    def unsalted_key(self) -> bytes | None:
        """The key as it was given to `publish(..., salt=N)`; any other key as it is."""
        key = self.key
        return None if key is None else unsalted(key)

    @property
    def value(self) -> bytes | None:
        """None is a tombstone."""
        value: bytes | None = self._raw.value()
        return value

    @property
    def headers(self) -> list[Header]:
        return list(self._raw.headers() or ())

    @property
    def timestamp_ms(self) -> int:
        """When it was published; in a retry topic, when it is due."""
        return int(self._raw.timestamp()[1])

    @property
    def origin(self) -> Origin:
        """Where it was first, and how often it was tried before."""
        return origin_of(
            self._raw.headers(),
            topic=self.topic,
            partition=self.partition,
            offset=self.offset,
            timestamp_ms=self.timestamp_ms,
        )

    @property
    def attempt(self) -> int:
        """1 for the first."""
        delivered = getattr(self._raw, "delivery_count", None)  # which share groups tell
        return (delivered and delivered()) or self.origin.attempts + 1

    def payload(self, kind: Any = Any) -> Any:
        """What the value says, read as an annotation of a handler would be. Raises PayloadError."""
        return codec_for(kind).decode(self._raw.value())

    @property
    def id(self) -> str:
        """By which it is the same message wherever it is: the publisher's, else the place where it was first."""
        return id_of(self._raw)

    def header(self, name: str) -> bytes | None:
        """The last one of that name."""
        found = [value for key, value in self.headers if key == name]
        return found[-1] if found else None

    def __repr__(self) -> str:
        return f"<Message {self.topic}[{self.partition}]@{self.offset} id={self.id}>"


def raw_of(message: Message) -> Any:
    """As the client library has it."""
    return message._raw


def id_of(raw: Any) -> str:
    """Of a message of the client library."""
    headers = raw.headers()
    if not headers:
        return f"{raw.topic()}:{raw.partition()}:{raw.offset()}"
    for name, value in headers:
        if name == MESSAGE_ID and value:
            return str(value.decode(errors="replace"))
    origin = origin_of(
        headers, topic=raw.topic(), partition=raw.partition(), offset=raw.offset(), timestamp_ms=0
    )
    return f"{origin.topic}:{origin.partition}:{origin.offset}"
