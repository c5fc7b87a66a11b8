"""Whose turn it is to replay dead letters of a topic: one at a time, under whatever id.

All replays of the letters of one topic are one "query" of the sink, and each of them has a stretch of its batch
numbers. Who begins a stretch decides for its first number, with nothing in it. From then on nobody who had the turn
before can decide any more, and what they decided is committed, so that the list of replayed letters is complete.
"""

from __future__ import annotations

import logging
from typing import Final

from penstock.client.cluster import Cluster
from penstock.client.deadletters.turns import Overtaken, turn_query
from penstock.spark.bookkeeping import DECISIONS
from penstock.spark.concluding import conclude, settle
from penstock.spark.decisions import Decision, Ledger, MicroBatch, SinkError, driver_name, last_mark

_LOG: Final = logging.getLogger("penstock.spark")
#: More pieces than any replay has.
_STRETCH: Final = 1 << 30
#: Others may want the turn at the same time; one of them gets it.
_ATTEMPTS_MAX: Final = 10
#: Before any stretch.
_NOBODY: Final = -1


def begin(cluster: Cluster, query: str) -> int:
    """Take the turn. Returns the number before that of our first piece. Raises SinkError, Unavailable, Refused."""
    for attempt in range(_ATTEMPTS_MAX):
        try:
            return _begin(cluster, query)
        except SinkError as overtaken:
            _LOG.info("taking the turn (%d): %s", attempt, overtaken)
    raise SinkError(f"others replay the same dead letters all the time ({query}); try again later")


def _begin(cluster: Cluster, query: str) -> int:
    with Ledger(cluster, query) as looking:
        last = looking.take()
    number = 0 if last is None else (last // _STRETCH + 1) * _STRETCH
    with Ledger(cluster, query) as ledger:
        if last is None:
            if ledger.take() is not None:
                raise SinkError(f"somebody else began to replay ({query})")
        else:
            # Finishes what was decided last, should whoever did that be gone.
            conclude(ledger, MicroBatch(query, last), [])
        ledger.decide(Decision(batch=MicroBatch(query, number), transactions=()))
    settle(cluster, query)
    return number


def check(cluster: Cluster, batch: MicroBatch) -> None:
    """Raises SinkError where somebody else has the turn by now, so that this batch was not written."""
    mark = last_mark(cluster, batch.query, stable=True)
    if mark is not None and mark.number > batch.number:
        raise SinkError(f"another replay of the same dead letters has begun since; {batch} was left to it")


class LettersTurn:
    """`client.deadletters.turns.Turn`, for who replays, edits or purges letters without Spark.

    Whoever begins a stretch takes this turn, because both are had by the same transactional id; and whoever takes this
    turn begins a stretch, where there has been a replay on Spark before.
    """

    def __init__(self, cluster: Cluster, topic: str) -> None:
        self._cluster = cluster
        self._query = turn_query(topic)
        self._number = _NOBODY

    @property
    def name(self) -> str:
        return driver_name(self._query)

    def take(self) -> None:
        """Raises SinkError, Unavailable, Refused."""
        is_used = bool(self._cluster.topics([DECISIONS]))
        self._number = begin(self._cluster, self._query) if is_used else _NOBODY

    def check(self) -> None:
        """Raises Overtaken, Unavailable, Refused."""
        try:
            check(self._cluster, MicroBatch(self._query, self._number))
        except SinkError as error:
            raise Overtaken(str(error)) from None
