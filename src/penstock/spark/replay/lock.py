"""The replay lock on the dead letters of a topic: only one replay at a time, on Spark or without it.

All replays of a dead-letter topic are one "query" of the exactly-once sink. Each run uses a range of the query's batch
numbers. A run acquires the lock when it decides the first number of a new range, without transactions. From then on
earlier holders are fenced: they cannot decide any more, and what they have decided is committed. So the list of
replayed dead letters is complete.
"""

from __future__ import annotations

import logging
from typing import Final

from penstock.client.deadletters.writer import ReplayFenced, replay_query_name
from penstock.client.wire.cluster import Cluster
from penstock.spark.exactly_once.decisions import (
    Decision,
    DecisionLog,
    MicroBatch,
    SinkError,
    last_decided_batch,
    sink_transactional_id,
)
from penstock.spark.exactly_once.two_phase_commit import commit_batch, resolve_transactions
from penstock.spark.internal_topics import DECISIONS_TOPIC

_LOG: Final = logging.getLogger("penstock.spark")
#: The size of a range of batch numbers: more than any replay needs.
_HOLDER_BATCHES: Final = 1 << 30
#: Several runs may try to acquire the lock at the same time. One of them succeeds.
_ATTEMPTS_MAX: Final = 10
#: Lower than every batch number.
_NO_BATCH: Final = -1


def acquire_lock(cluster: Cluster, query: str) -> int:
    """Acquire the lock. Return the batch number before the first one to use. Raises SinkError, Unavailable, Refused."""
    for attempt in range(_ATTEMPTS_MAX):
        try:
            return _try_acquire(cluster, query)
        except SinkError as error:
            _LOG.info("attempt %d to acquire the replay lock failed: %s", attempt, error)
    raise SinkError(f"other replays of the same dead letters keep the lock ({query}); try again later")


def _try_acquire(cluster: Cluster, query: str) -> int:
    with DecisionLog(cluster, query) as decision_log:
        last = decision_log.take()
    number = 0 if last is None else (last // _HOLDER_BATCHES + 1) * _HOLDER_BATCHES
    with DecisionLog(cluster, query) as decision_log:
        if last is None:
            if decision_log.take() is not None:
                raise SinkError(f"another replay has acquired the lock ({query})")
        else:
            # Finish the last decided batch, in case its driver has died.
            commit_batch(decision_log, MicroBatch(query, last), [])
        decision_log.decide(Decision(batch=MicroBatch(query, number), transactions=()))
    resolve_transactions(cluster, query)
    return number


def check_lock(cluster: Cluster, batch: MicroBatch) -> None:
    """Raise SinkError if another replay has acquired the lock, so that this batch was not written."""
    decided = last_decided_batch(cluster, batch.query, stable=True)
    if decided is not None and decided.number > batch.number:
        raise SinkError(
            f"another replay of the same dead letters has acquired the lock; {batch} was not written"
        )


class SparkReplayLock:
    """Implements `client.deadletters.writer.ReplayLock` for replays, edits and purges of dead letters without Spark.

    It uses the transactional id of replays on Spark, so that each fences the other. If a replay on Spark has run
    before, it also starts a new range of batch numbers.
    """

    def __init__(self, cluster: Cluster, topic: str) -> None:
        self._cluster = cluster
        self._query = replay_query_name(topic)
        self._number = _NO_BATCH

    @property
    def name(self) -> str:
        return sink_transactional_id(self._query)

    def take(self) -> None:
        """Acquire the lock. Raises SinkError, Unavailable, Refused."""
        is_used = bool(self._cluster.topics([DECISIONS_TOPIC]))
        self._number = acquire_lock(self._cluster, self._query) if is_used else _NO_BATCH

    def check(self) -> None:
        """Raise ReplayFenced if another replay has acquired the lock; Unavailable, Refused."""
        try:
            check_lock(self._cluster, MicroBatch(self._query, self._number))
        except SinkError as error:
            raise ReplayFenced(str(error)) from None
