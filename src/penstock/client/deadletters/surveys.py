"""How many letters there are, of whom and why: counted in one pass, whatever their number."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from penstock.client.cluster import Cluster
from penstock.client.deadletters.filters import Filter
from penstock.client.deadletters.letter import Letter
from penstock.client.deadletters.marks import Mark, State
from penstock.client.deadletters.reading import letters, read_marks, spans
from penstock.client.errors import Refused, UnsupportedVersion
from penstock.client.metadata import TopicInfo
from penstock.client.topics import topic_settings


@dataclass(slots=True, kw_only=True)
class Summary:
    """Of the letters of one topic that are asked for."""

    topic: str
    waiting: int = 0
    done: Counter[State] = field(default_factory=Counter)
    oldest_ms: int | None = None
    #: How long the topic keeps letters; None for ever, or where that may not be looked at.
    retention_ms: int | None = None
    newest_ms: int | None = None
    groups: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)

    def oldest_left_ms(self, now_ms: int) -> int | None:
        """Until the oldest letter that waits is deleted; None where it is not going to be."""
        if self.oldest_ms is None or self.retention_ms is None:
            return None
        return max(self.oldest_ms + self.retention_ms - now_ms, 0)

    @property
    def total(self) -> int:
        return self.waiting + self.done.total()

    def add(self, letter: Letter, mark: Mark | None) -> None:
        if mark is not None:
            self.done[mark.state] += 1
            return
        self.waiting += 1
        moment_ms = letter.timestamp_ms
        self.oldest_ms = moment_ms if self.oldest_ms is None else min(self.oldest_ms, moment_ms)
        self.newest_ms = moment_ms if self.newest_ms is None else max(self.newest_ms, moment_ms)
        self.groups[letter.group or ""] += 1
        self.errors[cause_of(letter)] += 1


def cause_of(letter: Letter) -> str:
    """The class of the error; what brokers give up has only a reason."""
    return letter.failure.error_class or letter.failure.reason


def _retention_ms(cluster: Cluster, topic: str) -> int | None:
    try:
        told = topic_settings(cluster, topic).get("retention.ms")
    except (Refused, UnsupportedVersion):
        return None  # not everyone may look at settings
    return None if told is None or int(told) < 0 else int(told)


def summarise(cluster: Cluster, topic: TopicInfo, wanted: Filter) -> Summary:
    """Raises Unavailable, Refused, TopicChanged, CorruptRecords."""
    there = spans(cluster, topic)
    done = read_marks(cluster, topic, there, is_settled=False)
    found = Summary(topic=topic.name, retention_ms=_retention_ms(cluster, topic.name))
    for letter in letters(cluster, topic, there):
        if wanted.matches(letter):
            found.add(letter, done.get(letter.spot))
    return found
