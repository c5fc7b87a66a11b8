"""What a member of a share group tells brokers of failures, ahead of its answers: a delay of its own, or the error.

Only our brokers know of it: without it a message rests as long as its group says, and a dead letter does not name the
error. So what cannot be told is warned of, and the answer is sent all the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from penstock.client.app.failing import failure_of
from penstock.client.app.settings import ApplicationError
from penstock.client.cluster import Cluster
from penstock.client.connection import Connection
from penstock.client.durations import DurationError, seconds
from penstock.client.errors import ClientError, check
from penstock.client.retrying import Deadline
from penstock.protocol.share_failures import (
    DELAY_MS_MAX,
    GROUPS_DELAY,
    SHARE_FAILURES,
    ShareFailures,
    WorkerError,
    WorkerFailure,
    pack_share_failures,
    read_answer,
)

__all__ = ["FailureReports", "Told", "delay_of", "told_of"]

_LOG: Final = logging.getLogger("penstock.client")
_AT_ONCE: Final = 50
#: The locks of the messages run on meanwhile.
_PATIENCE_MS: Final = 5_000


class Told(NamedTuple):
    delay_ms: int = GROUPS_DELAY
    error: WorkerError | None = None


def delay_of(given: Any) -> int:
    """In milliseconds. Raises ApplicationError."""
    try:
        delay_ms = round(seconds(given) * 1000)
    except DurationError as flaw:
        raise ApplicationError(f"delay={given!r}: {flaw}") from None
    if delay_ms > DELAY_MS_MAX:
        raise ApplicationError(f"delay={given!r} is longer than {DELAY_MS_MAX // 86_400_000} days")
    return delay_ms


def told_of(error: BaseException) -> Told:
    """For a message that is given up because of it."""
    failure = failure_of(error, "")
    return Told(error=WorkerError(failure.error_class, failure.message, failure.stack))


class FailureReports:
    """Of one member, in its thread."""

    def __init__(self, cluster: Callable[[], Cluster], group: str) -> None:
        self._make_cluster = cluster
        self._group = group
        self._cluster: Cluster | None = None
        self._waiting: dict[tuple[str, int], list[WorkerFailure]] = {}

    def add(self, raw: Any, told: Told) -> None:
        failure = WorkerFailure(raw.offset(), raw.delivery_count() or 1, *told)
        self._waiting.setdefault((raw.topic(), raw.partition()), []).append(failure)

    def send(self) -> None:
        """Returns when brokers have them, or when that is given up."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, {}
        deadline = Deadline(_PATIENCE_MS)
        for (topic, partition), failures in waiting.items():
            try:
                if self._cluster is None:
                    self._cluster = self._make_cluster()
                for some in _pieces(failures):
                    self._send(self._cluster, topic, partition, some, deadline)
            except ClientError as error:
                _LOG.warning(
                    "%s[%d]: delays and errors of %d messages are not known to the broker: %s",
                    topic,
                    partition,
                    len(failures),
                    error,
                )

    def _send(
        self,
        cluster: Cluster,
        topic: str,
        partition: int,
        failures: Sequence[WorkerFailure],
        deadline: Deadline,
    ) -> None:
        """Raises ClientError."""
        topic_id = cluster.topic(topic).id
        if topic_id is None:
            raise ClientError(f"the id of topic {topic} is not known")
        body = pack_share_failures(ShareFailures(self._group, topic_id, partition, failures))

        def ask(connection: Connection) -> None:
            answer = connection.call_raw(SHARE_FAILURES, 0, [body])
            check(read_answer(answer), f"failures in {topic}[{partition}]")

        cluster.call_leader(topic, partition, ask, deadline=deadline)

    def close(self) -> None:
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None


def _pieces(failures: Sequence[WorkerFailure]) -> Iterator[Sequence[WorkerFailure]]:
    for at in range(0, len(failures), _AT_ONCE):
        yield failures[at : at + _AT_ONCE]
