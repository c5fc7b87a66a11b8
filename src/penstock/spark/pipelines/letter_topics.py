"""The retry and dead-letter topics of a pipeline: made before it starts, with the partitions that its sources have."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from penstock.client.cluster import Cluster
from penstock.client.letter_topics import ensure_letters
from penstock.client.letters import (
    DEAD_LETTER_SETTINGS,
    RETRY_SETTINGS,
    dead_letter_topic,
    retry_level,
    retry_topic,
)
from penstock.client.metadata import TopicInfo
from penstock.client.positions import committed
from penstock.client.topic_contracts import LesserContract, check_topic_contracts
from penstock.spark.pipelines.declaration import Pipeline, PipelineError
from penstock.spark.pipelines.routing import Routing

#: At the end of a pattern's beginning: not what other pipelines have for letters.
_NO_LETTERS: Final = r"(?!.*\.(?:retry\.[1-9][0-9]*|dlq|dlq\.replayed)$)"


def source_pattern(pipeline: Pipeline) -> str:
    """Of the topics that a pattern means: without letters, which would come back for ever."""
    pattern = pipeline.source.pattern
    assert pattern is not None
    return f"(?:{pattern})" if pipeline.source.letters else f"{_NO_LETTERS}(?:{pattern})"


def sources(cluster: Cluster, pipeline: Pipeline) -> dict[str, TopicInfo]:
    """As they are now. Raises PipelineError where one that is named does not exist; Unavailable, Refused."""
    if pipeline.source.pattern is not None:
        return cluster.topics(re.compile(source_pattern(pipeline)))
    found = cluster.topics(pipeline.source.topics)
    for name in pipeline.source.topics:
        if name not in found:
            raise PipelineError(f"pipeline {pipeline.name}: there is no topic {name}")
    return found


def ensure(cluster: Cluster, pipeline: Pipeline, topics: Mapping[str, TopicInfo]) -> Routing:
    """Make those that are missing, and let those grow whose source has grown.

    Raises PipelineError where a source asks for more than the pipeline promises; Unavailable, Refused.
    """
    _check_contracts(cluster, pipeline, topics)
    partitions = {}
    retries = {}
    for source, info in topics.items():
        levels = _levels(cluster, pipeline, source)
        for name in levels:
            partitions[name] = ensure_letters(cluster, name, info, RETRY_SETTINGS)
            retries[name] = source
        dead = dead_letter_topic(source)
        partitions[dead] = ensure_letters(cluster, dead, info, DEAD_LETTER_SETTINGS)
    return Routing(
        group=pipeline.group,
        attempts_max=pipeline.errors.attempts,
        backoff=pipeline.errors.backoff,
        retries=retries,
        partitions=partitions,
    )


def _check_contracts(cluster: Cluster, pipeline: Pipeline, topics: Iterable[str]) -> None:
    try:
        check_topic_contracts(cluster, topics, pipeline.delivery.value, who=f"pipeline {pipeline.name}")
    except LesserContract as flaw:
        raise PipelineError(str(flaw)) from None


def _levels(cluster: Cluster, pipeline: Pipeline, source: str) -> list[str]:
    """Only row functions can be tried again. Levels of earlier declarations may still have something in them."""
    wanted = {retry_topic(source, level) for level in range(1, pipeline.errors.attempts)}
    if not pipeline.evaluates:
        return []
    there = set(cluster.topics(re.compile(re.escape(source) + r"\.retry\.[1-9][0-9]{0,2}")))
    if not pipeline.rows:
        wanted, there = (
            set(),
            there & {topic for topic, _ in committed(cluster, pipeline.group, stable=False)},
        )
    return sorted(wanted | there, key=lambda name: retry_level(name) or 0)


def with_new(routing: Routing, cluster: Cluster, pipeline: Pipeline) -> Routing:
    """Dead letters of topics that a pattern has come to match. Their retries begin when the pipeline starts anew.

    Raises Unavailable, Refused.
    """
    topics = sources(cluster, pipeline)
    new = {name: info for name, info in topics.items() if dead_letter_topic(name) not in routing.partitions}
    if not new:
        return routing
    _check_contracts(cluster, pipeline, new)
    made = {
        dead_letter_topic(name): ensure_letters(cluster, dead_letter_topic(name), info, DEAD_LETTER_SETTINGS)
        for name, info in new.items()
    }
    return Routing(
        group=routing.group,
        attempts_max=routing.attempts_max,
        backoff=routing.backoff,
        retries=routing.retries,
        partitions={**routing.partitions, **made},
    )
