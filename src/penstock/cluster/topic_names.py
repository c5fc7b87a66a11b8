"""Which topic names are legal, which collide, and which belong to the cluster itself."""

import re
from typing import Final

CONSUMER_OFFSETS: Final = "__consumer_offsets"
TRANSACTION_STATE: Final = "__transaction_state"
SHARE_GROUP_STATE: Final = "__share_group_state"
SCHEDULE: Final = "__penstock_schedule"
CLUSTER_METADATA: Final = "__cluster_metadata"

#: Topics the cluster keeps its own state in; __cluster_metadata is not a topic that clients can see at all.
INTERNAL_TOPICS: Final = frozenset({CONSUMER_OFFSETS, TRANSACTION_STATE, SHARE_GROUP_STATE, SCHEDULE})

#: A name, a dash, a partition number and a suffix have to fit in a file name of 255 bytes.
TOPIC_NAME_LENGTH_MAX: Final = 249
_NODE_ID_DIGITS_MAX: Final = 10
_LEGAL = re.compile(r"[a-zA-Z0-9._-]+")


def is_internal(topic: str) -> bool:
    return topic in INTERNAL_TOPICS


def topic_name_flaw(name: str) -> str | None:
    """What is wrong with a topic name, in Kafka's words, or None."""
    if not name:
        return "Topic name is invalid: the empty string is not allowed"
    if name in (".", ".."):
        return f"Topic name is invalid: '{name}' is not allowed"
    if len(name) > TOPIC_NAME_LENGTH_MAX:
        return (
            f"Topic name is invalid: the length of '{name}' is longer than "
            f"the max allowed length {TOPIC_NAME_LENGTH_MAX}"
        )
    if not _LEGAL.fullmatch(name):
        return (
            f"Topic name is invalid: '{name}' contains one or more characters other than "
            "ASCII alphanumerics, '.', '_' and '-'"
        )
    return None


def collision_key(name: str) -> str:
    """Names with the same key cannot live side by side: metrics print '.' and '_' alike."""
    return name.replace(".", "_")


def parse_node_id(text: str) -> int | None:
    """The id by which a resource names a broker; None for what is not a number of 32 bits."""
    is_number = text.isascii() and text.isdecimal() and len(text) <= _NODE_ID_DIGITS_MAX
    return int(text) if is_number else None
