"""Names of the headers that say where a dead letter or a retry comes from, and why it was written.

The headers that KIP-1191 names are `__dlq.errors.*`; ours begin with `penstock.dlq.`. All values are text.
"""

from typing import Final

TOPIC_HEADER: Final = "__dlq.errors.topic"
PARTITION_HEADER: Final = "__dlq.errors.partition"
OFFSET_HEADER: Final = "__dlq.errors.offset"
GROUP_HEADER: Final = "__dlq.errors.group"
#: How often the record was delivered.
DELIVERY_COUNT_HEADER: Final = "__dlq.errors.delivery.count"
ERROR_MESSAGE_HEADER: Final = "__dlq.errors.message"
#: The timestamp of the original record, in milliseconds.
TIMESTAMP_HEADER: Final = "penstock.dlq.timestamp"
REASON_HEADER: Final = "penstock.dlq.reason"
#: The name of the function that failed.
HANDLER_HEADER: Final = "penstock.dlq.handler"
ERROR_CLASS_HEADER: Final = "penstock.dlq.error.class"
ERROR_STACK_HEADER: Final = "penstock.dlq.error.stack"
#: Why the letter lacks the key and value of the record; absent if it has them.
WITHOUT_RECORD_HEADER: Final = "penstock.dlq.without.record"
#: Only in a letter that was edited: the partition and offset of the letter that it replaces, as in "1:42".
EDITED_FROM_HEADER: Final = "penstock.dlq.edited-from"

#: All names above begin with one of these.
HEADER_PREFIXES: Final = ("__dlq.errors.", "penstock.dlq.")

#: Longer texts about a failure are truncated.
ERROR_STACK_BYTES_MAX: Final = 8 << 10
ERROR_MESSAGE_BYTES_MAX: Final = 4 << 10
_ELLIPSIS: Final = " ..."

#: The minimum retention of a dead-letter topic that Penstock creates: 30 days.
DEAD_LETTER_RETENTION_MS: Final = 30 * 24 * 60 * 60 * 1000
#: Other settings of such a topic. With those of the brokers, letters could go earlier: `log.retention.bytes` deletes by
#: size, and compaction keeps one letter for each key.
DEAD_LETTER_TOPIC_SETTINGS: Final = {"cleanup.policy": "delete", "retention.bytes": "-1"}

#: The header with the id of a message, by which consumers recognise a message that was published twice.
MESSAGE_ID: Final = "message-id"


def dead_letter_retention_ms(source_ms: int) -> int:
    """Letters are kept at least as long as the records of the source topic; -1 is for ever."""
    return -1 if source_ms < 0 else max(source_ms, DEAD_LETTER_RETENTION_MS)


def truncate_text(text: str, bytes_max: int) -> str:
    """The text, or as much of its beginning as fits."""
    data = text.encode(errors="replace")
    if len(data) <= bytes_max:
        return text
    return data[: bytes_max - len(_ELLIPSIS)].decode(errors="ignore") + _ELLIPSIS
