"""Transactions that pipelines have left open: which pipeline they belong to, and how to end them.

An exactly-once sink keeps the transactions of a batch open until the driver has decided about it. Brokers do not end
them: to abort a transaction after the decision would lose rows. A pipeline that is killed in between leaves the
transactions of one batch open, and read_committed consumers wait until the pipeline runs again, or until
`end_open_transactions` is called.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from penstock.client.deadletters.headers import is_failure_topic
from penstock.client.deadletters.writer import replay_query_name
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.transactions import TransactionInfo, open_transactions
from penstock.spark.exactly_once.two_phase_commit import query_of_transactional_id, resolve_transactions
from penstock.spark.pipelines.status import PipelineStatus
from penstock.spark.sink.options import Contract

#: The records for retry and dead-letter topics of a batch are written under the query's id with this suffix.
FAILURE_RECORDS_SUFFIX: Final = "-letters"


def sink_queries(status: PipelineStatus) -> tuple[str, ...]:
    """Return the ids under which the pipeline writes batches exactly once. There are none with another contract."""
    if status.group is None:
        # A job. All replays of a dead-letter topic write under one id, which the topic's name determines.
        topic = status.source.partition(" -> ")[0]
        return (status.name, replay_query_name(topic)) if is_failure_topic(topic) else (status.name,)
    if status.delivery != Contract.EXACTLY_ONCE.value:
        return ()
    return tuple(name for query in status.queries for name in (query + FAILURE_RECORDS_SUFFIX, query))


def transaction_owner(transactional_id: str, known: Mapping[str, PipelineStatus]) -> str | None:
    """Return `pipeline NAME`, `query ID` if no pipeline uses the id, or None if it is not an id of a sink."""
    query = query_of_transactional_id(transactional_id)
    if query is None:
        return None
    for name, status in known.items():
        if query in sink_queries(status):
            return f"pipeline {name}"
    return f"query {query}"


def list_open_transactions(cluster: Cluster, queries: Iterable[str]) -> list[TransactionInfo]:
    """Return the open transactions of these queries, oldest first. Raises Unavailable, Refused."""
    wanted = set(queries)
    found = open_transactions(cluster) if wanted else []
    return [each for each in found if query_of_transactional_id(each.transactional_id) in wanted]


def end_open_transactions(cluster: Cluster, queries: Iterable[str]) -> None:
    """Commit the decided transactions and abort all others. If a query runs again, it repeats its last batch.

    Raises Unavailable, Refused, SinkError.
    """
    for query in queries:
        resolve_transactions(cluster, query)
