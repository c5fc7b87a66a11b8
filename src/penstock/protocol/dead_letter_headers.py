"""Names of the headers that say where a dead letter or a retry comes from, and why it was written.

The headers that KIP-1191 names are `__dlq.errors.*`; ours begin with `penstock.dlq.`. All values are text.
"""

from typing import Final

TOPIC_HEADER: Final = "__dlq.errors.topic"
PARTITION_HEADER: Final = "__dlq.errors.partition"
OFFSET_HEADER: Final = "__dlq.errors.offset"
GROUP_HEADER: Final = "__dlq.errors.group"
#: How often the record was tried.
DELIVERY_COUNT_HEADER: Final = "__dlq.errors.delivery.count"
ERROR_MESSAGE_HEADER: Final = "__dlq.errors.message"
#: Of the record where it was first, in milliseconds.
TIMESTAMP_HEADER: Final = "penstock.dlq.timestamp"
REASON_HEADER: Final = "penstock.dlq.reason"
#: Which function it was that failed.
HANDLER_HEADER: Final = "penstock.dlq.handler"
ERROR_CLASS_HEADER: Final = "penstock.dlq.error.class"
ERROR_STACK_HEADER: Final = "penstock.dlq.error.stack"
#: Only where the record itself could not be brought along: why.
WITHOUT_RECORD_HEADER: Final = "penstock.dlq.without.record"
#: Only in a letter that was corrected: partition and offset of the one that it takes the place of, "1:42".
EDITED_FROM_HEADER: Final = "penstock.dlq.edited-from"

#: All of the above begin with one of these.
HEADER_PREFIXES: Final = ("__dlq.errors.", "penstock.dlq.")

#: Longer texts about a failure are cut.
ERROR_STACK_BYTES_MAX: Final = 8 << 10
ERROR_MESSAGE_BYTES_MAX: Final = 4 << 10
_ELLIPSIS: Final = " ..."

#: How long a dead-letter topic keeps what it has at least, where it is made for that: 30 days.
DEAD_LETTER_RETENTION_MS: Final = 30 * 24 * 60 * 60 * 1000

#: By which a message is known as the same one when it is published twice.
MESSAGE_ID: Final = "message-id"


def dead_letter_retention_ms(source_ms: int) -> int:
    """Letters are kept for as long as records of their source, where that is longer; -1 is for ever."""
    return -1 if source_ms < 0 else max(source_ms, DEAD_LETTER_RETENTION_MS)


def truncate_text(text: str, bytes_max: int) -> str:
    """The beginning of it, where it is too long."""
    data = text.encode(errors="replace")
    if len(data) <= bytes_max:
        return text
    return data[: bytes_max - len(_ELLIPSIS)].decode(errors="ignore") + _ELLIPSIS
