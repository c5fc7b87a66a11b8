"""The replay lock on the dead letters of a topic: one replay at a time, under whatever id, on Spark or without it.

All replays of the dead letters of one topic are one "query" of the sink, and each of them has a range of its batch
numbers. A replay acquires the lock when it decides for the first number of a new range, with no transactions in it.
From then on earlier holders are fenced and cannot decide any more, and what they decided is committed, so that the list
of replayed dead letters is complete.
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
#: More pieces than any replay has.
_HOLDER_BATCHES: Final = 1 << 30
#: Others may want the turn at the same time; one of them gets it.
_ATTEMPTS_MAX: Final = 10
#: Before any stretch.
_NO_BATCH: Final = -1


def acquire_lock(cluster: Cluster, query: str) -> int:
    """Take the turn. Returns the number before that of our first piece. Raises SinkError, Unavailable, Refused."""
    for attempt in range(_ATTEMPTS_MAX):
        try:
            return _try_acquire(cluster, query)
        except SinkError as overtaken:
            _LOG.info("taking the turn (%d): %s", attempt, overtaken)
    raise SinkError(f"others replay the same dead letters all the time ({query}); try again later")


def _try_acquire(cluster: Cluster, query: str) -> int:
    with DecisionLog(cluster, query) as looking:
        last = looking.take()
    number = 0 if last is None else (last // _HOLDER_BATCHES + 1) * _HOLDER_BATCHES
    with DecisionLog(cluster, query) as decision_log:
        if last is None:
            if decision_log.take() is not None:
                raise SinkError(f"somebody else began to replay ({query})")
        else:
            # Finishes what was decided last, should whoever did that be gone.
            commit_batch(decision_log, MicroBatch(query, last), [])
        decision_log.decide(Decision(batch=MicroBatch(query, number), transactions=()))
    resolve_transactions(cluster, query)
    return number


def check_lock(cluster: Cluster, batch: MicroBatch) -> None:
    """Raises SinkError where somebody else has the turn by now, so that this batch was not written."""
    mark = last_decided_batch(cluster, batch.query, stable=True)
    if mark is not None and mark.number > batch.number:
        raise SinkError(f"another replay of the same dead letters has begun since; {batch} was left to it")


class SparkReplayLock:
    """`client.deadletters.turns.Turn`, for who replays, edits or purges letters without Spark.

    Whoever begins a stretch takes this turn, because both are had by the same transactional id; and whoever takes this
    turn begins a stretch, where there has been a replay on Spark before.
    """

    def __init__(self, cluster: Cluster, topic: str) -> None:
        self._cluster = cluster
        self._query = replay_query_name(topic)
        self._number = _NO_BATCH

    @property
    def name(self) -> str:
        return sink_transactional_id(self._query)

    def take(self) -> None:
        """Raises SinkError, Unavailable, Refused."""
        is_used = bool(self._cluster.topics([DECISIONS_TOPIC]))
        self._number = acquire_lock(self._cluster, self._query) if is_used else _NO_BATCH

    def check(self) -> None:
        """Raises Overtaken, Unavailable, Refused."""
        try:
            check_lock(self._cluster, MicroBatch(self._query, self._number))
        except SinkError as error:
            raise ReplayFenced(str(error)) from None
