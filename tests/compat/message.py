"""What a message is, whichever client carries it."""

from typing import NamedTuple

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")

Headers = tuple[tuple[str, bytes | None], ...]


class Message(NamedTuple):
    """The parts that a publisher chooses and every consumer must see again."""

    value: bytes | None
    key: bytes | None = None
    headers: Headers = ()
    timestamp_ms: int | None = None
    partition: int = 0


class Received(NamedTuple):
    message: Message
    offset: int


def numbered(count: int, *, partition: int = 0, size: int = 0) -> list[Message]:
    """Messages that can be told apart and put in order; `size` pads each value."""
    return [
        Message(value=b"%d" % n + b"." * max(0, size - len(b"%d" % n)), partition=partition)
        for n in range(count)
    ]


def values(received: list[Received]) -> list[bytes | None]:
    return [each.message.value for each in received]
