"""What topics take, so that a record which a broker would refuse is told of as what it is, before it is sent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.client.cluster import Cluster
from penstock.client.errors import Refused, UnsupportedVersion
from penstock.client.letter_topics import BYTES_SETTING
from penstock.client.retrying import Deadline
from penstock.client.settings import ConnectionSettings
from penstock.client.topics import topic_settings
from penstock.protocol.errors import ErrorCode
from penstock.spark.sink_rows import WrongRow

if TYPE_CHECKING:
    import pyarrow as pa

#: A batch must fit into a segment too.
_SIZES: Final = (BYTES_SETTING, "segment.bytes")
_CLEANUP_SETTING: Final = "cleanup.policy"
_KNOWN_MS_MAX: Final = 60_000


class RecordTooLarge(WrongRow):
    """A topic does not take a record of this size."""


class TopicLimits(NamedTuple):
    #: Of a batch, as it is sent. None where brokers do not tell.
    bytes_max: int | None = None
    #: Which one says so.
    bytes_setting: str = BYTES_SETTING
    needs_keys: bool = False


#: What this process has heard, by whom it asked; all of it is asked for anew after a while.
_HEARD: Final[dict[ConnectionSettings, tuple[dict[str, TopicLimits], Deadline]]] = {}


class Limits:
    """Of the topics that one task writes to. What others have heard lately is not held against a row."""

    def __init__(self, cluster: Cluster, *, afresh: bool = False) -> None:
        self._cluster = cluster
        self._known = {} if afresh else _heard(cluster.settings)

    def partition_count(self, topic: str) -> int:
        """Raises WrongRow where there can be no such topic; Refused, Unavailable."""
        try:
            found = self._cluster.topic_to_write(topic)
        except Refused as error:
            if error.code is not ErrorCode.invalid_topic_exception:
                raise
            raise WrongRow(
                f"there can be no topic {topic!r}: a name is 1 to 249 of A-Z, a-z, 0-9, dot, dash and underscore, "
                "and differs from others in more than dots and underscores"
            ) from None
        if found.is_internal:
            raise WrongRow(f"a row is for topic {topic}, which brokers keep for themselves")
        return len(found.partitions)

    def bytes_max(self, topic: str, wanted: int) -> int:
        """Of a batch that is made for it."""
        limit = self._of(topic).bytes_max
        return wanted if limit is None else min(wanted, limit)

    def check_keys(self, topic: str, records: pa.RecordBatch) -> None:
        """Raises WrongRow."""
        if not self._of(topic).needs_keys or _has_keys(records):
            return
        if self._of_now(topic).needs_keys:
            raise WrongRow(f"a row for topic {topic} has no key, which a compacted topic needs")

    def takes(self, topic: str, size: int) -> bool:
        """Whether a batch of that size is one for this topic."""
        return _is_within(size, self._of(topic)) or _is_within(size, self._of_now(topic))

    def too_large(self, topic: str, size: int) -> RecordTooLarge:
        limits = self._of(topic)
        return RecordTooLarge(
            f"a record of {size} bytes is too large for topic {topic}, "
            f"which takes at most {limits.bytes_setting}={limits.bytes_max}"
        )

    def _of(self, topic: str) -> TopicLimits:
        found = self._known.get(topic)
        return self._of_now(topic) if found is None else found

    def _of_now(self, topic: str) -> TopicLimits:
        self._known[topic] = asked = _ask(self._cluster, topic)
        return asked


def _heard(settings: ConnectionSettings) -> dict[str, TopicLimits]:
    known, age = _HEARD.get(settings, (None, None))
    if known is None or age is None or age.is_over:
        _HEARD[settings] = known, _ = {}, Deadline(_KNOWN_MS_MAX)
    return known


def _ask(cluster: Cluster, topic: str) -> TopicLimits:
    """Raises Unavailable."""
    try:
        told = topic_settings(cluster, topic)
    except (Refused, UnsupportedVersion):
        return TopicLimits()  # not everyone may look at settings
    sizes = [(int(size), name) for name in _SIZES if (size := told.get(name))]
    policies = (told.get(_CLEANUP_SETTING) or "").split(",")
    needs_keys = "compact" in map(str.strip, policies)
    bytes_max, setting = min(sizes, default=(None, BYTES_SETTING))
    return TopicLimits(bytes_max, setting, needs_keys=needs_keys)


def _is_within(size: int, limits: TopicLimits) -> bool:
    return limits.bytes_max is None or size <= limits.bytes_max


def _has_keys(records: pa.RecordBatch) -> bool:
    return "key" in records.schema.names and not records.column("key").null_count
