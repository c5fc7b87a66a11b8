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
#: It is the records themselves that are wrong.
_RECORD_ERRORS: Final = frozenset(
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


def broker_error(code: ErrorCode, subject: str, detail: str | None = None) -> Refused:
    """The broker's error about `subject` as an exception."""
    kind = Fenced if code in _FENCING_ERRORS else RecordsRefused if code in _RECORD_ERRORS else Refused
    words = code.name.replace("_", " ")
    return kind(code, f"{subject}: {words}" + (f" ({detail})" if detail else ""))


def raise_for_error(code: ErrorCode, subject: str, detail: str | None = None) -> None:
    """Raises Refused unless the broker answered that all is well."""
    if code is not ErrorCode.none:
        raise broker_error(code, subject, detail)


def parse_error_code(number: int) -> ErrorCode:
    """A newer broker may know errors that we do not."""
    try:
        return ErrorCode(number)  # type: ignore[call-arg, arg-type, unused-ignore]
    except ValueError:
        return ErrorCode.unknown_server_error


class RetryAction(Enum):
    RETRY = auto()
    #: Whoever was asked is not, or no longer, in charge.
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

#: Brokers hear of a new topic one after the other; these pass soon (`unknown_topic_ms_max`) or not at all.
UNKNOWN_TOPIC_ERRORS: Final = frozenset(
    {ErrorCode.unknown_topic_or_partition, ErrorCode.unknown_topic_id, ErrorCode.inconsistent_topic_id}
)
