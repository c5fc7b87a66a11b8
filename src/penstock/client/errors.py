"""What can go wrong for a client. Every message is a sentence for whoever runs the program."""

from __future__ import annotations

from typing import Any, Final

from penstock.protocol.errors import ErrorCode

_FENCING: Final = frozenset(
    {
        ErrorCode.invalid_producer_epoch,
        ErrorCode.producer_fenced,
        ErrorCode.fenced_instance_id,
        ErrorCode.fenced_member_epoch,
    }
)
#: It is the records themselves that are wrong.
_OF_RECORDS: Final = frozenset(
    {
        ErrorCode.message_too_large,
        ErrorCode.record_list_too_large,
        ErrorCode.invalid_record,
        ErrorCode.invalid_timestamp,
    }
)


class ClientError(Exception):
    """Anything that the client side raises."""


class Unavailable(ClientError):
    """Nobody answered before the deadline. What was asked for may have been done, or not; it may be asked again."""


class AuthenticationFailed(ClientError):
    """The broker does not trust us, or we do not trust the broker."""


class UnsupportedVersion(ClientError):
    """The broker does not know this request, or no version of it that we know."""


class CorruptRecords(ClientError):
    """What a broker sent as record batches is none."""


class Refused(ClientError):
    """The broker answered with an error that asking again does not mend."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.code, str(self))


class Fenced(Refused):
    """Somebody else goes on with this transactional id or this membership."""


class RecordsRefused(Refused):
    """The broker does not take these records, whoever sends them and however often."""


class OutOfRange(ClientError):
    """The offset is not in the log: `log_start <= offset <= log_end` does not hold."""

    def __init__(self, topic: str, partition: int, asked: int, log_start: int, log_end: int) -> None:
        what = "was deleted" if asked < log_start else "does not exist yet"
        super().__init__(
            f"offset {asked} of {topic}[{partition}] {what}: the log goes from {log_start} to {log_end}"
        )
        self.topic = topic
        self.partition = partition
        self.asked = asked
        self.log_start = log_start
        self.log_end = log_end

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.topic, self.partition, self.asked, self.log_start, self.log_end)


class TopicChanged(ClientError):
    """The topic was deleted, or deleted and created anew: offsets of the old one mean nothing in the new one."""


def refusal(code: ErrorCode, subject: str, detail: str | None = None) -> Refused:
    """The broker's error about `subject` as an exception."""
    kind = Fenced if code in _FENCING else RecordsRefused if code in _OF_RECORDS else Refused
    words = code.name.replace("_", " ")
    return kind(code, f"{subject}: {words}" + (f" ({detail})" if detail else ""))


def check(code: ErrorCode, subject: str, detail: str | None = None) -> None:
    """Raises Refused unless the broker answered that all is well."""
    if code is not ErrorCode.none:
        raise refusal(code, subject, detail)


def code_of(number: int) -> ErrorCode:
    """A newer broker may know errors that we do not."""
    try:
        return ErrorCode(number)  # type: ignore[call-arg, arg-type, unused-ignore]
    except ValueError:
        return ErrorCode.unknown_server_error
