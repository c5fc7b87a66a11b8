"""Topics of dead letters found by the names that people give, and the lists beside them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Final

from penstock.client.cluster import Cluster
from penstock.client.deadletters.reading import records, spans
from penstock.client.errors import ClientError
from penstock.client.letters import (
    REPLAYED_SETTINGS,
    dead_letter_topic,
    failure_in,
    is_letter_topic,
    original_topic,
    replayed_topic,
    retry_level,
)
from penstock.client.metadata import TopicInfo
from penstock.client.topics import NewTopic, ensure_topic

_LOOKED_AT: Final = 10


class NoLetters(ClientError):
    """There is no topic of dead letters of that name."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        super().__init__(f"there are no dead letters by the name of {name}")
        self.name = name
        self.known = sorted(known)


class DeadLetterError(ClientError):
    """What is asked for cannot be done with these letters."""


def holds_letters(topic: str) -> bool:
    """By its name. Share groups may be set to use others, which have to be asked for by name."""
    is_other = retry_level(topic) is not None or original_topic(topic) == topic
    return is_letter_topic(topic) and not is_other


def letter_topics(cluster: Cluster) -> dict[str, TopicInfo]:
    """All that are such by their names. Raises Unavailable, Refused."""
    found = cluster.topics()
    return {name: found[name] for name in sorted(found) if holds_letters(name)}


def find_topic(cluster: Cluster, name: str) -> TopicInfo:
    """The topic of that name, or that of the dead letters from it where there is one.

    Raises NoLetters; DeadLetterError for what holds no dead letters by its name; Unavailable, Refused.
    """
    found = cluster.topics([name, dead_letter_topic(name)])
    if not is_letter_topic(name) and dead_letter_topic(name) in found:
        return found[dead_letter_topic(name)]
    if name not in found:
        raise NoLetters(name, letter_topics(cluster))
    if is_letter_topic(name) and not holds_letters(name):
        what = "records that wait to be tried again" if retry_level(name) is not None else "no letters"
        raise DeadLetterError(f"{name} holds {what}; the dead letters are in {_sibling(name)}")
    if not holds_letters(name) and not _begins_with_letters(cluster, found[name]):
        raise DeadLetterError(f"{name} holds no dead letters, and there is no {dead_letter_topic(name)}")
    return found[name]


def _begins_with_letters(cluster: Cluster, topic: TopicInfo) -> bool:
    """Whether it is one of another name: a look at the first records of each partition tells."""
    for span in spans(cluster, topic):
        for record in islice(records(cluster, topic, span, bytes_max=1), _LOOKED_AT):
            if failure_in(record.headers) is not None:
                return True
    return False


def _sibling(name: str) -> str:
    if retry_level(name) is not None:
        return dead_letter_topic(original_topic(name))
    return name.removesuffix(replayed_topic(""))


def ensure_list(cluster: Cluster, letters: TopicInfo) -> TopicInfo:
    """The list of those that are done with. Raises Unavailable, Refused."""
    made = NewTopic(
        name=replayed_topic(letters.name), partitions=len(letters.partitions), settings=REPLAYED_SETTINGS
    )
    return ensure_topic(cluster, made)
