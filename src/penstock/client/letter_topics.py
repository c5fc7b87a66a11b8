"""Retry and dead-letter topics, made with the partitions of the topic whose letters they hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from penstock.client.cluster import Cluster
from penstock.client.errors import Refused, UnsupportedVersion
from penstock.client.metadata import TopicInfo
from penstock.client.topics import NewTopic, create_partitions, ensure_topic, topic_settings

BYTES_SETTING: Final = "max.message.bytes"
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
        wide = {**settings, **_room_for(cluster, source.name)}
        found = ensure_topic(cluster, NewTopic(name=name, partitions=count, settings=wide))
    if len(found.partitions) < count:
        found = create_partitions(cluster, name, count)
    return len(found.partitions)


def _room_for(cluster: Cluster, source: str) -> dict[str, str]:
    """A letter is a record of the source with more headers."""
    try:
        told = topic_settings(cluster, source).get(BYTES_SETTING)
    except (Refused, UnsupportedVersion):
        told = None  # not everyone may look at settings
    return {BYTES_SETTING: str(min(int(told) + _HEADERS_BYTES_MAX, _BYTES_LIMIT))} if told else {}
