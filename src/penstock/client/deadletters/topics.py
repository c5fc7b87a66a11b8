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
#: What a letter tells in its headers of itself.
_HEADERS_BYTES_MAX: Final = 64 << 10
_MESSAGE_BYTES_LIMIT: Final = (1 << 31) - 1


def ensure_failure_topic(cluster: Cluster, name: str, source: TopicInfo, settings: Mapping[str, str]) -> int:
    """Make it where it is missing, and let it grow with its source. Returns how many partitions it has.

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
    """A letter is a record of the source with more headers; what keeps letters does so for longer than the source."""
    try:
        source_settings = topic_settings(cluster, source)
    except (Refused, UnsupportedVersion):
        return {}  # not everyone may look at settings
    found = {}
    if bytes_max := source_settings.get(MESSAGE_BYTES_SETTING):
        found[MESSAGE_BYTES_SETTING] = str(min(int(bytes_max) + _HEADERS_BYTES_MAX, _MESSAGE_BYTES_LIMIT))
    if has_retention and (retention_ms := source_settings.get(RETENTION_SETTING)):
        found[RETENTION_SETTING] = str(dead_letter_retention_ms(int(retention_ms)))
    return found


_RECORDS_CHECKED: Final = 10


class NoDeadLetters(ClientError):
    """There is no topic of dead letters of that name."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        super().__init__(f"there are no dead letters by the name of {name}")
        self.name = name
        self.known = sorted(known)


class DeadLetterError(ClientError):
    """What is asked for cannot be done with these letters."""


def is_dead_letter_topic(topic: str) -> bool:
    """By its name. Share groups may be set to use others, which have to be asked for by name."""
    is_other = retry_level(topic) is not None or original_topic(topic) == topic
    return is_failure_topic(topic) and not is_other


def dead_letter_topics(cluster: Cluster) -> dict[str, TopicInfo]:
    """All that are such by their names. Raises Unavailable, Refused."""
    found = cluster.topics()
    return {name: found[name] for name in sorted(found) if is_dead_letter_topic(name)}


def find_dead_letter_topic(cluster: Cluster, name: str) -> TopicInfo:
    """The topic of that name, or that of the dead letters from it where there is one.

    Raises NoLetters; DeadLetterError for what holds no dead letters by its name; Unavailable, Refused.
    """
    found = cluster.topics([name, dead_letter_topic(name)])
    if not is_failure_topic(name) and dead_letter_topic(name) in found:
        return found[dead_letter_topic(name)]
    if name not in found:
        raise NoDeadLetters(name, dead_letter_topics(cluster))
    if is_failure_topic(name) and not is_dead_letter_topic(name):
        what = "records that wait to be tried again" if retry_level(name) is not None else "no letters"
        raise DeadLetterError(
            f"{name} holds {what}; the dead letters are in {_dead_letter_topic_beside(name)}"
        )
    if not is_dead_letter_topic(name) and not _starts_with_dead_letters(cluster, found[name]):
        raise DeadLetterError(f"{name} holds no dead letters, and there is no {dead_letter_topic(name)}")
    return found[name]


def _starts_with_dead_letters(cluster: Cluster, topic: TopicInfo) -> bool:
    """Whether it is one of another name: a look at the first records of each partition tells."""
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
    """The list of those that are done with. Raises Unavailable, Refused."""
    made = NewTopic(
        name=replayed_topic(letters.name), partitions=len(letters.partitions), settings=REPLAYED_SETTINGS
    )
    return ensure_topic(cluster, made)
