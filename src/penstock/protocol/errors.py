"""Kafka's error codes, and the exceptions that carry them."""

from typing import Final

from kio.schema.errors import ErrorCode

__all__ = ("ApiError", "ErrorCode", "InvalidRecords", "MalformedFrame")

#: A message may quote what a client sent, and older versions of replies carry strings of up to 32,767 bytes.
_MESSAGE_CHARS_MAX: Final = 2_000


class ApiError(Exception):
    """The request, or a part of it, is answered with a protocol error code."""

    def __init__(self, code: ErrorCode, message: str | None = None) -> None:
        if message is not None and len(message) > _MESSAGE_CHARS_MAX:
            message = f"{message[: _MESSAGE_CHARS_MAX - 3]}..."
        super().__init__(message or code.name)
        self.code = code
        self.message = message

    def __repr__(self) -> str:
        return f"ApiError({self.code.name}, {self.message!r})"


class InvalidRecords(ApiError):
    """Some records of a batch are invalid: those at `indexes`. The producer fails only those."""

    def __init__(self, message: str, indexes: tuple[int, ...]) -> None:
        super().__init__(ErrorCode.invalid_record, message)
        self.indexes = indexes


class MalformedFrame(Exception):
    """The bytes are not a valid message. The broker closes the connection."""
