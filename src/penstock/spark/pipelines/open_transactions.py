"""Transactions that pipelines have left open: which pipeline they belong to, and how to end them.

An exactly-once sink keeps the transactions of a batch open until the driver has decided about it, and brokers never end
them by themselves: to abort what is decided would lose rows. A pipeline that is killed in between leaves those of one
batch open. Consumers of committed records wait for them until the pipeline runs again, or until
`end_open_transactions` is called.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from penstock.client.deadletters.headers import is_failure_topic
from penstock.client.deadletters.writer import replay_query_name
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.transactions import TransactionInfo, open_transactions
from penstock.spark.exactly_once.two_phase_commit import query_of_transactional_id, resolve_transactions
from penstock.spark.pipelines.batch import sink_query_names
from penstock.spark.pipelines.status import PipelineStatus
from penstock.spark.sink.options import Contract


def sink_queries(status: PipelineStatus) -> tuple[str, ...]:
    """The names under which its batches are written exactly once; none where it writes otherwise."""
    if status.group is None:
        # A job: replays of dead letters are all one query of the sink, by the topic of the letters.
        topic = status.source.partition(" -> ")[0]
        return (status.name, replay_query_name(topic)) if is_failure_topic(topic) else (status.name,)
    if status.delivery != Contract.EXACTLY_ONCE.value:
        return ()
    return tuple(name for query in status.queries for name in sink_query_names(query))


def transaction_owner(transactional_id: str, known: Mapping[str, PipelineStatus]) -> str | None:
    """`pipeline NAME`, or `query ID` where no pipeline has it; None for what no sink of ours has begun."""
    query = query_of_transactional_id(transactional_id)
    if query is None:
        return None
    for name, status in known.items():
        if query in sink_queries(status):
            return f"pipeline {name}"
    return f"query {query}"


def list_open_transactions(cluster: Cluster, queries: Iterable[str]) -> list[TransactionInfo]:
    """What these have begun and not ended, oldest first. Raises Unavailable, Refused."""
    wanted = set(queries)
    found = open_transactions(cluster) if wanted else []
    return [each for each in found if query_of_transactional_id(each.transactional_id) in wanted]


def end_open_transactions(cluster: Cluster, queries: Iterable[str]) -> None:
    """Commit what is decided, abort all else. Whoever has begun it may run again, and does its last batch again.

    Raises Unavailable, Refused, SinkError.
    """
    for query in queries:
        resolve_transactions(cluster, query)
