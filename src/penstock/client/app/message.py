"""A message as handlers see it: a view of librdkafka's message that decodes only what is used."""

from __future__ import annotations

from typing import Any

import confluent_kafka

from penstock.client.deadletters.headers import MESSAGE_ID, Header, Origin, read_origin
from penstock.client.payloads import codec_for
from penstock.client.salting import unsalted

__all__ = (
    "Message",
    "RecordId",
    "TopicPartition",
    "confluent_partition",
    "message_id_of",
    "raw_of",
    "record_id_of",
    "topic_partition_of",
)


#: A topic and a partition number.
TopicPartition = tuple[str, int]
#: Topic, partition and offset.
RecordId = tuple[str, int, int]


def confluent_partition(
    topic_partition: TopicPartition, offset: int | None = None, note: str | None = None
) -> Any:
    """Returns confluent_kafka's TopicPartition; `note` is its commit metadata."""
    if offset is None:
        return confluent_kafka.TopicPartition(*topic_partition)
    return (
        confluent_kafka.TopicPartition(*topic_partition, offset)
        if note is None
        else confluent_kafka.TopicPartition(*topic_partition, offset, note)
    )


def topic_partition_of(raw: Any) -> TopicPartition:
    """`raw` is a message of the client library."""
    return raw.topic(), raw.partition()


def record_id_of(raw: Any) -> RecordId:
    return raw.topic(), raw.partition(), raw.offset()


class Message:
    """A message that was read: its value, key and headers, and its topic, partition and offset."""

    __slots__ = ("_raw",)

    def __init__(self, raw: Any) -> None:
        self._raw = raw

    @property
    def topic(self) -> str:
        """The topic it was read from: a retry topic if it failed before. `origin` has the original topic."""
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
        """The key as it was passed to `publish(..., salt=N)`; a key without a salt is returned unchanged."""
        key = self.key
        return None if key is None else unsalted(key)

    @property
    def value(self) -> bytes | None:
        """The value in bytes; None for a tombstone."""
        value: bytes | None = self._raw.value()
        return value

    @property
    def headers(self) -> list[Header]:
        return list(self._raw.headers() or ())

    @property
    def timestamp_ms(self) -> int:
        """When the message was published; in a retry topic, when the retry is due."""
        return int(self._raw.timestamp()[1])

    @property
    def origin(self) -> Origin:
        """Where the message was published first, and how often it was tried before."""
        return read_origin(
            self._raw.headers(),
            topic=self.topic,
            partition=self.partition,
            offset=self.offset,
            timestamp_ms=self.timestamp_ms,
        )

    @property
    def attempt(self) -> int:
        """The number of this attempt; 1 for the first."""
        delivered = getattr(self._raw, "delivery_count", None)  # only in share groups
        return (delivered and delivered()) or self.origin.attempts + 1

    def payload(self, kind: Any = Any) -> Any:
        """Decodes the value as `kind`, in the same way as for the annotation of a handler. Raises PayloadError."""
        return codec_for(kind).decode(self._raw.value())

    @property
    def id(self) -> str:
        """The id that a message keeps in retry and dead-letter topics.

        It is the publisher's message id or, without one, the original topic, partition and offset.
        """
        return message_id_of(self._raw)

    def header(self, name: str) -> bytes | None:
        """Returns the last header of that name; None if there is none."""
        found = [value for key, value in self.headers if key == name]
        return found[-1] if found else None

    def __repr__(self) -> str:
        return f"<Message {self.topic}[{self.partition}]@{self.offset} id={self.id}>"


def raw_of(message: Message) -> Any:
    """Returns the message of the client library."""
    return message._raw


def message_id_of(raw: Any) -> str:
    """Returns `Message.id` for a message of the client library."""
    headers = raw.headers()
    if not headers:
        return f"{raw.topic()}:{raw.partition()}:{raw.offset()}"
    for name, value in headers:
        if name == MESSAGE_ID and value:
            return str(value.decode(errors="replace"))
    origin = read_origin(
        headers, topic=raw.topic(), partition=raw.partition(), offset=raw.offset(), timestamp_ms=0
    )
    return f"{origin.topic}:{origin.partition}:{origin.offset}"
