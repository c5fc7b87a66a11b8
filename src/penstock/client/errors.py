"""Errors that the client raises, and which error codes of a broker a client may retry.

Every message is a sentence for the person who runs the program. `RETRIABLE_ERRORS` is the one table for all requests:
it says what to do before a client sends the request again.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Any, Final

from penstock.protocol.errors import ErrorCode

_FENCING_ERRORS: Final = frozenset(
    {
        ErrorCode.invalid_producer_epoch,
        ErrorCode.producer_fenced,
        ErrorCode.fenced_instance_id,
        ErrorCode.fenced_member_epoch,
    }
)
#: Errors that the records themselves cause.
_RECORD_ERRORS: Final = frozenset(
    {
        ErrorCode.message_too_large,
        ErrorCode.record_list_too_large,
        ErrorCode.invalid_record,
        ErrorCode.invalid_timestamp,
    }
)


class ClientError(Exception):
    """The base of all errors that the client raises."""


class Unavailable(ClientError):
    """No broker answered before the deadline. The request may have been executed or not; a retry may succeed."""


class AuthenticationFailed(ClientError):
    """The broker refused the client's credentials, or the client does not trust the broker."""


class UnsupportedVersion(ClientError):
    """The broker does not support this request, or no version of it that the client supports."""


class UnencodableRequest(ClientError):
    """A number is too large, or too small, for its field of the request; nothing was sent."""


class CorruptRecords(ClientError):
    """A broker sent bytes that are not valid record batches."""


class Refused(ClientError):
    """The broker answered with an error that a retry does not fix."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.code, str(self))


class Fenced(Refused):
    """Another producer has taken over the transactional id, or another member the membership."""


class NotPublished(ClientError):
    """A broker refused a message, or it is unknown whether a broker wrote it: the message text says which.

    `may_be_there` is true if the message may have been written after all. `too_large` is true if it exceeds a limit.
    """

    def __init__(self, sentence: str, *, may_be_there: bool = False, too_large: bool = False) -> None:
        super().__init__(sentence)
        self.may_be_there = may_be_there
        self.too_large = too_large


class RecordsRefused(Refused):
    """The broker refuses these records, and a retry cannot help."""


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
    """The topic was deleted, or deleted and created again: offsets of the old topic are not valid in the new one."""


def broker_error(code: ErrorCode, subject: str, detail: str | None = None) -> Refused:
    """Returns the exception for a broker's error about `subject`."""
    kind = Fenced if code in _FENCING_ERRORS else RecordsRefused if code in _RECORD_ERRORS else Refused
    words = code.name.replace("_", " ")
    return kind(code, f"{subject}: {words}" + (f" ({detail})" if detail else ""))


def raise_for_error(code: ErrorCode, subject: str, detail: str | None = None) -> None:
    """Raises Refused for every code except NONE."""
    if code is not ErrorCode.none:
        raise broker_error(code, subject, detail)


def parse_error_code(number: int) -> ErrorCode:
    """Returns UNKNOWN_SERVER_ERROR for a code of a newer broker."""
    try:
        return ErrorCode(number)  # type: ignore[call-arg, arg-type, unused-ignore]
    except ValueError:
        return ErrorCode.unknown_server_error


class RetryAction(Enum):
    RETRY = auto()
    #: The broker is not, or no longer, the leader, coordinator or controller.
    REFRESH_METADATA = auto()


RETRIABLE_ERRORS: Final = {
    ErrorCode.broker_not_available: RetryAction.REFRESH_METADATA,
    ErrorCode.concurrent_transactions: RetryAction.RETRY,
    ErrorCode.coordinator_load_in_progress: RetryAction.RETRY,
    ErrorCode.coordinator_not_available: RetryAction.REFRESH_METADATA,
    ErrorCode.fenced_leader_epoch: RetryAction.REFRESH_METADATA,
    ErrorCode.inconsistent_topic_id: RetryAction.REFRESH_METADATA,
    ErrorCode.kafka_storage_error: RetryAction.REFRESH_METADATA,
    ErrorCode.leader_not_available: RetryAction.REFRESH_METADATA,
    ErrorCode.network_exception: RetryAction.REFRESH_METADATA,
    ErrorCode.not_controller: RetryAction.REFRESH_METADATA,
    ErrorCode.not_coordinator: RetryAction.REFRESH_METADATA,
    ErrorCode.not_enough_replicas: RetryAction.RETRY,
    ErrorCode.not_enough_replicas_after_append: RetryAction.RETRY,
    ErrorCode.not_leader_or_follower: RetryAction.REFRESH_METADATA,
    ErrorCode.offset_not_available: RetryAction.RETRY,
    ErrorCode.replica_not_available: RetryAction.REFRESH_METADATA,
    ErrorCode.request_timed_out: RetryAction.RETRY,
    ErrorCode.throttling_quota_exceeded: RetryAction.RETRY,
    ErrorCode.unknown_leader_epoch: RetryAction.RETRY,
    ErrorCode.unknown_topic_id: RetryAction.REFRESH_METADATA,
    ErrorCode.unknown_topic_or_partition: RetryAction.REFRESH_METADATA,
    ErrorCode.unstable_offset_commit: RetryAction.RETRY,
}

#: Brokers learn of a new topic at different times: a client retries these errors for `unknown_topic_ms_max`.
UNKNOWN_TOPIC_ERRORS: Final = frozenset(
    {ErrorCode.unknown_topic_or_partition, ErrorCode.unknown_topic_id, ErrorCode.inconsistent_topic_id}
)
