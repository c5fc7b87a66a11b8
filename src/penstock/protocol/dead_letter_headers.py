"""Names of the headers that say where a dead letter or a retry is from, and why it is where it is.

Those that KIP-1191 names are `__dlq.errors.*`; ours begin with `penstock.dlq.`. All values are text.
"""

from typing import Final

TOPIC: Final = "__dlq.errors.topic"
PARTITION: Final = "__dlq.errors.partition"
OFFSET: Final = "__dlq.errors.offset"
GROUP: Final = "__dlq.errors.group"
#: How often the record was tried.
DELIVERY_COUNT: Final = "__dlq.errors.delivery.count"
MESSAGE: Final = "__dlq.errors.message"
#: Of the record where it was first, in milliseconds.
TIMESTAMP: Final = "penstock.dlq.timestamp"
REASON: Final = "penstock.dlq.reason"
#: Which function it was that failed.
HANDLER: Final = "penstock.dlq.handler"
ERROR_CLASS: Final = "penstock.dlq.error.class"
ERROR_STACK: Final = "penstock.dlq.error.stack"
#: Only where the record itself could not be brought along: why.
WITHOUT_RECORD: Final = "penstock.dlq.without.record"
#: Only in a letter that was corrected: partition and offset of the one that it takes the place of, "1:42".
EDITED_FROM: Final = "penstock.dlq.edited-from"

#: All of the above begin with one of these.
PREFIXES: Final = ("__dlq.errors.", "penstock.dlq.")

#: Longer texts about a failure are cut.
STACK_BYTES_MAX: Final = 8 << 10
MESSAGE_BYTES_MAX: Final = 4 << 10
_CUT: Final = " ..."

#: How long a dead-letter topic keeps what it has at least, where it is made for that: 30 days.
DEAD_LETTER_RETENTION_MS: Final = 30 * 24 * 60 * 60 * 1000

#: By which a message is known as the same one when it is published twice.
MESSAGE_ID: Final = "message-id"


def dead_letter_retention_ms(source_ms: int) -> int:
    """Letters are kept for as long as records of their source, where that is longer; -1 is for ever."""
    return -1 if source_ms < 0 else max(source_ms, DEAD_LETTER_RETENTION_MS)


def cut(text: str, bytes_max: int) -> str:
    """The beginning of it, where it is too long."""
    data = text.encode(errors="replace")
    if len(data) <= bytes_max:
        return text
    return data[: bytes_max - len(_CUT)].decode(errors="ignore") + _CUT
