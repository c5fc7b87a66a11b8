"""A message as the client library gives it to the application layer."""

from collections.abc import Sequence
from typing import Any

Place = tuple[str, int]


class RawMessage:
    def __init__(
        self,
        offset: int = 0,
        *,
        topic: str = "orders",
        partition: int = 0,
        key: bytes | None = None,
        value: bytes | None = b"{}",
        headers: Sequence[Any] = (),
    ) -> None:
        self._topic, self._partition, self._offset = topic, partition, offset
        self._key, self._value, self._headers = key, value, list(headers)

    @property
    def at(self) -> tuple[int, int]:
        return self._partition, self._offset

    def topic(self) -> str:
        return self._topic

    def partition(self) -> int:
        return self._partition

    def offset(self) -> int:
        return self._offset

    def key(self) -> bytes | None:
        return self._key

    def value(self) -> bytes | None:
        return self._value

    def headers(self) -> list[Any]:
        return self._headers

    def timestamp(self) -> tuple[int, int]:
        return 1, 1000
