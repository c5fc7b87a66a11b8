"""The retry and dead-letter topics of a pipeline, and which of them a failed row goes to.

The topics are created before the pipeline starts, with as many partitions as their sources. A failed row goes to the
next retry topic, where it is due after a backoff, or to the dead-letter topic.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from penstock.client.deadletters.headers import (
    DEAD_LETTER_SETTINGS,
    RETRY_SETTINGS,
    Failure,
    Header,
    Origin,
    dead_letter_topic,
    failure_headers,
    original_headers,
    read_origin,
    retry_level,
    retry_topic,
)
from penstock.client.deadletters.topics import ensure_failure_topic
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.metadata import TopicInfo
from penstock.client.wire.offsets import committed_offsets
from penstock.client.wire.topics import InsufficientContract, check_topic_contracts
from penstock.protocol.backoff import ExponentialBackoff
from penstock.spark.pipelines.declaration import Pipeline, PipelineError

_REFUSED: Final = "refused"
_GIVEN_UP: Final = "given up"
_TO_BE_TRIED_AGAIN: Final = "to be tried again"


class FailureRecord(NamedTuple):
    """The topic, partition, headers and timestamp with which a failed record is published again."""

    topic: str
    partition: int
    headers: list[Header]
    #: When a retry is due. None for a dead letter, which gets the time of writing.
    timestamp_ms: int | None

    @property
    def is_retry(self) -> bool:
        return self.timestamp_ms is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRouting:
    """Decides which topic the failed rows of one pipeline go to."""

    group: str
    attempts_max: int
    backoff: ExponentialBackoff
    #: Retry topic that the pipeline reads -> its source topic.
    retries: Mapping[str, str] = field(default_factory=dict)
    #: Number of partitions of each retry and dead-letter topic.
    partitions: Mapping[str, int] = field(default_factory=dict)

    def read_origin(self, record: Mapping[str, Any]) -> Origin:
        """Return where the record was first published, and how often it was tried. Only retries have such headers."""
        source = self.retries.get(record["topic"])
        position = {name: record[name] for name in ("topic", "partition", "offset", "timestamp_ms")}
        origin = read_origin(record["headers"] if source is not None else None, **position)
        if source is None or origin.topic == source:
            return origin
        # The headers name another source: the record was copied into this retry topic, so its origin is unknown.
        return Origin(**position, attempts=origin.attempts, group=origin.group)

    def source_of(self, topic: str) -> str:
        return self.retries.get(topic, topic)

    def own_headers(self, topic: str, headers: list[Header] | None) -> list[Header] | None:
        return original_headers(headers) if topic in self.retries else headers

    def failure_record(
        self,
        origin: Origin,
        source: str,
        headers: list[Header] | None,
        failure: Failure,
        *,
        is_retriable: bool,
        now_ms: int,
        chance: random.Random,
    ) -> FailureRecord:
        """Return the failure record. `source` is the original topic, and `headers` are the record's own."""
        attempts = origin.attempts + 1
        level = retry_topic(source, attempts)
        if is_retriable and attempts < self.attempts_max and level in self.retries:
            due_ms = now_ms + int(self.backoff.delay_ms(attempts - 1, chance))
            return self._sent(level, origin, headers, failure, _TO_BE_TRIED_AGAIN, due_ms)
        reason = _GIVEN_UP if is_retriable else _REFUSED
        return self._sent(dead_letter_topic(source), origin, headers, failure, reason, None)

    def _sent(
        self,
        topic: str,
        origin: Origin,
        headers: list[Header] | None,
        failure: Failure,
        reason: str,
        due_ms: int | None,
    ) -> FailureRecord:
        failed = Failure(
            error_class=failure.error_class, message=failure.message, stack=failure.stack, reason=reason
        )
        return FailureRecord(
            topic=topic,
            # The source may have more partitions than this topic.
            partition=origin.partition % self.partitions.get(topic, origin.partition + 1),
            headers=failure_headers(headers, origin, failed, group=self.group, attempts=origin.attempts + 1),
            timestamp_ms=due_ms,
        )


#: Prefix of a source pattern that excludes retry and dead-letter topics.
_NO_FAILURE_TOPICS: Final = r"(?!.*\.(?:retry\.[1-9][0-9]*|dlq|dlq\.replayed)$)"


def source_pattern(pipeline: Pipeline) -> str:
    """Return the source pattern without failure topics: a pipeline that reads its own dead letters would never end."""
    pattern = pipeline.source.pattern
    assert pattern is not None
    return f"(?:{pattern})" if pipeline.source.letters else f"{_NO_FAILURE_TOPICS}(?:{pattern})"


def source_topics(cluster: Cluster, pipeline: Pipeline) -> dict[str, TopicInfo]:
    """Return the current source topics. Raises PipelineError if a named topic does not exist; Unavailable, Refused."""
    if pipeline.source.pattern is not None:
        return cluster.topics(re.compile(source_pattern(pipeline)))
    found = cluster.topics(pipeline.source.topics)
    for name in pipeline.source.topics:
        if name not in found:
            raise PipelineError(f"pipeline {pipeline.name}: there is no topic {name}")
    return found


def ensure_failure_topics(
    cluster: Cluster, pipeline: Pipeline, topics: Mapping[str, TopicInfo]
) -> FailureRouting:
    """Create missing retry and dead-letter topics, and add partitions to those whose source has more now.

    Raises PipelineError if a source topic requires a stronger contract than the pipeline has; Unavailable, Refused.
    """
    _check_contracts(cluster, pipeline, topics)
    partitions = {}
    retries = {}
    for source, info in topics.items():
        levels = _retry_topics(cluster, pipeline, source)
        for name in levels:
            partitions[name] = ensure_failure_topic(cluster, name, info, RETRY_SETTINGS)
            retries[name] = source
        dead = dead_letter_topic(source)
        partitions[dead] = ensure_failure_topic(cluster, dead, info, DEAD_LETTER_SETTINGS)
    return FailureRouting(
        group=pipeline.group,
        attempts_max=pipeline.errors.attempts,
        backoff=pipeline.errors.backoff,
        retries=retries,
        partitions=partitions,
    )


def _check_contracts(cluster: Cluster, pipeline: Pipeline, topics: Iterable[str]) -> None:
    try:
        check_topic_contracts(cluster, topics, pipeline.delivery.value, who=f"pipeline {pipeline.name}")
    except InsufficientContract as flaw:
        raise PipelineError(str(flaw)) from None


def _retry_topics(cluster: Cluster, pipeline: Pipeline, source: str) -> list[str]:
    """Return the retry topics to read. Those of an earlier declaration may still contain records."""
    wanted = {retry_topic(source, level) for level in range(1, pipeline.errors.attempts)}
    if not pipeline.evaluates:
        return []
    there = set(cluster.topics(re.compile(re.escape(source) + r"\.retry\.[1-9][0-9]{0,2}")))
    if not pipeline.rows:
        wanted, there = (
            set(),
            there & {topic for topic, _ in committed_offsets(cluster, pipeline.group, stable=False)},
        )
    return sorted(wanted | there, key=lambda name: retry_level(name) or 0)


def with_new_topics(routing: FailureRouting, cluster: Cluster, pipeline: Pipeline) -> FailureRouting:
    """Create the dead-letter topics of new topics that the pattern matches. Their retries need a restart.

    Raises Unavailable, Refused.
    """
    topics = source_topics(cluster, pipeline)
    new = {name: info for name, info in topics.items() if dead_letter_topic(name) not in routing.partitions}
    if not new:
        return routing
    _check_contracts(cluster, pipeline, new)
    made = {
        dead_letter_topic(name): ensure_failure_topic(
            cluster, dead_letter_topic(name), info, DEAD_LETTER_SETTINGS
        )
        for name, info in new.items()
    }
    return FailureRouting(
        group=routing.group,
        attempts_max=routing.attempts_max,
        backoff=routing.backoff,
        retries=routing.retries,
        partitions={**routing.partitions, **made},
    )
