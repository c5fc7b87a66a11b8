"""Creates retry and dead-letter topics with the partitions of their source, and finds them by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Final

from penstock.client.deadletters.headers import (
    REPLAYED_SETTINGS,
    dead_letter_topic,
    is_failure_topic,
    original_topic,
    read_failure,
    replayed_topic,
    retry_level,
)
from penstock.client.deadletters.reader import offset_ranges, read_records
from penstock.client.errors import ClientError, Refused, UnsupportedVersion
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.metadata import TopicInfo
from penstock.client.wire.topics import NewTopic, create_partitions, ensure_topic, topic_settings
from penstock.protocol.dead_letter_headers import dead_letter_retention_ms

MESSAGE_BYTES_SETTING: Final = "max.message.bytes"
RETENTION_SETTING: Final = "retention.ms"
#: Room for the failure headers.
_HEADERS_BYTES_MAX: Final = 64 << 10
_MESSAGE_BYTES_LIMIT: Final = (1 << 31) - 1


def ensure_failure_topic(cluster: Cluster, name: str, source: TopicInfo, settings: Mapping[str, str]) -> int:
    """Creates the topic if it is missing, and adds partitions if its source has more. Returns their number.

    Raises Unavailable, Refused.
    """
    count = len(source.partitions)
    found = cluster.topics([name]).get(name)
    if found is None:
        fitting = {
            **settings,
            **_settings_from_source(cluster, source.name, has_retention=RETENTION_SETTING in settings),
        }
        found = ensure_topic(cluster, NewTopic(name=name, partitions=count, settings=fitting))
    if len(found.partitions) < count:
        found = create_partitions(cluster, name, count)
    return len(found.partitions)


def _settings_from_source(cluster: Cluster, source: str, *, has_retention: bool) -> dict[str, str]:
    """Returns a larger message size than the source's, for the failure headers, and a longer retention."""
    try:
        source_settings = topic_settings(cluster, source)
    except (Refused, UnsupportedVersion):
        return {}  # the user may not have the right to describe configs
    found = {}
    if bytes_max := source_settings.get(MESSAGE_BYTES_SETTING):
        found[MESSAGE_BYTES_SETTING] = str(min(int(bytes_max) + _HEADERS_BYTES_MAX, _MESSAGE_BYTES_LIMIT))
    if has_retention and (retention_ms := source_settings.get(RETENTION_SETTING)):
        found[RETENTION_SETTING] = str(dead_letter_retention_ms(int(retention_ms)))
    return found


_RECORDS_CHECKED: Final = 10


class NoDeadLetters(ClientError):
    """There is no such dead-letter topic."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        super().__init__(f"there is no dead-letter topic {name}")
        self.name = name
        self.known = sorted(known)


class DeadLetterError(ClientError):
    """The operation is not possible with these dead letters."""


def is_dead_letter_topic(topic: str) -> bool:
    """Whether the name is that of a dead-letter topic. Share groups may be configured to use other names."""
    is_other = retry_level(topic) is not None or original_topic(topic) == topic
    return is_failure_topic(topic) and not is_other


def dead_letter_topics(cluster: Cluster) -> dict[str, TopicInfo]:
    """Returns all topics with the name of a dead-letter topic. Raises Unavailable, Refused."""
    found = cluster.topics()
    return {name: found[name] for name in sorted(found) if is_dead_letter_topic(name)}


def find_dead_letter_topic(cluster: Cluster, name: str) -> TopicInfo:
    """Returns the dead-letter topic of this name, or the one of the topic with this name.

    Raises NoDeadLetters, DeadLetterError for a topic without dead letters, Unavailable, Refused.
    """
    found = cluster.topics([name, dead_letter_topic(name)])
    if not is_failure_topic(name) and dead_letter_topic(name) in found:
        return found[dead_letter_topic(name)]
    if name not in found:
        raise NoDeadLetters(name, dead_letter_topics(cluster))
    if is_failure_topic(name) and not is_dead_letter_topic(name):
        what = "records that wait for a retry" if retry_level(name) is not None else "no dead letters"
        raise DeadLetterError(
            f"{name} holds {what}; the dead letters are in {_dead_letter_topic_beside(name)}"
        )
    if not is_dead_letter_topic(name) and not _starts_with_dead_letters(cluster, found[name]):
        raise DeadLetterError(f"{name} holds no dead letters, and there is no {dead_letter_topic(name)}")
    return found[name]


def _starts_with_dead_letters(cluster: Cluster, topic: TopicInfo) -> bool:
    """Whether a topic with another name has dead letters: checks the first records of each partition."""
    for span in offset_ranges(cluster, topic):
        for record in islice(read_records(cluster, topic, span, bytes_max=1), _RECORDS_CHECKED):
            if read_failure(record.headers) is not None:
                return True
    return False


def _dead_letter_topic_beside(name: str) -> str:
    if retry_level(name) is not None:
        return dead_letter_topic(original_topic(name))
    return name.removesuffix(replayed_topic(""))


def ensure_replayed_topic(cluster: Cluster, letters: TopicInfo) -> TopicInfo:
    """Creates the list of resolved dead letters if it is missing. Raises Unavailable, Refused."""
    made = NewTopic(
        name=replayed_topic(letters.name), partitions=len(letters.partitions), settings=REPLAYED_SETTINGS
    )
    return ensure_topic(cluster, made)
