"""Topic names: which are legal, which collide, and which are internal topics of the cluster."""

import re
from typing import Final

CONSUMER_OFFSETS: Final = "__consumer_offsets"
TRANSACTION_STATE: Final = "__transaction_state"
SHARE_GROUP_STATE: Final = "__share_group_state"
SCHEDULE: Final = "__penstock_schedule"
AUDIT: Final = "__penstock_audit"
CLUSTER_METADATA: Final = "__cluster_metadata"

#: Topics that only the nodes write: the cluster's own state, and its audit trail. __cluster_metadata is not among them:
#: clients cannot see it.
INTERNAL_TOPICS: Final = frozenset({CONSUMER_OFFSETS, TRANSACTION_STATE, SHARE_GROUP_STATE, SCHEDULE, AUDIT})

#: A name, a dash, a partition number and a suffix have to fit in a file name of 255 bytes.
TOPIC_NAME_LENGTH_MAX: Final = 249
_LEGAL_NAME = re.compile(r"[a-zA-Z0-9._-]+")


def is_internal(topic: str) -> bool:
    return topic in INTERNAL_TOPICS


def topic_name_error(name: str) -> str | None:
    """Returns what is wrong with a topic name, in Kafka's words, or None."""
    if not name:
        return "Topic name is invalid: the empty string is not allowed"
    if name in (".", ".."):
        return f"Topic name is invalid: '{name}' is not allowed"
    if len(name) > TOPIC_NAME_LENGTH_MAX:
        return (
            f"Topic name is invalid: the length of '{name}' is longer than "
            f"the max allowed length {TOPIC_NAME_LENGTH_MAX}"
        )
    if not _LEGAL_NAME.fullmatch(name):
        return (
            f"Topic name is invalid: '{name}' contains one or more characters other than "
            "ASCII alphanumerics, '.', '_' and '-'"
        )
    return None


def collision_key(name: str) -> str:
    """Topics whose names have the same key cannot coexist: metrics print '.' and '_' alike."""
    return name.replace(".", "_")
