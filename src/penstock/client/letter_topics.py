"""Retry and dead-letter topics, made with the partitions of the topic whose letters they hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from penstock.client.cluster import Cluster
from penstock.client.errors import Refused, UnsupportedVersion
from penstock.client.metadata import TopicInfo
from penstock.client.topics import NewTopic, create_partitions, ensure_topic, topic_settings
from penstock.protocol.letters import dead_letter_retention_ms

BYTES_SETTING: Final = "max.message.bytes"
RETENTION_SETTING: Final = "retention.ms"
#: What a letter tells in its headers of itself.
_HEADERS_BYTES_MAX: Final = 64 << 10
_BYTES_LIMIT: Final = (1 << 31) - 1


def ensure_letters(cluster: Cluster, name: str, source: TopicInfo, settings: Mapping[str, str]) -> int:
    """Make it where it is missing, and let it grow with its source. Returns how many partitions it has.

    Raises Unavailable, Refused.
    """
    count = len(source.partitions)
    found = cluster.topics([name]).get(name)
    if found is None:
        fitting = {**settings, **_of_source(cluster, source.name, keeps=RETENTION_SETTING in settings)}
        found = ensure_topic(cluster, NewTopic(name=name, partitions=count, settings=fitting))
    if len(found.partitions) < count:
        found = create_partitions(cluster, name, count)
    return len(found.partitions)


def _of_source(cluster: Cluster, source: str, *, keeps: bool) -> dict[str, str]:
    """A letter is a record of the source with more headers; what keeps letters does so for longer than the source."""
    try:
        told = topic_settings(cluster, source)
    except (Refused, UnsupportedVersion):
        return {}  # not everyone may look at settings
    found = {}
    if room := told.get(BYTES_SETTING):
        found[BYTES_SETTING] = str(min(int(room) + _HEADERS_BYTES_MAX, _BYTES_LIMIT))
    if keeps and (kept := told.get(RETENTION_SETTING)):
        found[RETENTION_SETTING] = str(dead_letter_retention_ms(int(kept)))
    return found
