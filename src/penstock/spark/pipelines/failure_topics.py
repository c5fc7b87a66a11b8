"""Where a row goes that failed: to the next retry topic, due after a while, or to the dead letters."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from penstock.client.letters import (
    Failure,
    Header,
    Origin,
    dead_letter_topic,
    headers_for,
    origin_of,
    restored,
    retry_topic,
)
from penstock.client.retrying import Backoff

_REFUSED: Final = "refused"
_GIVEN_UP: Final = "given up"
_TO_BE_TRIED_AGAIN: Final = "to be tried again"


class Letter(NamedTuple):
    """Under which topic, partition, headers and time a record is published again."""

    topic: str
    partition: int
    headers: list[Header]
    #: None: when it is written.
    timestamp_ms: int | None

    @property
    def is_retry(self) -> bool:
        return self.timestamp_ms is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """For the rows of one pipeline."""

    group: str
    attempts_max: int
    backoff: Backoff
    #: Retry topics that are read, and whose they are.
    retries: Mapping[str, str] = field(default_factory=dict)
    #: How many partitions retry and dead-letter topics have.
    partitions: Mapping[str, int] = field(default_factory=dict)

    def arrival(self, record: Mapping[str, Any]) -> Origin:
        """Where it was first, with the attempts before this one. Only in retry topics are headers asked for that."""
        source = self.retries.get(record["topic"])
        place = {name: record[name] for name in ("topic", "partition", "offset", "timestamp_ms")}
        told = origin_of(record["headers"] if source is not None else None, **place)
        if source is None or told.topic == source:
            return told
        # Somebody has put it there by hand, and nobody knows where it is from.
        return Origin(**place, attempts=told.attempts, group=told.group)

    def source_of(self, topic: str) -> str:
        return self.retries.get(topic, topic)

    def own_headers(self, topic: str, headers: list[Header] | None) -> list[Header] | None:
        return restored(headers) if topic in self.retries else headers

    def letter(
        self,
        origin: Origin,
        source: str,
        headers: list[Header] | None,
        failure: Failure,
        *,
        is_retriable: bool,
        now_ms: int,
        chance: random.Random,
    ) -> Letter:
        """`source` is the topic whose letters these are, and `headers` are the record's own."""
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
    ) -> Letter:
        told = Failure(
            error_class=failure.error_class, message=failure.message, stack=failure.stack, reason=reason
        )
        return Letter(
            topic=topic,
            # The source may have grown since these topics were made.
            partition=origin.partition % self.partitions.get(topic, origin.partition + 1),
            headers=headers_for(headers, origin, told, group=self.group, attempts=origin.attempts + 1),
            timestamp_ms=due_ms,
        )
