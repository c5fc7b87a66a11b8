"""The driver's part of an exactly-once write: decide, commit what was decided, abort everything else.

A driver may die after any step, and any step may be repeated:

1. Fence older drivers (`decisions.DecisionLog`): they cannot decide any more.
2. Look up the last decision. If it is about this batch, it stands, whichever driver made it.
3. Otherwise decide: these transactions, and no others, are the batch.
4. Commit them.
5. Abort all other transactions that were begun for the batch: attempts that lost, and those of dead drivers.

Before there is a decision, no driver aborts what another one has prepared, because the other might decide to commit it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from penstock.client.errors import Refused
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.in_flight import ProducerIdAndEpoch
from penstock.client.wire.producer import PreparedTransaction, end_prepared_transaction
from penstock.client.wire.transactions import (
    current_producer,
    describe_transaction,
    end_transaction,
    fence_producer,
    list_transactions,
)
from penstock.spark.exactly_once.decisions import (
    QUERY_SEPARATOR,
    Decision,
    DecisionLog,
    MicroBatch,
    SinkError,
    checkpoint_owner,
    fenced_error,
    last_decided_batch,
    set_checkpoint_owner,
    sink_transactional_id,
)

_LOG: Final = logging.getLogger("penstock.spark")
_ONGOING: Final = "Ongoing"
_EMPTY: Final = "Empty"
_SLOTS: Final = 2
#: Does not occur in query ids, so the transactional ids of one query never start with the prefix of another.
_SEPARATOR: Final = QUERY_SEPARATOR


def attempt_id_prefix(batch: MicroBatch) -> str:
    """Return the prefix of the transactional ids of all attempts at a batch.

    The ids are reused two batches later, so that brokers do not accumulate ids without bound. By then the batch in
    between is decided, so all transactions of this batch have ended.
    """
    return f"{_query_prefix(batch.query)}{batch.number % _SLOTS}{_SEPARATOR}"


def _query_prefix(query: str) -> str:
    return sink_transactional_id(query) + _SEPARATOR


def query_of_transactional_id(transactional_id: str) -> str | None:
    """Return the query that a transactional id belongs to, or None if it is not an id of a sink."""
    name, _, _ = transactional_id.partition(_SEPARATOR)
    query = name.removeprefix(sink_transactional_id(""))
    return query if query != name else None


def commit_batch(
    decision_log: DecisionLog,
    batch: MicroBatch,
    prepared: Sequence[PreparedTransaction],
    *,
    fails_on_loss: bool = True,
    skips_older: bool = False,
) -> bool:
    """Decide and commit a batch. Return True if `prepared` was committed, and False if an earlier decision stands.

    Raises SinkError if another driver has decided a later batch (unless `skips_older`), or if transactions were
    aborted. Raises Unavailable if the caller should retry.
    """
    last = _fence_and_find_last(decision_log, batch)
    if last is not None and last > batch.number:
        _abort(decision_log.cluster, prepared)
        if skips_older:
            _LOG.info("%s is older than the last decided batch, so it is not written", batch)
            return False
        raise fenced_error(batch)
    is_ours = last != batch.number
    if is_ours:
        decision = Decision(batch=batch, transactions=tuple(each for each in prepared if not each.is_empty))
        _check_open(decision_log.cluster, decision)
        decision_log.decide(decision)
    else:
        found = decision_log.last()
        assert found is not None
        assert found.batch == batch, f"{found} is not about {batch}"
        decision = found
        _LOG.info("%s was decided before; its transactions are committed now", batch)
    _commit(decision_log, decision, fails_on_loss=fails_on_loss)
    _abort(decision_log.cluster, [each for each in prepared if each.transactional_id not in decision.names])
    abort_undecided(decision_log, decision)
    return is_ours


def abort_batch(
    decision_log: DecisionLog, batch: MicroBatch, prepared: Sequence[PreparedTransaction]
) -> None:
    """Abort the transactions of a failed batch, except those that a decision includes. Raises Unavailable, Refused."""
    last = _fence_and_find_last(decision_log, batch)
    if last == batch.number:
        found = decision_log.last()
        assert found is not None
        prepared = [each for each in prepared if each.transactional_id not in found.names]
    _abort(decision_log.cluster, prepared)


def _fence_and_find_last(decision_log: DecisionLog, batch: MicroBatch) -> int | None:
    """Fence other drivers, and return the last decided batch. If a later batch is decided already, fence no driver."""
    decided = last_decided_batch(decision_log.cluster, batch.query, stable=False)
    return decided.number if decided is not None and decided.number > batch.number else decision_log.take()


def finish_earlier_batch(cluster: Cluster, batch: MicroBatch, checkpoint: str | None = None) -> None:
    """Commit the transactions of the last decision if it is for an earlier batch.

    For callers that may start a batch without repeating an earlier one that failed. Raises Unavailable, Refused,
    SinkError.
    """
    decided = last_decided_batch(cluster, batch.query, stable=True)
    if decided is None and checkpoint is not None:
        take_over_checkpoint(cluster, checkpoint, batch.query)
    if decided is None or decided.number >= batch.number:
        return
    with DecisionLog(cluster, batch.query) as decision_log:
        last = decision_log.last()
        if last is not None and last.batch.number < batch.number:
            _commit(decision_log, last, fails_on_loss=True)


def take_over_checkpoint(cluster: Cluster, checkpoint: str, query: str) -> None:
    """Resolve the open transactions of the query that used this checkpoint before. Called before the first batch.

    The previous query will not run again, because its checkpoint now contains another query. Nothing else would end its
    prepared transactions, and read_committed consumers would wait for them forever.
    Raises Unavailable, Refused, SinkError.
    """
    last = checkpoint_owner(cluster, checkpoint)
    if last == query:
        return
    if last is not None:
        _LOG.warning("query %s replaces %s, whose checkpoint was deleted (%s)", query, last, checkpoint)
        resolve_transactions(cluster, last)
    set_checkpoint_owner(cluster, checkpoint, query)


def resolve_transactions(cluster: Cluster, query: str) -> None:
    """Finish the last batch of a stopped query if it is decided, and abort all its other transactions.

    If the query runs again, it finds the decision, or writes the batch again.

    Raises Unavailable, Refused, SinkError.
    """
    with DecisionLog(cluster, query) as decision_log:
        decision_log.take()
        last = decision_log.last()
        if last is not None:
            _commit(decision_log, last, fails_on_loss=True)
        kept = last.names if last is not None else frozenset()
        for name in _begun_ids(cluster, _query_prefix(query), kept):
            fence_producer(cluster, name)


# Before the decision


def _check_open(cluster: Cluster, decision: Decision) -> None:
    """Raise SinkError if a transaction has timed out. Checked now because the batch can still be written again."""
    if not decision.transactions:
        return
    listed = list_transactions(cluster, attempt_id_prefix(decision.batch), (_ONGOING,))
    gone = [
        each
        for each in decision.transactions
        if each.transactional_id not in listed and not _is_open(cluster, each)
    ]
    if gone:
        raise SinkError(
            f"{decision.batch}: {len(gone)} of {len(decision.transactions)} transactions were aborted before they "
            "could be committed, because they were open for longer than brokers allow (transaction.max.timeout.ms; no "
            "limit with transaction.two.phase.commit.enable=true); no row of the batch is written"
        )


def _is_open(cluster: Cluster, prepared: PreparedTransaction) -> bool:
    """Ask the transaction's own coordinator, in case the coordinator moved while transactions were listed."""
    info = describe_transaction(cluster, prepared.transactional_id)
    expected = ProducerIdAndEpoch(prepared.producer_id, prepared.epoch)
    return info is not None and info.state == _ONGOING and info.producer == expected


# After the decision


def _commit(decision_log: DecisionLog, decision: Decision, *, fails_on_loss: bool) -> None:
    lost: list[str] = []
    for each in decision.transactions:
        try:
            end_prepared_transaction(decision_log.cluster, each, commit=True)
        except Refused as error:
            if decision_log.last_batch() != decision.batch.number:
                # Another driver has committed it and continued with later batches, which have reused the id.
                raise fenced_error(decision.batch) from None
            _LOG.error(
                "%s: a transaction was aborted after the decision to commit it: %s", decision.batch, error
            )
            lost += [f"{topic}[{partition}]" for topic, partition in each.partitions]
    if lost and fails_on_loss:
        raise SinkError(
            f"{decision.batch} was decided, but some of its transactions were aborted before they could be committed: "
            f"rows for {', '.join(sorted(set(lost)))} are lost. The driver was down for longer than brokers keep "
            "transactions open (transaction.max.timeout.ms; no limit with transaction.two.phase.commit.enable=true). "
            "With failOnDataLoss=false the query continues without them"
        )


def _abort(cluster: Cluster, prepared: Sequence[PreparedTransaction]) -> None:
    for each in prepared:
        # The transaction may already be aborted, by a driver or by its timeout.
        with suppress(Refused):
            end_prepared_transaction(cluster, each, commit=False)


def abort_undecided(decision_log: DecisionLog, decision: Decision) -> None:
    """Abort all transactions of the batch that the decision does not include, so that readers need not wait for them.

    An attempt first initializes its transactional id, and then looks for a decision. The decision is written before
    this function lists the ids. So an attempt that is not in the list finds the decision and writes nothing, and an
    attempt that is in the list cannot write once its transaction is aborted here. A later batch may reuse the ids, so
    each is ended with the epoch that it had while this batch was still the last decided one.
    """
    batch = decision.batch
    if decision_log.last_batch() != batch.number:
        return
    names = _begun_ids(decision_log.cluster, attempt_id_prefix(batch), decision.names)
    producers = {
        name: found for name in names if (found := current_producer(decision_log.cluster, name)) is not None
    }
    if not producers or decision_log.last_batch() != batch.number:
        return
    for name, producer in producers.items():
        with suppress(Refused):
            end_transaction(
                decision_log.cluster, name, producer, commit=False, version=decision_log.transaction_version
            )


def _begun_ids(cluster: Cluster, prefix: str, kept: frozenset[str]) -> list[str]:
    return sorted(list_transactions(cluster, prefix, (_ONGOING, _EMPTY)).keys() - kept)
