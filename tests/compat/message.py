"""A message, the same for all client libraries."""

from typing import Any, NamedTuple

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")

Headers = tuple[tuple[str, bytes | None], ...]


class Message(NamedTuple):
    """The parts that a publisher chooses and every consumer must see again."""

    value: bytes | None
    key: bytes | None = None
    headers: Headers = ()
    timestamp_ms: int | None = None
    partition: int = 0

    def send_arguments(self) -> dict[str, Any]:
        """The keywords with which producers of aiokafka and kafka-python send it."""
        return {**self._asdict(), "headers": list(self.headers)}


class Received(NamedTuple):
    message: Message
    offset: int


def received_record(record: Any) -> Received:
    """From a record as aiokafka and kafka-python give it."""
    common = Message(
        value=record.value,
        key=record.key,
        headers=tuple(record.headers),
        timestamp_ms=record.timestamp,
        partition=record.partition,
    )
    return Received(common, record.offset)


def numbered(count: int, *, partition: int = 0, size: int = 0) -> list[Message]:
    """Messages that can be told apart and put in order; `size` pads each value."""
    return [
        Message(value=b"%d" % n + b"." * max(0, size - len(b"%d" % n)), partition=partition)
        for n in range(count)
    ]


def values(received: list[Received]) -> list[bytes | None]:
    return [each.message.value for each in received]
