"""Transactions that pipelines have left open: whose they are, what they hold back, and how they are ended.

An exactly-once sink keeps the transactions of a batch open until the driver has decided about it, and brokers never end
them by themselves: to abort what is decided would lose rows. A pipeline that is killed in between leaves those of one
batch open. Readers of committed records wait for them until the pipeline runs again, or until `release` is called.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from penstock.client.cluster import Cluster
from penstock.client.deadletters.turns import turn_query
from penstock.client.letters import is_letter_topic
from penstock.client.transactions import TransactionInfo, open_transactions
from penstock.spark.concluding import query_of, settle
from penstock.spark.pipelines.batch import written_as
from penstock.spark.pipelines.status import Status
from penstock.spark.sink_options import Contract


def sink_queries(status: Status) -> tuple[str, ...]:
    """The names under which its batches are written exactly once; none where it writes otherwise."""
    if status.group is None:
        # A job: replays of dead letters are all one query of the sink, by the topic of the letters.
        topic = status.source.partition(" -> ")[0]
        return (status.name, turn_query(topic)) if is_letter_topic(topic) else (status.name,)
    if status.delivery != Contract.EXACTLY_ONCE.value:
        return ()
    return tuple(name for query in status.queries for name in written_as(query))


def owner_of(transactional_id: str, known: Mapping[str, Status]) -> str | None:
    """`pipeline NAME`, or `query ID` where no pipeline has it; None for what no sink of ours has begun."""
    query = query_of(transactional_id)
    if query is None:
        return None
    for name, status in known.items():
        if query in sink_queries(status):
            return f"pipeline {name}"
    return f"query {query}"


def left_open(cluster: Cluster, queries: Iterable[str]) -> list[TransactionInfo]:
    """What these have begun and not ended, oldest first. Raises Unavailable, Refused."""
    wanted = set(queries)
    found = open_transactions(cluster) if wanted else []
    return [each for each in found if query_of(each.transactional_id) in wanted]


def release(cluster: Cluster, queries: Iterable[str]) -> None:
    """Commit what is decided, abort all else. Whoever has begun it may run again, and does its last batch again.

    Raises Unavailable, Refused, SinkError.
    """
    for query in queries:
        settle(cluster, query)
